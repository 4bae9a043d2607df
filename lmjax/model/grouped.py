"""Products of rows, sorted by group, with the matrix of their group: out[i] = x[i] · w[group of i].

`ragged` is XLA's own, for TPU and GPU. On a CPU it multiplies every row with every matrix, so there `blocks` walks over blocks of
rows: one plain product each, as fast as a dense product of as many rows, and none for a group without rows.
Rows past the last group's are undefined; nothing may read them.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lmjax.sharding.mesh import platform

BLOCK = 128  # rows of a product, at most: enough to be worth fetching a matrix for


def grouped_dot(
    x: Float[Array, "rows D"], w: Float[Array, "E D F"], sizes: Int[Array, "E"], out: jnp.dtype
) -> Float[Array, "rows F"]:
    """The product in dtype `out`; `sizes` counts the rows of each group, in order."""
    if platform() == "cpu":
        return blocks(x, w, sizes, jnp.dtype(out), block_rows(x.shape[0], w.shape[0]))
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=out)


def block_rows(rows: int, groups: int) -> int:
    """A power of two near the rows of an even group: small groups would be mostly padding."""
    return min(BLOCK, 1 << max(3, (rows // groups).bit_length() - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def blocks(x: Float[Array, "rows D"], w: Float[Array, "E D F"], sizes: Int[Array, "E"], out: jnp.dtype, block: int):
    """The product, block by block of rows; operands keep their dtype."""
    return _rows_times(x, w, sizes, out, block, ((1,), (0,)))


def _schedule(num_rows: int, sizes: Array, block: int) -> tuple[Array, Array, Array, Array]:
    """(number of blocks, group of each, its first row, the row where its group ends)."""
    counts = -(-sizes // block)
    ends, stops = jnp.cumsum(counts), jnp.cumsum(sizes)
    place = jnp.arange(num_rows // block + sizes.shape[0])
    group = jnp.minimum(jnp.searchsorted(ends, place, side="right"), sizes.shape[0] - 1)
    return ends[-1], group, (stops - sizes)[group] + (place - (ends - counts)[group]) * block, stops[group]


def _rows_times(x: Array, w: Array, sizes: Array, out: jnp.dtype, block: int, contract: tuple) -> Array:
    """Each row times its group's matrix. A block that reaches into the next group writes rows that the next block writes again."""
    count, group, start, _ = _schedule(x.shape[0], sizes, block)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def body(i, product):
        rows = jax.lax.dynamic_slice_in_dim(padded, start[i], block)
        matrix = jax.lax.dynamic_index_in_dim(w, group[i], keepdims=False)
        rows = jax.lax.dot_general(rows, matrix, (contract, ((), ())), preferred_element_type=out)
        return jax.lax.dynamic_update_slice_in_dim(product, rows, start[i], 0)

    width = w.shape[1 + (1 - contract[1][0])]
    return jax.lax.fori_loop(0, count, body, jnp.zeros((padded.shape[0], width), out))[: x.shape[0]]


def _forward(x, w, sizes, out, block):
    return blocks(x, w, sizes, out, block), (x, w, sizes)


def _backward(out, block, saved, d_out):
    x, w, sizes = saved
    d_out = d_out.astype(w.dtype)
    dx = _rows_times(d_out, w, sizes, x.dtype, block, ((1,), (1,)))
    count, group, start, stop = _schedule(x.shape[0], sizes, block)
    padded, d_padded = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, d_out))

    def body(i, dw):
        rows = jax.lax.dynamic_slice_in_dim(padded, start[i], block)
        d_rows = jax.lax.dynamic_slice_in_dim(d_padded, start[i], block)
        d_rows = jnp.where((start[i] + jnp.arange(block) < stop[i])[:, None], d_rows, 0)
        new = jax.lax.dot_general(rows, d_rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        new = new + jax.lax.dynamic_index_in_dim(dw, group[i], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw, new, group[i], 0)

    dw = jax.lax.fori_loop(0, count, body, jnp.zeros(w.shape, jnp.float32))
    return dx, dw.astype(w.dtype), None


blocks.defvjp(_forward, _backward)
