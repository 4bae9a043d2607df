"""SOAP against its equations, written for one block in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.optim import soap

CHOSEN = soap.Soap(b1=0.9, b2=0.8, epsilon=1e-8, block=6, every=2)


def test_blocks_and_back():
    stack = jnp.arange(2 * 12 * 10.0).reshape(2, 12, 10)
    blocks = soap.cut(stack, 6)
    assert blocks.shape == (2, 4, 6, 5)
    np.testing.assert_array_equal(blocks[1, 1], stack[1, :6, 5:])
    np.testing.assert_array_equal(soap.paste(blocks, (12, 10)), stack)
    assert soap.cut(jnp.zeros((1, 7, 11)), 6).shape == (1, 77, 1, 1)  # what does not divide: Adam by itself


def follow(statistic, basis, values):
    """The basis one orthogonal iteration on, with `values` (along rows) in the new order of its columns."""
    order = np.argsort(-np.diag(basis.T @ statistic @ basis))
    return np.linalg.qr(statistic @ basis[:, order])[0], values[order]


def block_by_hand(grads):
    """The directions of a block's steps."""
    rows, columns = grads[0].shape
    b1, b2, left, right = CHOSEN.b1, CHOSEN.b2, np.zeros((rows, rows)), np.zeros((columns, columns))
    m, v, directions = np.zeros((rows, columns)), np.zeros((rows, columns)), []
    for t, g in enumerate(grads):
        if t > 0:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (q_left.T @ g @ q_right) ** 2
            scaled = q_left.T @ m @ q_right / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + CHOSEN.epsilon)
            directions.append(q_left @ scaled @ q_right.T)
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        if t == 0:
            directions.append(np.zeros_like(g))
            q_left, q_right = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
        elif t % CHOSEN.every == 0:
            q_left, v = follow(left, q_left, v)
            q_right, transposed = follow(right, q_right, v.T)
            v = transposed.T
    return directions


def test_steps_are_the_equations():
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(2, 12, 5)) for _ in range(6)]  # a stack of two matrices; square enough to have full rank
    transform = soap.scale_by_soap(CHOSEN)
    state, update = transform.init({"down": jnp.zeros((2, 12, 5))}), jax.jit(transform.update)
    for t, g in enumerate(grads):
        updates, state = update({"down": jnp.asarray(g, jnp.float32)}, state)
        for layer in range(2):
            for rows in (slice(0, 6), slice(6, 12)):
                expected = block_by_hand([x[layer, rows] for x in grads[: t + 1]])[-1]
                np.testing.assert_allclose(updates["down"][layer, rows], expected, atol=2e-3)
