"""A pipeline gives what the layers give one after the other, and its compiled schedule has the ticks of the theory."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lmjax import parts
from lmjax.batch import Batch
from lmjax.data.config import DataConfig
from lmjax.errors import UserError
from lmjax.model import pipeline
from lmjax.model.config import ModelConfig
from lmjax.plan.hlo import collectives
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.sharding.stages import Schedule
from lmjax.train.config import RunConfig, TrainConfig
from lmjax.train.step import build_step

LAYERS, ROWS, WIDTH = 12, 48, 4


def layers_of(x, weights, numbers, rows):
    """Layers whose order matters, which use what belongs to each row, and give out what they saw."""
    outs = []
    for w, number in zip(weights, numbers, strict=True):
        x = jnp.tanh(x @ w + rows[:, None, None]) * (1 + number / 10)
        outs.append(x.sum(axis=(1, 2)))
    return x, jnp.stack(outs)


SCHEDULES = [
    Schedule(2, 2, 6),
    *(pytest.param(plan, marks=pytest.mark.slow) for plan in (Schedule(4, 1, 8), Schedule(4, 3, 4), Schedule(2, 6, 2))),
]


@pytest.mark.parametrize("unroll", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", SCHEDULES, ids=str)
def test_values_outputs_and_gradients_are_those_of_the_layers_in_turn(plan, unroll):
    rng = np.random.default_rng(0)
    x, weights, rows = (
        rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, 3, WIDTH), (LAYERS, WIDTH, WIDTH), (ROWS,))
    )
    weights *= 0.5
    reading = rng.normal(size=(LAYERS, ROWS)).astype(np.float32)

    def loss(run, x, weights, rows):
        y, outs = run(x, weights, rows)
        return jnp.sum(y[:, 0] * y[:, 1]) + jnp.sum(outs * reading), (y, outs)

    def ours(x, weights, rows):
        return pipeline.run(layers_of, x, weights, jnp.arange(LAYERS), rows, plan, unroll)

    def plain(x, weights, rows):
        return layers_of(x, weights, jnp.arange(LAYERS), rows)

    expected = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)(plain, x, weights, rows)
    with meshes.use(meshes.make_mesh(MeshConfig(data=-1, stage=plan.stages))):
        split = jax.device_put(weights, meshes.sharding(jax.sharding.get_mesh(), ("layers", None, None)))
        got = jax.jit(jax.value_and_grad(loss, (1, 2, 3), has_aux=True), static_argnums=0)(ours, x, split, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-5), got, expected)


@pytest.mark.parametrize("stages, repeats", [(4, 2), (2, 4), (4, 3), (8, 6)])
def test_dealing_permutes_each_chunk_once_and_moves_nothing_else(stages, repeats):
    plan = Schedule(stages, repeats, stages)
    weights = np.arange(stages * repeats * 2 * 3.0).reshape(stages * repeats * 2, 3)
    mesh = meshes.make_mesh(MeshConfig(data=1, stage=stages), jax.devices()[:stages])
    with meshes.use(mesh):
        place = meshes.sharding(mesh, ("layers", None))

        def local(w):
            return pipeline.deal(w, plan)[:, None]

        deal = jax.shard_map(
            local, in_specs=PartitionSpec("stage"), out_specs=PartitionSpec(None, "stage"), check_vma=False
        )
        compiled = jax.jit(deal, in_shardings=place).lower(weights).compile()
        dealt = compiled(jax.device_put(weights, place))
    assert dealt.sharding.spec == PartitionSpec(None, "stage")
    np.testing.assert_array_equal(dealt, weights.reshape(repeats, stages, 2, 3))
    found = re.findall(r"= \S+ (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert set(found) == {"collective-permute"} and len(found) == repeats


# ---------------------------------------------------------------------------------------------------- the compiled schedule

SEQ_LEN, ROWS_OF_A_STEP = 32, 16
MODEL = ModelConfig(vocab_size=256, num_layers=8, d_model=64, num_heads=4, d_ff=128, attention="reference")
CONFIG = RunConfig(
    model=MODEL, train=TrainConfig(batch_size=ROWS_OF_A_STEP, precision="float32"), data=DataConfig(seq_len=SEQ_LEN)
)


def compiled_text(config: RunConfig) -> str:
    made = parts.build_parts(config)
    step = build_step(config, made.loss, made.optimizer, made.schedule, made.mesh, made.shardings)
    local = np.zeros((config.train.batch_size, config.data.seq_len), np.int32)
    batch = Batch(local, local, local.astype(np.float32), local, local)
    with meshes.use(made.mesh):
        return step.lower(made.abstract_state(), batch).compile().as_text()


@pytest.mark.parametrize("repeats, ticks", [(1, 8 + 3), pytest.param(2, 16 + 3, marks=pytest.mark.slow)])
def test_the_compiled_step_has_the_ticks_of_the_theory_and_passes_on_by_permutes(repeats, ticks):
    model = dataclasses.replace(MODEL, micro_batches=8, stage_repeats=repeats, scan="on")
    text = compiled_text(dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(data=2, stage=4)))
    found = collectives(text)
    passed = [c.arrays for c in found if c.kind == "collective-permute" and c.times == ticks]
    rows = ("f32", (ROWS_OF_A_STEP // 8 // 2, SEQ_LEN, MODEL.d_model))
    assert passed == 4 * [(rows,)]  # what is done and what waits, forward and backward
    others = {(c.kind, c.times) for c in found if c.kind != "collective-permute"}
    assert {times for _, times in others} == {1}, others  # gradients are summed once, and nothing is gathered


@pytest.mark.parametrize(
    "model, mesh, message",
    [
        ({"num_layers": 6}, {"stage": 4}, r"num_layers=6 does not divide by config\.mesh\.stage=4"),
        (
            {"stage_repeats": 4},
            {"stage": 4},
            r"num_layers=8 does not divide by .*stage=4 × config\.model\.stage_repeats=4",
        ),
        ({"micro_batches": 6}, {"stage": 4}, r"micro_batches=6 does not divide by config\.mesh\.stage=4"),
        ({}, {"data": 4, "stage": 2, "fsdp": 1}, None),
        ({}, {"data": 1, "stage": 8}, None),
        (
            {"sliding_window": 8, "layer_pattern": ("local", "global")},
            {"stage": 8},
            "chunks of 1 that are not alike",
        ),
    ],
)
def test_what_cannot_be_a_pipeline_is_named_before_anything_is_compiled(model, mesh, message):
    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(MODEL, **model), mesh=MeshConfig(**({"data": -1} | mesh))
    )
    if message is None:
        parts.build_parts(config)
        return
    with pytest.raises(UserError, match=message):
        parts.build_parts(config)
