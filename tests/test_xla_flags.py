"""XLA's flags are those that the compilers know, and what a user gives wins."""

import importlib.util
import os
import subprocess
import sys

import pytest

from lmjax.xla_flags import TABLES, VARIABLES, flags

COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
place = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name="{}").devices[0])
x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=place)
jax.jit(jnp.tanh).trace(x).lower(lowering_platforms=("tpu",)).compile()
"""


def python(code, platform, value):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", VARIABLES[platform]: value}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_what_is_given_wins():
    first, *rest = TABLES["tpu"]
    given = f"--{first.name}=false --xla_other=1"
    assert flags("tpu", given) == " ".join([given, *(f"--{flag.name}={flag.value}" for flag in rest)])
    assert flags("tpu") == " ".join(f"--{flag.name}={flag.value}" for flag in TABLES["tpu"])


def test_no_flag_stands_twice_or_without_a_reason():
    for table in TABLES.values():
        assert len({flag.name for flag in table}) == len(table) and all(flag.reason for flag in table)


@pytest.mark.parametrize("unknown", ["", " --xla_gpu_no_such_flag=true"])
def test_jaxlib_knows_the_flags_for_gpus(unknown):
    done = python("import jax; jax.devices()", "gpu", flags("gpu") + unknown)
    assert (done.returncode == 0) == (not unknown), done.stderr
    assert not unknown or "Unknown flag" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra topology")
@pytest.mark.parametrize("slice_name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_libtpu_compiles_for_each_generation_with_the_flags_for_tpus(slice_name):
    done = python(COMPILE.format(slice_name), "tpu", flags("tpu"))
    assert done.returncode == 0, done.stderr
    if slice_name == "v5e:2x2":
        done = python(COMPILE.format(slice_name), "tpu", flags("tpu") + " --xla_no_such_flag=true")
        assert done.returncode != 0 and "xla_no_such_flag" in done.stderr
