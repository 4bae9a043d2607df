"""Attention on a GPU by cuDNN's fused kernel, as JAX offers it: half precision, no soft-cap.

Without packed documents the kernel knows the mask by itself (causal, window). With them it takes an additive mask of T × T for
each row, computed again in the backward pass: memory of one layer grows with T².
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lmjax.model.blockwise import Rule, visible
from lmjax.model.kernel import on_each_device

WIDEST = 128  # of a head, on every GPU that has the kernel
LONGEST = (
    8192  # tokens of a row for which the mask of packed documents is worth its memory; choosing by itself stops here
)


def lacks(length: int, dim: int, dtype: jnp.dtype, rule: Rule) -> str | None:
    """What of this cuDNN cannot do; none: it can do all."""
    if rule.softcap is not None:
        return "a soft-cap of the scores"
    if jnp.dtype(dtype).itemsize != 2:
        return f"{jnp.dtype(dtype).name}, only bfloat16 and float16"
    if dim > WIDEST or dim % 8:
        return f"heads of {dim}, only multiples of 8 up to {WIDEST}"
    return "rows of an odd number of tokens" if length % 2 else None


def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    rule: Rule,
    kernel: str = "cudnn",
) -> Float[Array, "B T K G H"]:
    """Causal attention inside segments, window and prefix; `kernel="xla"` gives the same arguments to JAX's plain form."""
    return on_each_device(lambda *arrays: _on_one_device(*arrays, rule, kernel), q, k, v, segments)


def _on_one_device(q, k, v, segments, rule, kernel):
    batch, length, kv_heads, group, dim = q.shape
    attention = functools.partial(jax.nn.dot_product_attention, implementation=kernel)
    flat = q.reshape(batch, length, kv_heads * group, dim)
    if segments is None and not rule.prefix:
        window = None if rule.window is None else (rule.window - 1, 0)
        return attention(flat, k, v, is_causal=True, local_window_size=window).reshape(q.shape)

    def masked(q, k, v, segments):
        places = jnp.arange(length)
        seen = visible(places[:, None], places[None], rule.window, rule.prefix)[None]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segments[:, None, :])
        return attention(q, k, v, mask=seen[:, None])

    return jax.checkpoint(masked)(flat, k, v, segments).reshape(q.shape)
