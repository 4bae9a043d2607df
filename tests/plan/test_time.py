"""Time, the cadence of checkpoints, and the roofline, against brute force and closed forms."""

import dataclasses

import numpy as np
import pytest

from lmjax.data.config import DataConfig
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.plan import hardware, memory, time
from lmjax.plan.flops import flops_per_token
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig

CONFIG = RunConfig(
    model=ModelConfig(
        vocab_size=512, num_layers=4, d_model=256, num_heads=8, num_kv_heads=4, d_ff=512, tie_embeddings=False
    ),
    mesh=MeshConfig(data=1, fsdp=8),
    train=TrainConfig(batch_size=32),
    data=DataConfig(seq_len=128),
)
V5P = hardware.by_name("v5p")


@pytest.mark.parametrize("save, between", [(30.0, 86_400.0), (60.0, 3600.0), (5.0, 600.0)])
def test_the_interval_wastes_least(save, between):
    """Against a search over intervals of the exact expectation with preemptions that come by a Poisson process (Daly, eq. 13)."""

    def expected(interval):
        return between * (np.exp((interval + save) / between) - 1) / interval

    intervals = np.linspace(save / 10, between, 200_000)
    best = intervals[np.argmin(expected(intervals))]
    ours = time.save_interval_s(save, between)
    assert ours == pytest.approx(best, rel=0.02) and expected(ours) <= expected(best) * 1.0002


def test_a_save_dearer_than_the_time_between_preemptions():
    assert time.save_interval_s(100.0, 40.0) == 40.0


def test_cadence_in_steps():
    found = time.cadence(30.0, 300.0, 1.0, step_s=10.0)
    assert found.steps == round(found.interval_s / 10.0)
    assert time.cadence(30.0, 300.0, 1.0, step_s=1e9).steps == 1
    assert time.cadence(30.0, 300.0, 24.0, 1.0).lost_share > found.lost_share > 0


def test_the_roofline_computes_what_a_device_computes():
    flops = flops_per_token(CONFIG.model, 128).hardware * 32 * 128 / 8
    assert time.roofline(CONFIG, 8, V5P).compute_s == pytest.approx(flops / 459e12)
    split = dataclasses.replace(CONFIG, mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    assert time.roofline(split, 8, V5P).compute_s == pytest.approx(flops / 459e12)


def sent(mesh: MeshConfig, devices: int, **model) -> dict[str, float]:
    """Bytes that a device sends, for a variant of the config."""
    config = dataclasses.replace(CONFIG, mesh=mesh, model=dataclasses.replace(CONFIG.model, **model))
    return time.sent_bytes(config, memory.layout(config, devices))


def test_bytes_sent_are_the_ideal():
    """Gathered twice and reduced once in two bytes over a ring of 8; two pairs of all-reduces of B · T · D a layer; nothing else."""
    model = CONFIG.model
    layer = 256 * (8 + 2 * 4) * 32 + 8 * 32 * 256 + 3 * 256 * 512
    weights = 4 * layer + 2 * 256 * 512
    assert sent(MeshConfig(data=1, fsdp=8), 8)["fsdp"] == pytest.approx(3 * 2 * weights * 7 / 8)
    tokens = 32 * 128 / 2
    assert sent(MeshConfig(data=2, tensor=4), 8)["tensor"] == pytest.approx(
        4 * 2 * (3 / 4) * model.num_layers * tokens * 256 * 2
    )
    only = sent(MeshConfig(data=8), 8)
    assert only["data"] > 0 and not any(value for name, value in only.items() if name != "data")


def test_experts_send_rows_there_and_back_twice():
    found = sent(MeshConfig(data=4, expert=2), 8, moe=MoeConfig(num_experts=4, top_k=1, capacity_factor=1.0))
    assert found["expert"] == pytest.approx(4 * (1 / 2) * 4 * (32 * 128 / 8) * 256 * 2)


def test_what_limits_a_step():
    assert time.roofline(CONFIG, 8, V5P).limit == "gathering weights and reducing gradients"
    long = dataclasses.replace(CONFIG, data=DataConfig(seq_len=65_536))
    assert time.roofline(long, 8, V5P).limit == "compute"
    slow = dataclasses.replace(V5P, interconnect_bytes_per_s=1e3)
    tensor = dataclasses.replace(CONFIG, mesh=MeshConfig(data=1, tensor=4))
    assert time.roofline(tensor, 4, slow).limit == "tensor and expert communication"
