"""Tensors of Hugging Face checkpoints and their places in the tree: one table, read both ways. No jax.

A tensor's dims are letters of the alphabet in `lmjax.plan.params`, joined where the file flattens them: "KGH D" is a matrix of
K · G · H rows, the query heads of each key-value head together. Our array has the same letters in another order; one with L (layers),
X (layers with experts), Y (those without), P (queries, key, value) or M (gate, up) holds several tensors, one after another.
Which tensors there are follows from the fields of the config alone.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from lmjax.model.config import ModelConfig
from lmjax.plan.params import dim_sizes

# Where `block` puts a layer's norms, as llama's kin name them.
NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
PREFIXES = {
    "llama": "model.",
    "mixtral": "model.",
    "gpt2": "transformer.",
}  # which a checkpoint of the bare model lacks
HEAD = "lm_head.weight"
# The router, the experts, and the gate, up and down of one.
EXPERTS = {
    "llama": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
}
# What old versions stored beside the weights: computed again from the config.
BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$|(^|\.)h\.\d+\.attn\.(masked_)?bias$")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and what it is of ours."""

    name: str
    stored: str  # dims in the file
    path: str  # of our parameter
    dims: str  # of its part of ours, in our order; 1 where it is one of several
    at: tuple[
        tuple[str, int], ...
    ] = ()  # where the part begins, along those dims of the parameter that it does not fill
    shift: float = 0.0  # added on the way in: Gemma stores a norm's scale without its 1

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Its shape in the file."""
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.stored.split())

    def part_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of its part of ours."""
        return tuple(sizes[letter] for letter in self.dims.split())

    def origin(self, whole: str) -> tuple[int, ...]:
        """Where the part begins in our parameter, whose dims are `whole`."""
        return tuple(dict(self.at).get(letter, 0) for letter in whole.split())

    def to_ours(self, array: Any, sizes: dict[str, int]) -> Any:
        """The file's array, of NumPy or jax, as the part of ours, float32."""
        stored, dims = letters(self.stored), letters(self.dims)
        array = array.astype(np.float32).reshape([sizes[letter] for letter in stored])
        array = array.transpose([stored.index(letter) for letter in dims]).reshape(self.part_shape(sizes))
        return array + np.float32(self.shift) if self.shift else array

    def to_theirs(self, part: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        """The part of ours as the file's array."""
        stored, dims = letters(self.stored), letters(self.dims)
        part = (part - np.float32(self.shift) if self.shift else part).reshape([sizes[letter] for letter in dims])
        return part.transpose([dims.index(letter) for letter in stored]).reshape(self.shape(sizes))


def letters(dims: str) -> str:
    """The dims one by one, without those that are 1."""
    return re.sub("[ 1]", "", dims)


def sizes(model: ModelConfig) -> dict[str, int]:
    """Letter → size; 1 is 1."""
    return {**dim_sizes(model), "1": 1}


def tensors(model: ModelConfig, scheme: str, shift: float = 0.0) -> Iterator[Tensor]:
    """All tensors of a checkpoint of this model.

    Args:
      model: its fields.
      scheme: of `PREFIXES`, how they are named and stored; mixtral is llama with other names for experts.
      shift: what norms lack in the file.
    """
    is_gpt2, prefix = scheme == "gpt2", PREFIXES[scheme]
    token, position, norm = ("wte", "wpe", "ln_f") if is_gpt2 else ("embed_tokens", "embed_positions", "norm")
    yield Tensor(f"{prefix}{token}.weight", "V D", "embed/token", "V D")
    if model.position == "learned":
        yield Tensor(f"{prefix}{position}.weight", "S D", "embed/position", "S D")
    for layer in range(model.num_layers):
        stem, experts = f"{prefix}{'h' if is_gpt2 else 'layers'}.{layer}.", model.expert_layers[layer]
        own = model.expert_layers[:layer].count(experts)  # its number among those with, or without, experts
        places = ("L", layer), ("X" if experts else "Y", own)
        for tensor in gpt2_layer(model, shift) if is_gpt2 else llama_layer(model.with_all(experts), shift, scheme):
            yield dataclasses.replace(
                tensor,
                name=stem + tensor.name,
                path=f"layers/{tensor.path}",
                dims=f"1 {tensor.dims}",
                at=(*places, *tensor.at),
            )
    yield from norm_tensors(model, f"{prefix}{norm}", "final_norm", shift)
    if not model.tie_embeddings:
        yield Tensor(HEAD, "V D", "head/kernel", "D V")


def norm_tensors(model: ModelConfig, name: str, path: str, shift: float) -> Iterator[Tensor]:
    """Scale and bias of a norm over D."""
    yield Tensor(f"{name}.weight", "D", f"{path}/scale", "D", shift=shift)
    if model.norm_bias:
        yield Tensor(f"{name}.bias", "D", f"{path}/bias", "D")


def llama_layer(model: ModelConfig, shift: float, scheme: str) -> Iterator[Tensor]:
    """A layer of Llama, Mistral, Qwen, Gemma, OLMo: products stored [out, in], apart."""
    group = model.num_heads // model.kv_heads
    for name, heads, place in (("q", "G", 0), ("k", "1", group), ("v", "1", group + 1)):
        stem, rows, at = f"self_attn.{name}_proj", letters(f"K{heads}H"), (("P", place),)
        yield Tensor(f"{stem}.weight", f"{rows} D", "attention/qkv", f"D K {heads} H", at)
        if model.attention_bias or model.qkv_bias:
            yield Tensor(f"{stem}.bias", rows, "attention/qkv_bias", f"K {heads} H", at)
    yield Tensor("self_attn.o_proj.weight", "D KGH", "attention/out", "K G H D")
    if model.attention_bias:
        yield Tensor("self_attn.o_proj.bias", "D", "attention/out_bias", "D")
    if model.qk_norm:
        query, key = ("KGH", "KH") if model.qk_norm_heads else ("H", "H")
        yield Tensor("self_attn.q_norm.weight", query, "attention/q_norm", " ".join(query), shift=shift)
        yield Tensor("self_attn.k_norm.weight", key, "attention/k_norm", " ".join(key), shift=shift)
    for ours, theirs in NORMS[model.block].items():
        yield from norm_tensors(model, theirs, ours, shift)
    yield from mlp_tensors(model) if model.moe is None else moe_tensors(model, scheme)


def mlp_tensors(model: ModelConfig) -> Iterator[Tensor]:
    """Gate, up and down of llama's kin."""
    for place, name in enumerate(("gate", "up") if model.gated else ("up",)):
        yield Tensor(f"mlp.{name}_proj.weight", "U D", "mlp/up", "D 1 U", (("M", place),))
        if model.mlp_bias:
            yield Tensor(f"mlp.{name}_proj.bias", "U", "mlp/up_bias", "1 U", (("M", place),))
    yield Tensor("mlp.down_proj.weight", "D U", "mlp/down", "U D")
    if model.mlp_bias:
        yield Tensor("mlp.down_proj.bias", "D", "mlp/down_bias", "D")


def moe_tensors(model: ModelConfig, scheme: str) -> Iterator[Tensor]:
    """The router, every expert, and what all tokens run through."""
    moe = model.moe
    assert moe is not None
    router, experts, halves = EXPERTS[scheme]
    yield Tensor(f"{router}.weight", "E D", "moe/router", "D E")
    for expert in range(moe.num_experts):
        stem = f"{experts}.{expert}"
        for place, name in enumerate(halves[:2]):
            at = (("E", expert), ("M", place))
            yield Tensor(f"{stem}.{name}.weight", "F D", "moe/expert_up", "1 D 1 F", at)
        yield Tensor(f"{stem}.{halves[2]}.weight", "D F", "moe/expert_down", "1 F D", (("E", expert),))
    if moe.shared_d_ff:
        for place, name in enumerate(("gate", "up")):
            yield Tensor(f"mlp.shared_expert.{name}_proj.weight", "R D", "moe/shared/up", "D 1 R", (("M", place),))
        yield Tensor("mlp.shared_expert.down_proj.weight", "D R", "moe/shared/down", "R D")
    if moe.shared_gate:
        yield Tensor("mlp.shared_expert_gate.weight", "1 D", "moe/shared_gate", "D")


def gpt2_layer(model: ModelConfig, shift: float) -> Iterator[Tensor]:
    """A layer of GPT-2: products stored [in, out], queries, keys and values in one."""
    yield Tensor("attn.c_attn.weight", "D PKH", "attention/qkv", "D K P H")
    yield Tensor("attn.c_attn.bias", "PKH", "attention/qkv_bias", "K P H")
    yield Tensor("attn.c_proj.weight", "KGH D", "attention/out", "K G H D")
    yield Tensor("attn.c_proj.bias", "D", "attention/out_bias", "D")
    yield Tensor("mlp.c_fc.weight", "D MU", "mlp/up", "D M U")
    yield Tensor("mlp.c_fc.bias", "MU", "mlp/up_bias", "M U")
    yield Tensor("mlp.c_proj.weight", "U D", "mlp/down", "U D")
    yield Tensor("mlp.c_proj.bias", "D", "mlp/down_bias", "D")
    yield from norm_tensors(model, "ln_1", "attention_norm", shift)
    yield from norm_tensors(model, "ln_2", "mlp_norm", shift)
