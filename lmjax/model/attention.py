"""Grouped-query attention: one description of the mask, several implementations that must agree.

    out = softmax(softcap(q kᵀ / √H) + mask) v           Vaswani et al., 2017 (1706.03762); Ainslie et al., 2023 (2305.13245)

`reference` is the plain form. `blockwise` never holds T × T scores: it visits the pairs of blocks that the mask can touch,
with a running softmax, and recomputes them in the backward pass (Rabe & Staats, 2021, 2112.05682; Dao et al., 2022, 2205.14135).
`splash` is its like on a TPU, `cudnn` on a GPU. Where a row's tokens are split over devices, `ring` joins their blocks.
An implementation that cannot honour a part of the mask refuses it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lmjax.axes import CONTEXT
from lmjax.config import need
from lmjax.model import blockwise, cudnn, ring, rope, splash
from lmjax.model.blockwise import CAUSAL, Rule
from lmjax.model.cache import LayerCache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dense
from lmjax.model.initialize import Initializer
from lmjax.model.norm import rms_normalize
from lmjax.sharding.mesh import constrain, is_manual, platform


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees: all conditions hold together. Key j is never after query i, but for a prefix.

    Without `query_places`, queries and keys are the same tokens. With them, keys are the slots of a cache.
    """

    segments: Int[Array, "B T"] | None = None  # a query sees its own segment only
    query_places: Int[Array, "B T"] | None = None  # the place of each query in its row; `cache.NOWHERE` for padding
    key_places: Int[Array, "B S"] | None = None  # the same of each key; none: its index
    # tokens that a query sees, itself included; none: all before it
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    # tokens at the row's start that see one another whatever the order and the window
    prefix: int = dataclasses.field(default=0, metadata={"static": True})


def reference(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    softcap: float | None = None,
) -> Float[Array, "B T K G H"]:
    """Attention with all scores at once; scores and softmax in float32, the result in v's dtype."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    scores = blockwise.soft_cap(scores, softcap)
    keys = jnp.arange(k.shape[1])[None, None] if mask.key_places is None else mask.key_places[:, None]
    places = jnp.arange(q.shape[1])[None] if mask.query_places is None else mask.query_places
    seen = blockwise.visible(places[:, :, None], keys, mask.window, mask.prefix)
    if mask.segments is not None:
        seen &= mask.segments[:, :, None] == mask.segments[:, None, :]
    scores = jnp.where(seen[:, None, None], scores, blockwise.NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def in_blocks(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    softcap: float | None = None,
    block: int = 128,
) -> Float[Array, "B T K G H"]:
    """Attention by blocks of `block` tokens, memory in proportion to T; queries and keys must be the same tokens."""
    refuse_a_cache("blockwise", mask)
    return blockwise.attend(q, k, v, mask.segments, softcap, min(block, q.shape[1]), mask.window, mask.prefix)


def by_splash(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    softcap: float | None = None,
) -> Float[Array, "B T K G H"]:
    """Attention by the TPU's kernel; no prefix, rows of a multiple of 128."""
    refuse_a_cache("splash", mask)
    rule = Rule(softcap, mask.window, mask.prefix)
    refuse("splash", splash.lacks(q.shape[1], rule))
    return splash.attend(q, k, v, mask.segments, rule)


def by_cudnn(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    softcap: float | None = None,
) -> Float[Array, "B T K G H"]:
    """Attention by cuDNN's kernel; half precision, no soft-cap."""
    refuse_a_cache("cudnn", mask)
    rule = Rule(softcap, mask.window, mask.prefix)
    refuse("cudnn", cudnn.lacks(q.shape[1], q.shape[-1], q.dtype, rule))
    return cudnn.attend(q, k, v, mask.segments, rule)


def in_a_ring(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    softcap: float | None = None,
    block: int = 128,
) -> Float[Array, "B T K G H"]:
    """Attention of this device's tokens over rows that are split over `context`; see `lmjax.sharding.context`."""
    refuse_a_cache("ring", mask)
    return ring.attend(q, k, v, mask.segments, Rule(softcap, mask.window, mask.prefix), block)


def refuse(name: str, lacks: str | None) -> None:
    """A `UserError` where an implementation lacks something."""
    need(lacks is None, f"config.model.attention={name!r} cannot do {lacks}; auto, blockwise and reference can")


def refuse_a_cache(name: str, mask: Mask) -> None:
    """For implementations whose queries and keys are the same tokens."""
    if mask.query_places is not None:
        raise ValueError(f"{name} attention takes queries and keys of the same tokens, not a cache")


IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference, "blockwise": in_blocks, "splash": by_splash, "cudnn": by_cudnn,
}  # fmt: skip
FLOAT32 = jnp.dtype("float32")
PLATFORMS = {"splash": "tpu", "cudnn": "gpu"}  # the others run anywhere


def check_platform(config: ModelConfig, platform: str) -> None:
    """A `UserError` for a kernel of another platform ("cpu", "gpu", "tpu")."""
    needed = PLATFORMS.get(config.attention, platform)
    need(
        needed == platform,
        f"config.model.attention={config.attention!r} runs on a {needed}, not on this {platform}; auto fits",
    )


def chosen(
    config: ModelConfig, length: int, dtype: jnp.dtype = FLOAT32, rule: Rule = CAUSAL, platform: str = "cpu"
) -> str:
    """The name of the implementation for rows of `length` tokens: `config.attention`, or by length, platform and mask."""
    if config.attention != "auto":
        return config.attention
    if length <= config.attention_block:
        return "reference"
    if platform == "tpu" and splash.lacks(length, rule) is None:
        return "splash"
    if platform == "gpu" and length <= cudnn.LONGEST and cudnn.lacks(length, config.dim_head, dtype, rule) is None:
        return "cudnn"
    return "blockwise"


def describe(config: ModelConfig, length: int, types: Dtypes, platform: str, context: int) -> str:
    """What attends in the layers of a run, each kind by its name, for its log."""
    layers = []
    for kind in dict.fromkeys(config.pattern):
        rule = Rule(config.attention_softcap, config.window(kind))
        name = "ring" if context > 1 else chosen(config, length, types.activation, rule, platform)
        layers.append(f"{name} in {kind} layers")
    return f"attention over rows of {length} tokens, {config.attention} on {platform}: {', '.join(layers)}"


def choose(config: ModelConfig, length: int, cached: bool, dtype: jnp.dtype = FLOAT32, rule: Rule = CAUSAL) -> Callable:
    """The implementation for rows of `length` tokens, by `config.attention`, where it runs and what it must honour."""
    if cached:
        return reference  # a cache is read by a few queries: T × S is small
    if is_manual(CONTEXT):
        # The length is a device's part: even a short one needs the others' keys.
        need(
            config.attention in ("auto", "blockwise"),
            f"config.model.attention={config.attention!r} does not see the tokens that config.mesh.context puts on other "
            "devices; auto and blockwise do",
        )
        return functools.partial(in_a_ring, block=config.attention_block)
    name = chosen(config, length, dtype, rule, platform())
    implementation = IMPLEMENTATIONS[name]
    return functools.partial(implementation, block=config.attention_block) if name == "blockwise" else implementation


class Attention(nnx.Module):
    """Weights: qkv (D, K, G + 2, H), each key-value head after its G query heads, so that a shard holds whole groups;
    out (K, G, H, D)."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.config = config
        width, dim, kv_heads = config.d_model, config.dim_head, config.kv_heads
        group = config.num_heads // kv_heads
        self.qkv = nnx.Param(
            init((width, kv_heads, group + 2, dim), fan_in=width), axes=("embed", "kv_heads", None, None)
        )
        self.out = nnx.Param(
            init((kv_heads, group, dim, width), fan_in=config.num_heads * dim, residual=True),
            axes=("kv_heads", None, None, "embed"),
        )
        if config.attention_bias or config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((kv_heads, group + 2, dim)), axes=("kv_heads", None, None))
        if config.attention_bias:
            self.out_bias = nnx.Param(jnp.zeros(width), axes=("norm",))
        if config.qk_norm_heads:
            self.q_norm = nnx.Param(jnp.ones((kv_heads, group, dim)), axes=("kv_heads", None, None))
            self.k_norm = nnx.Param(jnp.ones((kv_heads, dim)), axes=("kv_heads", None))
        elif config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(dim), axes=("norm",))
            self.k_norm = nnx.Param(jnp.ones(dim), axes=("norm",))

    def project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], types: Dtypes, kind: str
    ) -> tuple[Array, Array, Array]:
        """Queries [B T K G H], keys and values [B T K H], normalized and rotated as the config says of layers of this kind."""
        config = self.config
        qkv = dense(x, self.qkv[...], types)
        qkv = qkv + self.qkv_bias[...].astype(qkv.dtype) if config.attention_bias or config.qkv_bias else qkv
        qkv = constrain(qkv, "rows", None, "kv_heads", None, None)
        group = config.num_heads // config.kv_heads
        # A split and not three slices, whose gradients would be padded with zeros and added.
        q, k, v = jnp.split(qkv, [group, group + 1], axis=-2)
        k, v = k.squeeze(-2), v.squeeze(-2)
        if config.qk_norm:
            q = rms_normalize(q, self.q_norm[...], config.norm_epsilon)
            k = rms_normalize(k, self.k_norm[...], config.norm_epsilon)
        if config.position == "rope":
            local = kind == "local" and config.rope_local_theta is not None
            theta, scaling = (config.rope_local_theta, None) if local else (config.rope_theta, config.rope_scaling)
            cos, sin = rope.angles(positions, config.dim_head, theta, scaling)
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        if config.scores_over != config.dim_head:
            q = q * math.sqrt(config.dim_head / config.scores_over)  # attention divides by sqrt(H)
        return q, k, v

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Mask,
        types: Dtypes,
        cache: LayerCache | None = None,
        kind: str = "global",
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """The branch's output, before the residual sum, and the cache with this call's keys and values written in.

        `kind` is the layer's in `config.pattern`: it decides the mask's window.
        """
        mask = dataclasses.replace(mask, window=self.config.window(kind))
        q, k, v = self.project(x, positions, types, kind)
        if cache is not None:
            cache, k, v, places = cache.seen_by(k, v, mask.query_places)
            mask = dataclasses.replace(mask, key_places=places)
        rule = Rule(self.config.attention_softcap, mask.window, mask.prefix)
        attend = choose(self.config, x.shape[1], cache is not None, q.dtype, rule)
        mixed = attend(q, k.astype(q.dtype), v.astype(q.dtype), mask, self.config.attention_softcap)
        if self.config.split_tokens:  # around the layer's products, and not of the scores
            mixed = constrain(mixed, "rows", None, "kv_heads", None, None)
        out = dense(mixed, self.out[...], types, in_dims=3)
        return (out + self.out_bias[...].astype(out.dtype) if self.config.attention_bias else out), cache
