"""Every mesh axis alone, and every three together, train as one device does: losses of 20 steps, and the gradients of one.

Packed rows, weights that differ, accumulation, dropout and auxiliary losses are all there; chunks of a context are of one or two tokens.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from test_step import CONFIG, EXPERTS, Run, batch, changed

from lmjax.axes import MESH_AXES
from lmjax.sharding.config import MeshConfig

ROWS = 16
ONE = MeshConfig(data=1)
ALONE = [{"data": 8}, {"fsdp": 8}, {"tensor": 8}, {"context": 8}, {"expert": 8}, {"stage": 4}]
THREE = [dict.fromkeys(axes, 2) for axes in itertools.combinations(MESH_AXES, 3)]
FAST = [{"stage": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
EVERY = {"fsdp2-expert2-tensor2": 2, "stage2-fsdp2-expert2": 2}  # where experts stand in one layer of two


def name(sizes):
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def trained(mesh, experts, **fields):
    """The gradients of a step (as Adam's first moment holds them), what 20 report, and the routers' biases after them.

    `experts` says in each how many layers one has experts: 0 in none.
    """
    config = changed(CONFIG, "model", num_layers=4, dropout=0.1, remat="dots", scan="on", **fields)
    if experts:
        moe = dataclasses.replace(EXPERTS.model.moe, every=experts)
        config = changed(config, "model", moe=moe, d_ff=EXPERTS.model.d_ff)
    config = dataclasses.replace(changed(config, "train", accumulation=2, batch_size=ROWS), mesh=mesh)
    run = Run(config)
    reported = [run(batch(rows=ROWS))]
    grads = jax.tree.map(np.asarray, run.state.opt_state[0].mu)
    reported += [run(batch(rows=ROWS, seed=seed)) for seed in range(1, 20)]
    return grads, reported, run.state.params["layers"]["moe"]["router_bias"] if experts else None


@functools.cache
def on_one_device(experts):
    return trained(ONE, experts)


def agree(ours, expected):
    (grads, reported, bias), (expected_grads, expected_reported, expected_bias) = ours, expected
    for name in ("train/loss", "train/z_loss", "train/balance_loss", "train/router_z_loss", "moe/dropped_share"):
        if name in reported[0]:
            np.testing.assert_allclose(
                *([row[name] for row in rows] for rows in (reported, expected_reported)), atol=1e-5
            )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), grads, expected_grads)
    if bias is not None:
        np.testing.assert_allclose(bias, expected_bias, atol=1e-7)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, id=name(sizes), marks=() if sizes in FAST else pytest.mark.slow) for sizes in ALONE + THREE],
)
def test_every_mesh_trains_the_same(sizes):
    experts = EVERY.get(name(sizes), 1) if "expert" in sizes else 0
    agree(trained(MeshConfig(**({"data": 1} | sizes)), experts), on_one_device(experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"context": 2, "expert": 2, "tensor": 2},
        {"stage": 2, "fsdp": 2, "tensor": 2},
    ],
    ids=name,
)
def test_tokens_split_between_products_train_the_same(sizes):
    experts = int("expert" in sizes)
    agree(trained(MeshConfig(**({"data": 1} | sizes)), experts, split_tokens=True), on_one_device(experts))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 1])
def test_rounds_of_a_pipeline_train_the_same(experts):
    """Two rounds over chunks of one layer; without experts also a pattern of two kinds in each chunk."""
    sizes = {"stage": 2, "fsdp": 2, "tensor": 2}
    fields = {"stage_repeats": 2, "micro_batches": 2}
    agree(trained(MeshConfig(data=1, **sizes), experts, **fields), on_one_device(experts))
    if not experts:
        pattern = {"sliding_window": 4, "layer_pattern": ("local", "global")}
        agree(trained(MeshConfig(data=1, **sizes), 0, **pattern), trained(ONE, 0, **pattern))
