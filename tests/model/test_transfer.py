"""What was tuned at a base model holds at a wider and deeper one: sizes of activations after some steps tell."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig, MupConfig
from lmjax.model.dense import dtypes
from lmjax.model.transfer import folded
from lmjax.optim.build import build_optimizer
from lmjax.optim.config import OptimConfig
from lmjax.parts import build_parts
from lmjax.train.config import RunConfig

TYPES = dtypes("float32", "cpu")
BASE = ModelConfig(vocab_size=64, num_layers=2, d_model=32, num_heads=2, d_ff=64, max_length=16, tie_embeddings=False)
TOKENS = jax.random.randint(jax.random.key(3), (8, 16), 0, 64)
POSITIONS = jnp.broadcast_to(jnp.arange(16), (8, 16))


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params):
    hidden, _ = decoder.forward(model, params, TOKENS, POSITIONS, Mask(), TYPES)
    return decoder.unembed(model, params, hidden, TYPES)


def moved(model, optim, steps=4):
    """Root mean square of what training changed in the logits; every step reads the same rows."""
    params = decoder.init(model, jax.random.key(0))
    optimizer = build_optimizer(optim, 1.0 / model.width_ratio)

    def loss(params):
        log_p = jax.nn.log_softmax(logits(model, params)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, TOKENS[:, 1:, None], axis=-1))

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (jax.tree.map(lambda p, u: p + optim.learning_rate * u, params, updates), state), None

        (after, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
        return jnp.sqrt(jnp.mean((logits(model, after) - logits(model, params)) ** 2))

    return float(train(params))


def wider(factor, mup, **fields):
    heads, width, hidden = BASE.num_heads * factor, BASE.d_model * factor, BASE.hidden * factor
    model = dataclasses.replace(BASE, d_model=width, num_heads=heads, d_ff=hidden, **fields)
    return dataclasses.replace(model, mup=MupConfig(BASE.d_model) if mup else None)


@pytest.mark.parametrize("name, rate", [("adamw", 0.01), pytest.param("muon", 0.02, marks=pytest.mark.slow)])
def test_steps_move_logits_as_far_at_eight_times_the_width(name, rate):
    optim = OptimConfig(name=name, learning_rate=rate, weight_decay=0.1)
    narrow = moved(BASE, optim)
    assert 0.6 < moved(wider(8, mup=True), optim) / narrow < 1.7
    assert moved(wider(8, mup=False), optim) / narrow > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_steps_move_logits_and_choices_as_far_with_experts(every):
    """Their products are matrices like others, the router makes logits: of its own."""
    optim = OptimConfig(learning_rate=0.01, weight_decay=0.1)
    experts = {"moe": MoeConfig(num_experts=4, shared_d_ff=32, shared_gate=True, every=every)}
    narrow = moved(wider(1, mup=False, **experts), optim)
    experts = {"moe": dataclasses.replace(experts["moe"], shared_d_ff=8 * 32)}
    assert 0.6 < moved(wider(8, mup=True, **experts), optim) / narrow < 1.7
    assert moved(wider(8, mup=False, **experts), optim) / narrow > 2.5


def test_depth_is_a_finer_step_and_not_a_longer_way():
    """Equal layers, each over their number, are Euler's method: twice as many change little."""
    one = dataclasses.replace(BASE, num_layers=1, scan="on", init_std=0.1)
    params = decoder.init(one, jax.random.key(0))

    def repeated(count, mup):
        model = dataclasses.replace(one, num_layers=count, mup=mup)
        return logits(model, {**params, "layers": jax.tree.map(lambda p: jnp.repeat(p, count, 0), params["layers"])})

    for mup, low, high in ((MupConfig(32, base_layers=1), 0.0, 0.1), (None, 0.3, math.inf)):
        eight, sixteen = repeated(8, mup), repeated(16, mup)
        assert low < float(jnp.linalg.norm(sixteen - eight) / jnp.linalg.norm(eight)) < high


def test_initial_weights_are_the_bases_but_for_the_layers_matrices():
    for init in ("scaled", "fan_in"):
        base = decoder.init(dataclasses.replace(BASE, init=init), jax.random.key(0))
        wide = decoder.init(wider(4, mup=True, init=init), jax.random.key(0))
        spread = jax.tree.map(lambda a, b: float(jnp.std(a) / jnp.std(b)), wide, base)
        np.testing.assert_allclose([spread["embed"]["token"], spread["head"]["kernel"]], 1.0, rtol=0.1)
        layers = spread["layers"]
        each = (layers["attention"]["qkv"], layers["attention"]["out"], layers["mlp"]["up"], layers["mlp"]["down"])
        np.testing.assert_allclose(each, 0.5, rtol=0.1)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_matrices_learn_slower_and_decay_alike(name):
    """The matrices' direction over m; the decay and all else as without."""
    params = {"down": jnp.ones((2, 3, 4)), "kernel": jnp.ones((3, 5)), "scale": jnp.ones(3)}

    def updates(rate, decay):
        optimizer = build_optimizer(OptimConfig(name=name, weight_decay=decay), rate)
        return optimizer.update(params, optimizer.init(params), params)[0]

    whole, slow, decayed = updates(1.0, 0.0), updates(0.25, 0.0), updates(0.25, 0.5)
    np.testing.assert_allclose(slow["down"], 0.25 * whole["down"], rtol=1e-6)
    np.testing.assert_allclose(decayed["down"] - slow["down"], -0.5, rtol=1e-5)
    for other in ("kernel", "scale"):
        np.testing.assert_array_equal(slow[other], whole[other])


MUP = MupConfig(base_width=8, base_layers=1, base_head_dim=2)
VARIANTS = {
    "tied": {"tie_embeddings": True},
    "grouped, biases, score_dim": {"num_kv_heads": 1, "attention_bias": True, "score_dim": 5},
    "qk-norm, after": {"qk_norm": True, "block": "post"},
    "experts": {"moe": MoeConfig(num_experts=4, shared_d_ff=64, shared_gate=True, every=2), "tie_embeddings": True},
    "experts, after": {"moe": MoeConfig(num_experts=4, shared_d_ff=64), "block": "post"},
    "gpt2": {"norm": "layernorm", "norm_bias": True, "mlp_bias": True, "activation": "gelu", "position": "learned"},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_folded_weights_give_the_same_logits(fields):
    model = dataclasses.replace(BASE, init_std=0.3, mup=MUP, scan="on", **fields)
    params = decoder.init(model, jax.random.key(1))
    # norms and biases at values of their own, so that each factor's place matters
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(2), p.shape), params)
    plain, weights = folded(model, params)
    assert plain.mup is None and plain.differences(dataclasses.replace(model, mup=None)) == []
    np.testing.assert_allclose(logits(plain, weights), logits(model, params), atol=2e-4)
    assert float(jnp.max(jnp.abs(logits(plain, params) - logits(model, params)))) > 0.1


def test_factors_are_of_the_model_and_named_where_they_differ():
    model = wider(4, mup=True)
    assert model.width_ratio == 4 and model.branch_scale == 1 and model.scores_over == model.dim_head
    (difference,) = model.differences(wider(4, mup=False))
    assert difference == "width_ratio=4.0, not 1.0"
    heads = dataclasses.replace(model, mup=MupConfig(32, base_head_dim=4))
    assert heads.scores_over == 16 * 16 / 4 and math.isclose(heads.branch_scale, 1.0)


@pytest.mark.parametrize("fields", [{"prefix_dim": 4}, {"scale_embeddings": True}])
def test_what_has_no_rule_is_refused_by_name(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        dataclasses.replace(BASE, mup=MUP, **fields)


def test_a_run_of_a_wider_model_takes_its_rate():
    params = {"down": jnp.ones((2, 3, 4)), "kernel": jnp.ones((3, 5))}
    optimizer = build_parts(RunConfig(model=wider(4, mup=True), optim=OptimConfig(weight_decay=0.0))).optimizer
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose([updates["down"][0, 0, 0], updates["kernel"][0, 0]], [-0.25, -1.0], rtol=1e-4)
