"""`config.json` as transformers 4 wrote it, in the words of the published checkpoints; their sizes are known."""

import pytest

from lmjax.errors import UserError
from lmjax.hf import config_read
from lmjax.model.config import MoeConfig, RopeScaling
from lmjax.plan import params

COMMON = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def written(kind, architecture, version, shape, **keys):
    """A file's content; `shape` are the values of SHAPE."""
    head = {"architectures": [architecture], "model_type": kind, "transformers_version": version}
    return {**COMMON, **head, **dict(zip(SHAPE, shape, strict=True)), **keys}


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
QWEN_MOE = {
    "decoder_sparse_step": 1, "hidden_act": "silu", "output_router_logits": False, "router_aux_loss_coef": 0.001, "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "use_sliding_window": False, "rope_theta": 1000000.0,
}  # fmt: skip
# name → (content, parameters, fields)
PUBLISHED = {
    "Llama 3.1 8B": (
        written(
            "llama", "LlamaForCausalLM", "4.43.0.dev0", (128256, 4096, 32, 32, 8, 14336), attention_bias=False, attention_dropout=0.0,
            hidden_act="silu", max_position_embeddings=131072, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5,
            rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=False,
        ),
        8_030_261_248,
        {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 8192, 1.0, 4.0), "tie_embeddings": False},
    ),
    "Mistral 7B v0.1": (
        written(
            "mistral", "MistralForCausalLM", "4.34.0.dev0", (32000, 4096, 32, 32, 8, 14336), hidden_act="silu",
            max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
        ),
        7_241_732_096,
        {"sliding_window": 4096, "layer_pattern": (), "max_length": 32768},
    ),
    "Mixtral 8x7B v0.1": (
        written(
            "mixtral", "MixtralForCausalLM", "4.36.0.dev0", (32000, 4096, 32, 32, 8, 14336), hidden_act="silu",
            max_position_embeddings=32768, num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5,
            rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, attention_dropout=0.0,
        ),
        46_702_792_704,
        {"moe": MoeConfig(8, 2, balance_loss=0.02, z_loss=0.0), "rope_theta": 1e6, "sliding_window": None},
    ),
    "Qwen2.5 7B, yarn": (
        written(
            "qwen2", "Qwen2ForCausalLM", "4.40.1", (152064, 3584, 28, 28, 4, 18944), attention_dropout=0.0, hidden_act="silu",
            max_position_embeddings=131072, max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072,
            tie_word_embeddings=False, use_mrope=False, use_sliding_window=False,
            rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        ),
        7_615_616_512,
        {"qkv_bias": True, "sliding_window": None, "rope_scaling": RopeScaling("yarn", 4.0, 32768)},
    ),
    "Qwen3 8B": (
        written(
            "qwen3", "Qwen3ForCausalLM", "4.51.0", (151936, 4096, 36, 32, 8, 12288), attention_bias=False, attention_dropout=0.0,
            head_dim=128, hidden_act="silu", max_position_embeddings=40960, max_window_layers=36, rms_norm_eps=1e-6, rope_scaling=None,
            rope_theta=1000000, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
        ),
        8_190_735_360,
        {"qk_norm": True, "head_dim": 128, "rope_theta": 1e6},
    ),
    "Qwen1.5 MoE A2.7B": (
        written(
            "qwen2_moe", "Qwen2MoeForCausalLM", "4.39.0.dev0", (151936, 2048, 24, 16, 16, 5632), max_position_embeddings=8192,
            max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60, num_experts_per_tok=4,
            shared_expert_intermediate_size=5632, sliding_window=32768, **QWEN_MOE,
        ),
        14_315_784_192,
        {"d_ff": 1408, "qkv_bias": True, "sliding_window": None},
    ),
    "Qwen3 30B A3B": (
        written(
            "qwen3_moe", "Qwen3MoeForCausalLM", "4.51.0", (151936, 2048, 48, 32, 4, 6144), attention_bias=False, head_dim=128,
            max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
            num_experts=128, num_experts_per_tok=8, rope_scaling=None, sliding_window=None, **QWEN_MOE,
        ),
        30_532_122_624,
        {"d_ff": 768, "qk_norm": True, "dense_hidden": None},
    ),
    "Gemma 2 9B": (
        written(
            "gemma2", "Gemma2ForCausalLM", "4.42.0.dev0", (256000, 3584, 42, 16, 8, 14336), attention_bias=False, attention_dropout=0.0,
            attn_logit_softcapping=50.0, cache_implementation="hybrid", final_logit_softcapping=30.0, head_dim=256,
            hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
            query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096,
        ),
        9_241_705_984,
        {"layer_pattern": ("local", "global"), "attention_softcap": 50.0, "logit_softcap": 30.0, "tie_embeddings": True},
    ),
    "Gemma 3 1B": (
        written(
            "gemma3_text", "Gemma3ForCausalLM", "4.50.0.dev0", (262144, 1152, 26, 4, 1, 6912), attention_bias=False,
            attn_logit_softcapping=None, cache_implementation="hybrid", final_logit_softcapping=None, head_dim=256,
            hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32768, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
            rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
        ),
        999_885_952,
        {"layer_pattern": ("local",) * 5 + ("global",), "rope_theta": 1e6, "rope_local_theta": 1e4, "sliding_window": 512},
    ),
    "OLMo 2 7B": (
        written(
            "olmo2", "Olmo2ForCausalLM", "4.47.0.dev0", (100352, 4096, 32, 32, 32, 11008), attention_bias=False, hidden_act="silu",
            max_position_embeddings=4096, pad_token_id=100277, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000,
            tie_word_embeddings=False,
        ),
        7_298_617_344,
        {"block": "post", "qk_norm_heads": True, "rope_theta": 5e5},
    ),
    "GPT-2": (
        {
            **COMMON, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
            "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
        124_439_808,
        {"position": "learned", "norm": "layernorm", "tie_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_of_version_4(name):
    content, count, fields = PUBLISHED[name]
    kind, model = config_read.read(content)
    assert kind == content["model_type"]
    assert {field: getattr(model, field) for field in fields} == fields
    assert params.total(model) == count


@pytest.mark.parametrize(
    "scaling, expected",
    [
        ({"type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"rope_type": "default"}, None),
        ({"type": "yarn", "factor": 2.0}, RopeScaling("yarn", 2.0, 131072)),
    ],
)
def test_scalings_of_version_4(scaling, expected):
    content = {**PUBLISHED["Llama 3.1 8B"][0], "rope_scaling": scaling}
    assert config_read.read(content)[1].rope_scaling == expected


@pytest.mark.parametrize(
    "name, keys",
    [
        ("GPT-2", {"predict_special_tokens": True, "output_past": True, "_num_labels": 1, "n_special": 0}),
        ("Llama 3.1 8B", {"unsloth_version": "2024.9", "unsloth_fixed": True, "_attn_implementation_autoset": True}),
        ("Llama 3.1 8B", {"is_llama_config": True, "partial_rotary_factor": 1.0, "tokenizer_class": "LlamaTokenizer"}),
        ("Llama 3.1 8B", {"max_length": 4096, "do_sample": True, "temperature": 0.9, "top_p": 0.6, "top_k": 50}),
        ("Qwen3 8B", {"repetition_penalty": 1.05, "num_beams": 4, "num_return_sequences": 1, "min_length": 1}),
    ],
)
def test_keys_of_published_files_that_change_no_logits(name, keys):
    content = PUBLISHED[name][0]
    assert config_read.read({**content, **keys}) == config_read.read(content)


@pytest.mark.parametrize(
    "name, keys, message",
    [
        ("Gemma 3 1B", {"layer_types": 1}, "layer_types=1 must be a list of texts"),
        ("Gemma 3 1B", {"layer_types": [["full_attention"]]}, "layer_types=.* must be a list of texts"),
        ("Gemma 3 1B", {"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers of 26"),
        ("Gemma 3 1B", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be at least 1"),
        ("Gemma 3 1B", {"rope_local_base_freq": "x"}, "rope_local_base_freq='x' must be a number"),
        ("Qwen2.5 7B, yarn", {"use_sliding_window": "yes"}, "use_sliding_window='yes' must be true or false"),
        ("Qwen2.5 7B, yarn", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers='x' must be"),
        ("Qwen2.5 7B, yarn", {"num_hidden_layers": "x"}, "num_hidden_layers='x' must be an integer"),
        ("GPT-2", {"n_head": 0}, "n_head=0 must be at least 1"),
    ],
)
def test_a_value_of_another_kind_is_told_in_a_line(name, keys, message):
    with pytest.raises(UserError, match=message):
        config_read.read({**PUBLISHED[name][0], **keys})


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_qwen_reads_whether_it_uses_its_window(name):
    content = {**PUBLISHED[name][0], "use_sliding_window": False}
    if "Mixtral" in name:
        content["sliding_window"] = 4096
    kept = {"Mistral 7B v0.1": 4096, "Mixtral 8x7B v0.1": 4096, "Gemma 2 9B": 4096, "Gemma 3 1B": 512}
    assert config_read.read(content)[1].sliding_window == kept.get(name)


@pytest.mark.parametrize(
    "keys, layers",
    [
        ({"decoder_sparse_step": 4}, [3, 7, 11, 15, 19, 23]),
        ({"mlp_only_layers": [0, 23]}, list(range(1, 23))),
        ({"decoder_sparse_step": 6, "mlp_only_layers": [5]}, [11, 17, 23]),
    ],
)
def test_which_layers_of_qwen_have_experts(keys, layers):
    """(layer + 1) % decoder_sparse_step is 0, and the layer is none of mlp_only_layers."""
    _, model = config_read.read({**PUBLISHED["Qwen1.5 MoE A2.7B"][0], **keys})
    assert [layer for layer, experts in enumerate(model.expert_layers) if experts] == layers
    assert model.dense_hidden == 5632 and model.hidden == 1408


def test_a_model_whose_experts_are_all_replaced_is_refused():
    with pytest.raises(UserError, match="leave no layer its experts"):
        config_read.read({**PUBLISHED["Qwen1.5 MoE A2.7B"][0], "decoder_sparse_step": 25})


@pytest.mark.parametrize("key, value", [("is_causal", False), ("is_causal", 0), ("partial_rotary_factor", 0.0)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_false_that_changes_the_maths_is_refused(name, key, value):
    """transformers masks both ways by the first in every family: that a key is unknown and false does not make it harmless."""
    with pytest.raises(UserError, match=f"{key}={value} is not supported for"):
        config_read.read({**PUBLISHED[name][0], key: value})
    content, _, _ = PUBLISHED[name]
    assert config_read.read({**content, key: 1}) == config_read.read(content)
