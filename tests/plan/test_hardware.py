"""The table of accelerators: found by the strings that JAX reports, and consistent with JAX's own figures for TPUs."""

import pytest

from lmjax.errors import UserError
from lmjax.plan import hardware


def test_names_and_kinds_are_unique():
    names = [row.name for row in hardware.ACCELERATORS]
    kinds = [kind for row in hardware.ACCELERATORS for kind in row.kinds]
    assert len(names) == len(set(names)) and len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    "kind, name",
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_find(kind, name):
    assert hardware.find(kind) is hardware.by_name(name)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 NVL", "TPU v5 lite pod", ""])
def test_an_unknown_device_is_none_and_never_a_near_one(kind):
    assert hardware.find(kind) is None


def test_an_unknown_name_is_the_users_mistake():
    with pytest.raises(UserError, match="did you mean 'v5e'"):
        hardware.by_name("v5ee")


@pytest.mark.parametrize(
    "name, version, cores",
    [("v4", "TPU_V4", 2), ("v5e", "TPU_V5E", 1), ("v5p", "TPU_V5P", 2), ("v6e", "TPU_V6E", 1), ("tpu7x", "TPU_7X", 1)],
)
def test_tpu_rows_agree_with_jax(name, version, cores):
    """JAX keeps a table for its kernels, by core; `cores` of them are one device."""
    from jax.experimental.pallas import tpu as pltpu

    row, chip = hardware.by_name(name), pltpu.ChipVersion[version]
    peer = pltpu.get_tpu_info_for_chip(chip, cores)
    assert row.devices_per_chip == chip.num_physical_tensor_cores_per_chip // cores
    assert row.bfloat16_flops == pytest.approx(peer.bf16_ops_per_second * cores, rel=0.01)
    assert row.hbm_bytes == pytest.approx(peer.hbm_capacity_bytes * cores, rel=0.02)
    assert row.hbm_bytes_per_s == pytest.approx(peer.mem_bw_bytes_per_second * cores, rel=0.13)
