"""A kernel of attention that knows one device alone, on each device's rows and heads."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from lmjax.sharding import mesh


def on_each_device(local: Callable[..., Array], *arrays: Array | None) -> Array:
    """local(q, k, v, segments) on each device's part over the axes that are the compiler's: it cannot partition a kernel."""
    if not mesh.automatic_axes():
        return local(*arrays)
    keys, rows = mesh.spec("rows", None, "kv_heads", None), mesh.spec("rows", None)
    specs = mesh.spec("rows", None, "kv_heads", None, None), keys, keys, rows
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0], axis_names=mesh.automatic_axes(), check_vma=False)(
        *arrays
    )
