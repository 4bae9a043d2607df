"""One mesh for TPU, GPU and CPU, and the shardings that the rules give on it.

Equations never mention the mesh: `with use(mesh)` makes it ambient, `constrain` names logical axes.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmjax.axes import FSDP, FSDP_INNER, MESH_AXES
from lmjax.config import need
from lmjax.sharding import rules, topology
from lmjax.sharding.config import MeshConfig

ROWS = rules.RULES["batch"]  # over which rows are split
HOST = "pinned_host"


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh of `MESH_AXES` over all devices, laid out for the hardware's topology.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or do not fit their slices.
    """
    devices = jax.devices() if devices is None else devices
    fsdp = config.sizes(len(devices))[MESH_AXES.index(FSDP)]
    inner = topology.inner_fsdp(fsdp, devices)
    names = [part for axis in MESH_AXES for part in ((axis, FSDP_INNER) if axis == FSDP and inner > 1 else (axis,))]
    laid = topology.arrange(config, devices, inner)
    return Mesh(laid, names, axis_types=(AxisType.Auto,) * laid.ndim)


def sizes(mesh: Mesh) -> dict[str, int]:
    """The sizes of the axes as a config has them."""
    return {axis: math.prod(mesh.shape[part] for part in _parts(axis, mesh)) for axis in MESH_AXES}


def _parts(axis: str, mesh: Any) -> tuple[str, ...]:
    return (axis, FSDP_INNER) if axis == FSDP and FSDP_INNER in mesh.axis_names else (axis,)


def parts_of(axis: str) -> tuple[str, ...]:
    """The axes of the ambient mesh that an axis of a config is."""
    return _parts(axis, jax.sharding.get_abstract_mesh())


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
    return restrict(_partition(logical, True, jax.sharding.get_abstract_mesh()), automatic_axes())


def _partition(logical: tuple[str | None, ...], fsdp: bool, mesh: Any) -> PartitionSpec:
    names = ((axes,) if isinstance(axes, str) else axes or () for axes in rules.spec(logical, fsdp))
    return PartitionSpec(*(_entry([part for axis in axes for part in _parts(axis, mesh)]) for axes in names))


def _entry(axes: list[str]) -> str | tuple[str, ...] | None:
    return (axes[0] if len(axes) == 1 else tuple(axes)) if axes else None


def restrict(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The same with no other mesh axes than these."""
    names = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return PartitionSpec(*(_entry([axis for axis in each if axis in axes]) for each in names))


def whole_spec(*logical: str | None) -> PartitionSpec:
    """Where an array with these logical axes lies on the ambient mesh."""
    return _partition(logical, True, jax.sharding.get_abstract_mesh())


def manual(local: Callable[..., Any], logical: tuple[str | None, ...]) -> Callable[[jax.Array], jax.Array]:
    """`local` on each device's part over all axes that were the compiler's, of an array with these logical axes, and back."""
    place = spec(*logical)
    return jax.shard_map(local, in_specs=place, out_specs=place, axis_names=automatic_axes(), check_vma=False)


def platform() -> str:
    """Where the traced program will run ("cpu", "gpu", "tpu"): the ambient mesh's devices, which may be of another machine; else ours."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def size(axis: str) -> int:
    """Size of an axis of the ambient mesh; 1 without a mesh."""
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    return math.prod(shape.get(part, 1) for part in parts_of(axis))


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


def manual_rows() -> int:
    """How many devices hold rows of which each sees its own alone."""
    return math.prod(size(axis) for axis in ROWS if is_manual(axis))


def own_rows(x: jax.Array) -> jax.Array:
    """[B, …] of a whole batch → this device's rows, where their axes are manual."""
    names = tuple(part for axis in ROWS if is_manual(axis) for part in parts_of(axis))
    if not names:
        return x
    own = x.shape[0] // manual_rows()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(names) * own, own, axis=0)


def is_split() -> bool:
    """Whether the compiler partitions over several devices of the ambient mesh."""
    return any(size(axis) > 1 for axis in automatic_axes())


def shards(logical: str) -> int:
    """Into how many pieces the compiler cuts a logical axis on the ambient mesh."""
    (axes,) = spec(logical)
    return rules.num_shards(axes, dict(jax.sharding.get_abstract_mesh().shape))


def batch_shards() -> int:
    """How many pieces the rows of a batch are cut into on the ambient mesh."""
    return shards("batch")


def sharding(mesh: Mesh, logical: tuple[str | None, ...], fsdp: bool = True) -> NamedSharding:
    """Where an array with these logical axes lives."""
    return NamedSharding(mesh, _partition(logical, fsdp, mesh))


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
