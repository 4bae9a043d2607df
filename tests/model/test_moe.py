"""Mixture of experts against the equations, one token at a time; and no two ways of running it differ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.model import decoder, moe
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.model.initialize import Initializer
from lmjax.model.moe import Moe

FLOAT32 = dtypes("float32", "cpu")
SMALL = ModelConfig(vocab_size=61, num_layers=2, d_model=32, num_heads=4, d_ff=24, max_length=32, init_std=0.3)
VARIANTS = {
    "Mixtral": MoeConfig(num_experts=4, top_k=2),
    "Qwen2": MoeConfig(num_experts=6, top_k=3, renormalize=False, shared_d_ff=40, shared_gate=True),
    "DeepSeek": MoeConfig(num_experts=8, top_k=2, scores="sigmoid", shared_d_ff=16, bias_rate=0.01, balance_loss=0.0),
    "Switch": MoeConfig(num_experts=4, top_k=1, renormalize=False),
    "all": MoeConfig(num_experts=3, top_k=3),
}


def config(name="Mixtral", **changes):
    return dataclasses.replace(SMALL, moe=dataclasses.replace(VARIANTS[name], **changes))


def layer(config, seed=0, scale=1.0):
    """A layer's parameters, no bias of which is 0, and its call `(params, x, segments, dropless) → (out, stats)`."""
    from flax import nnx

    graph, state = nnx.split(Moe(config, Initializer(config, nnx.Rngs(params=seed))), nnx.Param)
    params = nnx.to_pure_dict(state)
    if "router_bias" in params:
        params["router_bias"] = 0.3 * jax.random.normal(jax.random.key(9), params["router_bias"].shape)
    params["router"] *= scale

    def call(params, x, segments=None, dropless=False):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x, segments, FLOAT32, dropless)

    return params, call


def rows(batch=2, length=12, seed=3, width=32):
    return jax.random.normal(jax.random.key(seed), (batch, length, width))


def np_mlp(x, up, down):
    gate, up = np.einsum("d,dmf->mf", x, up)
    return (gate / (1 + np.exp(-gate)) * up) @ down


def np_moe(config, params, x, segments=None):
    """Each token by itself, in float64, from the equations; and what was chosen."""
    moe, params = config.moe, jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x, out, chosen = np.asarray(x, np.float64), np.zeros(x.shape), np.zeros((*x.shape[:2], moe.top_k), int)
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ params["router"]
        scores = 1 / (1 + np.exp(-logits)) if moe.scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        chosen[place] = np.argsort(-(scores + params.get("router_bias", 0.0)))[: moe.top_k]
        total = scores[chosen[place]].sum() if moe.renormalize else 1.0
        for expert in chosen[place] if segments is None or segments[place] else ():
            out[place] += (
                scores[expert] / total * np_mlp(x[place], params["expert_up"][expert], params["expert_down"][expert])
            )
        if moe.shared_d_ff:
            shared = np_mlp(x[place], params["shared"]["up"], params["shared"]["down"])
            out[place] += shared / (1 + np.exp(-x[place] @ params["shared_gate"])) if moe.shared_gate else shared
    return out, chosen


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("capacity", [None, 100.0])
def test_a_layer_equals_the_equations(name, capacity):
    cfg = config(name, capacity_factor=capacity)
    params, call = layer(cfg)
    out, stats = call(params, rows())
    expected, chosen = np_moe(cfg, params, rows())
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    loads = np.stack([np.bincount(row.ravel(), minlength=cfg.moe.num_experts) for row in chosen])
    np.testing.assert_array_equal(stats.load, loads)
    assert not stats.dropped.any()
