"""Rows whose tokens are split over the devices of the `context` axis.

A loss is a sum over tokens, so each device computes the sum of its own, and only attention looks at the tokens of others
(`lmjax/model/ring.py`). Device c of C holds chunks c and 2 C - 1 - c of the row's 2 C: with a causal mask all have the same work.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lmjax.axes import CONTEXT
from lmjax.sharding import mesh
from lmjax.sharding.config import check_tokens_divide


def zigzag(x: Array, shards: int) -> Array:
    """[B, T, …] with T in the order in which equal parts are the devices' chunks."""
    order = np.array([chunk for c in range(shards) for chunk in (c, 2 * shards - 1 - c)])
    chunks = x.reshape(x.shape[0], 2 * shards, -1, *x.shape[2:])
    return chunks[:, order].reshape(x.shape)


def own_tokens(x: Array) -> Array:
    """[B, T, …] of whole rows → this device's, where `context` is manual."""
    shards = mesh.size(CONTEXT)
    own = x.shape[1] // shards
    return jax.lax.dynamic_slice_in_dim(zigzag(x, shards), jax.lax.axis_index(CONTEXT) * own, own, axis=1)


def split_tokens(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same `loss(params, batch, key=…)`, a tree of sums over tokens, with rows split where the ambient mesh says so."""

    @functools.wraps(loss)
    def split(params, batch, key=None):
        shards = mesh.size(CONTEXT)
        if shards == 1:
            return loss(params, batch, key=key)
        check_tokens_divide(batch[0].shape[1], shards)
        batch = jax.tree.map(lambda x: zigzag(jnp.asarray(x), shards), batch)

        def local(params, batch, key):
            return jax.tree.map(lambda x: x[None], loss(params, batch, key=key))

        whole, tokens = PartitionSpec(), PartitionSpec(None, CONTEXT)
        sums = jax.shard_map(
            local,
            in_specs=(whole, tokens, whole),
            out_specs=PartitionSpec(CONTEXT),
            axis_names={CONTEXT},
            check_vma=False,
        )(params, batch, key)
        return jax.tree.map(lambda x: x.sum(axis=0), sums)

    return split
