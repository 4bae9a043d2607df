"""Steps compiled for GPUs that are not here. What needs JAX's CUDA plugin runs in the stage of CI that installs it."""

import dataclasses
import importlib.util

import pytest
from test_compile import SMALL

from lmjax.plan import compile as compiling
from lmjax.plan import estimate, gpu_target, hardware
from lmjax.sharding.config import MeshConfig

HAS_PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
needs_plugin = pytest.mark.skipif(not HAS_PLUGIN, reason="the extra cuda is not here")


@pytest.mark.parametrize("topology, expected", [("h200:1", (1, 1)), ("h200:8", (1, 8)), ("h100:32", (4, 8))])
def test_hosts_and_gpus(topology, expected):
    assert gpu_target.shape(topology, 8) == expected


def test_chips_are_those_of_the_table():
    """The memory that XLA finds on a chip is that of the table within what vendors call a GB."""
    for name, target in gpu_target.TARGETS.items():
        row = hardware.by_name(name)
        assert row.platform == "gpu" and target.description.startswith(row.kinds[0].removesuffix(" HBM3"))
        assert target.memory_bytes == pytest.approx(row.hbm_bytes, rel=0.02)
        assert target.memory_bytes_per_s == pytest.approx(row.hbm_bytes_per_s, rel=0.05)


@needs_plugin
@pytest.mark.slow
def test_a_step_for_eight_gpus():
    """cuDNN attends; weights are gathered and their gradients truly scattered, over fsdp alone; memory is near the plan's."""
    config = dataclasses.replace(SMALL, mesh=MeshConfig(data=1, fsdp=8))
    result = compiling.compile_step(config, "h200:8")
    assert result.fits and result.num_devices == 8 and result.flops is None
    kinds = {row.kind: row for row in result.traffic}
    assert {"all-gather", "reduce-scatter"} <= kinds.keys()
    assert {axis for row in result.traffic for axis in row.axes} == {"fsdp"}
    weights = kinds["reduce-scatter"].sent_bytes
    assert kinds["all-reduce"].sent_bytes < 0.5 * weights  # norms and sums, no matrix
    planned = estimate.plan(config, 8, "h200").memory
    assert result.argument_bytes == pytest.approx(planned.state + planned.batch, rel=0.05)


@needs_plugin
@pytest.mark.slow
def test_one_gpu_sends_nothing():
    config = dataclasses.replace(SMALL, mesh=MeshConfig(data=1))
    result = compiling.compile_step(config, "h100:1")
    assert result.fits and not result.traffic
