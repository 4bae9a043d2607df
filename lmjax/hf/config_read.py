"""`config.json` of Hugging Face, of transformers 4 or 5 → a family and the fields of `ModelConfig`. No jax.

Reading refuses every key that is in none of the family's tables, for it may change the maths.
"""

import math
from collections.abc import Mapping
from typing import Any

from lmjax import config as configs
from lmjax.config import did_you_mean
from lmjax.errors import UserError
from lmjax.hf.families import FAMILIES, FIXED, GEMMA_KEYS, HARMLESS, REQUIRED, SCALING_KEYS, Family
from lmjax.model.config import ModelConfig, RopeScaling


def read(config: Mapping[str, Any], name: str = "config.json") -> tuple[str, ModelConfig]:
    """The family and the fields of a `config.json`, of transformers 4 or 5.

    Raises:
      UserError: a family, a key or a value that we have no maths for.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"{name}: model_type={kind!r} is not supported{did_you_mean(str(kind), FAMILIES)}")
    family = FAMILIES[kind]
    check_keys(config, kind, family, name)
    values = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    # A null is a missing key, but where it says "no cap" and "no window".
    values |= {key: None for key in ("sliding_window", *family.keys) if key in config and config[key] is None}
    fields = {field: values[key] for key, field in family.keys.items() if key in values}
    missing = [key for key in REQUIRED if key in family.keys | family.moe_keys and values.get(key) is None]
    if missing:
        raise UserError(f"{name} lacks {', '.join(missing)}")
    fields |= family.fields
    fields |= read_windows(values, family, fields["num_layers"], name)
    if family.rope_keys:
        fields |= read_rope(values, kind, fields["max_length"], name)
    if family.moe_keys:
        moe = {field: values[key] for key, field in family.moe_keys.items() if key in values}
        fields["moe"] = {"z_loss": 0.0, **moe, **family.moe_fields}
    return kind, configs.build(ModelConfig, fields, name)


def check_keys(config: Mapping[str, Any], kind: str, family: Family, name: str) -> None:
    """Every key is known, and every fixed one has a value that we have the maths for."""
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise UserError(f"{name}: architectures={architectures} is not supported; {family.architecture} is")
    known = HARMLESS | set(family.keys) | set(family.moe_keys) | family.window_keys | family.rope_keys | family.ignored
    fixed = FIXED | family.fixed
    for key, value in config.items():
        if key in fixed and value is not None and value not in fixed[key]:
            raise UserError(f"{name}: {key}={value!r} is not supported for {kind}; {fixed[key][0]!r} is")
        if key not in known and key not in fixed and value not in (None, False, [], {}):
            raise UserError(f"{name}: {key}={value!r} is no known key of {kind}, and may change the maths")


def read_windows(values: Mapping[str, Any], family: Family, num_layers: int, name: str) -> dict[str, Any]:
    """`sliding_window` and `layer_pattern`."""
    window = values.get("sliding_window")
    # Families that do not read use_sliding_window have their windows whatever it says.
    off = "use_sliding_window" in family.window_keys and not values.get("use_sliding_window", False)
    if not family.window_keys or window is None or off:
        return {}
    kinds = values.get("layer_types")
    if kinds is None and "max_window_layers" in family.window_keys:
        first = values.get("max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if kinds is None and family.keys is GEMMA_KEYS:
        period = values.get("sliding_window_pattern", 6) if "sliding_window_pattern" in family.window_keys else 2
        kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    names = {"sliding_attention": "local", "full_attention": "global"}
    unknown = set(kinds or ()) - set(names)
    if unknown:
        raise UserError(f"{name}: layer_types holds {sorted(unknown)}, which is not supported")
    pattern = shortest_period([names[kind] for kind in kinds]) if kinds else ()
    if pattern == ("global",):
        return {}
    return {"sliding_window": window, "layer_pattern": () if pattern == ("local",) else pattern}


def shortest_period(kinds: list[str]) -> tuple[str, ...]:
    """The fewest kinds that repeat to the whole list."""
    periods = (n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return tuple(kinds[: next(periods)])


def read_rope(values: Mapping[str, Any], kind: str, max_length: int, name: str) -> dict[str, Any]:
    """`rope_theta`, `rope_local_theta` and `rope_scaling`, of the keys of version 4 or of `rope_parameters`."""
    new = dict(values.get("rope_parameters") or {})
    thetas = {"rope_theta": FAMILIES[kind].theta, "rope_local_base_freq": 1e4}
    thetas |= {key: values[key] for key in thetas if key in values}
    local = None
    if "full_attention" in new or "sliding_attention" in new:
        local = dict(new.get("sliding_attention") or {})
        new = dict(new.get("full_attention") or {})
        if read_scaling(local, max_length, name) is not None:
            raise UserError(f"{name}: rope_parameters scales sliding_attention, which is not supported")
    scaling = dict(values.get("rope_scaling") or {}) or new
    fields = {"rope_theta": float(new.get("rope_theta", scaling.get("rope_theta", thetas["rope_theta"])))}
    fields["rope_scaling"] = read_scaling(scaling, max_length, name)
    if kind == "gemma3_text":
        theta = (local or {}).get("rope_theta", thetas["rope_local_base_freq"])
        fields["rope_local_theta"] = float(theta)
    elif local is not None and local.get("rope_theta", fields["rope_theta"]) != fields["rope_theta"]:
        fields["rope_local_theta"] = float(local["rope_theta"])
    return fields


def read_scaling(rope: Mapping[str, Any], max_length: int, name: str) -> RopeScaling | None:
    """The scaling of a `rope_scaling` or a `rope_parameters`; none for the default type."""
    rope = {key: value for key, value in rope.items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    rope.pop("rope_theta", None)
    if kind != "default" and kind not in SCALING_KEYS:
        raise UserError(f"{name}: rope type {kind!r} is not supported{did_you_mean(str(kind), SCALING_KEYS)}")
    mscales = [rope.pop(key, None) for key in ("mscale", "mscale_all_dim")] if kind == "yarn" else []
    harmless = {"partial_rotary_factor": 1.0, "truncate": True}
    rope = {key: value for key, value in rope.items() if harmless.get(key) != value}
    unknown = [f"{key}={rope[key]!r}" for key in rope.keys() - SCALING_KEYS.get(kind, {}).keys()]
    if unknown:
        raise UserError(f"{name}: rope {', '.join(sorted(unknown))} is not supported for {kind}")
    if kind == "default":
        return None
    fields = {field: rope[key] for key, field in SCALING_KEYS[kind].items() if key in rope}
    if kind != "linear":
        fields.setdefault("original_length", max_length)
    if mscales and all(mscales) and "factor" in fields:
        growth = 0.1 * math.log(fields["factor"])
        fields.setdefault("attention_factor", (mscales[0] * growth + 1) / (mscales[1] * growth + 1))
    if "factor" not in fields:
        raise UserError(f"{name}: rope type {kind!r} lacks its factor")
    fields = {field: int(value) if field == "original_length" else float(value) for field, value in fields.items()}
    return RopeScaling(kind, **fields)
