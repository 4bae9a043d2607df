"""Weights that are split over `fsdp`, whole while they are used: the one function that gathers, and its backward.

    forward    w (float32, a shard) → cast → all-gather                       ZeRO 3 (Rajbhandari et al., 2020, arXiv 1910.02054)
    backward   the gradient of this device's rows → reduce-scatter → float32

It works where `fsdp` is manual (`lmjax.sharding.local`): each device differentiates the loss of its own rows, so that the sum over devices
is ours to make. Left to the compiler, a TPU's sums the whole weight on every device and cuts it, which sends twice as much.

On a TPU `fsdp` is one axis of the mesh for each torus dimension that it spans: shards are gathered over the last, then over the first, and
each is a ring of neighbours. Over several dimensions at once the compiler makes an all-reduce of the reduce-scatter again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from lmjax.axes import EXPERT, FSDP, TENSOR
from lmjax.sharding import mesh, rules

VIEWS = ("all_gather", "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "name")
Names = tuple[str | None, ...]


def gather(w: Array, logical: Names, dtype: Any, summed: Any = None, whole_experts: bool = False) -> Array:
    """The weight, whole over fsdp and in `dtype`; where fsdp is not manual, as it is.

    Args:
      w: float32, this device's shard.
      logical: the logical axes of its dims.
      dtype: of what is sent and returned.
      summed: dtype in which its gradients are sent and summed; none: `dtype`.
      whole_experts: whole over `expert`, too.
    """
    for axis in (FSDP, EXPERT) if whole_experts else (FSDP,):
        if _dim(logical, axis) is not None and mesh.is_manual(axis):
            w = _gathered(w, logical, axis, dtype, summed or dtype)
    return w


def _dim(logical: Names, axis: str) -> int | None:
    """The dim that a mesh axis splits."""
    dims = [dim for dim, name in enumerate(logical) if name is not None and rules.RULES.get(name) == axis]
    return dims[0] if dims else None


def keep_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: what is computed is kept; weights that are whole, and other views of what there is, are made again."""
    return primitive.name not in VIEWS and not _gathers(params)


def _gathers(params: dict[str, Any]) -> bool:
    """Whether a primitive with these parameters calls what gathers."""
    for value in params.values():
        for equation in getattr(getattr(value, "jaxpr", value), "eqns", ()):
            if equation.primitive.name == "all_gather" or _gathers(equation.params):
                return True
    return False


def gather_tree(weights: Any, logical: Any, dtype: Any, summed: Any = None) -> Any:
    """`gather` for a tree; what routes stays in its dtype, for the choice of experts is a matter of rounding, and knows all experts."""
    if not (mesh.is_manual(FSDP) or mesh.is_manual(EXPERT)):
        return weights

    def one(w, names):
        if names[-1] == "experts":
            return gather(w, names, w.dtype, whole_experts=True)
        return gather(w, names, dtype, summed)

    return jax.tree.map(one, weights, logical)


def _on_shards(local: Callable[[Array], Array], logical: Names) -> Callable[[Array], Array]:
    """`local` where the compiler has no axis left: it would gather a weight over tensor before it gathers it over fsdp."""
    return mesh.manual(local, logical) if mesh.is_split() else local


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gathered(w: Array, logical: Names, axis: str, dtype: Any, summed: Any) -> Array:
    dim, parts = _dim(logical, axis), mesh.parts_of(axis)

    def local(w):
        for part in reversed(parts):
            w = jax.lax.all_gather(w, part, axis=dim, tiled=True)
        return w

    return _on_shards(local, logical)(w.astype(dtype))


def _major_first(x: Array) -> Array:
    """The same, on a TPU in memory in the order of its dims, where the compiler would choose another."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if mesh.platform() == "tpu" else x


def _scattered(d_w: Array, logical: Names, axis: str) -> Array:
    """The sum over the devices, of which each gets its shard, float32."""
    dim, parts = _dim(logical, axis), mesh.parts_of(axis)
    # The pieces are dims of their own, before all others in memory, too: over a minor dim a TPU's compiler makes an all-reduce and cuts it.
    pieces = tuple(jax.lax.axis_size(part) for part in parts)

    def local(d_w):
        d_w = d_w.reshape(*d_w.shape[:dim], *pieces, -1, *d_w.shape[dim + 1 :])
        d_w = jnp.moveaxis(d_w, range(dim, dim + len(parts)), range(len(parts)))
        for part in parts:
            d_w = jax.lax.psum_scatter(_major_first(d_w), part, scatter_dimension=0, tiled=False)
        return d_w

    return _on_shards(local, logical)(d_w).astype(jnp.float32)


_gathered.defvjp(
    lambda w, logical, axis, dtype, summed: (_gathered(w, logical, axis, dtype, summed), None),
    lambda logical, axis, dtype, summed, _, d_w: (_scattered(d_w.astype(summed), logical, axis),),
)


@jax.custom_vjp
def _scattered_first(x: Array, w: Array) -> tuple[Array, Array]:
    return x, w


_scattered_first.defvjp(lambda x, w: ((x, w), None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def scattered_first(x: Array, w: Array) -> tuple[Array, Array]:
    """Both as they are; the backward pass goes on from x when w's gradient is split: left to it, a compiler keeps it whole to the end.

    Args:
      x: activations.
      w: a weight before `gather`, which is used after them.
    """
    return _scattered_first(x, w) if mesh.is_manual(FSDP) else (x, w)


TABLE, WHOLE = ("vocab", "embed"), PartitionSpec()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table: Array, tokens: Int[Array, "B T"], dtype: Any, summed: Any = None) -> Array:
    """Rows [B T D] of a table (V over tensor, D over fsdp, which is manual); their gradients are added up in float32.

    The table's gradient is added up here and not by the compiler, which gets it wrong in a loop over micro-batches on a TPU (openxla/xla
    #49143), and over a split vocabulary (#42481).
    """
    return _rows(_gathered(table, TABLE, FSDP, dtype, summed), tokens)


def _rows(table: Array, tokens: Array) -> Array:
    """With a split vocabulary each device looks up what it has, and the sum is the rows."""
    if mesh.size(TENSOR) == 1:
        return table[tokens]

    def local(table, tokens):
        places = tokens - jax.lax.axis_index(TENSOR) * table.shape[0]
        own = (places >= 0) & (places < table.shape[0])
        return jax.lax.psum(jnp.where(own[..., None], table[jnp.where(own, places, 0)], 0), TENSOR)

    return _over_tensor(local, (mesh.spec("vocab", None), WHOLE), WHOLE)(table, tokens)


def _over_tensor(local: Callable[..., Array], arguments: Any, result: PartitionSpec) -> Callable[..., Array]:
    return jax.shard_map(local, in_specs=arguments, out_specs=result, axis_names=mesh.automatic_axes(), check_vma=False)


def _look_up_backward(dtype, summed, saved, d_rows):
    table, tokens = saved
    shape = table.shape[0], d_rows.shape[-1]

    def added(rows, tokens, d_rows, start):
        places = tokens - start
        places = jnp.where((places >= 0) & (places < rows), places, rows)  # past the end: dropped
        zeros = jnp.zeros((rows, shape[1]), jnp.float32)
        return zeros.at[places].add(d_rows.astype(jnp.float32), mode="drop")

    if mesh.size(TENSOR) == 1:
        d_table = added(shape[0], tokens, d_rows, 0)
    else:
        rows = shape[0] // mesh.size(TENSOR)

        def local(tokens, d_rows):
            return added(rows, tokens, d_rows, jax.lax.axis_index(TENSOR) * rows)

        d_table = _over_tensor(local, (WHOLE, WHOLE), mesh.spec("vocab", None))(tokens, d_rows)
    return _scattered(d_table.astype(summed or dtype), TABLE, FSDP), None


look_up.defvjp(
    lambda table, tokens, dtype, summed: (look_up(table, tokens, dtype, summed), (table, tokens)), _look_up_backward
)
