"""Causal attention by blocks, in plain JAX: memory grows with T, not T².

The row is cut into blocks. For the pairs (query block i, key block j ≤ i) a running softmax keeps each query's maximum m, sum l
and output o:

    m' = max(m, max s),   l' = l e^(m - m') + Σ e^(s - m'),   o' = o e^(m - m') + e^(s - m') v

The backward pass keeps only the output and log Z = m + log l, and computes each pair's scores again:

    p = e^(s - log Z),  dv += pᵀ do,  ds = p (do vᵀ - Σ(o do)),  dq += ds k,  dk += dsᵀ q
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

NEVER = -1e30  # the score of a key that is not seen: finite, so that no difference of two is NaN
UNROLLED_PAIRS = (
    10  # up to here the pairs are written out, and XLA fuses each; above, a loop keeps compile time constant
)


def soft_cap(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """c tanh(x / c): bounds scores or logits smoothly (Gemma 2, arXiv 2408.00118)."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    softcap: float | None,
    block: int,
) -> Float[Array, "B T K G H"]:
    """Causal attention inside segments. Rows whose length is no multiple of the block are padded at the end."""
    length = q.shape[1]
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
    padding = -length % block
    if padding:
        # Padding comes after every real query, so causality hides it; its own queries see themselves and are cut off.
        q, k, v, segments = (jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, segments))
    out = _attend(
        _to_blocks(q, block), _to_blocks(k, block), _to_blocks(v, block), _to_blocks(segments, block), softcap
    )
    return _from_blocks(out)[:, :length]


def _to_blocks(x: Array, block: int) -> Array:
    """[B, T, K, …, H] → [blocks, B, K, …, block, H]; [B, T] → [blocks, B, block]."""
    x = x.reshape(x.shape[0], -1, block, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 2, -2 if x.ndim > 3 else -1), 1, 0)


def _from_blocks(x: Array) -> Array:
    """[blocks, B, K, G, block, H] → [B, T, K, G, H]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 0, 1), -2, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scan_pairs(body, carry, num_blocks: int):
    """Runs body(carry, i, j) over the block pairs that causality allows, row by row."""
    pairs = np.array([(i, j) for i in range(num_blocks) for j in range(i + 1)], np.int32)
    if len(pairs) <= UNROLLED_PAIRS:
        for i, j in pairs:
            carry = body(carry, int(i), int(j))
        return carry
    return jax.lax.scan(lambda c, pair: (body(c, pair[0], pair[1]), None), carry, pairs)[0]


def _scores(q, k, segments, i, j, softcap):
    """Scores [B K G block block] of a pair, in float32, NEVER where the mask hides the key; and before the mask."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    block = q.shape[-2]
    scores = soft_cap(jnp.einsum("bkgth,bksh->bkgts", q[i], k[j], preferred_element_type=jnp.float32) * scale, softcap)
    places = jnp.arange(block)
    seen = (i * block + places)[:, None] >= (j * block + places)[None]
    seen = seen & (segments[i][:, :, None] == segments[j][:, None, :])
    return jnp.where(seen[:, None, None], scores, NEVER), scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segments, softcap):
    return _forward(q, k, v, segments, softcap)[0]


def _forward(q, k, v, segments, softcap):
    def body(carry, i, j):
        out, top, total = carry
        scores, _ = _scores(q, k, segments, i, j, softcap)
        new_top = jnp.maximum(top[i], scores.max(axis=-1))
        shrink = jnp.exp(top[i] - new_top)
        weights = jnp.exp(scores - new_top[..., None])
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
        out = out.at[i].set(out[i] * shrink[..., None] + mixed)
        return out, top.at[i].set(new_top), total.at[i].set(total[i] * shrink + weights.sum(axis=-1))

    stats = q.shape[:-1]
    start = (jnp.zeros(q.shape, jnp.float32), jnp.full(stats, NEVER, jnp.float32), jnp.zeros(stats, jnp.float32))
    out, top, total = _scan_pairs(body, start, q.shape[0])
    out = (out / total[..., None]).astype(v.dtype)
    return out, (q, k, v, segments, out, top + jnp.log(total))


def _backward(softcap, saved, d_out):
    q, k, v, segments, out, log_z = saved
    scale = 1.0 / math.sqrt(q.shape[-1])
    wide = {"preferred_element_type": jnp.float32}
    overlap = jnp.einsum("...h,...h->...", out, d_out, **wide)  # a product and a sum are slower by far on a CPU

    def body(carry, i, j):
        dq, dk, dv = carry
        scores, capped = _scores(q, k, segments, i, j, softcap)
        weights = jnp.exp(scores - log_z[i][..., None])
        dv = dv.at[j].add(jnp.einsum("bkgts,bkgth->bksh", weights.astype(v.dtype), d_out[i], **wide))
        d_scores = jnp.einsum("bkgth,bksh->bkgts", d_out[i], v[j], **wide) - overlap[i][..., None]
        d_scores = weights * d_scores * scale
        if softcap is not None:
            d_scores = d_scores * (1.0 - (capped / softcap) ** 2)
        d_scores = d_scores.astype(q.dtype)
        dq = dq.at[i].add(jnp.einsum("bkgts,bksh->bkgth", d_scores, k[j], **wide))
        dk = dk.at[j].add(jnp.einsum("bkgts,bkgth->bksh", d_scores, q[i], **wide))
        return dq, dk, dv

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dq, dk, dv = _scan_pairs(body, start, q.shape[0])
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
