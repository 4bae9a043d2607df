"""What a search finds fits, is the fastest of all candidates, and is a config that plans as was said."""

import dataclasses
import math

import pytest

from lmjax.config import build, set_override, to_dict
from lmjax.data.config import DataConfig
from lmjax.model.config import ModelConfig, MoeConfig
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
    assert memory.memory(LLAMA, 8).total > room
    best, *others = search.search(LLAMA, 8, V5P)
    assert best.memory_bytes <= room
    fastest = min(
        roofline(config, 8, V5P).step_s
        for mesh in search.meshes(LLAMA, 8)
        for remat in search.REMAT
        for count in search.accumulations(LLAMA, mesh, 8)
        if memory.memory(config := search.variant(LLAMA, mesh, remat, count), 8).total <= room
    )
    assert best.roofline.step_s == pytest.approx(fastest, abs=1e-4)
    assert all(best.roofline.step_s <= one.roofline.step_s + 1e-4 for one in others)


def test_overrides_make_the_candidate():
    best = search.search(LLAMA, 8, V5P)[0]
    values = to_dict(LLAMA)
    for override in best.overrides:
        set_override(values, override.removeprefix("--config."))
    assert build(RunConfig, values) == best.config
    assert memory.memory(best.config, 8).total == best.memory_bytes


def test_meshes_multiply_to_the_devices_and_keep_what_else_is_split():
    moe = dataclasses.replace(
        LLAMA, model=ModelConfig(moe=MoeConfig(num_experts=8)), mesh=MeshConfig(data=1, context=1)
    )
    found = list(search.meshes(moe, 16))
    assert len(found) == len(set(found)) and all(math.prod(mesh.given) == 16 for mesh in found)
    assert {mesh.expert for mesh in found} == {1, 2, 4, 8}
    split = dataclasses.replace(LLAMA, mesh=MeshConfig(data=1, context=2))
    assert {mesh.context for mesh in search.meshes(split, 16)} == {2}


def test_too_few_devices():
    """On one chip the state alone is 96 GB."""
    assert search.search(LLAMA, 1, V5E) == []
    few = dataclasses.replace(LLAMA, train=TrainConfig(batch_size=8))
    fewest = search.fewest_devices(few, V5P)
    assert search.search(few, fewest, V5P) and not search.search(few, fewest // 2, V5P)
