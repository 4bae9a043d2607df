"""Grouped products against one plain product for each row, gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.model import grouped

SIZES = {
    "even": [8, 8, 8, 8],
    "one has all": [0, 32, 0, 0],
    "some have none": [0, 20, 0, 12],
    "rows of no group": [5, 0, 9, 1],
    "no row": [0, 0, 0, 0],
    "one over a block": [9, 17, 1, 5],
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("product", ["blocks", "ragged"])
def test_equals_a_product_of_each_row(name, product):
    keys, sizes = jax.random.split(jax.random.key(0), 3), SIZES[name]
    x, w = jax.random.normal(keys[0], (32, 6)), jax.random.normal(keys[1], (4, 6, 10))
    real, group = sum(sizes), np.repeat(np.arange(4), sizes)
    cotangent = jax.random.normal(keys[2], (32, 10)).at[real:].set(0.0)
    out, d_x, d_w = (np.asarray(a) for a in pulled[product](x, w, jnp.asarray(sizes, jnp.int32), cotangent))
    x, w, cotangent = (np.asarray(a, np.float64) for a in (x, w, cotangent))
    d_weights = np.zeros(w.shape)
    for row in range(real):
        np.testing.assert_allclose(out[row], x[row] @ w[group[row]], atol=1e-5)
        np.testing.assert_allclose(d_x[row], w[group[row]] @ cotangent[row], atol=1e-5)
        d_weights[group[row]] += np.outer(x[row], cotangent[row])
    np.testing.assert_allclose(d_w, d_weights, atol=1e-5)
    assert not d_x[real:].any()


def product_and_gradients(product):
    def both(x, w, sizes, cotangent):
        out, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return out, *pull(cotangent)

    return jax.jit(both)


pulled = {
    "blocks": product_and_gradients(lambda x, w, sizes: grouped.blocks(x, w, sizes, jnp.dtype("float32"), 8)),
    "ragged": product_and_gradients(jax.lax.ragged_dot),
}


def test_half_precision_operands_and_a_wide_sum():
    x, w = jnp.ones((300, 512), jnp.bfloat16), jnp.ones((2, 512, 4), jnp.bfloat16)
    sizes = jnp.asarray([257, 43], jnp.int32)
    both = product_and_gradients(lambda x, w, sizes: grouped.blocks(x, w, sizes, jnp.dtype("float32"), 64))
    out, dx, dw = both(x, w, sizes, jnp.ones((300, 4), jnp.float32))
    assert out.dtype == jnp.float32 and out.min() == out.max() == 512
    assert dx.dtype == dw.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        dw[:, 0, 0], jnp.asarray([257.0, 43.0], jnp.bfloat16)
    )  # rounded once, not at each block


@pytest.mark.parametrize("rows, groups, block", [(4096, 8, 128), (64, 8, 8), (2, 8, 8), (300, 4, 64), (100, 4, 16)])
def test_blocks_are_no_larger_than_an_even_group(rows, groups, block):
    assert grouped.block_rows(rows, groups) == block
