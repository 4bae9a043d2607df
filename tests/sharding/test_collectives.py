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


def compiled(config):
    """Every collective of the step."""
    parts = build_parts(config)
    step = build_step(config, parts.loss, parts.optimizer, parts.schedule, parts.mesh, parts.shardings)
    local = np.zeros((B, config.data.seq_len), np.int32)
    batch = Batch(local, local, local.astype(np.float32), local, local)
    with meshes.use(parts.mesh):
        text = step.lower(parts.abstract_state(), batch).compile().as_text()
    return hlo.collectives(text), dict(parts.mesh.shape)


def collectives(config):
    """(kind, shape) → how often, of the loop over layers, forward and backward; a tuple's parts counted one by one."""
    found = collections.Counter()
    for one in compiled(config)[0]:
        if "while/body" in one.op:
            found.update((one.kind, shape) for _, shape in one.arrays)
    return found


def large(config):
    """(kind, axes, elements of the whole) → how often in a step, of arrays as large as an activation or a weight."""
    found = collections.Counter()
    ones, sizes = compiled(config)
    for one in ones:
        for _, shape in one.arrays:
            whole = int(np.prod(shape)) * (one.group_size if one.kind == "reduce-scatter" else 1)
            if whole > B * T:  # norms, statistics and counts are smaller
                found[one.kind, one.axes(sizes), whole] += one.times
    return found


def config(**sizes):
    return dataclasses.replace(CONFIG, mesh=MeshConfig(**{"data": 1} | sizes))


def test_tensor_sums_two_activations_a_layer_forward_and_backward():
    found = collectives(config(tensor=8))
    assert found["all-reduce", (B * T, D)] == 4
    assert not [kind for kind, _ in found if kind != "all-reduce"]  # no weight is gathered


WEIGHTS = (D * 8 * 3 * 16, D * D, D * 2 * F, F * D)  # of a layer


def expected(fsdp, parts=1):
    """Each weight gathered forward, gathered backward, and its gradient reduce-scattered; the table is looked up and makes the logits."""
    found = collections.Counter()
    for weight in WEIGHTS:
        found["all-gather", fsdp, weight // parts] += 2 * MODEL.num_layers
        found["reduce-scatter", fsdp, weight // parts] += MODEL.num_layers
    found["all-gather", fsdp, V * D // parts] += 1  # in float32 both are one
    found["reduce-scatter", fsdp, V * D // parts] += 2
    return found


@pytest.mark.parametrize("remat", ["none", "full"])
def test_fsdp_gathers_each_weight_forward_and_backward_and_scatters_each_gradient(remat):
    model = dataclasses.replace(MODEL, remat=remat)
    assert large(dataclasses.replace(config(fsdp=8), model=model)) == expected(("fsdp",))


def test_products_of_axes_add_nothing():
    """Tensor: two sums forward and two backward a layer, one of the rows looked up, one of the head's; data: the sum of the shards."""
    found = large(config(data=2, fsdp=2, tensor=2))
    rows = B // 4 * T * D
    wanted = expected(("fsdp",), parts=2)
    wanted["all-reduce", ("tensor",), rows] += 4 * MODEL.num_layers + 2
    for weight in WEIGHTS:
        wanted["all-reduce", ("data",), weight // 4 * MODEL.num_layers] += 1
    wanted["all-reduce", ("data",), V * D // 4] += 1
    assert found == wanted


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
