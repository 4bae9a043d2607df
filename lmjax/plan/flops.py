"""FLOPs of a token, forward and in training: two for each multiply-add of a matrix product, nothing else.

Forward, for a token of a row of T tokens, over L layers:

    qkv        2 · D · K (G + 2) H
    attention  2 · 2 · N · H · (T + 1) / 2     scores and values; token t attends t keys, (T + 1) / 2 on average
               2 · 2 · N · H · W (1 - (W - 1) / 2T)    with a window of W < T tokens: token t attends min(t, W) keys
    out        2 · N · H · D
    mlp        2 · M · D · F + 2 · F · D       M = 2 where gated, else 1
               2 · D · E + k times that        in layers with experts, k of E for a token; a shared MLP's as a dense one's
    head       2 · D · V, once                 tied or not; looking up an embedding multiplies nothing
    prefix     2 · I · D · P / T               P features of width I before the text: the layers then have T + P tokens for T of text,
                                               of which the P see one another, P (P - 1) / 2 pairs more

The backward pass computes a gradient for each of the two operands of a product: training is three times the forward.
Model FLOPs are these, whatever the program does: MFU counts them only (PaLM, arXiv 2204.02311, appendix B, but with causal
attention counted once instead of twice). Hardware FLOPs add what rematerialization computes again. Packed documents
attend to fewer keys than a whole row; the convention counts the row.
"""

import dataclasses
import functools

from lmjax.model.config import ModelConfig

BACKWARD = 2  # products of the backward pass for each one of the forward


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one token by part, over all layers, and what training recomputes."""

    qkv: float
    attention: float
    out: float
    mlp: float
    head: float
    recomputed: float  # forward FLOPs that the backward pass repeats, see `recomputed`
    prefix: float = 0.0  # projecting features before text
    added: float = 0.0  # what is computed beyond the equations: `kernel_flops` of attention, `empty_places` of experts

    @property
    def forward(self) -> float:
        """Model FLOPs of a token's forward pass."""
        return self.qkv + self.attention + self.out + self.mlp + self.head + self.prefix

    @property
    def training(self) -> float:
        """Model FLOPs of a token's forward and backward pass: what MFU counts."""
        return (1 + BACKWARD) * self.forward

    @property
    def hardware(self) -> float:
        """Model FLOPs of training, what rematerialization repeats, and what kernels and buckets add."""
        return self.training + self.recomputed + self.added


@functools.cache  # of the few models that a search has, on hundreds of meshes
def flops_per_token(model: ModelConfig, seq_len: int, platform: str | None = None, prefix: int = 0) -> Flops:
    """FLOPs of one token of text in rows of `seq_len`, averaged over the row; with a platform ("tpu"), those of its kernels.

    `prefix` features stand before the text.
    """
    length = seq_len + prefix
    width = model.num_heads * model.dim_head
    fused = (model.num_heads + 2 * model.kv_heads) * model.dim_head
    keys = sum(keys_seen(length, model.window(kind), prefix) for kind in model.kinds)
    layer = {
        "qkv": 2 * model.d_model * fused,
        "attention": 2 * 2 * width * keys / model.num_layers,
        "out": 2 * width * model.d_model,
        "mlp": sum(count * sum(mlp_flops(alike)) for alike, count in model.alike.items()) / model.num_layers,
    }
    parts = {name: float(model.num_layers * count) for name, count in layer.items()}
    kernel = platform == "tpu" and has_splash(model, seq_len) and not prefix  # which the kernel does not know
    layers = parts | {"recomputed": recomputed(model, parts)}
    return Flops(
        **{name: count * length / seq_len for name, count in layers.items()},
        head=2.0 * model.d_model * model.vocab_size,
        prefix=2.0 * (model.prefix_dim or 0) * model.d_model * prefix / seq_len,
        added=(kernel_flops(model, seq_len) if kernel else 0.0) + empty_places(model) * length / seq_len,
    )


def empty_places(model: ModelConfig) -> float:
    """FLOPs of a token in experts' buckets beyond its own rows: with a capacity of 1.25 a quarter more rows are multiplied."""
    if model.moe is None or model.moe.capacity_factor is None:
        return 0.0
    experts = sum(count * mlp_flops(alike)[1] for alike, count in model.alike.items())
    passes = 1 + BACKWARD + (1 if model.remat != "none" else 0)
    return (model.moe.capacity_factor - 1) * passes * experts


def mlp_flops(model: ModelConfig) -> tuple[int, int]:
    """Forward FLOPs of a token in one layer of a model whose layers are alike: of the MLP that every token runs through (with a
    router), and of its experts."""
    products = 2 * (3 if model.gated else 2) * model.d_model
    if model.moe is None:
        return products * model.hidden, 0
    gate = 2 * model.d_model if model.moe.shared_gate else 0
    dense = products * model.moe.shared_d_ff + gate + 2 * model.d_model * model.moe.num_experts
    return dense, products * model.hidden * model.moe.top_k


def keys_seen(seq_len: int, window: int | None, prefix: int = 0) -> float:
    """Keys that a token attends, averaged over a row of `seq_len`, of which those of the prefix see all of it."""
    reach = min(window or seq_len, seq_len)
    near = min(prefix, reach)
    later = prefix * prefix - near * (near + 1) / 2 - (prefix - near) * reach  # that the prefix sees beside
    return reach * (1 - (reach - 1) / (2 * seq_len)) + later / seq_len


def recomputed(model: ModelConfig, parts: dict[str, float]) -> float:
    """Forward FLOPs of the layers that the backward pass repeats under `model.remat`.

    none: nothing. dots: attention's scores and values; the outputs of products with weights are kept. block_outputs: all that leads
    to the last product of each branch (out, down). full: every layer but its last product, down, whose output nothing needs again.
    An attention by blocks computes its scores again under every policy; that is its kernel's business, see `kernel_flops`.
    Experts are recomputed whole under all policies: their outputs give the gates' gradients, and their products are no plain ones.
    """
    last = experts = 0  # products that are last in their layer, and those of experts
    for alike, count in model.alike.items():
        last += 2 * count * model.d_model * (alike.hidden if alike.moe is None else alike.moe.shared_d_ff)
        experts += count * mlp_flops(alike)[1]
    up = parts["mlp"] - last
    return {
        "none": 0.0,
        "dots": parts["attention"] + experts,
        "block_outputs": parts["qkv"] + parts["attention"] + up,
        "full": parts["qkv"] + parts["attention"] + parts["out"] + up,
    }[model.remat]


# ----------------------------------------------------------------------------------------------------------------- kernels

SPLASH_BLOCKS = (512, 256, 128)  # `lmjax.model.splash` takes the largest that divides the row
SPLASH_PRODUCTS = (
    2 + 4 + 3
)  # forward: scores, values; keys' and values' gradients: scores, their gradient, two more; queries': 2 + 1


def has_splash(model: ModelConfig, seq_len: int) -> bool:
    """Whether a TPU attends by its kernel, as `lmjax.model.attention.chosen` decides."""
    wanted = model.attention == "splash" or (model.attention == "auto" and seq_len > model.attention_block)
    return wanted and seq_len % SPLASH_BLOCKS[-1] == 0


def kernel_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of a token in all layers that a TPU's kernel computes beyond the equation and what remat repeats of it.

    It visits whole blocks, of which the mask hides a part, and each of its two backward kernels computes the scores and their gradient.
    """
    product = 2 * model.num_layers * model.num_heads * model.dim_head
    again = 2 if model.remat != "none" else 0
    computed = (SPLASH_PRODUCTS + again) * product * visited_pairs(model, seq_len) / seq_len
    counted = (
        (2 * (1 + BACKWARD) + again) * product * sum(keys_seen(seq_len, model.window(kind)) for kind in model.kinds)
    )
    return computed - counted / model.num_layers


def visited_pairs(model: ModelConfig, seq_len: int) -> float:
    """Pairs of a query and a key in the blocks that the kernel visits in a row, on average over the layers."""
    block = next((size for size in SPLASH_BLOCKS if seq_len % size == 0), SPLASH_BLOCKS[-1])
    count = 0
    for kind in model.kinds:
        reach = model.window(kind) or seq_len
        count += sum(i - max(0, (i * block - (reach - 1)) // block) + 1 for i in range(seq_len // block))
    return count * block**2 / model.num_layers
