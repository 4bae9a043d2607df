"""Causal attention by blocks, in plain JAX: memory grows with T, not T², and time with T · window where there is one.

The row is cut into blocks. For the pairs (query block i, key block j) that the mask can touch a running softmax keeps each
query's maximum m, sum l and output o:

    m' = max(m, max s),   l' = l e^(m - m') + Σ e^(s - m'),   o' = o e^(m - m') + e^(s - m') v

The backward pass keeps only the output and log Z = m + log l, and computes each pair's scores again:

    p = e^(s - log Z),  dv += pᵀ do,  ds = p (do vᵀ - Σ(o do)),  dq += ds k,  dk += dsᵀ q

Queries and keys may be parts of a row that stand anywhere in it: `lmjax/model/ring.py` runs the same pairs over several devices.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

NEVER = -1e30  # the score of a key that is not seen: finite, so that no difference of two is NaN
UNROLLED_PAIRS = (
    10  # up to here the pairs are written out, and XLA fuses each; above, a loop keeps compile time constant
)


class Rule(NamedTuple):
    """The static part of the scores and of the mask; see `lmjax.model.attention.Mask`."""

    softcap: float | None = None
    window: int | None = None  # query i sees keys j > i - window
    prefix: int = 0  # the row's first tokens, which see one another


CAUSAL = Rule()


class Queries(NamedTuple):
    """Queries in blocks."""

    q: Float[Array, "blocks B K G block H"]
    segments: Int[Array, "blocks B block"]
    starts: Int[Array, " blocks"] | None = None  # the place of each block's first token; none: one after another


class Keys(NamedTuple):
    """Keys and values in blocks."""

    k: Float[Array, "blocks B K block H"]
    v: Float[Array, "blocks B K block H"]
    segments: Int[Array, "blocks B block"]
    starts: Int[Array, " blocks"] | None = None


def soft_cap(scores: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """c tanh(x / c): bounds scores or logits smoothly (Gemma 2, arXiv 2408.00118)."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def visible(queries: Array, keys: Array, window: int | None, prefix: int) -> Array:
    """Whether a query at its place sees a key at its: causal, inside the window; the prefix sees all of itself."""
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    return seen | ((queries < prefix) & (keys < prefix)) if prefix else seen


def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    softcap: float | None,
    block: int,
    window: int | None = None,
    prefix: int = 0,
) -> Float[Array, "B T K G H"]:
    """Causal attention inside segments. Rows whose length is no multiple of the block are padded at the end."""
    length = q.shape[1]
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
    padding = -length % block
    if padding:
        # Padding comes after every real query, so causality hides it; its own queries see themselves and are cut off.
        q, k, v, segments = (jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, segments))
    blocks = (to_blocks(x, block) for x in (q, k, v, segments))
    return from_blocks(_attend(*blocks, Rule(softcap, window, prefix)))[:, :length]


def to_blocks(x: Array, block: int) -> Array:
    """[B, T, K, …, H] → [blocks, B, K, …, block, H]; [B, T] → [blocks, B, block]."""
    x = x.reshape(x.shape[0], -1, block, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 2, -2 if x.ndim > 3 else -1), 1, 0)


def from_blocks(x: Array) -> Array:
    """[blocks, B, K, …, block, H] → [B, T, K, …, H]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 0, 1), -2, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def block_pairs(num_blocks: int, block: int, rule: Rule) -> Int[np.ndarray, "pairs 2"]:
    """The pairs (i, j) of blocks of one row that hold a query and a key it sees, row by row."""
    row, column = np.indices((num_blocks, num_blocks))
    touched = column <= row
    if rule.window is not None:
        touched &= (column + 1) * block - 1 > row * block - rule.window  # the last key, for the first query
    touched |= np.maximum(row, column) * block < rule.prefix
    return np.argwhere(touched).astype(np.int32)


def scan_pairs(body: Callable, carry: Any, pairs: Iterable) -> Any:
    """Runs body(carry, i, j) over pairs of blocks."""
    if isinstance(pairs, np.ndarray) and len(pairs) <= UNROLLED_PAIRS:
        for i, j in pairs:
            carry = body(carry, int(i), int(j))
        return carry
    return jax.lax.scan(lambda c, pair: (body(c, pair[0], pair[1]), None), carry, pairs)[0]


def _scores(queries: Queries, keys: Keys, i, j, rule: Rule):
    """Scores [B K G block block] of a pair, in float32, NEVER where the mask hides the key; and before the mask."""
    q, k = queries.q[i], keys.k[j]
    scale = 1.0 / math.sqrt(q.shape[-1])
    block = q.shape[-2]
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    scores = soft_cap(scores, rule.softcap)
    places = jnp.arange(block)
    first, second = (
        start * block if side.starts is None else side.starts[start] for side, start in ((queries, i), (keys, j))
    )
    seen = visible((first + places)[:, None], (second + places)[None], rule.window, rule.prefix)
    seen = seen & (queries.segments[i][:, :, None] == keys.segments[j][:, None, :])
    return jnp.where(seen[:, None, None], scores, NEVER), scores


class Running(NamedTuple):
    """The running softmax of every query."""

    out: Float[Array, "blocks B K G block H"]
    top: Float[Array, "blocks B K G block"]
    total: Float[Array, "blocks B K G block"]

    def finish(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """The output in `dtype`, and log Z."""
        return (self.out / self.total[..., None]).astype(dtype), self.top + jnp.log(self.total)


def begin(q: Float[Array, "blocks B K G block H"]) -> Running:
    """Nothing seen yet."""
    stats = q.shape[:-1]
    return Running(jnp.zeros(q.shape, jnp.float32), jnp.full(stats, NEVER, jnp.float32), jnp.zeros(stats, jnp.float32))


def forward_pair(state: Running, i, j, queries: Queries, keys: Keys, rule: Rule) -> Running:
    """The running softmax after query block i has seen key block j."""
    out, top, total = state
    scores, _ = _scores(queries, keys, i, j, rule)
    new_top = jnp.maximum(top[i], scores.max(axis=-1))
    shrink = jnp.exp(top[i] - new_top)
    weights = jnp.exp(scores - new_top[..., None])
    v = keys.v[j]
    mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out.at[i].set(out[i] * shrink[..., None] + mixed)
    return Running(out, top.at[i].set(new_top), total.at[i].set(total[i] * shrink + weights.sum(axis=-1)))


class Grads(NamedTuple):
    """Gradients in float32, summed over pairs."""

    dq: Float[Array, "blocks B K G block H"]
    dk: Float[Array, "blocks B K block H"]
    dv: Float[Array, "blocks B K block H"]


class Saved(NamedTuple):
    """What the backward pass knows of each query's output."""

    d_out: Float[Array, "blocks B K G block H"]
    overlap: Float[Array, "blocks B K G block"]  # Σ(o do)
    log_z: Float[Array, "blocks B K G block"]


def saved(out: Array, d_out: Array, log_z: Array) -> Saved:
    """A product and a sum in place of the einsum are slower by far on a CPU."""
    return Saved(d_out, jnp.einsum("...h,...h->...", out, d_out, preferred_element_type=jnp.float32), log_z)


def backward_pair(grads: Grads, i, j, queries: Queries, keys: Keys, outputs: Saved, rule: Rule) -> Grads:
    """Adds the gradients that pass through the scores of query block i and key block j."""
    wide = {"preferred_element_type": jnp.float32}
    q, k, v, d_out = queries.q[i], keys.k[j], keys.v[j], outputs.d_out[i]
    scores, capped = _scores(queries, keys, i, j, rule)
    weights = jnp.exp(scores - outputs.log_z[i][..., None])
    dv = grads.dv.at[j].add(jnp.einsum("bkgts,bkgth->bksh", weights.astype(v.dtype), d_out, **wide))
    d_scores = jnp.einsum("bkgth,bksh->bkgts", d_out, v, **wide) - outputs.overlap[i][..., None]
    d_scores = weights * d_scores * (1.0 / math.sqrt(q.shape[-1]))
    if rule.softcap is not None:
        d_scores = d_scores * (1.0 - (capped / rule.softcap) ** 2)
    d_scores = d_scores.astype(q.dtype)
    dq = grads.dq.at[i].add(jnp.einsum("bkgts,bksh->bkgth", d_scores, k, **wide))
    dk = grads.dk.at[j].add(jnp.einsum("bkgts,bkgth->bksh", d_scores, q, **wide))
    return Grads(dq, dk, dv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segments, rule):
    return _forward(q, k, v, segments, rule)[0]


def _forward(q, k, v, segments, rule):
    queries, keys = Queries(q, segments), Keys(k, v, segments)
    pairs = block_pairs(q.shape[0], q.shape[-2], rule)
    state = scan_pairs(lambda c, i, j: forward_pair(c, i, j, queries, keys, rule), begin(q), pairs)
    out, log_z = state.finish(v.dtype)
    return out, (q, k, v, segments, out, log_z)


def _backward(rule, residuals, d_out):
    q, k, v, segments, out, log_z = residuals
    queries, keys, outputs = Queries(q, segments), Keys(k, v, segments), saved(out, d_out, log_z)
    start = Grads(*(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
    pairs = block_pairs(q.shape[0], q.shape[-2], rule)
    grads = scan_pairs(lambda c, i, j: backward_pair(c, i, j, queries, keys, outputs, rule), start, pairs)
    return *(grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v))), None


_attend.defvjp(_forward, _backward)
