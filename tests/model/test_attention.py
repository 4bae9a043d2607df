"""Every implementation of attention against a plain oracle, and against what a mask promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.model import attention
from lmjax.model.attention import IMPLEMENTATIONS, PLATFORMS, Mask
from lmjax.model.config import ModelConfig
from lmjax.model.dense import dtypes

ANYWHERE = [name for name in IMPLEMENTATIONS if name not in PLATFORMS]  # the others in test_splash.py and test_cudnn.py


def implementation(name, block=16):
    function = IMPLEMENTATIONS[name]
    return functools.partial(function, block=block) if name == "blockwise" else function


def inputs(length, batch=2, kv_heads=2, group=3, dim=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q = 3.0 * jax.random.normal(keys[0], (batch, length, kv_heads, group, dim))
    k, v = (3.0 * jax.random.normal(key, (batch, length, kv_heads, dim)) for key in keys[1:])
    return q, k, v


def oracle(q, k, v, segments, softcap):
    """One query at a time, over the keys that it may see, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, n, g in np.ndindex(q.shape[:4]):
        seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
        scores = k[b, seen, n] @ q[b, t, n, g] / np.sqrt(q.shape[-1])
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n, g] = (weights / weights.sum()) @ v[b, seen, n]
    return out


def random_segments(length, batch=2, seed=0):
    return 1 + np.cumsum(np.random.default_rng(seed).random((batch, length)) < 0.15, axis=1).astype(np.int32)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 16, 37, 96])  # one token, a block, a part of one, more pairs than are unrolled
@pytest.mark.parametrize("name", ANYWHERE)
def test_equals_the_oracle(name, length, packed, softcap):
    q, k, v = inputs(length)
    segments = random_segments(length) if packed else None
    out = implementation(name)(q, k, v, Mask(None if segments is None else jnp.asarray(segments)), softcap)
    np.testing.assert_allclose(out, oracle(q, k, v, segments, softcap), atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("length", [37, 96])
def test_blockwise_gradients_equal_those_of_the_reference(length, softcap):
    q, k, v = inputs(length)
    mask = Mask(jnp.asarray(random_segments(length)))

    def grads(name):
        loss = lambda *x: jnp.sum(jnp.sin(implementation(name)(*x, mask, softcap)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for ours, reference in zip(grads("blockwise"), grads("reference")):
        np.testing.assert_allclose(ours, reference, atol=1e-5 * float(jnp.abs(reference).max()))


@pytest.mark.parametrize("window", [1, 7, 40])
def test_a_window_hides_what_is_before_it(window):
    q, k, v = inputs(37)
    out = attention.reference(q, k, v, Mask(window=window))
    for last in (0, 5, 36):
        start = max(0, last + 1 - window)
        alone = oracle(*(x[:, start : last + 1] for x in (q, k, v)), None, None)
        np.testing.assert_allclose(out[:, last], alone[:, -1], atol=2e-5)


@pytest.mark.parametrize("name", ANYWHERE)
def test_documents_of_a_row_do_not_see_one_another(name):
    q, k, v = inputs(48)
    segments = jnp.asarray(np.repeat([[1, 2]], 24, axis=1).repeat(2, 0), jnp.int32)
    edited = [x.at[:, :24].add(1.0) for x in (q, k, v)]
    before, after = (implementation(name)(*x, Mask(segments)) for x in ((q, k, v), edited))
    np.testing.assert_array_equal(before[:, 24:], after[:, 24:])
    assert not np.allclose(before[:, :24], after[:, :24])


def test_blockwise_refuses_a_cache():
    q, k, v = inputs(16)
    with pytest.raises(ValueError, match="not a cache"):
        IMPLEMENTATIONS["blockwise"](q, k, v, Mask(query_places=jnp.zeros((2, 16), jnp.int32)))


def test_half_precision_keeps_its_statistics_in_float32():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(64))
    for name in ANYWHERE:
        out = implementation(name)(q, k, v, Mask())
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out.astype(jnp.float32), oracle(q, k, v, None, None), atol=0.05)


def test_blockwise_memory_grows_with_the_row_and_the_reference_with_its_square():
    def temporaries(name, length):
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(length, batch=1, kv_heads=1, group=1)]
        grad = jax.jit(jax.grad(lambda *x: jnp.sum(implementation(name, 64)(*x, Mask())), argnums=(0, 1, 2)))
        return grad.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("blockwise", 4096) < 2.2 * temporaries("blockwise", 2048)
    assert temporaries("reference", 4096) > 20 * temporaries("blockwise", 4096)


def test_auto_chooses_by_length_and_a_cache_is_read_by_the_reference():
    config = ModelConfig(attention="auto", attention_block=128)
    assert attention.choose(config, 128, cached=False) is attention.reference
    assert attention.choose(config, 129, cached=False).func is attention.in_blocks
    assert attention.choose(config, 129, cached=True) is attention.reference


def test_what_attends_is_told():
    config, types = ModelConfig(sliding_window=7, layer_pattern=("local", "global")), dtypes("bfloat16", "tpu")
    told = attention.describe(config, 4096, types, "tpu", 1)
    assert told == "attention over rows of 4096 tokens, auto on tpu: splash in local layers, splash in global layers"
    assert "ring in local layers" in attention.describe(config, 4096, types, "cpu", 2)
