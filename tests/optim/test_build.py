"""One contract for all optimizers: they converge, decay what they should, and give an update at learning rate 1."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmjax.model import decoder
from lmjax.model.config import ModelConfig
from lmjax.optim.build import OPTIMIZERS, build_optimizer
from lmjax.optim.config import OptimConfig

MODEL = ModelConfig(
    vocab_size=50, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, tie_embeddings=False, attention_bias=True
)
RATES = {"adamw": 0.05, "lion": 0.02, "adafactor": 0.05, "muon": 0.05}


def tree():
    return decoder.init(MODEL, jax.random.key(0))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_converges_and_compiles_once(name):
    params, target = tree(), decoder.init(MODEL, jax.random.key(1))
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.0))
    loss = lambda p: sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(target)))  # noqa: E731

    @jax.jit
    def step(params, state, rate):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(lambda p, u: p + rate * u, params, updates), state

    state, first = optimizer.init(params), loss(params)
    for i in range(60):
        params, state = step(params, state, RATES[name] * (1 - i / 60))
    assert loss(params) < 0.1 * first
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_pulls_matrices_only_and_is_times_the_learning_rate(name):
    params = jax.tree.map(jnp.ones_like, tree())
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.25))
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    attention, mlp = updates["layers"]["attention"], updates["layers"]["mlp"]
    for matrix in (attention["qkv"], attention["out"], mlp["up"], mlp["down"]):
        np.testing.assert_allclose(matrix, -0.25, atol=1e-6)
    for other in (attention["qkv_bias"], updates["final_norm"]["scale"], updates["embed"]["token"]):
        np.testing.assert_allclose(other, 0.0, atol=1e-6)


def test_embeddings_decay_when_asked():
    params = jax.tree.map(jnp.ones_like, tree())
    optimizer = build_optimizer(OptimConfig(name="adamw", weight_decay=0.25, decay_embeddings=True))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["embed"]["token"], -0.25)
    np.testing.assert_allclose(updates["final_norm"]["scale"], 0.0)


def test_adamw_is_the_equation():
    params = {"down": jnp.asarray([[1.0, -2.0]])}
    optimizer = build_optimizer(OptimConfig(name="adamw", b1=0.9, b2=0.99, epsilon=1e-8, weight_decay=0.1))
    state, m, v, p = optimizer.init(params), 0.0, 0.0, np.asarray(params["down"], np.float64)
    for t in range(1, 5):
        g = np.asarray([[0.3 * t, -0.1]])
        updates, state = optimizer.update(
            {"down": jnp.asarray(g, jnp.float32)}, state, {"down": jnp.asarray(p, jnp.float32)}
        )
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        expected = -(m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + 0.1 * p)
        np.testing.assert_allclose(updates["down"], expected, rtol=1e-5)
        p = p + 0.01 * expected


def test_muon_orthogonalizes_each_matrix_by_itself():
    params = tree()
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(5), x.shape), params)
    optimizer = build_optimizer(OptimConfig(name="muon", weight_decay=0.0))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    up = updates["layers"]["mlp"]["up"]  # [L, D, gate and up, F]
    for layer in range(2):
        for half in range(2):
            singular = jnp.linalg.svd(up[layer, :, half], compute_uv=False)
            # Newton-Schulz brings singular values near 1; optax scales by sqrt(out / in) where the matrix is wide.
            scale = np.sqrt(max(1.0, up.shape[-1] / up.shape[1]))
            assert singular.min() / scale > 0.6 and singular.max() / scale < 1.3
    assert isinstance(optimizer, optax.GradientTransformation)
