"""The chunked loss head against the plain equations, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.model.dense import dtypes
from lmjax.train.loss import HeadConfig, head_loss

TYPES = dtypes("float32", "cpu")


def inputs(rows=3, length=21, width=16, vocab=37):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (rows, length, width))
    w = jax.random.normal(keys[1], (width, vocab))
    targets = jax.random.randint(keys[2], (rows, length), 0, vocab)
    weights = jnp.where(jax.random.uniform(keys[3], (rows, length)) < 0.3, 0.0, 1.5)
    return x, w, targets, weights


def plain(x, w, targets, weights, z_loss, softcap):
    logits = x @ w
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    z = jax.nn.logsumexp(logits, -1) ** 2
    return jnp.sum(weights * nll) + z_loss * jnp.sum(weights * z), (jnp.sum(weights * nll), jnp.sum(weights * z))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 10, 63, 10_000])  # a token of each row, ragged chunks, one chunk
def test_equals_the_plain_loss(chunk, softcap):
    x, w, targets, weights = inputs()
    head = HeadConfig(0.01, softcap, chunk, TYPES)
    # The cotangent is not 1: gradients of 3 · total are 3 times those of total.
    ours = lambda x, w: 3.0 * head_loss(x, w, targets, weights, head)[0]  # noqa: E731
    expected = lambda x, w: 3.0 * plain(x, w, targets, weights, 0.01, softcap)[0]  # noqa: E731
    got, want = (jax.value_and_grad(f, argnums=(0, 1))(x, w) for f in (ours, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_the_reported_likelihood_holds_no_z_loss():
    x, w, targets, weights = inputs()
    with_z, without = (head_loss(x, w, targets, weights, HeadConfig(z, None, 8, TYPES)) for z in (0.5, 0.0))
    np.testing.assert_allclose(with_z[1], without[1])
    np.testing.assert_allclose(with_z[0], with_z[1][0] + 0.5 * with_z[1][1], rtol=1e-6)
    np.testing.assert_allclose(without[0], without[1][0])


def test_tokens_of_weight_zero_count_for_nothing():
    x, w, targets, weights = inputs()
    head = HeadConfig(0.01, None, 8, TYPES)
    hidden = weights == 0
    grad = jax.grad(lambda x, t: head_loss(x, w, t, weights, head)[0])
    first = grad(x, targets)
    np.testing.assert_array_equal(first[hidden], 0.0)
    np.testing.assert_array_equal(first, grad(x, jnp.where(hidden, 0, targets)))


def test_logits_of_the_whole_batch_never_exist():
    rows, length, width, vocab = 4, 512, 16, 8192
    shapes = [
        ((rows, length, width), "float32"),
        ((width, vocab), "float32"),
        ((rows, length), "int32"),
        ((rows, length), "float32"),
    ]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def temporaries(chunk):
        head = HeadConfig(0.0, None, chunk, TYPES)
        grad = jax.jit(jax.grad(lambda x, w, t, m: head_loss(x, w, t, m, head)[0], argnums=(0, 1)))
        return grad.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(rows * length) >= 4 * rows * length * vocab
    assert temporaries(128) < 0.25 * temporaries(rows * length)
