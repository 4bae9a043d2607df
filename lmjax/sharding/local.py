"""A loss in which each device computes the sum over its own rows and tokens, where the mesh asks for it.

A loss is a sum over tokens, so devices need of one another only weights (`lmjax.sharding.gather`) and, where the tokens of a row are split,
the keys of attention (`lmjax.sharding.context`). Inside, the axes over which rows and tokens are split are manual; the compiler partitions
over the others. What a parameter is whole over, its gradient is summed over when all is done.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmjax.axes import CONTEXT, FSDP, STAGE
from lmjax.sharding import mesh
from lmjax.sharding.config import check_tokens_divide
from lmjax.sharding.context import zigzag


def manual_axes(zero: int) -> tuple[str, ...]:
    """The axes of the ambient mesh over which a device works alone."""
    split = zero == 3 and mesh.size(FSDP) > 1 and mesh.size(STAGE) == 1
    # Where tokens are split, so are all rows: stages and experts have a `shard_map` of their own inside, and XLA (jax 0.12) aborts where
    # an axis of the inner one comes before one of the outer.
    axes = [*mesh.ROWS, CONTEXT] if split or mesh.size(CONTEXT) > 1 else []
    own = [part for axis in axes for part in mesh.parts_of(axis) if mesh.size(axis) > 1]
    return tuple(part for part in own if not mesh.is_manual(part))


def on_each_device(loss: Callable[..., Any], logical: Any, zero: int) -> Callable[..., Any]:
    """The same `loss(params, batch, key=…)`, a tree of sums over tokens.

    Args:
      loss: of global arrays or of a device's; its parameters are gathered where they are used.
      logical: the logical axes of its parameters, a tree.
      zero: 3: parameters are split over fsdp.
    """

    @functools.wraps(loss)
    def split(params, batch, key=None):
        axes = manual_axes(zero)
        if not axes:
            return loss(params, batch, key=key)
        shards = mesh.size(CONTEXT)
        if shards > 1:
            check_tokens_divide(batch[0].shape[1], shards)
            batch = jax.tree.map(lambda x: zigzag(jnp.asarray(x), shards), batch)
        only = functools.partial(mesh.restrict, axes=axes)
        tokens = only(PartitionSpec(*mesh.whole_spec("batch"), CONTEXT))
        places = jax.tree.map(
            lambda names: only(mesh.whole_spec(*names)), logical, is_leaf=lambda x: isinstance(x, tuple)
        )

        def local(params, batch, key):
            return jax.tree.map(lambda x: x[None], loss(params, batch, key=key))

        sums = jax.shard_map(
            local,
            in_specs=(places, tokens, PartitionSpec()),
            out_specs=PartitionSpec(axes),
            axis_names=set(axes),
            check_vma=False,
        )(params, batch, key)
        return jax.tree.map(lambda x: x.sum(axis=0), sums)

    return split
