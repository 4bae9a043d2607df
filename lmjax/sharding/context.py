"""Rows whose tokens are split over the devices of the `context` axis.

A loss is a sum over tokens, so each device computes the sum of its own, and only attention looks at the tokens of others
(`lmjax/model/ring.py`), and a router at how many of them chose each expert. Device c of C holds chunks c and 2 C - 1 - c of the
row's 2 C: with a causal mask all have the same work.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lmjax.axes import CONTEXT
from lmjax.sharding import mesh


def zigzag(x: Array, shards: int) -> Array:
    """[B, T, …] with T in the order in which equal parts are the devices' chunks."""
    order = np.array([chunk for c in range(shards) for chunk in (c, 2 * shards - 1 - c)])
    chunks = x.reshape(x.shape[0], 2 * shards, -1, *x.shape[2:])
    return chunks[:, order].reshape(x.shape)


def manual_shards() -> int:
    """How many devices hold parts of a row of which each sees its own alone."""
    return mesh.size(CONTEXT) if mesh.is_manual(CONTEXT) else 1


def own_tokens(x: Array) -> Array:
    """[B, T, …] of whole rows → this device's, where `context` is manual."""
    shards = manual_shards()
    if shards == 1:
        return x
    own = x.shape[1] // shards
    return jax.lax.dynamic_slice_in_dim(zigzag(x, shards), jax.lax.axis_index(CONTEXT) * own, own, axis=1)


def over_row(x: Array) -> Array:
    """Sums over the tokens of rows, from those over each device's own."""
    return jax.lax.psum(x, CONTEXT) if manual_shards() > 1 else x


def before_halves(counts: Array) -> Array:
    """[2, …], counts among the tokens of this device's two chunks → those among all tokens of the row before each of the two."""
    shards, device = manual_shards(), jax.lax.axis_index(CONTEXT)
    every = jax.lax.all_gather(counts, CONTEXT)
    chunks = jnp.concatenate([every[:, 0], every[::-1, 1]])  # in the order of the row
    before = jnp.cumsum(chunks, axis=0) - chunks
    return before[jnp.stack([device, 2 * shards - 1 - device])]
