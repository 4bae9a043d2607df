"""Attention written once more, for what is never to share a fault with it: every score at once, the mask by its definition."""

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.model.blockwise import Rule

RULES = {
    "causal": Rule(),
    "soft-cap": Rule(softcap=5.0),
    "window": Rule(window=11),
    "window of one": Rule(window=1),
    "wide window": Rule(window=500),
    "prefix": Rule(prefix=21),
    "all": Rule(5.0, 9, 21),
}


def inputs(length, batch=2, kv_heads=2, group=3, dim=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q = 3.0 * jax.random.normal(keys[0], (batch, length, kv_heads, group, dim))
    return q, *(3.0 * jax.random.normal(key, (batch, length, kv_heads, dim)) for key in keys[1:])


def segments(length, batch=2, seed=0, rate=0.05):
    return 1 + np.cumsum(np.random.default_rng(seed).random((batch, length)) < rate, axis=1).astype(np.int32)


def seen(length, ids, rule):
    """[B T T]: which keys each query sees."""
    out = np.zeros((len(ids), length, length), bool)
    for b, i, j in np.ndindex(out.shape):
        past = j <= i and (rule.window is None or i - j < rule.window)
        out[b, i, j] = (past or (i < rule.prefix and j < rule.prefix)) and ids[b, i] == ids[b, j]
    return jnp.asarray(out)


def attention(q, k, v, ids, rule):
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(q.shape[-1])
    scores = scores if rule.softcap is None else rule.softcap * jnp.tanh(scores / rule.softcap)
    scores = jnp.where(seen(q.shape[1], ids, rule)[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), v)


def agree(ours, length, rule, ids=None, arrange=lambda x: x, **sizes):
    """Asserts that outputs and gradients of `ours(q, k, v, ids)` are the oracle's, `arrange`d."""
    arrays = inputs(length, **sizes)
    ids = segments(length, arrays[0].shape[0]) if ids is None else ids
    weights = jnp.sin(jnp.arange(arrays[0].size)).reshape(
        arrays[0].shape
    )  # a cotangent of which no two parts are alike

    def results(function):
        def loss(*arrays):
            out = function(*arrays)
            return jnp.sum(out * arrange(weights)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)

    expected_grads, expected = results(lambda *x: arrange(attention(*x, ids, rule)))
    grads, out = results(lambda *x: ours(*x, jnp.asarray(ids)))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, wanted, atol=1e-5 * max(1.0, float(jnp.abs(wanted).max())))
