"""The table of families: which key of a `config.json` of Hugging Face is which field of `ModelConfig`. No jax.

A family is a row of `FAMILIES`: what all its members are, which key is which field, what a key that is missing means, and
which values of the other keys we have the maths for.
"""

import dataclasses
from typing import Any

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
# which layers have experts, and the width of the others' MLPs
QWEN_DENSE = {"decoder_sparse_step": "every", "mlp_only_layers": "dense_layers", "intermediate_size": "dense_d_ff"}
REQUIRED = (
    "moe_intermediate_size", "num_experts_per_tok",
    "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "n_layer", "n_embd", "n_head",
)  # fmt: skip
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
# type of scaling → its keys and our fields
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
    "n_ctx", "gradient_checkpointing", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_sliding_window_pattern", "predict_special_tokens", "output_past", "_num_labels", "tokenizer_class", "is_llama_config",
    "unsloth_version", "unsloth_fixed",
    # how texts are drawn: of config.json before generation_config.json was
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "decoder_start_token_id", "prefix",
}  # fmt: skip
# Keys that transformers reads in every family, and the values that we have the maths for: a false or a 0 here is no "not so".
FIXED = {"is_causal": (True,), "partial_rotary_factor": (1.0,)}
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
        ignored=frozenset({"sliding_window_size"}),  # in the hub's files; transformers does not read it
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
        | {"qkv_bias": True, "norm_topk_prob": False, "router_aux_loss_coef": 0.001, "intermediate_size": 5632},
        {"hidden_act": SILU},
        frozenset(QWEN_WINDOW_KEYS),
        moe_keys={"num_experts": "num_experts", "norm_topk_prob": "renormalize"}
        | {"shared_expert_intermediate_size": "shared_d_ff"} | MOE_KEYS | QWEN_DENSE,
        moe_fields={"shared_gate": True},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        QWEN_MOE | {"attention_bias": "attention_bias"},
        LLAMA_SPECIAL | {"max_position_embeddings": 32_768, "hidden_act": "silu", "num_key_value_heads": 4}
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.001, "intermediate_size": 6144},
        {"hidden_act": SILU},
        frozenset({"sliding_window", "use_sliding_window"}),
        # version 4 writes the first key, version 5 the second
        moe_keys={"num_experts": "num_experts", "num_local_experts": "num_experts", "norm_topk_prob": "renormalize"}
        | MOE_KEYS | QWEN_DENSE,
        ignored=frozenset({"max_window_layers"}),
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
