"""Grouped-query attention: one description of the mask, several implementations that must agree.

    out = softmax(softcap(q kᵀ / √H) + mask) v           Vaswani et al., 2017 (1706.03762); Ainslie et al., 2023 (2305.13245)

`reference` is the plain form. `blockwise` never holds T × T scores: it visits the pairs of blocks that the mask can touch,
with a running softmax, and recomputes them in the backward pass (Rabe & Staats, 2021, 2112.05682; Dao et al., 2022, 2205.14135).
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

from lmjax.model import blockwise, rope
from lmjax.model.cache import LayerCache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dense
from lmjax.model.initialize import Initializer
from lmjax.model.norm import rms_normalize
from lmjax.sharding.mesh import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees: all conditions hold together. Key j is never after query i.

    Without `query_places`, queries and keys are the same tokens. With them, keys are the slots of a cache.
    """

    segments: Int[Array, "B T"] | None = None  # a query sees its own segment only
    query_places: Int[Array, "B T"] | None = None  # the slot of each query among the keys
    # tokens that a query sees, itself included; none: all before it
    window: int | None = dataclasses.field(default=None, metadata={"static": True})


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
    keys = jnp.arange(k.shape[1])
    places = jnp.arange(q.shape[1])[None] if mask.query_places is None else mask.query_places
    seen = keys[None, None] <= places[:, :, None]
    if mask.window is not None:
        seen &= keys[None, None] > places[:, :, None] - mask.window
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
    if mask.query_places is not None:
        raise ValueError("blockwise attention takes queries and keys of the same tokens, not a cache")
    if mask.window is not None:
        raise ValueError("blockwise attention knows no window")
    return blockwise.attend(q, k, v, mask.segments, softcap, min(block, q.shape[1]))


IMPLEMENTATIONS: dict[str, Callable] = {"reference": reference, "blockwise": in_blocks}


def choose(config: ModelConfig, length: int, cached: bool) -> Callable:
    """The implementation for rows of `length` tokens, by `config.attention`."""
    name = config.attention
    if cached:
        name = "reference"  # a cache is read by a few queries: T × S is small
    elif name == "auto":
        name = "blockwise" if length > config.attention_block else "reference"
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
        qkv = constrain(qkv, "batch", None, "kv_heads", None, None)
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
        if config.score_dim is not None:
            q = q * math.sqrt(config.dim_head / config.score_dim)  # attention divides by sqrt(H)
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
            cache = cache.write(k, v, mask.query_places)
            k, v = cache.keys, cache.values
        attend = choose(self.config, x.shape[1], cache is not None)
        mixed = attend(q, k.astype(q.dtype), v.astype(q.dtype), mask, self.config.attention_softcap)
        out = dense(mixed, self.out[...], types, in_dims=3)
        return (out + self.out_bias[...].astype(out.dtype) if self.config.attention_bias else out), cache
