"""What the compiler says of a step for a slice that is not here."""

import importlib.util
import json
import os
import types

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from rich.console import Console

from lmjax import xla_flags
from lmjax.data.config import DataConfig
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig
from lmjax.plan import compile as compiling
from lmjax.plan import compiled, estimate, hardware
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig

V5P = hardware.by_name("v5p")
SMALL = RunConfig(
    model=ModelConfig(
        vocab_size=1024, num_layers=2, d_model=256, num_heads=4, num_kv_heads=2, head_dim=128, d_ff=512, remat="full",
        tie_embeddings=False, attention_block=128,
    ),
    mesh=MeshConfig(data=1, fsdp=4),
    train=TrainConfig(batch_size=8, precision="bfloat16"),
    data=DataConfig(seq_len=512),
)  # fmt: skip


@pytest.mark.parametrize(
    "topology, message",
    [
        ("v9:2x2", "is not in the table"),
        ("v5e:5x7x3", "--topology"),
        ("h100-pcie:8", "of GPUs the compiler knows a100"),
        ("h200", "as h200:8"),
        ("h200:12", "up to 8 or a multiple"),
    ],
)
def test_slices_that_are_none(topology, message):
    with pytest.raises(UserError, match=message):
        compiling.devices_of(topology)


def test_without_the_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lmjax\[topology\]'"):
        compiling.devices_of("v5e:2x2")
    with pytest.raises(UserError, match=r"pip install 'lmjax\[cuda\]'"):
        compiling.devices_of("h200:8")


def test_the_compiler_gets_the_flags_of_a_launch(monkeypatch):
    given = "--xla_enable_async_all_gather=false"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **options: types.SimpleNamespace(devices=["chip"]))
    assert compiling.devices_of("v5e:2x2") == compiling.devices_of("v5e:2x2") == ["chip"]
    assert os.environ["LIBTPU_INIT_ARGS"] == xla_flags.flags("tpu", given)


@pytest.mark.parametrize(
    "message, expected",
    [
        ("CompileTimeHbmOom: … temporaries (44.06G) exceeds available HBM (15.75G).", (44.06, 15.75)),
        ("CompileTimeHbmOom: Used 20.50G of 15.75G hbm.", (20.5, 15.75)),
    ],
)
def test_a_refusal_is_an_answer(message, expected):
    found = compiling.out_of_memory(jax.errors.JaxRuntimeError(message))
    assert found == pytest.approx(tuple(size * 2**30 for size in expected), abs=1)


def test_another_error_goes_on():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiling.out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no luck"))


@pytest.mark.parametrize("groups, dims", [(((0, 1), (2, 3)), 1), (((0, 2), (1, 3)), 1), (((0, 1, 2, 3),), 2)])
def test_a_group_has_the_links_of_the_dims_that_it_spans(groups, dims):
    """Four chips of a square, of three torus dims with 200 GB/s each."""
    places = np.array([(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)])
    assert compiling.bandwidth(groups, places, V5P) == pytest.approx(dims * 200e9)


@pytest.mark.slow
def test_a_small_step_compiled():
    """FLOPs within 3 %, the axes of its collectives, and a page; two slices, of which one is too small."""
    result = compiling.compile_step(SMALL, "v5e:2x2")
    planned = estimate.plan(SMALL, 4, "v5e")
    assert result.fits and result.num_devices == 4 and result.mesh["fsdp"] == 4
    assert result.flops == pytest.approx(planned.device_flops, rel=0.03)
    assert result.argument_bytes == pytest.approx(planned.memory.state + planned.memory.batch, rel=0.01)
    assert result.needed_bytes >= result.argument_bytes + result.temporary_bytes
    assert {axis for row in result.traffic for axis in row.axes} == {"fsdp", "fsdp_inner"}  # one for each torus dim
    assert json.loads(json.dumps(compiled.to_dict(result)))["communicate_s"] > 0
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(compiled.render(result, planned.memory.total, planned.device_flops))
    page = console.export_text()
    assert "all-gather" in page and "Compiled for v5e:2x2" in page


@pytest.mark.parametrize(
    "name, groups, rate",
    [("h200", ((0, 1), (2, 3)), 450e9), ("h200", ((0, 2), (1, 3)), 50e9), ("a100", ((0, 2), (1, 3)), 25e9)],
)
def test_gpus_of_two_hosts_speak_over_the_network(name, groups, rate):
    places = np.array([(0,), (0,), (1,), (1,)])
    assert compiling.bandwidth(groups, places, hardware.by_name(name)) == rate


def test_what_does_not_fit_is_said():
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    none = dict.fromkeys(("argument_bytes", "temporary_bytes", "code_bytes", "flops", "compute_s"))
    result = compiled.Compiled(
        "v5e:2x2", 4, {"fsdp": 4}, 16 * 2**30, fits=False, needed_bytes=44 * 2**30, traffic=(), compile_s=1.0, **none
    )  # fmt: skip
    console.print(compiled.render(result, 40 * 2**30, 1e12))
    assert "does not fit: 44.00 GiB" in console.export_text() and result.overlapped_share == 1.0
