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

KINDS = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", dict: "an object", list: "a list of texts",
}  # fmt: skip


def read(config: Mapping[str, Any], name: str = "config.json") -> tuple[str, ModelConfig]:
    """The family and the fields of a `config.json`, of transformers 4 or 5.

    Raises:
      UserError: a family, a key or a value that we have no maths for.
    """
    kind = config.get("model_type")
    if type(kind) is not str or kind not in FAMILIES:
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
    check_counts(values, family, name)
    fields |= family.fields
    fields |= read_windows(values, family, fields["num_layers"], name)
    if family.rope_keys:
        fields |= read_rope(values, kind, fields["max_length"], name)
    if family.moe_keys:
        moe = {field: values[key] for key, field in family.moe_keys.items() if key in values}
        fields["moe"] = {"z_loss": 0.0, **moe, **family.moe_fields}
    return kind, configs.build(ModelConfig, fields, name)


def checked(value: Any, kind: type, key: str, name: str) -> Any:
    """The value of a key, which must be of this kind: what is counted or looked up before `ModelConfig` sees to the types."""
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is list and not all(type(item) is str for item in value)):
        raise UserError(f"{name}: {key}={value!r} must be {KINDS[kind]}")
    return value


def section(values: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    """The object at a key without its nulls; empty where there is none."""
    found = checked(values.get(key) or {}, dict, key, name)
    return {inner: value for inner, value in found.items() if value is not None}


def check_counts(values: Mapping[str, Any], family: Family, name: str) -> None:
    """Sizes that are divided by and counted to are integers, and not 0."""
    for key in REQUIRED:
        if key in family.keys and checked(values[key], int, key, name) < 1:
            raise UserError(f"{name}: {key}={values[key]} must be at least 1")


def check_keys(config: Mapping[str, Any], kind: str, family: Family, name: str) -> None:
    """Every key is known, and every fixed one has a value that we have the maths for."""
    architectures = checked(config.get("architectures") or [family.architecture], list, "architectures", name)
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
    if not family.window_keys or window is None:
        return {}
    switch = "use_sliding_window"  # families that do not read it have their windows whatever it says
    if switch in family.window_keys and not checked(values.get(switch, False), bool, switch, name):
        return {}
    kinds = values.get("layer_types")
    if kinds is None and "max_window_layers" in family.window_keys:
        first = checked(values.get("max_window_layers", 28), int, "max_window_layers", name)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if kinds is None and family.keys is GEMMA_KEYS:
        key = "sliding_window_pattern"
        period = checked(values.get(key, 6), int, key, name) if key in family.window_keys else 2
        if period < 1:
            raise UserError(f"{name}: {key}={period} must be at least 1")
        kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    names = {"sliding_attention": "local", "full_attention": "global"}
    unknown = set(checked(kinds or [], list, "layer_types", name)) - set(names)
    if unknown:
        raise UserError(f"{name}: layer_types holds {sorted(unknown)}, which is not supported")
    if kinds and len(kinds) != num_layers:
        raise UserError(f"{name}: layer_types names {len(kinds)} layers of {num_layers}")
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
    new = section(values, "rope_parameters", name)
    thetas = {"rope_theta": FAMILIES[kind].theta, "rope_local_base_freq": 1e4}
    thetas |= {key: values[key] for key in thetas if key in values}
    local = None
    if "full_attention" in new or "sliding_attention" in new:
        local = section(new, "sliding_attention", name)
        new = section(new, "full_attention", name)
        if read_scaling(local, max_length, name) is not None:
            raise UserError(f"{name}: rope_parameters scales sliding_attention, which is not supported")
    scaling = section(values, "rope_scaling", name) or new
    theta = new.get("rope_theta", scaling.get("rope_theta", thetas["rope_theta"]))
    fields = {"rope_theta": float(checked(theta, float, "rope_theta", name))}
    fields["rope_scaling"] = read_scaling(scaling, max_length, name)
    if kind == "gemma3_text":
        theta = (local or {}).get("rope_theta", thetas["rope_local_base_freq"])
        fields["rope_local_theta"] = float(checked(theta, float, "rope_local_base_freq", name))
    elif local is not None and local.get("rope_theta", fields["rope_theta"]) != fields["rope_theta"]:
        fields["rope_local_theta"] = float(checked(local["rope_theta"], float, "rope_theta", name))
    return fields


def read_scaling(rope: Mapping[str, Any], max_length: int, name: str) -> RopeScaling | None:
    """The scaling of a `rope_scaling` or a `rope_parameters`; none for the default type."""
    rope = dict(rope)
    kind = checked(rope.pop("rope_type", rope.pop("type", "default")), str, "rope_type", name)
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
    keys = [(key, field) for key, field in SCALING_KEYS[kind].items() if key in rope]
    fields = {field: checked(rope[key], float, f"rope {key}", name) for key, field in keys}
    if kind != "linear":
        fields.setdefault("original_length", max_length)
    if mscales and all(mscales) and "factor" in fields:
        mscales = [checked(value, float, "rope mscale", name) for value in mscales]
        growth = 0.1 * math.log(max(fields["factor"], 1.0))  # a smaller one is refused below
        fields.setdefault("attention_factor", (mscales[0] * growth + 1) / (mscales[1] * growth + 1))
    if "factor" not in fields:
        raise UserError(f"{name}: rope type {kind!r} lacks its factor")
    length = fields.get("original_length")
    fields |= {"original_length": int(length)} if type(length) is float and length.is_integer() else {}
    return configs.build(RopeScaling, {"kind": kind, **fields}, f"{name}: rope")
