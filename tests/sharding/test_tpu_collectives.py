"""Golden communication of the step as it is compiled for a TPU: one collective or one byte more, and a test fails."""

import collections
import dataclasses
import math
import pathlib

import pytest

from lmjax import config as configs
from lmjax.data.config import DataConfig
from lmjax.model.config import ModelConfig
from lmjax.plan import compile as compiling
from lmjax.plan import hlo, params
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig

B, T, D, F, V, HEADS, KEYS, H = 16, 256, 512, 1024, 3072, 4, 4, 128
MODEL = ModelConfig(
    vocab_size=V, num_layers=3, d_model=D, num_heads=HEADS, num_kv_heads=KEYS, head_dim=H, d_ff=F, tie_embeddings=False,
    attention="reference",
)  # fmt: skip
CONFIG = RunConfig(
    model=MODEL, data=DataConfig(seq_len=T), train=TrainConfig(batch_size=B, precision="bfloat16", loss_chunk=B * T)
)
WEIGHTS = (D * (HEADS + 2 * KEYS) * H, HEADS * H * D, D * 2 * F, F * D)  # of a layer
LLAMA = str(pathlib.Path(__file__).parents[2] / "configs" / "pretrain" / "llama3_8b.py")
SMALL = 2**15  # numbers; norms, statistics and counts are smaller, weights and activations larger

pytestmark = pytest.mark.slow


def large(monkeypatch, topology, accumulation=1, split_tokens=False, **sizes):
    """(kind, axes, numbers of the whole) → how often in a step; with its dtype where that is not bfloat16."""
    seen = []

    def keep(text, mesh, row):
        seen.append((hlo.collectives(text), dict(mesh.shape)))
        return ()

    monkeypatch.setattr(compiling, "traffic", keep)
    train = dataclasses.replace(CONFIG.train, accumulation=accumulation, batch_size=B * accumulation)
    model = dataclasses.replace(MODEL, split_tokens=split_tokens)
    config = dataclasses.replace(CONFIG, model=model, train=train, mesh=MeshConfig(**{"data": 1} | sizes))
    compiling.compile_step(config, topology)
    ((ones, axes),) = seen
    found = collections.Counter()
    for one in ones:
        for dtype, shape in one.arrays:
            whole = math.prod(shape) * (one.group_size if one.kind == "reduce-scatter" else 1)
            if whole > SMALL:
                found[(one.kind, one.axes(axes), whole, *([] if dtype == "bf16" else [dtype]))] += one.times
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fsdp_gathers_each_weight_forward_and_backward_and_scatters_each_gradient(monkeypatch, accumulation):
    """Over one dim of the torus, then over the other; the table and the head once each. Every micro-batch does so, and no more."""
    wanted = collections.Counter()
    for weight, layers, uses in [(w, MODEL.num_layers, 2) for w in WEIGHTS] + [(V * D, 1, 1)] * 2:
        for axis, whole in (("fsdp", weight), ("fsdp_inner", weight // 2)):
            wanted["all-gather", (axis,), whole] += uses * layers * accumulation
            wanted["reduce-scatter", (axis,), whole] += layers * accumulation
    assert large(monkeypatch, "v5e:2x2", accumulation, fsdp=4) == wanted


@pytest.mark.parametrize(
    "topology, rows, most_bytes",
    [
        ("v5e:16x16", 256, 6.9e9),
        ("v5p:4x4x4", 128, 15.6e9),
        ("v5p:2x4x4", 64, 15.6e9),  # where the compiler, left to choose how pieces lie, makes all-reduces of them
    ],
)
def test_llama_8b_takes_no_more_than_maxtext(topology, rows, most_bytes):
    """Memory of a chip; and each number of a gradient is sent once, in two bytes, where MaxText 0.2.5 all-reduces them: twice."""
    config = configs.load(RunConfig, LLAMA, [f"train.batch_size={rows}"])
    step = compiling.compile_step(config, topology)
    assert step.needed_bytes <= most_bytes
    sent = collections.Counter()
    for one in step.traffic:
        sent[one.kind] += one.sent_bytes
    assert sent["reduce-scatter"] <= 2 * params.total(config.model)
    assert sent["all-gather"] <= 2 * sent["reduce-scatter"]
    assert sent["all-reduce"] + sent["all-to-all"] + sent["collective-permute"] < 0.001 * sent["reduce-scatter"]


def test_tensor_sums_two_activations_a_layer_forward_and_backward(monkeypatch):
    """And one of the rows looked up, one of the head's gradient."""
    assert large(monkeypatch, "v5e:2x2", tensor=4) == {("all-reduce", ("tensor",), B * T * D): 4 * MODEL.num_layers + 2}


def test_tokens_split_between_products_are_gathered_before_and_scattered_after(monkeypatch):
    """In place of each of those sums a layer's gather and reduce-scatter. Beside the layers: rows looked up are scattered, before they are
    cast; the last layer's are gathered, in the backward pass the first one's gradient; the head's is a sum."""
    layers, whole = 4 * MODEL.num_layers, B * T * D
    assert large(monkeypatch, "v5e:2x2", split_tokens=True, tensor=4) == {
        ("reduce-scatter", ("tensor",), whole): layers,
        ("all-gather", ("tensor",), whole): layers + 2,
        ("reduce-scatter", ("tensor",), whole, "f32"): 1,
        ("all-reduce", ("tensor",), whole): 1,
    }
