"""The router of a mixture of experts: which experts a token runs through, and with what weight; float32 throughout.

    s = softmax(x W) or sigmoid(x W),   chosen: the k largest of s + b,   gate = s, over the sum of the chosen where renormalized

Two losses keep the experts in use, both means over the tokens of a row, so that neither the number of devices nor that of
micro-batches changes them; a row weighs as much as its trained tokens do, and layers add up:

    balance   E · Σ_e f_e P_e,  f_e the share of the row's choices that fell on e, P_e its mean probability    (1 when even)
    z         log² Σ_e exp(x W)_e                                        Zoph et al., 2022 (2202.08906)

The balance loss is that of Fedus et al., 2021 (2101.03961), by row as in DeepSeek-V3 (2412.19437); from there, too, the
bias b that balances without a loss: after each step it moves by a fixed amount against the sign of its expert's excess load.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lmjax.model.config import MoeConfig
from lmjax.sharding.context import over_row


class Routes(NamedTuple):
    """What the router chose."""

    experts: Int[Array, "B T k"]
    gates: Float[Array, "B T k"]


class RouterStats(NamedTuple):
    """What a layer's router did with each row, padding left out; or those of all layers, with a leading L.

    Where `context` splits rows, every device has the losses of whole rows, which it weighs by its own tokens, and counts these alone.
    """

    balance: Float[Array, "*L B"]  # the balance loss
    z: Float[Array, "*L B"]  # the z-loss
    entropy: Float[Array, "*L B"]  # nats, summed over tokens
    load: Float[Array, "*L B E"]  # choices that fell on each expert
    dropped: Float[Array, "*L B"]  # choices that found their expert full


class RouterSums(NamedTuple):
    """Over rows (and layers, but for the load); sums of micro-batches add up."""

    balance: Float[Array, ""]  # weighted by the rows' loss weights
    z: Float[Array, ""]  # the same
    entropy: Float[Array, ""]  # nats, over all tokens and layers
    load: Float[Array, "L E"]
    dropped: Float[Array, ""]


def route(
    config: MoeConfig,
    x: Float[Array, "B T D"],
    weights: Float[Array, "D E"],
    bias: Float[Array, "E"] | None,
    valid: Bool[Array, "B T"],
) -> tuple[Routes, RouterStats]:
    """Chooses experts for every token; `valid` is false for padding, which counts nowhere."""
    flat = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    logits = jnp.matmul(flat, weights, precision=jax.lax.Precision.HIGHEST).reshape(*x.shape[:2], -1)
    scores = jax.nn.softmax(logits) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    wanted = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    experts = jax.lax.top_k(wanted, config.top_k)[1]
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    gates = gates / jnp.sum(gates, axis=-1, keepdims=True) if config.renormalize else gates
    return Routes(experts, gates), statistics(config, logits, scores, experts, valid)


def statistics(config: MoeConfig, logits: Array, scores: Array, experts: Array, valid: Array) -> RouterStats:
    """Losses of each row; of its tokens that are here, entropy and load."""
    num_experts = logits.shape[-1]
    chosen = (experts[..., None] == jnp.arange(num_experts)) & valid[..., None, None]
    load = jnp.sum(chosen, axis=(1, 2), dtype=jnp.float32)
    tokens = jnp.maximum(over_row(jnp.sum(valid, axis=1, dtype=jnp.float32)), 1.0)
    shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    means = over_row(jnp.sum(jnp.where(valid[..., None], shares, 0.0), axis=1)) / tokens[:, None]
    balance = num_experts / config.top_k * jnp.sum(over_row(load) * means, axis=-1) / tokens
    z = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0)
    entropy = jnp.where(valid, jnp.sum(jax.scipy.special.entr(shares), axis=-1), 0.0)
    z = over_row(jnp.sum(z, axis=1)) / tokens
    return RouterStats(balance, z, jnp.sum(entropy, axis=1), load, jnp.zeros_like(tokens))


def summed(stats: RouterStats, row_weights: Float[Array, "B"]) -> RouterSums:
    """Over the rows of a batch and all layers; `row_weights` are the sums of the rows' loss weights."""
    return RouterSums(
        balance=jnp.sum(stats.balance * row_weights),
        z=jnp.sum(stats.z * row_weights),
        entropy=jnp.sum(stats.entropy),
        load=jnp.sum(stats.load, axis=1),
        dropped=jnp.sum(stats.dropped),
    )


def auxiliary(config: MoeConfig, sums: RouterSums) -> Float[Array, ""]:
    """What is added to the sum that a step minimizes."""
    return config.balance_loss * sums.balance + config.z_loss * sums.z


def metrics(config: MoeConfig, sums: RouterSums, denominator: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
    """What a step reports; `denominator` is the sum of its loss weights."""
    choices = jnp.maximum(jnp.sum(sums.load), 1.0)
    mean = jnp.maximum(jnp.mean(sums.load, axis=1), 1.0)
    return {
        "train/balance_loss": config.balance_loss * sums.balance / denominator,
        "train/router_z_loss": config.z_loss * sums.z / denominator,
        "moe/load_max": jnp.max(jnp.max(sums.load, axis=1) / mean),
        "moe/load_min": jnp.min(jnp.min(sums.load, axis=1) / mean),
        "moe/dropped_share": sums.dropped / choices,
        "moe/router_entropy": sums.entropy * config.top_k / choices,
    }


def moved_bias(config: MoeConfig, bias: Float[Array, "L E"], load: Float[Array, "L E"]) -> Float[Array, "L E"]:
    """The selection bias after a step with this load: up where an expert had less than its share, down where more."""
    return bias + config.bias_rate * jnp.sign(jnp.mean(load, axis=1, keepdims=True) - load)
