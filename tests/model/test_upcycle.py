"""Experts from a dense decoder compute what it did, until training drives them apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.model.upcycle import upcycle

DENSE = ModelConfig(vocab_size=61, num_layers=2, d_model=32, num_heads=4, d_ff=24, init_std=0.3)
TOKENS = jnp.arange(40).reshape(2, 20)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params):
    types = dtypes("float32", "cpu")
    hidden, _ = decoder.forward(config, params, TOKENS, jnp.broadcast_to(jnp.arange(20), (2, 20)), Mask(), types)
    return decoder.unembed(config, params, hidden, types)


@pytest.mark.parametrize(
    "moe",
    [
        MoeConfig(num_experts=4),
        MoeConfig(num_experts=3, top_k=1, scores="sigmoid", shared_d_ff=16, bias_rate=0.1),
        MoeConfig(num_experts=4, dense_layers=(0,)),
    ],
    ids=["softmax", "sigmoid, shared", "in some layers"],
)
def test_the_new_decoder_computes_what_the_dense_one_did(moe):
    config, params = dataclasses.replace(DENSE, moe=moe), decoder.init(DENSE, jax.random.key(0))
    made = upcycle(params, DENSE, config, jax.random.key(1))
    expected = logits(DENSE, params)
    np.testing.assert_allclose(logits(config, made), expected, atol=1e-6 * float(jnp.abs(expected).max()))
    fresh = decoder.init(config, jax.random.key(0))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, fresh)
    up, chosen = params["layers"]["mlp"]["up"], np.array(config.expert_layers)
    np.testing.assert_array_equal(made["layers"]["moe"]["expert_up"][:, 1], up[chosen])
    if not chosen.all():
        np.testing.assert_array_equal(made["layers"]["mlp"]["up"], up[~chosen])


def test_noise_tells_experts_apart_and_a_key_is_a_model():
    config, params = dataclasses.replace(DENSE, moe=MoeConfig(num_experts=4)), decoder.init(DENSE, jax.random.key(0))
    made, same = (upcycle(params, DENSE, config, jax.random.key(1), noise=0.1) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, made, same)
    up, dense = made["layers"]["moe"]["expert_up"], params["layers"]["mlp"]["up"]
    assert jnp.std(up - dense[:, None]) == pytest.approx(0.1 * float(jnp.std(dense)), rel=0.05)


@pytest.mark.parametrize(
    "dense, changes, message",
    [
        (DENSE, {"moe": None}, "without config.model.moe into one with it"),
        (DENSE, {"moe": MoeConfig(renormalize=False)}, "moe.renormalize"),
        (DENSE, {"d_ff": 32}, "other parameters than the dense model"),
        (DENSE, {"moe": MoeConfig(dense_layers=(0,), dense_d_ff=8)}, "moe.dense_d_ff"),
        (dataclasses.replace(DENSE, mlp_bias=True), {}, "other parameters than the dense model"),
    ],
)
def test_what_would_not_be_the_same_model_is_refused(dense, changes, message):
    config = dataclasses.replace(DENSE, **{"moe": MoeConfig(), **changes})
    with pytest.raises(UserError, match=message):
        upcycle(decoder.init(dense, jax.random.key(0)), dense, config, jax.random.key(1))
