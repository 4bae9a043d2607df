"""Axes on hardware that is not here: devices that say where they are."""

import dataclasses
import itertools

import numpy as np
import pytest

from lmjax.axes import MESH_AXES
from lmjax.errors import UserError
from lmjax.sharding.config import MeshConfig
from lmjax.sharding.mesh import make_mesh, sizes
from lmjax.sharding.topology import arrange, slow_links


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh is laid out by."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def tpus(slices, shape=(4, 4, 4)):
    """Slices of a v5p."""
    places = list(itertools.product(*map(range, reversed(shape))))
    return [
        Device(s * len(places) + i, "tpu", "TPU v5", (s * len(places) + i) // 4, s, place[::-1])
        for s in range(slices)
        for i, place in enumerate(places)
    ]


def gpus(nodes):
    return [Device(i, "gpu", "NVIDIA H100 80GB HBM3", i // 8, i // 8) for i in range(8 * nodes)]


def along(devices, axis):
    """The devices' lines along an axis."""
    place = MESH_AXES.index(axis)
    return np.moveaxis(devices, place, -1).reshape(-1, devices.shape[place])


def slices_along(devices, axis):
    return {tuple(d.slice_index for d in line) for line in along(devices, axis)}


@pytest.mark.parametrize("devices", [tpus(2), gpus(2)], ids=["tpu", "gpu"])
def test_data_goes_over_the_slow_network_and_nothing_else(devices):
    mesh = arrange(MeshConfig(data=-1, fsdp=2, tensor=4), devices)
    assert sorted(d.id for d in mesh.flat) == list(range(len(devices)))
    half = mesh.shape[0] // 2
    assert slices_along(mesh, "data") == {(0,) * half + (1,) * half}
    for axis in MESH_AXES[1:]:
        assert all(len(set(line)) == 1 for line in slices_along(mesh, axis)), axis


def test_stages_go_over_the_slow_network_where_the_config_says_so():
    mesh = arrange(MeshConfig(data=2, stage=4, fsdp=-1, dcn_data=1, dcn_stage=4), tpus(4, (2, 2, 2)))
    assert slices_along(mesh, "stage") == {(0, 1, 2, 3)}
    assert slices_along(mesh, "data") == {(0, 0), (1, 1), (2, 2), (3, 3)}
    mesh = arrange(MeshConfig(data=4, stage=2, fsdp=-1, dcn_stage=2), tpus(4, (2, 2, 2)))  # data takes the rest
    assert slices_along(mesh, "stage") == {(0, 1), (2, 3)}


@pytest.mark.parametrize(
    "config, slices, message",
    [
        (MeshConfig(data=2, fsdp=-1, dcn_data=2), 1, r"dcn_data=2 × dcn_stage=1, but the devices are of one slice"),
        (MeshConfig(data=2, fsdp=-1, dcn_data=4), 2, r"dcn_data=4 × dcn_stage=1 does not match 2 slices"),
        (MeshConfig(data=1, fsdp=-1), 2, r"data=1 × stage=1 do not divide by dcn_data=2"),
        (MeshConfig(data=2, fsdp=-1, dcn_stage=2), 2, r"data=2 × stage=1 do not divide by dcn_data=1 × dcn_stage=2"),
    ],
)
def test_slices_that_do_not_fit(config, slices, message):
    with pytest.raises(UserError, match=message):
        arrange(config, tpus(slices, (2, 2, 2)))
    with pytest.raises(UserError, match="dcn_stage must be positive"):
        MeshConfig(dcn_stage=0)


@pytest.mark.parametrize("axes", itertools.combinations(MESH_AXES, 2), ids="-".join)
def test_axes_that_are_no_whole_dims_of_the_torus_share_them(axes):
    """8 × 8 over 4 × 4 × 4: one of them has a dim and half of another."""
    devices = tpus(1)
    mesh = make_mesh(MeshConfig(**{"data": 1} | dict.fromkeys(axes, 8)), devices)
    assert sizes(mesh) == dict.fromkeys(MESH_AXES, 1) | dict.fromkeys(axes, 8)
    assert sorted(device.id for device in mesh.devices.flat) == list(range(64))


def test_a_mesh_that_the_hardware_makes_slow_is_told_in_a_line():
    def told(config, devices):
        return slow_links(arrange(config, devices))

    assert told(MeshConfig(data=-1, fsdp=4, tensor=4), tpus(1)) == []
    (line,) = told(MeshConfig(data=-1, fsdp=4, tensor=16), tpus(1))
    assert line.startswith("config.mesh.tensor=16 lies over 2 dims of the torus") and "\n" not in line
    assert told(MeshConfig(data=-1, context=16), tpus(1)) == []  # a ring needs neighbours alone
    assert told(MeshConfig(data=2, tensor=8), gpus(2)) == []
    one_slice = [dataclasses.replace(d, slice_index=0) for d in gpus(2)]
    (line,) = told(MeshConfig(data=1, tensor=16), one_slice)
    assert line.startswith("config.mesh.tensor=16 is more than the 8 GPUs of a node")
    # What `arrange` refuses may come from elsewhere.
    across = np.array(gpus(2)).reshape(1, 1, 1, 1, 2, 8).swapaxes(-1, -2).reshape(1, 1, 1, 1, 8, 2)
    assert [line.split(";")[0] for line in slow_links(across)] == [
        "config.mesh.tensor=2 lies over 2 slices, between which the network is slow"
    ]
