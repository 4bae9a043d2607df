"""What a search finds fits, is the fastest of all candidates, and is a config that plans as was said."""

import dataclasses
import math

import pytest

from lmjax.config import build, load, set_override, to_dict
from lmjax.data.config import DataConfig
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.optim.config import CompressConfig
from lmjax.plan import hardware, memory, search
from lmjax.plan.time import roofline
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig

LLAMA = RunConfig(
    model=ModelConfig(
        vocab_size=128_256, num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14_336, tie_embeddings=False
    ),
    train=TrainConfig(batch_size=16),
    data=DataConfig(seq_len=8192),
)
V5E, V5P = hardware.by_name("v5e"), hardware.by_name("v5p")


def test_the_best_fits_and_none_that_fits_is_faster():
    """Against every mesh, remat and micro-batch; the replicated model does not fit."""
    room = V5P.hbm_bytes * (1 - search.HEADROOM)
    assert memory.memory(LLAMA, 4).total > room
    best, *others = search.search(LLAMA, 4, V5P)
    assert best.memory_bytes <= room
    fastest = min(
        roofline(config, 4, V5P).step_s
        for mesh in search.meshes(LLAMA, 4)
        for remat in search.REMAT
        for count in search.accumulations(LLAMA, mesh, 4)
        if memory.memory(
            config := search.variant(LLAMA, mesh, dataclasses.replace(LLAMA.model, remat=remat), count), 4
        ).total
        <= room
    )
    assert best.roofline.step_s == pytest.approx(fastest, abs=1e-4)
    assert all(best.roofline.step_s <= one.roofline.step_s + 1e-4 for one in others)


def test_overrides_make_the_candidate():
    best = search.search(LLAMA, 4, V5P)[0]
    values = to_dict(LLAMA)
    for override in best.overrides:
        set_override(values, override.removeprefix("--config."))
    assert build(RunConfig, values) == best.config
    assert memory.memory(best.config, 4).total == best.memory_bytes


def test_meshes_multiply_to_the_devices_and_keep_what_else_is_split():
    moe = dataclasses.replace(
        LLAMA, model=ModelConfig(moe=MoeConfig(num_experts=8)), mesh=MeshConfig(data=1, context=1)
    )
    found = list(search.meshes(moe, 16))
    assert len(found) == len(set(found)) and all(math.prod(mesh.given) == 16 for mesh in found)
    assert {mesh.expert for mesh in found} == {1, 2, 4, 8}
    split = dataclasses.replace(LLAMA, mesh=MeshConfig(data=1, context=2))
    assert {mesh.context for mesh in search.meshes(split, 16)} == {2}


def test_stages_are_tried_where_they_divide_and_win_where_nothing_else_can():
    """A network so slow that weights cannot be gathered: layers stay where they are, rows pass on."""
    found = list(search.meshes(LLAMA, 16))
    assert {mesh.stage for mesh in found} == {1, 2, 4, 8, 16} and MeshConfig(data=1, stage=8, fsdp=2) in found
    repeats = dataclasses.replace(LLAMA, model=dataclasses.replace(LLAMA.model, stage_repeats=8))
    assert {mesh.stage for mesh in search.meshes(repeats, 16)} == {1, 2, 4}
    slow = dataclasses.replace(V5P, interconnect_bytes_per_s=1e9)
    best = search.search(LLAMA, 8, slow)[0]
    assert best.config.mesh.stage > 1 and memory.layout(best.config, 8).pipeline.ticks > 1


def test_between_slices_go_replicas_and_stages():
    found = list(search.meshes(LLAMA, 16, slices=4))
    assert {(mesh.dcn_data, mesh.dcn_stage) for mesh in found} == {(-1, 1), (-1, 2), (-1, 4)}
    assert all(mesh.data % (4 // mesh.dcn_stage) == 0 and mesh.stage % mesh.dcn_stage == 0 for mesh in found)
    assert len(set(found)) == len(found)


def test_a_model_that_no_node_holds_fits_on_several():
    """Llama 70B on 8 nodes of 8 H100, of which replicas alone would each be a node; its overrides say all of it."""
    config = load(RunConfig, "configs/pretrain/llama3_70b.py")
    best = search.search(config, 64, hardware.by_name("h100"), slices=8)[0]
    assert best.config.mesh.dcn_stage > 1 and best.memory_bytes < 0.9 * hardware.by_name("h100").hbm_bytes
    values = to_dict(config)
    for override in best.overrides:
        set_override(values, override.removeprefix("--config."))
    assert build(RunConfig, values) == best.config


def test_compressed_gradients_keep_stages_and_experts_whole():
    topk = dataclasses.replace(LLAMA, compress=CompressConfig(kind="topk"))
    assert {(mesh.stage, mesh.data > 1) for mesh in search.meshes(topk, 16)} == {(1, True)}


def test_too_few_devices():
    """On one chip the state alone is 96 GB."""
    assert search.search(LLAMA, 1, V5E) == []
    few = dataclasses.replace(LLAMA, train=TrainConfig(batch_size=8))
    fewest = search.fewest_devices(few, V5P)
    assert search.search(few, fewest, V5P) and not search.search(few, fewest // 2, V5P)
