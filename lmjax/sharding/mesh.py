"""One mesh for TPU, GPU and CPU, and the shardings that the rules give on it.

Equations never mention the mesh: `with use(mesh)` makes it ambient, `constrain` names logical axes.
"""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmjax.axes import MESH_AXES
from lmjax.config import need
from lmjax.sharding import rules, topology
from lmjax.sharding.config import MeshConfig

HOST = "pinned_host"


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh of `MESH_AXES` over all devices, laid out for the hardware's topology.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or do not fit their slices.
    """
    devices = topology.arrange(config, jax.devices() if devices is None else devices)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * devices.ndim)


def use(mesh: Mesh):
    """Context in which `constrain` knows the mesh."""
    return jax.set_mesh(mesh)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Pins the layout of an activation; without an ambient mesh, the identity."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*logical))


def spec(*logical: str | None) -> PartitionSpec:
    """Where an array with these logical axes lies, but for what a `shard_map` around has split already."""
    automatic = automatic_axes()
    names = ((axes,) if isinstance(axes, str) else axes or () for axes in rules.spec(logical))
    return PartitionSpec(*(tuple(axis for axis in axes if axis in automatic) or None for axes in names))


def platform() -> str:
    """Where the traced program will run ("cpu", "gpu", "tpu"): the ambient mesh's devices, which may be of another machine; else ours."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def size(axis: str) -> int:
    """Size of an axis of the ambient mesh; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def automatic_axes() -> frozenset[str]:
    """Axes of the ambient mesh that the compiler partitions over, and not a `shard_map` around."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def is_manual(axis: str) -> bool:
    """Whether a `shard_map` around gives each device its part over this axis."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def is_inside() -> bool:
    """Whether a `shard_map` over some axis is around."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def is_split() -> bool:
    """Whether the ambient mesh has several devices."""
    ambient = jax.sharding.get_abstract_mesh()
    return not ambient.empty and ambient.size > 1


def shards(logical: str) -> int:
    """Into how many pieces the compiler cuts a logical axis on the ambient mesh."""
    (axes,) = spec(logical)
    return rules.num_shards(axes, {axis: size(axis) for axis in MESH_AXES})


def batch_shards() -> int:
    """How many pieces the rows of a batch are cut into on the ambient mesh."""
    return shards("batch")


def sharding(mesh: Mesh, logical: tuple[str | None, ...], fsdp: bool = True) -> NamedSharding:
    """Where an array with these logical axes lives."""
    return NamedSharding(mesh, PartitionSpec(*rules.spec(logical, fsdp)))


def check_offload(device: Any) -> None:
    """A `UserError` where a device cannot keep arrays in its host's memory."""
    try:
        kinds = {memory.kind for memory in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:  # a device that is only compiled for: TPUs and GPUs have it
        kinds = {HOST}
    need(
        HOST in kinds,
        f"config.mesh.offload: {device.device_kind} knows no memory of kind {HOST!r}, only {sorted(kinds)}",
    )


def on_host(place: NamedSharding) -> NamedSharding:
    """The same place, in the memory of the devices' host."""
    return place.with_memory_kind(HOST)


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def tree_shardings(mesh: Mesh, logical: Any, fsdp: bool = True) -> Any:
    """`sharding` of every leaf of a tree of logical axes."""
    return jax.tree.map(lambda names: sharding(mesh, names, fsdp), logical, is_leaf=lambda x: isinstance(x, tuple))
