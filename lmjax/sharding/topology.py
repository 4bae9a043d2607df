"""Where the axes of a mesh lie on the hardware: in a slice over its own links, between slices over the data-centre network.

A slice is what `slice_index` of a device says: TPUs that are wired together, or the GPUs of a node. Only `data` and `stage` go between
slices, where a step sends least.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from lmjax.axes import CONTEXT, FSDP, MESH_AXES, TENSOR
from lmjax.config import need
from lmjax.sharding.config import MeshConfig

NODE_GPUS = 8  # that NVLink joins, on a platform whose devices do not tell their slice


def arrange(config: MeshConfig, devices: Sequence[Any], inner: int = 1) -> np.ndarray:
    """The devices in the order of `MESH_AXES`, neighbours near one another; fsdp is two axes where `inner` is not 1.

    Raises:
      UserError: the sizes do not multiply to the devices, or do not fit their slices.
    """
    sizes, slices = config.sizes(len(devices)), count_slices(devices)
    if slices == 1:
        need(
            config.dcn_data in (-1, 1) and config.dcn_stage == 1,
            f"config.mesh: dcn_data={config.dcn_data} × dcn_stage={config.dcn_stage}, but the devices are of one slice",
        )
        if inner > 1:
            place = MESH_AXES.index(FSDP)
            sizes = (*sizes[:place], sizes[place] // inner, inner, *sizes[place + 1 :])
        return whole_dims_first(mesh_utils.create_device_mesh, sizes, devices)
    between = config.slice_sizes(sizes, slices)
    inside = [size // parts for size, parts in zip(sizes, between, strict=True)]
    return whole_dims_first(mesh_utils.create_hybrid_device_mesh, inside, between, devices)


def inner_fsdp(fsdp: int, devices: Sequence[Any]) -> int:
    """The size of `fsdp_inner`: what is left of fsdp when its outer part is a dimension of the torus; 1: it is one axis."""
    if devices[0].platform != "tpu" or count_slices(devices) > 1:
        return 1
    torus = [len(set(places)) for places in zip(*(device.coords for device in devices), strict=True)]
    outer = [size for size in torus if 1 < size < fsdp and fsdp % size == 0]
    return fsdp // outer[0] if outer else 1


def whole_dims_first(create: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
    """A mesh whose axes are whole dims of the torus; where the sizes do not allow it, parts of dims."""
    try:
        return create(*arguments)
    except NotImplementedError:
        return create(*arguments, allow_split_physical_axes=True)


def count_slices(devices: Iterable[Any]) -> int:
    """How many slices the devices are of."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def slow_links(devices: np.ndarray) -> list[str]:
    """One line for each axis that waits for links which are slow for it; `devices` in the order of `MESH_AXES`."""
    lines = []
    for axis in (TENSOR, CONTEXT):
        place = MESH_AXES.index(axis) - len(MESH_AXES)  # from the end: fsdp, before it, may be two axes
        along = np.moveaxis(devices, place, -1).reshape(-1, devices.shape[place])
        reason = slow(axis, along[0])
        if reason is not None:
            lines.append(f"config.mesh.{axis}={along.shape[1]} {reason}; a smaller one would be faster")
    return lines


def slow(axis: str, devices: np.ndarray) -> str | None:
    """Why the links between the devices along an axis are slow for it; none: they are not."""
    if count_slices(devices) > 1:
        return f"lies over {count_slices(devices)} slices, between which the network is slow"
    platform = devices[0].platform
    if platform == "gpu" and len(devices) > NODE_GPUS:
        return f"is more than the {NODE_GPUS} GPUs of a node, between which the network is slow"
    if platform == "tpu" and axis == TENSOR and torus_dims(devices) > 1:
        return f"lies over {torus_dims(devices)} dims of the torus, whose links are not used at once"
    return None


def torus_dims(devices: np.ndarray) -> int:
    """In how many dims of the torus the devices differ."""
    coordinates = itertools.zip_longest(*(device.coords for device in devices))
    return sum(len(set(values)) > 1 for values in coordinates)
