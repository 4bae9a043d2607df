"""A step whose gradients cross `data` compressed: beside the exact one, resumed to the bit, its bytes counted."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.checkpoint.restore import restore
from lmjax.checkpoint.save import Saver
from lmjax.model.config import ModelConfig
from lmjax.optim.config import CompressConfig, OptimConfig
from lmjax.parts import build_parts
from lmjax.plan import hlo
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import CheckpointConfig, RunConfig, TrainConfig
from lmjax.train.state import init_state
from lmjax.train.step import build_step

STEPS = 80
CONFIG = RunConfig(
    model=ModelConfig(vocab_size=64, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=64),
    mesh=MeshConfig(data=2, fsdp=2, tensor=2),
    optim=OptimConfig(learning_rate=0.01, warmup_steps=2, schedule="constant", weight_decay=0.0),
    train=TrainConfig(steps=STEPS, batch_size=8, precision="float32", loss_chunk=64),
)
KINDS = {
    "bfloat16": CompressConfig("bfloat16"),
    "int8": CompressConfig("int8", block=64),
    "topk": CompressConfig("topk", share=0.25),
}


@functools.cache
def build(compress, mesh=CONFIG.mesh, accumulation=1):
    """(parts, step, what makes the state before the first)."""
    train = dataclasses.replace(CONFIG.train, accumulation=accumulation)
    parts = build_parts(dataclasses.replace(CONFIG, compress=compress, mesh=mesh, train=train))
    step = build_step(parts.config, parts.loss, parts.optimizer, parts.schedule, parts.mesh, parts.shardings)
    return parts, step, jax.jit(lambda: init_state(parts.config, parts.optimizer), out_shardings=parts.shardings.state)


def batch(seed):
    """A language in which the next token is a function of the last, mostly."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 64, (8, 17)).astype(np.int32)
    for t in range(1, 17):
        ids[:, t] = np.where(rng.random(8) < 0.9, ids[:, t - 1] * 5 % 64, ids[:, t])
    ones = np.ones((8, 16), np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], ones.astype(np.float32), ones, np.broadcast_to(np.arange(16), (8, 16)) * ones)


def run(built, steps, state=None, begin=0):
    """The state after those steps and their losses."""
    (parts, step, start), losses = built, []
    with meshes.use(parts.mesh):
        state = start() if state is None else state
        for s in range(begin, begin + steps):
            state, metrics = step(state, batch(s))
            losses.append(float(metrics["train/loss"]))
    return state, losses


@pytest.fixture(scope="module")
def exact():
    return run(build(CompressConfig()), STEPS)[1]


@pytest.mark.parametrize(
    "kind, band",
    [
        ("bfloat16", 0.01),
        ("int8", 0.02),
        ("topk", 0.05),
    ],
)
@pytest.mark.slow
def test_losses_stay_beside_the_exact_ones_and_a_resume_changes_no_bit(kind, band, exact, tmp_path):
    built = build(KINDS[kind])
    state, losses = run(built, STEPS)
    assert np.mean(exact[-10:]) < 0.3 * exact[0]  # it learns
    assert losses != exact and abs(np.mean(losses[-10:]) - np.mean(exact[-10:])) < band
    if kind == "bfloat16":
        assert state.residual is None
        return
    up = state.residual["layers"]["mlp"]["up"]
    assert 8 * up.addressable_shards[0].data.size == up.size  # cut over replicas and as its parameter
    with meshes.use(built[0].mesh):
        half, _ = run(built, 70)
        with Saver(tmp_path, CheckpointConfig(), {}) as saver:
            saver.save(70, half)
        resumed = restore(tmp_path, built[0].abstract_state()).state
    resumed, more = run(built, STEPS - 70, resumed, begin=70)
    assert more == losses[70:]
    jax.tree.map(np.testing.assert_array_equal, resumed.residual, state.residual)


@pytest.mark.slow
def test_one_number_of_a_hundred_learns_later_and_catches_up():
    mesh, steps = MeshConfig(data=2, fsdp=4), 600
    exact, sparse = (
        run(build(kind, mesh), steps)[1] for kind in (CompressConfig(), CompressConfig("topk", share=0.01))
    )
    behind = [np.mean(sparse[begin : begin + 100]) - np.mean(exact[begin : begin + 100]) for begin in (0, 200, 500)]
    assert behind[0] > 1.0 and behind[1] < 0.6 * behind[0] and behind[2] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=8), MeshConfig(data=2, context=4), MeshConfig(data=4, fsdp=2, zero=1)]
)
def test_every_mesh_sums_the_same_replicas(mesh, exact):
    _, losses = run(build(KINDS["bfloat16"], mesh, accumulation=1), 10)
    np.testing.assert_allclose(losses, exact[:10], atol=0.02)


def test_all_that_is_large_on_the_data_axis_is_compressed():
    built = build(KINDS["int8"])
    with meshes.use(built[0].mesh):
        text = built[1].lower(built[0].abstract_state(), batch(0)).compile().as_text()
    found = [one for one in hlo.collectives(text) if "data" in one.axes(dict(built[0].mesh.shape))]
    assert {"s8", "f32"} == {dtype for one in found for dtype, _ in one.arrays}
    floats = [np.prod(shape) for one in found for dtype, shape in one.arrays if dtype == "f32"]
    codes = [np.prod(shape) for one in found for dtype, shape in one.arrays if dtype == "s8"]
    assert max(floats) < 0.05 * max(codes)  # scales and sums of losses
