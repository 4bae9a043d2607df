"""Layers with and without experts in one decoder: what each does, that it is drawn as ever, and what is compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.model import decoder, stack
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.model.pattern import kinds

FLOAT32 = dtypes("float32", "cpu")
SMALL = ModelConfig(vocab_size=41, num_layers=5, d_model=24, num_heads=3, d_ff=20, init_std=0.3)
MOES = {
    "every other": MoeConfig(num_experts=3, every=2),
    "the first ones dense": MoeConfig(num_experts=3, dense_layers=(0, 1), dense_d_ff=28, shared_d_ff=12),
    "here and there": MoeConfig(num_experts=3, dense_layers=(1, 2, 4), bias_rate=0.1),
}
TOKENS = jnp.arange(24).reshape(2, 12)
POSITIONS = jnp.broadcast_to(jnp.arange(12), TOKENS.shape)


def mixed(name, **changes):
    return dataclasses.replace(SMALL, moe=MOES[name], **changes)


def of_layer(config, layers, number):
    """What that layer is, and its parameters."""
    kind = kinds(config)[number]
    own = config.expert_layers[:number].count(kind.experts)
    name, other = ("moe", "mlp") if kind.experts else ("mlp", "moe")
    at = {key: own if key == name else number for key in layers if key != other}
    return kind, {key: jax.tree.map(lambda a, n=n: a[n], layers[key]) for key, n in at.items()}


def grown(config, params, tokens):
    """Hidden states, and gradients of them all."""

    def total(params):
        hidden, _, routed = decoder.forward_routed(config, params, tokens, POSITIONS, Mask(), FLOAT32)
        return jnp.sum(jnp.sin(hidden)), (hidden, routed)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@pytest.mark.parametrize("name", MOES)
def test_layers_run_one_after_another(name):
    config = mixed(name)
    params = decoder.init(config, jax.random.key(0))
    (_, (hidden, routed)), _ = grown(config, params, TOKENS)
    x, loads = params["embed"]["token"][TOKENS], []

    @functools.partial(jax.jit, static_argnums=0)
    def run(kind, weights, x):
        return stack.block(config, kind, weights)(x, POSITIONS, Mask(), FLOAT32)

    for number in range(config.num_layers):
        kind, weights = of_layer(config, params["layers"], number)
        x, _, stats = run(kind, weights, x)
        assert (stats is not None) == kind.experts
        loads += [] if stats is None else [stats.load]
    np.testing.assert_allclose(hidden, decoder.merge(config, params).final_norm(x), atol=2e-5)
    np.testing.assert_array_equal(routed.load, np.stack(loads))


@pytest.mark.parametrize("name", MOES)
def test_a_layer_is_drawn_as_if_all_were_like_it(name):
    config = mixed(name)
    layers = decoder.init(config, jax.random.key(0))["layers"]
    for number in range(config.num_layers):
        kind, weights = of_layer(config, layers, number)
        alike = decoder.init(config.with_all(kind.experts), jax.random.key(0))["layers"]
        jax.tree.map(np.testing.assert_array_equal, weights, jax.tree.map(lambda a, n=number: a[n], alike))


@pytest.mark.parametrize("name, remat", [("every other", "full"), ("here and there", "none")])
def test_a_scan_changes_neither_values_nor_gradients(name, remat):
    config = mixed(name, scan="off")
    params = decoder.init(config, jax.random.key(0))
    plain = grown(config, params, TOKENS)
    scanned = grown(dataclasses.replace(config, scan="on", remat=remat), params, TOKENS)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * (1 + float(jnp.abs(b).max())))  # noqa: E731
    jax.tree.map(close, scanned, plain)


def test_the_program_of_a_pattern_does_not_grow_with_layers():
    def size(layers, moe):
        config = dataclasses.replace(SMALL, num_layers=layers, moe=moe, scan="on")
        abstract = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
        run = jax.jit(lambda p: decoder.forward_routed(config, p, TOKENS, POSITIONS, Mask(), FLOAT32))
        return len(run.lower(abstract).as_text().splitlines())

    assert size(12, MOES["every other"]) == size(4, MOES["every other"])
    assert size(12, MoeConfig(dense_layers=(0,))) == size(4, MoeConfig(dense_layers=(0,)))
