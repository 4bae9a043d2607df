"""Bytes for each device: the exact parts equal the shards of the real state; the estimates hold against the compiler."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.data.config import DataConfig
from lmjax.errors import UserError
from lmjax.model import attention, decoder
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.optim.build import OPTIMIZERS, build_optimizer
from lmjax.optim.config import OptimConfig
from lmjax.plan import activations, heap, memory
from lmjax.sharding.config import MeshConfig
from lmjax.sharding.mesh import make_mesh
from lmjax.train.config import RunConfig, TrainConfig
from lmjax.train.loss import next_token_loss
from lmjax.train.state import init_state, state_shardings

MODEL = ModelConfig(
    vocab_size=512, num_layers=4, d_model=128, num_heads=8, num_kv_heads=4, d_ff=256, tie_embeddings=False, qk_norm=True,
)  # fmt: skip
MESHES = {
    "data": MeshConfig(data=8),
    "fsdp, zero 1": MeshConfig(data=2, fsdp=4, zero=1),
    "fsdp, zero 2": MeshConfig(data=1, fsdp=8, zero=2),
    "all three": MeshConfig(data=2, fsdp=2, tensor=2),
    "tensor": MeshConfig(data=1, fsdp=2, tensor=4),
    "context": MeshConfig(data=1, fsdp=2, context=4),
    "stage": MeshConfig(data=1, fsdp=2, stage=4),
}


def shard_bytes(shapes, shardings) -> int:
    """Bytes on one device of a tree; scalars and the empty places of factored statistics are left out."""
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
        if leaf.size > 16
    )


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_gradients_are_the_shards_of_the_real_ones(mesh, name):
    config = RunConfig(model=MODEL, mesh=mesh, optim=OptimConfig(name=name, warmup_steps=0))
    optimizer = build_optimizer(config.optim)
    shardings = state_shardings(config, make_mesh(mesh), optimizer)
    state = jax.eval_shape(lambda: init_state(config, optimizer))
    planned = memory.memory(config, 8)
    assert planned.params == shard_bytes(state.params, shardings.state.params)
    assert planned.gradients == shard_bytes(state.params, shardings.grads)
    assert planned.optimizer == shard_bytes(state.opt_state, shardings.state.opt_state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_experts_are_the_shards_of_the_real_ones(name):
    moe = MoeConfig(num_experts=8, shared_d_ff=64, shared_gate=True, bias_rate=0.1)
    mesh = MeshConfig(data=1, fsdp=2, expert=2, tensor=2)
    config = RunConfig(
        model=dataclasses.replace(MODEL, moe=moe), mesh=mesh, optim=OptimConfig(name=name, warmup_steps=0)
    )
    optimizer = build_optimizer(config.optim)
    shardings = state_shardings(config, make_mesh(mesh), optimizer)
    state = jax.eval_shape(lambda: init_state(config, optimizer))
    planned = memory.memory(config, 8)
    assert planned.params == shard_bytes(state.params, shardings.state.params)
    assert planned.optimizer == shard_bytes(state.opt_state, shardings.state.opt_state)


def test_batch_is_the_rows_of_a_device():
    config = RunConfig(train=TrainConfig(batch_size=32, accumulation=2), data=DataConfig(seq_len=100))
    rows, length = 32 // 4, 100
    assert memory.memory(config, 4).batch == rows * length * sum(4 for name in Batch._fields if name != "prefix")


def test_state_on_the_host_is_on_a_device_for_the_update_alone():
    config = RunConfig(model=MODEL, mesh=MeshConfig(data=1, fsdp=4))
    there = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=4, offload=True))
    kept, moved = memory.memory(config, 4), memory.memory(there, 4)
    assert (moved.optimizer, moved.host) == (0, kept.optimizer) and kept.host == 0 and moved.state == kept.state
    (update,) = (one for one in memory.buffers(there, memory.layout(there, 4)) if one.part == memory.STATE)
    assert update == heap.Buffer(memory.STATE, kept.optimizer, memory.UPDATE, memory.UPDATE)
    assert moved.total < kept.total <= moved.total + kept.optimizer


def test_features_before_text_are_tokens_of_the_layers(tmp_path):
    """8 features and 24 tokens take what 32 tokens take in the layers, what 24 take in the head, and their own bytes in the batch."""
    np.savez(tmp_path / "seen.npz", one=np.zeros((8, 12), np.float32))
    model = dataclasses.replace(MODEL, prefix_dim=12)

    def held(length, **features):
        data = DataConfig(seq_len=length, packing="document", features=features)
        config = RunConfig(model=model, data=data, train=TrainConfig(batch_size=4))
        return memory.memory(config, 1), memory.buffers(config, memory.layout(config, 1))

    (with_features, ours), (text, text_buffers), (long, long_buffers) = (
        held(24, text=str(tmp_path / "seen.npz")), held(24), held(32)
    )  # fmt: skip
    assert with_features.activations == long.activations > text.activations
    for part, like in ((memory.KEPT, long_buffers), (memory.LOGITS, text_buffers)):
        assert [one for one in ours if one.part == part] == [one for one in like if one.part == part]
    assert with_features.batch == text.batch + 4 * 8 * 12 * 4


def test_accumulation_halves_activations_and_doubles_gradients():
    config = RunConfig(train=TrainConfig(batch_size=16), model=ModelConfig(remat="full"))
    halved = dataclasses.replace(config, train=TrainConfig(batch_size=16, accumulation=2))
    whole, half = memory.memory(config, 1), memory.memory(halved, 1)
    assert half.activations * 2 == whole.activations and half.gradients == 2 * whole.gradients


def test_remat_keeps_less_and_less():
    kept = [
        activations.kept_for_backward(MODEL, 256, 2, 1, remat) for remat in ("none", "dots", "block_outputs", "full")
    ]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    assert kept[-1] == 2 * MODEL.d_model


def test_split_rows_take_a_share_of_what_whole_ones_take():
    whole, split = (
        memory.memory(RunConfig(model=MODEL, mesh=MeshConfig(data=1, context=count)), count) for count in (1, 4)
    )
    assert split.activations == pytest.approx(whole.activations / 4, rel=0.1) and split.params == whole.params


@pytest.mark.parametrize("kind", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("length", [64, 128, 129, 256])
def test_blockwise_where_the_model_chooses_it(kind, length):
    model = dataclasses.replace(MODEL, attention=kind)
    chosen = getattr(attention.choose(model, length, cached=False), "func", attention.reference)
    assert activations.is_blockwise(model, length) == (chosen is attention.in_blocks)


@pytest.mark.parametrize(
    "config, devices, message",
    [
        (RunConfig(mesh=MeshConfig(data=3)), 3, "8 rows of a micro-batch do not divide over data = 3"),
        (
            RunConfig(mesh=MeshConfig(data=1, tensor=4)),
            4,
            r"num_heads\)=6 does not divide by config.mesh.tensor=4 \(parameter layers/attention/qkv\)",
        ),
        (RunConfig(mesh=MeshConfig(data=2)), 8, "does not match 8 device"),
        (
            RunConfig(mesh=MeshConfig(context=4), data=DataConfig(seq_len=100)),
            4,
            r"seq_len=100 does not divide by 2 × config\.mesh\.context=4",
        ),
        (
            RunConfig(
                model=ModelConfig(split_tokens=True), mesh=MeshConfig(data=1, tensor=2), data=DataConfig(seq_len=101)
            ),
            2,
            "split_tokens: 101 tokens do not divide by config.mesh.context × tensor = 2",
        ),
        (RunConfig(mesh=MeshConfig(data=2, expert=4)), 8, "expert=4 splits experts: config.model.moe has none"),
        (
            RunConfig(model=ModelConfig(moe=MoeConfig(num_experts=6)), mesh=MeshConfig(data=2, expert=4)),
            8,
            r"moe.num_experts=6 does not divide by config.mesh.expert=4 \(parameter layers/moe/router\)",
        ),
    ],
)
def test_what_does_not_divide_is_the_users_mistake(config, devices, message):
    with pytest.raises(UserError, match=message):
        memory.memory(config, devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "reference"},
        {"activation": "geglu"},
        {"activation": "gelu"},
        {"activation": "relu"},
        {"qk_norm": False},
        {"remat": "dots"},
        {"moe": MoeConfig(num_experts=4, shared_d_ff=256)},
        {"moe": MoeConfig(num_experts=4, capacity_factor=1.5)},
        {"moe": MoeConfig(num_experts=4), "remat": "full"},
        {"moe": MoeConfig(num_experts=4, every=2, dense_d_ff=1024)},
        {"remat": "block_outputs"},
        {"remat": "full"},
    ],
    ids=str,
)
def test_estimates_hold_against_the_compiler(changes):
    """Temporaries of a compiled gradient, in float32 because XLA on a CPU keeps half precision as float32 anyway."""
    model = ModelConfig(
        vocab_size=2000, num_layers=8, d_model=256, num_heads=8, num_kv_heads=2, d_ff=768, tie_embeddings=False, qk_norm=True,
        scan="on", attention="blockwise",
    )  # fmt: skip
    model = dataclasses.replace(model, **changes)
    train = TrainConfig(batch_size=8, precision="float32", loss_chunk=512)
    config = RunConfig(model=model, train=train, data=DataConfig(seq_len=256))

    def loss(params, batch):
        return next_token_loss(model, params, batch, None, 0.0, 512, dtypes("float32", "cpu")).total

    shapes = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    ints, floats = (jax.ShapeDtypeStruct((8, 256), dtype) for dtype in (jnp.int32, jnp.float32))
    compiled = jax.jit(jax.grad(loss)).lower(shapes, Batch(ints, ints, floats, ints, ints)).compile()
    found = memory.buffers(config, memory.layout(config, 1), fused=False)
    planned = heap.height([buffer for buffer in found if buffer.part != memory.GRADIENTS])  # those are outputs here
    ratio = planned / compiled.memory_analysis().temp_size_in_bytes
    assert 0.75 < ratio < 1.25
