"""Attention on a TPU by the Pallas kernel that ships with JAX: blocks that the mask cannot touch cost nothing.

The kernel is not partitioned by the compiler, so on a mesh each device runs it on its rows and heads (`shard_map`).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as kernels
from jaxtyping import Array, Float, Int

from lmjax.model.blockwise import Rule
from lmjax.model.kernel import on_each_device

LANES = 128  # a block of keys is a multiple of it
BLOCKS = (512, 256, LANES)  # the largest that divides the row


def lacks(length: int, rule: Rule) -> str | None:
    """What of this the kernel cannot do; none: it can do all."""
    if rule.prefix:
        return "a prefix"
    return f"rows of {length} tokens, no multiple of {LANES}" if length % LANES else None


def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    rule: Rule,
    interpret: bool = False,
) -> Float[Array, "B T K G H"]:
    """Causal attention inside segments and the window; `interpret` runs the kernel anywhere, slowly."""
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments

    def local(q, k, v, segments):
        return _on_one_device(q, k, v, segments, rule, interpret)

    return on_each_device(local, q, k, v, segments)


def _on_one_device(q, k, v, segments, rule, interpret):
    batch, length, kv_heads, group, dim = q.shape
    block = next(size for size in BLOCKS if length % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )  # fmt: skip
    shape = (length, length)
    seen = kernels.CausalMask(shape)
    if rule.window is not None:
        seen = kernels.LocalMask(shape, (rule.window - 1, 0), offset=0)
    kernel = kernels.make_splash_mha_single_device(
        kernels_mask(seen, kv_heads * group),
        block_sizes=sizes,
        attn_logits_soft_cap=rule.softcap,
        interpret=interpret,
    )

    def row(q, k, v, segments):
        return kernel(q, k, v, kernels.SegmentIds(segments, segments))

    q = (q * dim**-0.5).astype(q.dtype).reshape(batch, length, -1, dim)
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out = jnp.swapaxes(jax.vmap(row)(*heads_first, segments), 1, 2)
    return out.reshape(batch, length, kv_heads, group, dim).astype(v.dtype)


def kernels_mask(seen: kernels.Mask, num_heads: int) -> kernels.MultiHeadMask:
    """The same mask for every head."""
    return kernels.MultiHeadMask([seen] * num_heads)
