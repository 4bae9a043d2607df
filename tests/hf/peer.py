"""Small random models of each family, by transformers: what imports and exports are compared with."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 160, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 3e3, "factor": 4.0, "original_max_position_embeddings": 32}
THETA = {"rope_type": "default", "rope_theta": 777.0}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPE = {"full_attention": {"rope_type": "linear", "rope_theta": 2e3, "factor": 8.0}, "sliding_attention": THETA}
# name → (config class, its fields beside SMALL's)
MODELS = {
    "llama": ("LlamaConfig", {"rope_parameters": THETA}),
    "llama, llama3 rope, tied": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, biases, wide heads": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama, linear rope": ("LlamaConfig", {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 3.0}}),
    "mistral": ("MistralConfig", {"sliding_window": 11, "rope_parameters": THETA}),
    "qwen2": ("Qwen2Config", {"rope_parameters": THETA}),
    "qwen2, yarn, tied": ("Qwen2Config", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "rope_parameters": THETA}
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rope_parameters": THETA}),
    "qwen3, yarn by mscale": (
        "Qwen3Config", {"head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 9.0}}
    ),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 20, "rope_parameters": THETA}
        | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 12.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 20, "rope_parameters": GEMMA3_ROPE}
        | {"layer_types": LOCAL},
    ),
    "olmo2": ("Olmo2Config", {"rope_parameters": THETA}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": THETA}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 20, "rope_parameters": THETA}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "rope_parameters": THETA}),
    "qwen2_moe, dense between": (
        "Qwen2MoeConfig",
        EXPERTS | {"shared_expert_intermediate_size": 20, "rope_parameters": THETA, "decoder_sparse_step": 2},
    ),
    "qwen3_moe, dense layers": (
        "Qwen3MoeConfig", EXPERTS | {"head_dim": 16, "rope_parameters": THETA, "mlp_only_layers": [0, 2], "num_hidden_layers": 4}
    ),
    "gpt2": ("GPT2Config", {"num_key_value_heads": None, "intermediate_size": None}),
    "gpt2, own width": ("GPT2Config", {"num_key_value_heads": None, "intermediate_size": None, "n_inner": 40}),
}  # fmt: skip
GPT2_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
}  # fmt: skip


def config(name, **changes):
    """The peer's config."""
    kind, fields = MODELS[name]
    fields = {key: value for key, value in {**SMALL, **fields, **changes}.items() if value is not None}
    if kind == "GPT2Config":
        fields = {GPT2_NAMES.get(key, key): value for key, value in fields.items()}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return getattr(transformers, kind)(**fields, **ids)


def model(name, seed=0, **changes):
    """A model whose every parameter is random: no bias is 0 and no norm is 1."""
    torch.manual_seed(seed)
    peer = transformers.AutoModelForCausalLM.from_config(config(name, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return peer


def load(folder):
    """The model of a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")
    return model.eval()


def logits(peer, tokens):
    """Logits of rows of tokens, float32."""
    with torch.no_grad():
        return peer(torch.tensor(tokens)).logits.float().numpy()


def word_tokenizer(count=96):
    """A tokenizer of `count` words in the library's own form, which puts <bos> before each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, count)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return tokenizer
