"""The fields of `ModelConfig` → `config.json` of Hugging Face: the first family that reads back as the same model. No jax."""

import dataclasses
from typing import Any

from lmjax.errors import UserError
from lmjax.hf.config_read import read
from lmjax.hf.families import FAMILIES, SCALING_KEYS, Family
from lmjax.model.config import ModelConfig


def write(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The family of a model and its `config.json`, which transformers 4 and 5 read.

    Raises:
      UserError: no family is this model; the differences to the nearest are named.
    """
    nearest: tuple[str, list[str]] | None = None
    refusals = []
    for kind, family in FAMILIES.items():
        config = {"model_type": kind, "architectures": [family.architecture], **write_keys(model, kind, family)}
        try:
            differences = model.differences(read(config)[1])
        except UserError as error:  # what the family always has, this model cannot have
            refusals.append(f"{kind}: {error}")
            continue
        if not differences:
            return kind, config
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = kind, differences
    if nearest is None:
        raise UserError(f"no family has such a model; {refusals[0]}")
    raise UserError(
        f"no family has such a model; the nearest is {nearest[0]}, which differs in {'; '.join(nearest[1])}"
    )


def write_keys(model: ModelConfig, kind: str, family: Family) -> dict[str, Any]:
    """The keys of one family from the fields of a model that may be of another."""
    resolved = model.resolved()
    config = {key: resolved[field] for key, field in family.keys.items()}
    config |= {key: values[0] for key, values in family.fixed.items() if key in family.defaults}
    config["initializer_range"] = model.init_std
    if family.moe_keys and model.moe is not None:
        moe = dataclasses.asdict(model.moe) | {"dense_d_ff": model.dense_hidden or model.hidden}
        config |= {key: moe[field] for key, field in family.moe_keys.items()}
    if family.window_keys:
        config |= write_windows(model, family)
    if family.rope_keys:
        config |= write_rope(model, kind)
    return config


def write_windows(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Windows and kinds of layers, as far as the family has them."""
    config: dict[str, Any] = {"sliding_window": model.sliding_window}
    if "layer_types" in family.window_keys:
        names = {"local": "sliding_attention", "global": "full_attention"}
        config["layer_types"] = [names[kind] for kind in model.kinds]
    if "use_sliding_window" in family.window_keys:
        config["use_sliding_window"] = model.sliding_window is not None
    if "max_window_layers" in family.window_keys:
        # For readers that know no layer_types: windows after the first layers.
        config["max_window_layers"] = (*model.kinds, "local").index("local")
    return config


def write_rope(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Rope in the keys of both versions."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        values = dataclasses.asdict(model.rope_scaling)
        keys = SCALING_KEYS[model.rope_scaling.kind]
        scaling = {"rope_type": model.rope_scaling.kind} | {
            key: values[field] for key, field in keys.items() if values[field] is not None
        }
    parameters = {**scaling, "rope_theta": model.rope_theta}
    config: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_parameters": parameters}
    config["rope_scaling"] = None if model.rope_scaling is None else scaling
    if kind == "gemma3_text":
        local = model.rope_theta if model.rope_local_theta is None else model.rope_local_theta
        config["rope_local_base_freq"] = local
        sliding = {"rope_type": "default", "rope_theta": local}
        config["rope_parameters"] = {"full_attention": parameters, "sliding_attention": sliding}
    return config
