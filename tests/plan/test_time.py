"""Time, the cadence of checkpoints, and the roofline, against brute force and closed forms."""

import dataclasses
import pathlib

import numpy as np
import pytest

from lmjax import config as configs
from lmjax.data.config import DataConfig
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.optim.config import CompressConfig
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
GPT2 = pathlib.Path(__file__).parent.parent.parent / "configs" / "pretrain" / "gpt2_124m.py"


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


def test_below_zero_3_gradients_and_new_weights_travel_in_float32():
    """Held to what libtpu compiled for v5e:2x2, zero 1: 232 MB scattered, 161 MB gathered, 47 MB summed. It scatters the gradient of tied
    embeddings twice, for either use, which the ideal does not.
    """
    config = configs.load(
        RunConfig, str(GPT2), ["model.num_layers=2", "train.batch_size=8", "mesh.data=1", "mesh.fsdp=4"]
    )
    found = []
    for zero in (1, 2):
        mesh = dataclasses.replace(config.mesh, zero=zero)
        found.append(time.sent_bytes(config, memory.layout(dataclasses.replace(config, mesh=mesh), 4))["fsdp"])
    assert found[0] == found[1] == pytest.approx(231.8e6 + 160.7e6 + 47.3e6, rel=0.3)
    assert found[0] / 2 == pytest.approx(160.7e6, rel=0.03)


def test_experts_send_rows_there_and_back_twice():
    found = sent(MeshConfig(data=4, expert=2), 8, moe=MoeConfig(num_experts=4, top_k=1, capacity_factor=1.0))
    assert found["expert"] == pytest.approx(4 * (1 / 2) * 4 * (32 * 128 / 8) * 256 * 2)


def test_what_limits_a_step():
    assert time.roofline(CONFIG, 8, V5P).limit == "gathering weights and reducing gradients"
    long = dataclasses.replace(CONFIG, data=DataConfig(seq_len=65_536))
    assert time.roofline(long, 8, V5P).limit == "compute"
    slow = dataclasses.replace(V5P, interconnect_bytes_per_s=1e3)
    tensor = dataclasses.replace(CONFIG, mesh=MeshConfig(data=1, tensor=4))
    assert time.roofline(tensor, 4, slow).limit == "communication between products (tensor, expert, context, stage)"


# ------------------------------------------------------------------------------------------------- pipelines and slices


def test_a_bubble_takes_its_time_and_stages_pass_rows_on():
    """Four stages, 8 micro-batches: 11 ticks for 8; each passes a micro-batch's rows of its replica on four times, in two bytes."""
    mesh = MeshConfig(data=2, stage=4)
    config = dataclasses.replace(CONFIG, mesh=mesh, model=dataclasses.replace(CONFIG.model, micro_batches=8))
    flops = flops_per_token(CONFIG.model, 128).hardware * 32 * 128 / 8
    assert time.roofline(config, 8, V5P).compute_s == pytest.approx(flops / 459e12 * 11 / 8)
    assert sent(mesh, 8, micro_batches=8)["stage"] == 4 * 11 * (32 // 2 // 8) * 128 * 256 * 2
    split = sent(MeshConfig(data=1, fsdp=2, stage=4), 8, micro_batches=8)["fsdp"]
    whole, head = sent(MeshConfig(data=1, fsdp=2), 2)["fsdp"], 2 * 256 * 512 * 3 * 2 / 2
    assert split - head == pytest.approx((whole - head) / 4 * 11)  # a stage's weights, at each tick


def test_rounds_deal_weights_and_shorten_the_bubble():
    """Layers that pass 2 rounds over 2 stages: their weights travel there and their gradients back, float32."""
    once, twice = (sent(MeshConfig(data=1, stage=2), 2, micro_batches=4, stage_repeats=n) for n in (1, 2))
    layer = 256 * (8 + 2 * 4) * 32 + 8 * 32 * 256 + 3 * 256 * 512
    rows = 4 * (32 // 4) * 128 * 256 * 2
    assert once["stage"] == 5 * rows and twice["stage"] == 9 * rows + 2 * 4 * 2 * layer / 2


@pytest.mark.parametrize(
    "kind, factor", [("none", 1 / 2), ("bfloat16", 2 / 4), ("int8", (1 + 4 / 256) / 4), ("topk", 0.01 * 4)]
)
def test_gradients_between_slices(kind, factor):
    """Two slices of two replicas: an exact sum sends half of it from each, all of it from a slice; codes go to two others from each."""
    inside, between = time.gradient_bytes(CompressConfig(kind=kind), 4_000_000, 4, 2)
    assert between == pytest.approx(4_000_000 * factor)
    assert inside == pytest.approx(4_000_000 if kind == "none" else 4_000_000 * factor / 2)


def test_a_step_waits_for_the_network_between_slices():
    """Sixteen devices of two slices: float32 gradients of a slice's shard cross at a share of the host's links."""
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(data=2, fsdp=8))
    one, two = (time.roofline(config, 16, V5P, slices) for slices in (1, 2))
    where = memory.layout(config, 16)
    shard = memory.tree_bytes(config.model, where, fsdp=True)
    assert one.network_s == 0.0 and two.network_s == pytest.approx(shard / V5P.network_bytes_per_s.value)
    assert two.hidden_s == pytest.approx(one.hidden_s - shard / V5P.interconnect_bytes_per_s)
    assert two.limit == "the network between slices" and two.step_s == two.network_s
    stages = dataclasses.replace(CONFIG, mesh=MeshConfig(data=1, fsdp=8, stage=2, dcn_data=1, dcn_stage=2))
    passed = sent(stages.mesh, 16)["stage"]
    assert time.roofline(stages, 16, V5P, 2).exposed_s == pytest.approx(passed / V5P.network_bytes_per_s.value)


def test_slices_that_do_not_fit():
    with pytest.raises(UserError, match=r"data=1 × stage=1 do not divide by dcn_data=2"):
        time.roofline(CONFIG, 8, V5P, 2)
    with pytest.raises(UserError, match=r"between slices of v4 is not in the table"):
        time.roofline(dataclasses.replace(CONFIG, mesh=MeshConfig(data=2)), 2, hardware.by_name("v4"), 2)
    with pytest.raises(UserError, match=r"--slices 3 does not divide the 8 devices"):
        time.count_slices(V5P, 8, 3)
    assert time.count_slices(V5P, 512, None) == 1 and time.count_slices(hardware.by_name("h100"), 32, None) == 4
