"""Golden communication of the compiled step: one collective more, and a test fails."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.parts import build_parts
from lmjax.plan import hlo
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig
from lmjax.train.step import build_step

B, T, D, F, V = 8, 256, 128, 512, 256
MODEL = ModelConfig(vocab_size=V, num_layers=3, d_model=D, num_heads=8, d_ff=F, scan="on", attention="reference")
CONFIG = RunConfig(model=MODEL, train=TrainConfig(batch_size=B, precision="float32", loss_chunk=B * T // 2))


def collectives(config):
    """(kind, shape) → how often, of the loop over layers, forward and backward; a tuple's parts counted one by one."""
    parts = build_parts(config)
    step = build_step(config, parts.loss, parts.optimizer, parts.schedule, parts.mesh, parts.shardings)
    local = np.zeros((B, config.data.seq_len), np.int32)
    batch = Batch(local, local, local.astype(np.float32), local, local)
    with meshes.use(parts.mesh):
        text = step.lower(parts.abstract_state(), batch).compile().as_text()
    found = collections.Counter()
    for one in hlo.collectives(text):
        if "while/body" in one.op:
            found.update((one.kind, shape) for _, shape in one.arrays)
    return found


def config(**sizes):
    return dataclasses.replace(CONFIG, mesh=MeshConfig(**{"data": 1} | sizes))


def test_tensor_sums_two_activations_a_layer_forward_and_backward():
    found = collectives(config(tensor=8))
    assert found["all-reduce", (B * T, D)] == 4
    assert not [kind for kind, _ in found if kind != "all-reduce"]  # no weight is gathered


def test_fsdp_gathers_each_weight_forward_and_backward_and_reduces_each_gradient_once():
    found = collectives(config(fsdp=8))
    weights = {(D, 8, 3, 16): 2, (8, 1, 16, D): 2, (D, 2, F): 2, (F, D): 2}
    gathered = collections.Counter()
    for (kind, shape), count in found.items():
        if kind == "all-gather":
            gathered[int(np.prod(shape))] += count
    expected = collections.Counter()
    for shape, count in weights.items():
        expected[int(np.prod(shape))] += count
    assert {size: gathered[size] for size in expected} == expected
    reduced = sum(int(np.prod(shape)) * count for (kind, shape), count in found.items() if kind == "all-reduce")
    norms, tables = 2 * D, 2 * D * V  # the table is looked up and, tied, makes the logits
    assert sum(map(np.prod, weights)) <= reduced <= sum(map(np.prod, weights)) + norms + tables + B * T
    assert not [kind for kind, _ in found if kind in ("all-to-all", "collective-permute")]


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_products_of_axes_need_no_other_kind(sizes):
    found = collectives(config(**sizes))
    assert {kind for kind, _ in found} <= {"all-reduce", "all-gather"}


def test_data_sums_gradients_only():
    found = collectives(config(data=8))
    assert {kind for kind, _ in found} <= {"all-reduce"}
    assert jax.device_count() == 8


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_experts_send_rows_there_and_back_forward_and_backward_and_gather_no_weight(capacity):
    """Eight experts on eight devices, top-2: a dropless bucket holds all of a device's tokens, another a quarter of them."""
    moe = MoeConfig(num_experts=8, top_k=2, capacity_factor=capacity)
    model = dataclasses.replace(MODEL, moe=moe, d_ff=F // 2)
    found = collections.Counter()
    for (kind, shape), count in collectives(dataclasses.replace(config(expert=8), model=model)).items():
        found[kind, int(np.prod(shape))] += count * (kind == "all-to-all" or int(np.prod(shape)) >= D * F)
    bucket = T if capacity is None else T * 2 // 8
    # Compiled for a CPU, a collective of 8 pieces is a tuple of them.
    rows = sum(count for (kind, size), count in found.items() if kind == "all-to-all" and size == bucket * D)
    assert rows == 4 * 8, found
    assert not [size for (kind, size), count in found.items() if kind == "all-gather" and count]
