"""Families of models: `config.json` of Hugging Face ↔ the fields of `ModelConfig`. No jax.

A family is a row of `FAMILIES`: what all its members are, which key is which field, what a key that is missing means, and
which values of the other keys we have the maths for. Reading refuses every key that is in none of these. A model is written as
the first family that reads back as the same model.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lmjax import config as configs
from lmjax.config import did_you_mean
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig, RopeScaling

KEYS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "max_length",
    "tie_word_embeddings": "tie_embeddings",
}
GPT2_KEYS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_embd": "d_model",
    "n_head": "num_heads",
    "n_inner": "d_ff",
    "layer_norm_epsilon": "norm_epsilon",
    "n_positions": "max_length",
    "tie_word_embeddings": "tie_embeddings",
}
GEMMA_KEYS = KEYS | {
    "attention_bias": "attention_bias",
    "query_pre_attn_scalar": "score_dim",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
}
MOE_KEYS = {"num_experts_per_tok": "top_k", "router_aux_loss_coef": "balance_loss"}
QWEN_MOE = {key: field for key, field in KEYS.items() if field != "d_ff"} | {"moe_intermediate_size": "d_ff"}
ALL_SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}  # every layer has experts
REQUIRED = (
    "moe_intermediate_size", "num_experts_per_tok",
    "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "n_layer", "n_embd", "n_head",
)  # fmt: skip
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
WINDOW_KEYS = {"sliding_window", "layer_types"}
QWEN_WINDOW_KEYS = WINDOW_KEYS | {"use_sliding_window", "max_window_layers"}
# Keys that change no logits: how the model is drawn, dropped out, called, batched or stored.
HARMLESS = {
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path",
    "initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "use_cache", "cache_implementation",
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "id2label", "label2id", "problem_type", "task_specific_params",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "output_hidden_states", "output_attentions",
    "output_router_logits", "return_dict", "chunk_size_feed_forward", "reorder_and_upcast_attn",
    "n_ctx", "gradient_checkpointing", "attn_implementation", "_attn_implementation", "_sliding_window_pattern",
}  # fmt: skip
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
LLAMA_SPECIAL = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}
GEMMA = {
    "block": "sandwich", "activation": "geglu", "scale_embeddings": True, "norm": "rmsnorm", "position": "rope",
}  # fmt: skip
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "hidden_activation": GELU[0],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """What transformers calls a model type."""

    architecture: str
    fields: dict[str, Any]  # of every member
    keys: dict[str, str]  # key of config.json → our field
    defaults: dict[str, Any]  # what transformers takes where a key is missing
    fixed: dict[str, tuple]  # key → the values that we have the maths for; the first is written
    window_keys: frozenset[str] = frozenset()
    rope_keys: frozenset[str] = frozenset(ROPE_KEYS)
    moe_keys: dict[str, str] = dataclasses.field(default_factory=dict)  # key → field of `MoeConfig`; empty: no experts
    moe_fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # of every member's experts
    ignored: frozenset[str] = frozenset()  # keys that do nothing in this family
    theta: float = 10_000.0  # rope_theta where there is none
    scheme: str = "llama"  # of the tensors' names
    norm_shift: float = 0.0  # what norms lack in the file


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {},
        KEYS | {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        LLAMA_SPECIAL | {"hidden_act": "silu"},
        {"hidden_act": SILU, "pretraining_tp": (1,)},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {},
        KEYS,
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "tie_word_embeddings": False}
        | {"sliding_window": 4096, "hidden_act": "silu"},
        {"hidden_act": SILU},
        frozenset({"sliding_window"}),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qkv_bias": True},
        KEYS,
        LLAMA_SPECIAL | {"max_position_embeddings": 32_768, "hidden_act": "silu", "num_key_value_heads": 32},
        {"hidden_act": SILU},
        frozenset(QWEN_WINDOW_KEYS),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        KEYS | {"attention_bias": "attention_bias"},
        LLAMA_SPECIAL
        | {"max_position_embeddings": 32_768, "head_dim": 128, "hidden_act": "silu", "num_key_value_heads": 32},
        {"hidden_act": SILU},
        frozenset(QWEN_WINDOW_KEYS),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA,
        GEMMA_KEYS,
        GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"hidden_activation": GELU, "hidden_act": GELU, "use_bidirectional_attention": (False,)},
        frozenset(WINDOW_KEYS),
        norm_shift=1.0,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA | {"qk_norm": True},
        GEMMA_KEYS,
        GEMMA_DEFAULTS | {"max_position_embeddings": 131_072},
        {"hidden_activation": GELU, "hidden_act": GELU, "use_bidirectional_attention": (False,)},
        frozenset(WINDOW_KEYS | {"sliding_window_pattern"}),
        frozenset(ROPE_KEYS | {"rope_local_base_freq"}),
        theta=1e6,
        norm_shift=1.0,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {},
        KEYS,
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "tie_word_embeddings": False}
        | {"hidden_act": "silu", "router_aux_loss_coef": 0.001},
        {"hidden_act": SILU, "router_jitter_noise": (0.0,)},
        frozenset({"sliding_window"}),
        moe_keys={"num_local_experts": "num_experts"} | MOE_KEYS,
        moe_fields={"renormalize": True},
        theta=1e6,
        scheme="mixtral",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {},
        QWEN_MOE | {"qkv_bias": "qkv_bias"},
        LLAMA_SPECIAL | {"max_position_embeddings": 32_768, "hidden_act": "silu", "num_key_value_heads": 16}
        | {"qkv_bias": True, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        {"hidden_act": SILU} | ALL_SPARSE,
        frozenset(QWEN_WINDOW_KEYS),
        moe_keys={"num_experts": "num_experts", "norm_topk_prob": "renormalize"}
        | {"shared_expert_intermediate_size": "shared_d_ff"} | MOE_KEYS,
        moe_fields={"shared_gate": True},
        ignored=frozenset({"intermediate_size"}),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        QWEN_MOE | {"attention_bias": "attention_bias"},
        LLAMA_SPECIAL | {"max_position_embeddings": 32_768, "hidden_act": "silu", "num_key_value_heads": 4}
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        {"hidden_act": SILU} | ALL_SPARSE,
        frozenset({"sliding_window", "use_sliding_window"}),
        # version 4 writes the first key, version 5 the second
        moe_keys={"num_experts": "num_experts", "num_local_experts": "num_experts", "norm_topk_prob": "renormalize"} | MOE_KEYS,
        ignored=frozenset({"intermediate_size", "max_window_layers"}),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"block": "post", "qk_norm": True, "qk_norm_heads": True},
        KEYS | {"attention_bias": "attention_bias"},
        LLAMA_SPECIAL | {"rms_norm_eps": 1e-5, "hidden_act": "silu"},
        {"hidden_act": SILU},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "norm": "layernorm", "norm_bias": True, "position": "learned", "activation": "gelu", "attention_bias": True,
            "mlp_bias": True,
        },
        GPT2_KEYS,
        {"layer_norm_epsilon": 1e-5, "n_positions": 1024, "tie_word_embeddings": True, "activation_function": "gelu_new"},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        },
        rope_keys=frozenset(),
        scheme="gpt2",
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- reading


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
    for key, value in config.items():
        if key in family.fixed and value is not None and value not in family.fixed[key]:
            raise UserError(f"{name}: {key}={value!r} is not supported for {kind}; {family.fixed[key][0]!r} is")
        if key not in known and key not in family.fixed and value not in (None, False, [], {}):
            raise UserError(f"{name}: {key}={value!r} is no known key of {kind}, and may change the maths")


def read_windows(values: Mapping[str, Any], family: Family, num_layers: int, name: str) -> dict[str, Any]:
    """`sliding_window` and `layer_pattern`."""
    window = values.get("sliding_window")
    if (
        not family.window_keys
        or window is None
        or not values.get("use_sliding_window", "use_sliding_window" not in family.window_keys)
    ):
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


SCALING_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_length", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "attention_factor": "attention_factor",
    },
}  # fmt: skip


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


# ----------------------------------------------------------------------------------------------------------------- writing


def write(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The family of a model and its `config.json`, which transformers 4 and 5 read.

    Raises:
      UserError: no family is this model; the differences to the nearest are named.
    """
    nearest: tuple[str, list[str]] | None = None
    for kind, family in FAMILIES.items():
        config = {"model_type": kind, "architectures": [family.architecture], **write_keys(model, kind, family)}
        try:
            differences = model.differences(read(config)[1])
        except UserError:  # what the family always has, this model cannot have
            continue
        if not differences:
            return kind, config
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = kind, differences
    assert nearest is not None  # llama or gpt2 reads whatever is a model
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
        config |= {key: getattr(model.moe, field) for key, field in family.moe_keys.items()}
    if "intermediate_size" in family.ignored:
        config["intermediate_size"] = model.hidden  # of dense layers, of which there are none
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
