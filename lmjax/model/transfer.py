"""Hyper-parameters that were tuned at a narrow and shallow base model, for a wide and deep one.

With m = d_model / base_width, ℓ = num_layers / base_layers and h = head_dim / base_head_dim, `config.mup` changes

    |                      | initial std   | Adam's rate | decay × rate | forward          |
    | embeddings, norms    | as the base's | η           | as the base's |                 |
    | matrices of layers   | std / √m      | η / m       | as the base's |                 |
    | head, tied or not    | as the base's | η           | as the base's | logits / m      |
    | router of experts    | as the base's | η           | as the base's | its logits / m  |
    | attention's scores   |               |             |               | / √h            |
    | output of branches   | √(2 L) of the base |        |               | / ℓ             |

so that after any number of steps activations and logits are as large as the base's, and move as far. Width: Yang et al., 2022
(2203.03466), as in its table 8. Depth: CompleteP, Dey et al., 2025 (2505.01618), with α = 1. Epsilon is not scaled: it must be
far below the root of Adam's second moment, which falls like 1 / (m ℓ).

A model is the same function without `mup` once its factors are multiplied into the weights: `folded`.
"""

import dataclasses
import math
from typing import Any

from lmjax.model.config import ModelConfig
from lmjax.model.decoder import Params

LAST = ("out", "out_bias", "down", "down_bias", "expert_down")  # weights and biases of the products that end a branch


def folded(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """A model without `mup` that gives the same logits, for readers that know no factors."""
    if config.mup is None:
        return config, params
    queries = math.sqrt((config.score_dim or config.dim_head) / config.scores_over)
    heads = config.num_heads // config.kv_heads
    layers = {name: dict(part) for name, part in params["layers"].items()}
    attention = layers["attention"]
    if config.qk_norm:
        attention["q_norm"] = attention["q_norm"] * queries
    else:
        for name in {"qkv", "qkv_bias"} & attention.keys():  # […, K, G + 2, H]: query heads first
            attention[name] = attention[name].at[..., :heads, :].multiply(queries)
    # The last things of a branch: its norm, where it has one there.
    if config.block == "pre":
        lasts = [attention, *(layers[name] for name in ("mlp", "moe") if name in layers)]
    else:
        lasts = [layers["attention_post_norm"], layers["mlp_post_norm"]]
    for last in lasts:
        multiply(last, LAST if config.block == "pre" else ("scale", "bias"), config.branch_scale)
    if "moe" in layers:
        multiply(layers["moe"], ("router", "shared_gate"), 1.0 / config.width_ratio)
        if "shared" in layers["moe"] and config.block == "pre":
            layers["moe"]["shared"] = dict(layers["moe"]["shared"])
            multiply(layers["moe"]["shared"], LAST, config.branch_scale)
    final = dict(params["final_norm"])
    multiply(final, ("scale", "bias"), 1.0 / config.width_ratio)
    return dataclasses.replace(config, mup=None), {**params, "layers": layers, "final_norm": final}


def multiply(part: dict[str, Any], names: tuple[str, ...], factor: float) -> None:
    """Replaces those of the arrays that are there by their multiples."""
    for name in part.keys() & set(names):
        part[name] = part[name] * factor
