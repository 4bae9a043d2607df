"""Adam with moments of 8 bits (Dettmers et al., 2021, 2110.02861): a quarter of AdamW's memory, the same hyper-parameters.

A block of `block` numbers keeps its largest magnitude s in float32 and for each number x the nearest code q to x / s in a map of 256
values: about log-spaced over seven decades, finer at the top ("dynamic tree quantization"; signed for m, unsigned for v). A step reads
both moments, updates in float32 and writes them back rounded.

Blocks lie along a dim that fsdp does not cut, so that scales live beside their codes, which have the parameter's shape and place.
Embeddings (as in the paper), routers, norms and biases keep moments of 32 bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt8

from lmjax.optim.matrices import leaf_name
from lmjax.optim.shapes import BLOCK_DIMS


class Quantized(NamedTuple):
    """An array of 8-bit numbers."""

    codes: UInt8[Array, "..."]
    scales: Float[Array, "..."]  # one for each block


class QuantizedAdamState(NamedTuple):
    """Moments: `Quantized` or float32."""

    count: Int[Array, ""]
    mu: Any
    nu: Any


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values in [-1, 1] (or [0, 1]), ascending, float32."""
    values = [0.0, 1.0]
    for exponent in range(7):
        steps = np.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=np.float32)
        means = 10.0 ** (exponent - 6) * (steps[:-1] + steps[1:]) / 2
        values += [*means, *-means] if signed else [*means]
    return np.sort(np.array(values, np.float32))


def blocks_of(x: Array, dim: int, block: int) -> Float[Array, "... n b"]:
    """The blocks along a dim, which becomes the last two; the last block is filled up with zeros."""
    x = jnp.moveaxis(x, dim, -1)
    block = min(block, x.shape[-1])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    return x.reshape(*x.shape[:-1], -1, block)


def quantize(x: Array, dim: int, block: int, signed: bool) -> Quantized:
    """To the nearest of the map's values times the block's largest magnitude."""
    values = dynamic_map(signed)
    blocks = blocks_of(x, dim, block)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    ratio = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    codes = jnp.searchsorted((values[:-1] + values[1:]) / 2, ratio, method="compare_all").astype(jnp.uint8)
    codes = codes.reshape(*codes.shape[:-2], -1)[..., : x.shape[dim]]
    return Quantized(jnp.moveaxis(codes, -1, dim), jnp.moveaxis(scales, -1, dim))


def dequantize(x: Quantized, dim: int, block: int, signed: bool) -> Array:
    """As float32."""
    values = jnp.asarray(dynamic_map(signed))[x.codes]
    scales = jnp.repeat(x.scales, min(block, x.codes.shape[dim]), axis=dim, total_repeat_length=None)
    return values * jax.lax.slice_in_dim(scales, 0, x.codes.shape[dim], axis=dim % values.ndim)


def scale_by_quantized_adam(b1: float, b2: float, epsilon: float, block: int) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with 8-bit moments of what `BLOCK_DIMS` names."""

    def store(path, x, signed):
        dim = BLOCK_DIMS.get(leaf_name(path))
        return x if dim is None else quantize(x, dim, block, signed)

    def read(path, x, signed):
        return dequantize(x, BLOCK_DIMS[leaf_name(path)], block, signed) if isinstance(x, Quantized) else x

    def init(params):
        zeros = [
            jax.tree_util.tree_map_with_path(lambda p, x, s=signed: store(p, jnp.zeros_like(x), s), params)
            for signed in (True, False)
        ]
        return QuantizedAdamState(jnp.zeros((), jnp.int32), *zeros)

    def update(grads, state, params=None):
        count = state.count + 1

        def step(path, g, m, v):
            m = b1 * read(path, m, True) + (1 - b1) * g
            v = b2 * read(path, v, False) + (1 - b2) * g**2
            update = (m / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + epsilon)
            return update, store(path, m, True), store(path, v, False)

        done = jax.tree_util.tree_map_with_path(step, grads, state.mu, state.nu)
        updates, mu, nu = (jax.tree.map(lambda _, new, i=i: new[i], grads, done) for i in range(3))
        return updates, QuantizedAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)
