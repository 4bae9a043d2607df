"""Bytes of the activations of one layer and one token: what it keeps for the backward pass, and what is there while it is computed.

With a bytes for an activation (2 in half precision, as on TPU and GPU, else 4), w arrays of the MLP's width by its activation
(`MLP_ARRAYS`), M = 2 products into the hidden width where gated, else 1, and t = config.mesh.tensor, it keeps

    none            16 D + 2 a D + w F/t + attention   two norms in float32, inputs of qkv and up
      blockwise     a (3 N + 2 K) H/t + 4 N/t          q, output twice, k, v, log Z
      reference     a (2 N + 2 K) H/t + (4 + a) N T/t  scores before and after the softmax (8 N T/t more with a softcap)
    dots            2 a D + a (N + 2 K) H/t + M a F/t  layer input, and the outputs of the products
    block_outputs   2 a D                              layer input, attention branch
    full            a D                                layer input

With config.model.split_tokens each D is D/t, but for the inputs of qkv and up that "none" keeps.

Experts keep rows · (3 a D + w F/t) in place of w F/t under "none", and nothing under "dots": rows gathered, run through, and brought
back. There are k rows for a token; factor · k with a capacity; with dropless experts on x = config.mesh.expert devices, the worst
case x · min(k, E/x). A shared MLP comes on top.

Where the backward pass stands in a layer, what the layer did not keep is there again, and in the MLP

    a (2 M + 2) F/t     the products' outputs, the activation, and the gradients of both

On a CPU, which fuses little, all that "none" would keep of the layer is there, with the gradients a (M + 1) F/t + 2 a D.
"""

from lmjax.model.config import ModelConfig

# Arrays of the MLP's width that "none" keeps, in bytes for a hidden unit, given the bytes of an activation.
MLP_ARRAYS = {
    "swiglu": lambda a: 6 * a,  # gate, up, sigmoid, silu, product, and the product as the input of down
    "geglu": lambda a: 8 * a,
    "gelu": lambda a: 6 * a,
    "relu": lambda a: a + 1,  # the input of down, and a boolean mask
}


def kept_for_backward(model: ModelConfig, seq_len: int, a: int, tensor: int, remat: str, expert: int = 1) -> float:
    """Bytes that one layer, of a model whose layers are alike, keeps of one token under a remat policy, `a` bytes an activation."""
    width, queries = model.d_model, model.num_heads * model.dim_head / tensor
    keys = model.kv_heads * model.dim_head / tensor
    hidden = (model.hidden if model.moe is None else model.moe.shared_d_ff) / tensor
    between = width / tensor if model.split_tokens else width
    if remat == "full":
        return float(a * between)
    if remat == "block_outputs":
        return float((2 if model.block == "pre" else 3) * a * between)  # a norm after the MLP needs its output
    if remat == "dots":
        return 2 * a * between + a * (queries + 2 * keys) + (2 if model.gated else 1) * a * hidden
    norms = (
        (32 if model.block == "sandwich" else 16) * between
        + 2 * a * width
        + (8 * (queries + keys) if model.qk_norm else 0)
    )
    dropout = 2 * width if model.dropout else 0  # a boolean mask on each branch
    mlp = MLP_ARRAYS[model.activation](a) * hidden + experts_keep(model, a, tensor, expert)
    return norms + dropout + mlp + attention_keeps(model, seq_len, a, tensor)


def experts_keep(model: ModelConfig, a: int, tensor: int, expert: int) -> float:
    """Bytes that one layer's experts keep of one token where nothing is rematerialized."""
    if model.moe is None:
        return 0.0
    return expert_rows(model, expert) * (
        3 * a * model.d_model + MLP_ARRAYS[model.activation](a) * model.hidden / tensor
    )


def expert_rows(model: ModelConfig, expert: int) -> float:
    """Rows that run through experts for one token; with dropless experts on several devices, the buckets' worst case."""
    if model.moe.capacity_factor is None and expert > 1:
        return float(expert * min(model.moe.top_k, model.moe.num_experts // expert))
    return model.moe.top_k * (model.moe.capacity_factor or 1.0)


def attention_keeps(model: ModelConfig, seq_len: int, a: int, tensor: int) -> float:
    """Bytes that one layer's attention keeps of one token where nothing is rematerialized."""
    heads, keys = model.num_heads / tensor, 2 * model.kv_heads * model.dim_head / tensor
    if is_blockwise(model, seq_len):
        return a * (3 * heads * model.dim_head + keys) + 4 * heads
    scores = 4 + a + (8 if model.attention_softcap is not None else 0)
    return a * (2 * heads * model.dim_head + keys) + scores * heads * seq_len


def is_blockwise(model: ModelConfig, seq_len: int) -> bool:
    """Whether attention never holds T × T scores; `lmjax.model.attention.choose` decides."""
    return seq_len > model.attention_block if model.attention == "auto" else model.attention != "reference"


def backward_needs(model: ModelConfig, a: int, tensor: int, expert: int = 1) -> float:
    """Bytes of a token while the backward pass is in a layer, beyond what the layer kept: its MLP's, or its experts'."""
    width, heads = model.d_model, model.num_heads * model.dim_head / tensor
    fused = heads + 2 * model.kv_heads * model.dim_head / tensor
    kept = {
        "none": 0.0,
        "dots": 4 * width + heads,
        "block_outputs": 3 * width + fused + heads,
        "full": 4 * width + fused + heads,
    }
    arrays = {"none": 2, "dots": 4}.get(model.remat, 4 if model.gated else 3) + (2 if model.gated else 0)
    if model.moe is not None:
        rows = expert_rows(model, expert)
        hidden = rows * model.hidden / tensor + model.moe.shared_d_ff / tensor
        return a * (kept[model.remat] + 3 * rows * width + arrays * hidden)
    return a * (kept[model.remat] + arrays * model.hidden / tensor)


def backward_needs_unfused(model: ModelConfig, seq_len: int, a: int, tensor: int, expert: int = 1) -> float:
    """The same on a CPU."""
    rows = 1.0 if model.moe is None else expert_rows(model, expert)
    gradients = a * ((3 if model.gated else 2) * rows * model.hidden / tensor + 2 * model.d_model)
    return kept_for_backward(model, seq_len, a, tensor, "none", expert) + gradients


def forward_needs(model: ModelConfig, a: int, tensor: int, expert: int = 1) -> float:
    """Bytes of a token while the forward pass is in a layer's MLP or experts, beyond what the layer keeps."""
    arrays = 3 if model.gated else 2
    if model.moe is not None:
        rows = expert_rows(model, expert)
        return a * (2 * model.d_model + 2 * rows * model.d_model + arrays * rows * model.hidden / tensor)
    return a * (2 * model.d_model + arrays * model.hidden / tensor)
