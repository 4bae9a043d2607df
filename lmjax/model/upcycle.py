"""Experts from a dense decoder: each starts as a copy of its layer's MLP, and training drives them apart. Layers that stay without
experts keep their MLP.

Where the chosen experts' gates sum to 1 the new decoder computes what the old one did, whatever its fresh router says
(Komatsuzaki et al., 2022, 2212.05055). A shared MLP starts with a down product of zeros, and so changes nothing at first.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from lmjax.config import need
from lmjax.model import decoder
from lmjax.model.config import ModelConfig
from lmjax.model.decoder import Params


def upcycle(params: Params, dense: ModelConfig, config: ModelConfig, key: PRNGKeyArray, noise: float = 0.0) -> Params:
    """The parameters of `config`, whose layers have experts, from those of `dense`.

    Args:
      params: of the dense decoder.
      dense: its config; `config` but for the experts, as far as parameters go.
      config: with `moe`.
      key: of the router, a shared MLP and the noise.
      noise: standard deviation of what is added to each expert's weights, over that of the weights; it tells experts apart sooner.

    Raises:
      UserError: the shapes of all but the MLPs differ, or the experts' outputs would be scaled.
    """
    need(
        dense.moe is None and config.moe is not None,
        "upcycling turns a model without config.model.moe into one with it",
    )
    need(config.moe.renormalize, "upcycling needs config.model.moe.renormalize: else gates do not sum to 1")
    plain = dataclasses.replace(config, moe=None)
    need(
        config.dense_hidden in (None, config.hidden),
        "upcycling keeps the MLPs' width: config.model.moe.dense_d_ff is another",
    )
    have, want = (jax.eval_shape(lambda c=c: decoder.init(c, jax.random.key(0))) for c in (dense, plain))
    need(have == want, "upcycling: config.model has other parameters than the dense model, beside its experts")
    fresh_key, up_key, down_key = jax.random.split(key, 3)
    fresh = decoder.init(config, fresh_key)["layers"]["moe"]
    layers = dict(params["layers"])
    mlp, chosen = layers.pop("mlp"), np.array(config.expert_layers)
    if not chosen.all():
        layers["mlp"] = jax.tree.map(lambda weights: weights[~chosen], mlp)

    def copies(weights, key):
        weights = weights[chosen]
        experts = jnp.repeat(weights[:, None], config.moe.num_experts, axis=1)
        return experts + noise * jnp.std(weights) * jax.random.normal(key, experts.shape) if noise else experts

    fresh |= {"expert_up": copies(mlp["up"], up_key), "expert_down": copies(mlp["down"], down_key)}
    if config.moe.shared_d_ff:
        fresh["shared"]["down"] = jnp.zeros_like(fresh["shared"]["down"])
    return {**params, "layers": {**layers, "moe": fresh}}
