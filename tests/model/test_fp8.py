"""Products in eight bits: against NumPy, row by row, and beside bfloat16 in training."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.model import decoder, fp8
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.train.config import RunConfig, TrainConfig

FLOAT32 = jnp.dtype("float32")


def np_quantize(x, dtype, axis):
    """Rounded values times their scale, float64."""
    scale = np.abs(x).max(axis=axis, keepdims=True).astype(np.float32) / np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.where(scale == 0, np.float32(1), scale)
    return (x / scale).astype(dtype).astype(np.float64) * scale


def operands(tail=(5,)):
    draw = np.random.default_rng(0)
    x = (draw.normal(size=(7, 16)) * np.geomspace(1e-3, 1e3, 7)[:, None]).astype(np.float32)
    w, g = draw.normal(size=(16, *tail)), draw.normal(size=(7, *tail))
    return jnp.asarray(x), jnp.asarray(w, jnp.float32), jnp.asarray(g, jnp.float32)


@pytest.mark.parametrize("tail", [(5,), (2, 3)])
def test_product_and_gradients_are_those_of_numpy(tail):
    x, w, g = operands(tail)
    y, back = jax.vjp(jax.jit(lambda x, w: fp8.product(x, w, FLOAT32)), x, w)
    dx, dw = back(g)
    x, w, g = np.asarray(x), np.asarray(w).reshape(16, -1), np.asarray(g).reshape(7, -1)
    x8, w8 = np_quantize(x, ml_dtypes.float8_e4m3fn, 1), np_quantize(w, ml_dtypes.float8_e4m3fn, None)
    np.testing.assert_allclose(np.reshape(y, (7, -1)), x8 @ w8, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np_quantize(g, ml_dtypes.float8_e5m2, 1) @ w8.T, rtol=1e-5, atol=1e-5)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(448)
    folded = np_quantize((g * scale).astype(np.float32), ml_dtypes.float8_e5m2, None)
    np.testing.assert_allclose(np.reshape(dw, (16, -1)), (x8 / scale).T @ folded, rtol=1e-4, atol=1e-4)


def test_errors_are_those_of_three_and_two_bits():
    x, w, g = operands()
    y, back = jax.vjp(lambda x, w: fp8.product(x, w, FLOAT32), x, w)
    for ours, exact in ((y, x @ w), *zip(back(g), (g @ w.T, x.T @ g))):
        error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert 0.001 < error < 0.1


def test_a_token_does_not_see_its_neighbours_by_rounding():
    x, w, g = operands()
    other = x.at[3].multiply(1e4)
    whole, changed = (jax.vjp(lambda x: fp8.product(x, w, FLOAT32), rows) for rows in (x, other))
    rows = np.array([0, 1, 2, 4, 5, 6])
    np.testing.assert_array_equal(whole[0][rows], changed[0][rows])
    np.testing.assert_array_equal(whole[1](g)[0][rows], changed[1](g)[0][rows])


@pytest.mark.parametrize("places", [((None, None), (None, None, "tensor")), ((None, "tensor"), ("tensor", None))])
def test_split_weights_give_the_same(places):
    """As a tensor axis splits the products into and out of a branch; scales are those of whole rows and weights."""
    x, w, g = operands((2, 8) if len(places[1]) == 3 else (8,))
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    both = [jax.NamedSharding(mesh, jax.P(*place)) for place in places]

    def run(x, w):
        y, back = jax.vjp(lambda x, w: fp8.product(x, w, FLOAT32), x, w)
        return y, *back(g)

    for one, split in zip(jax.jit(run)(x, w), jax.jit(run)(*jax.device_put((x, w), tuple(both))), strict=True):
        np.testing.assert_allclose(split, one, rtol=1e-5, atol=1e-5)


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    values, scale = fp8.quantize(jnp.array([[0.0, 0.0], [1.0, -3.0], [1.0, jnp.inf]]), fp8.FORWARD, (1,))
    assert values.dtype == fp8.FORWARD and values[0].tolist() == [0, 0] and values[1, 1] == -448
    assert scale[0, 0] == 1 and not np.isfinite(np.asarray(values, np.float32)[2]).all()


@pytest.mark.slow
def test_trains_as_bfloat16_does():
    """Layers alone are in eight bits; the losses stay within a twentieth of each other, and are not the same."""
    model = ModelConfig(vocab_size=32, num_layers=1, d_model=32, num_heads=2, max_length=16)
    tokens = jnp.asarray(np.cumsum(np.random.default_rng(0).integers(1, 4, (8, 17)), axis=1) % 32)
    positions = jnp.broadcast_to(jnp.arange(16), (8, 16))

    def train(precision):
        dtype = dtypes(precision, "cpu")

        def loss(params):
            hidden, _ = decoder.forward(model, params, tokens[:, :-1], positions, Mask(), dtype)
            log_p = jax.nn.log_softmax(decoder.unembed(model, params, hidden, dtype))
            return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

        def step(carry, _):
            params, moment = carry
            value, grads = jax.value_and_grad(loss)(params)
            moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
            return (jax.tree.map(lambda p, m: p - 0.05 * m, params, moment), moment), value

        params = decoder.init(model, jax.random.key(0))
        zeros = jax.tree.map(jnp.zeros_like, params)
        return np.asarray(jax.jit(lambda p: jax.lax.scan(step, (p, zeros), length=40)[1])(params))

    eight, half = train("fp8_emulated"), train("bfloat16")
    assert half[-1] < 0.6 * half[0]
    assert abs(eight[-5:].mean() / half[-5:].mean() - 1) < 0.05
    assert np.abs(eight - half).max() > 1e-4


def test_only_layers_are_in_eight_bits():
    kinds = dtypes("fp8", "gpu")
    assert kinds.matmul == kinds.activation == jnp.bfloat16 and kinds.in_layers().matmul == fp8.FORWARD
    assert dtypes("bfloat16", "gpu").in_layers().matmul == jnp.bfloat16


def device(platform, kind, capability=None):
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


def test_chips_without_such_units_are_refused_unless_forced():
    for lacking in (device("cpu", "cpu"), device("gpu", "NVIDIA A100", "8.0"), device("tpu", "TPU v5")):
        with pytest.raises(UserError, match="fp8_emulated"):
            fp8.check_platform("fp8", lacking)
        fp8.check_platform("fp8_emulated", lacking)
        fp8.check_platform("bfloat16", lacking)
    for having in (device("gpu", "NVIDIA H200", "9.0"), device("gpu", "NVIDIA B200", "10.0"), device("tpu", "TPU7x")):
        fp8.check_platform("fp8", having)


def test_experts_are_refused():
    with pytest.raises(UserError, match=r"config\.model\.moe"):
        RunConfig(model=ModelConfig(moe=MoeConfig()), train=TrainConfig(precision="fp8"))
