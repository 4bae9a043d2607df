"""Parameters of a decoder, from its config alone: the tree's paths, dims and shapes, and counts by group.

Dims are letters of the alphabet in `lmjax.axes`, with M = 2 products into the MLP's hidden where it is gated, else 1, R the hidden
width of a shared MLP beside experts, I the width of features before text, and P = G + 2: for each key-value head its query heads,
its key and its value. The layers' leading L is a stack; X is that of the layers with experts, whose hidden width is F, and Y that of
those with an MLP, whose hidden width is U.
"""

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType

from lmjax.model.config import ModelConfig

GROUPS = ("embedding", "attention", "mlp", "norm", "head")


def dim_sizes(model: ModelConfig) -> dict[str, int]:
    """Letter → size."""
    queries = model.num_heads // model.kv_heads
    return {
        "L": model.num_layers, "D": model.d_model, "F": model.hidden, "V": model.vocab_size, "S": model.max_length,
        "K": model.kv_heads, "G": queries, "P": queries + 2, "H": model.dim_head, "M": 2 if model.gated else 1,
        "E": model.moe.num_experts if model.moe else 0, "R": model.moe.shared_d_ff if model.moe else 0,
        "I": model.prefix_dim or 0, "X": sum(model.expert_layers), "Y": model.num_layers - sum(model.expert_layers),
        "U": model.dense_hidden or 0,
    }  # fmt: skip


@functools.cache  # a search asks for a model's parameters thousands of times
def parameter_dims(model: ModelConfig) -> Mapping[str, str]:
    """Path → dims, as "L D M F"; the decoder's tree, flattened with slashes."""
    dims = {"embed/token": "V D"}
    if model.position == "learned":
        dims["embed/position"] = "S D"
    if model.prefix_dim is not None:
        dims["embed/prefix"] = "I D"
    norms = {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "post_norm")}[model.block]
    for path in (f"layers/{branch}_{norm}" for branch in ("attention", "mlp") for norm in norms):
        dims |= norm_dims(model, path, "L D")
    dims |= attention_dims(model)
    dims |= {} if all(model.expert_layers) else mlp_dims(model)
    dims |= moe_dims(model) if any(model.expert_layers) else {}
    dims |= norm_dims(model, "final_norm", "D")
    if not model.tie_embeddings:
        dims["head/kernel"] = "D V"
    return MappingProxyType(dims)


def norm_dims(model: ModelConfig, path: str, dims: str) -> dict[str, str]:
    """A norm's scale, and its bias where it has one."""
    return {f"{path}/{name}": dims for name in ("scale", "bias") if name == "scale" or model.norm_bias}


def attention_dims(model: ModelConfig) -> dict[str, str]:
    """The fused query, key and value product, the output product, and what the config adds."""
    dims = {"layers/attention/qkv": "L D K P H", "layers/attention/out": "L K G H D"}
    if model.attention_bias or model.qkv_bias:
        dims["layers/attention/qkv_bias"] = "L K P H"
    if model.attention_bias:
        dims["layers/attention/out_bias"] = "L D"
    if model.qk_norm_heads:
        dims |= {"layers/attention/q_norm": "L K G H", "layers/attention/k_norm": "L K H"}
    elif model.qk_norm:
        dims |= {"layers/attention/q_norm": "L H", "layers/attention/k_norm": "L H"}
    return dims


def mlp_dims(model: ModelConfig) -> dict[str, str]:
    """The fused gate and up product (or up alone), and the down product."""
    dims = {"layers/mlp/up": "Y D M U", "layers/mlp/down": "Y U D"}
    if model.mlp_bias:
        dims |= {"layers/mlp/up_bias": "Y M U", "layers/mlp/down_bias": "Y D"}
    return dims


def moe_dims(model: ModelConfig) -> dict[str, str]:
    """The router, the experts, each like an MLP, and what the config adds: a selection bias, a shared MLP, its gate."""
    dims = {"layers/moe/router": "X D E", "layers/moe/expert_up": "X E D M F", "layers/moe/expert_down": "X E F D"}
    if model.moe.bias_rate:
        dims["layers/moe/router_bias"] = "X E"
    if model.moe.shared_d_ff:
        dims |= {"layers/moe/shared/up": "X D M R", "layers/moe/shared/down": "X R D"}
    if model.moe.shared_gate:
        dims["layers/moe/shared_gate"] = "X D"
    return dims


@functools.cache
def parameter_shapes(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Path → shape of each parameter array."""
    sizes = dim_sizes(model)
    shapes = {path: tuple(sizes[dim] for dim in dims.split()) for path, dims in parameter_dims(model).items()}
    return MappingProxyType(shapes)


# What a dim of a weight is called in `lmjax.sharding.rules`. A vector (norms, biases over D) is never split.
STACKS = dict.fromkeys("LXY", "layers")
LOGICAL = {**STACKS, "D": "embed", "K": "kv_heads", **dict.fromkeys("FRU", "mlp"), "E": "experts", "V": "vocab"}
VECTOR = "norm"


@functools.cache
def logical_axes(model: ModelConfig) -> Mapping[str, tuple[str | None, ...]]:
    """Path → logical axis of each dim, as the sharding rules know them."""
    axes = {}
    for path, dims in parameter_dims(model).items():
        letters = dims.split()
        is_vector = len([dim for dim in letters if dim not in STACKS]) == 1
        axes[path] = tuple(VECTOR if is_vector and dim not in STACKS else LOGICAL.get(dim) for dim in letters)
    return MappingProxyType(axes)


def is_layer_matrix(path: str) -> bool:
    """Whether a parameter is one of the layers' products: what muon's orthogonal update is for."""
    return path.endswith(("/qkv", "/out", "/up", "/down", "/expert_up", "/expert_down"))


def group(path: str) -> str:
    """The group that a parameter counts in; norms of queries and keys are norms."""
    if "norm" in path:
        return "norm"
    for part, name in (
        ("embed/", "embedding"),
        ("/attention/", "attention"),
        ("/mlp/", "mlp"),
        ("/moe/", "mlp"),
        ("head/", "head"),
    ):
        if part in path:
            return name
    raise ValueError(f"parameter {path!r} is in no group")


def count_by_group(model: ModelConfig) -> dict[str, int]:
    """Parameters of each group, in the order of `GROUPS`; a tied head counts nothing of its own."""
    counts = dict.fromkeys(GROUPS, 0)
    for path, shape in parameter_shapes(model).items():
        counts[group(path)] += math.prod(shape)
    return counts


def total(model: ModelConfig) -> int:
    """All parameters."""
    return sum(count_by_group(model).values())


def active(model: ModelConfig) -> int:
    """Parameters that a token runs through: of the experts, those that it is sent to."""
    shapes, idle = parameter_shapes(model), 0
    if model.moe is not None:
        experts = sum(math.prod(shape) for path, shape in shapes.items() if "/expert_" in path)
        idle = experts * (model.moe.num_experts - model.moe.top_k) // model.moe.num_experts
    return total(model) - idle


def non_embedding(model: ModelConfig) -> int:
    """Parameters of the layers and norms: neither embeddings nor head, the N of scaling laws (Kaplan 2020)."""
    counts = count_by_group(model)
    return sum(counts.values()) - counts["embedding"] - counts["head"]
