"""8-bit moments against those of bitsandbytes, and Adam within what rounding allows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmjax.optim import quantized


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_as_near_as_those_of_bitsandbytes(signed):
    """The same map and scales; its kernel for CPUs does not always find the nearest value, ours is never farther."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    theirs = functional.create_dynamic_map(signed=signed)
    np.testing.assert_allclose(quantized.dynamic_map(signed), theirs.sort()[0], rtol=1e-6)
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(24, 512)) * np.exp(rng.normal(scale=4.0, size=(24, 512)))).astype(np.float32)
    x = x if signed else np.abs(x)
    codes, state = functional.quantize_blockwise(torch.from_numpy(x), code=theirs, blocksize=256)
    ours = quantized.quantize(jnp.asarray(x), -1, 256, signed)
    np.testing.assert_array_equal(np.asarray(ours.scales).ravel(), state.absmax)
    back = quantized.dequantize(ours, -1, 256, signed)
    off = np.abs(back - x), np.abs(functional.dequantize_blockwise(codes, state).numpy() - x)
    rounding = 1e-6 * np.repeat(np.asarray(ours.scales), 256, axis=1)
    assert np.all(off[0] <= off[1] + rounding)


@pytest.mark.parametrize("dim, block", [(-1, 4), (-2, 4), (-2, 64), (0, 2)])
def test_blocks_lie_along_the_dim(dim, block):
    """Any length, also one that blocks do not divide; zero comes back exactly."""
    x = np.random.default_rng(1).normal(size=(3, 10, 6)).astype(np.float32)
    x[:, 2] = 0.0
    stored = quantized.quantize(jnp.asarray(x), dim, block, signed=True)
    assert stored.codes.shape == x.shape and stored.scales.shape[dim] == -(-x.shape[dim] // min(block, x.shape[dim]))
    back = np.asarray(quantized.dequantize(stored, dim, block, signed=True))
    for first in range(0, x.shape[dim], block):
        piece, found = (np.take(a, range(first, min(first + block, x.shape[dim])), axis=dim) for a in (x, back))
        top = np.abs(piece).max(axis=dim, keepdims=True)
        assert (np.abs(piece - found) <= 0.01 * top).all()
    np.testing.assert_array_equal(back[:, 2], 0.0)


def test_updates_are_adams_up_to_rounding():
    params = {"down": jnp.zeros((2, 256, 8)), "token": jnp.zeros((7, 8))}
    transforms = quantized.scale_by_quantized_adam(0.9, 0.99, 1e-8, 64), optax.scale_by_adam(0.9, 0.99, 1e-8)
    states = [transform.init(params) for transform in transforms]
    for t in range(8):
        keys = jax.random.split(jax.random.key(t))
        grads = {name: jax.random.normal(key, params[name].shape) for name, key in zip(params, keys, strict=True)}
        updates, states = zip(
            *(x.update(grads, s, params) for x, s in zip(transforms, states, strict=True)), strict=True
        )
    np.testing.assert_allclose(updates[0]["token"], updates[1]["token"], rtol=1e-5)
    error = np.abs(updates[0]["down"] - updates[1]["down"])
    assert error.mean() < 0.02 and error.max() > 0  # it is quantized
    leaves = jax.tree.leaves(states[0].mu["down"])
    assert sum(leaf.nbytes for leaf in leaves) < 0.28 * params["down"].nbytes
