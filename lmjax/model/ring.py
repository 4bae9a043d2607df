"""Attention over a row whose tokens are split over the devices of the `context` axis: keys and values travel in a ring.

Device c of C holds chunks c and 2 C - 1 - c of the row's 2 C (zig-zag), so that causality leaves every device the same work: at each
turn after its own, the keys that arrive are before one of its chunks as a whole and before half of the other,

    keys of r < c:   (c, r)              and (2 C - 1 - c, r)
    keys of r > c:   (2 C - 1 - c, 2 C - 1 - r)  and (2 C - 1 - c, r)

The softmax runs on over the turns (`blockwise`), the backward pass sends each key's gradient around with it until it is home
(Liu et al., 2023, arXiv 2310.01889; Brandon et al., 2023, arXiv 2311.09431). It is called where `context` is manual: see
`lmjax.sharding.context`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lmjax.axes import CONTEXT
from lmjax.config import need
from lmjax.model import blockwise
from lmjax.model.blockwise import Grads, Keys, Queries, Rule
from lmjax.sharding import mesh


def attend(
    q: Float[Array, "B T K G H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"] | None,
    rule: Rule,
    block: int,
) -> Float[Array, "B T K G H"]:
    """Causal attention of this device's tokens, T of them in two chunks, over the whole row."""
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
    chunk = q.shape[1] // 2
    need(
        rule.prefix <= chunk,
        f"a prefix of {rule.prefix} tokens exceeds the {chunk} of a chunk: lower config.mesh.context",
    )
    block = next(size for size in range(min(block, chunk), 0, -1) if chunk % size == 0)
    blocks = (blockwise.to_blocks(x, block) for x in (q, k, v, segments))
    return blockwise.from_blocks(_attend(*blocks, rule))


def _starts(num_blocks: int, block: int, device) -> Int[Array, " blocks"]:
    """The places in the row where a device's blocks begin."""
    half = num_blocks // 2
    inside = jnp.arange(half) * block
    last = 2 * mesh.size(CONTEXT) - 1
    return jnp.concatenate([device * half * block + inside, (last - device) * half * block + inside])


def _later_pairs(num_blocks: int, source, device) -> Int[Array, "pairs 2"]:
    """Pairs of blocks for keys of another device: the queries' second chunk and the keys' first, and the pair of the others' order."""
    half = num_blocks // 2
    i, j = (x.reshape(-1) for x in jnp.indices((half, half)))
    both = jnp.where(source < device, 0, half)
    return jnp.stack([jnp.concatenate([half + i, both + i]), jnp.concatenate([j, both + j])], axis=1)


def _pass_on(tree):
    """Every device's arrays to the next one of the ring."""
    size = mesh.size(CONTEXT)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, [(c, (c + 1) % size) for c in range(size)]), tree)


def _inside(body, rule: Rule, queries: Queries, keys: Keys):
    """`body` for a pair of blocks that the window touches; others are skipped where they run."""
    if rule.window is None:
        return body
    block = queries.q.shape[-2]

    def checked(carry, i, j):
        first, last = queries.starts[i], keys.starts[j] + block - 1
        touched = last > first - rule.window
        if rule.prefix:
            touched |= jnp.maximum(first, keys.starts[j]) < rule.prefix
        return jax.lax.cond(touched, body, lambda carry, i, j: carry, carry, i, j)

    return checked


def _turns(run, carry, keys: Keys, travelling, prefix: int):
    """run(carry, keys, travelling, pairs) → (carry, travelling) for the keys of every device, its own first.

    `travelling` moves on with the keys, and after the last turn is home.
    """
    size, device = mesh.size(CONTEXT), jax.lax.axis_index(CONTEXT)
    num_blocks, block = keys.k.shape[0], keys.k.shape[-2]
    own = blockwise.block_pairs(num_blocks, block, Rule(prefix=prefix))  # the prefix is in the first chunk of all
    carry, travelling = run(
        carry, keys._replace(starts=_starts(num_blocks, block, device)), travelling, jnp.asarray(own)
    )

    def turn(state, count):
        carry, keys, travelling = state
        keys, travelling = _pass_on((keys, travelling))
        source = (device - count) % size
        placed = keys._replace(starts=_starts(num_blocks, block, source))
        carry, travelling = run(carry, placed, travelling, _later_pairs(num_blocks, source, device))
        return (carry, keys, travelling), None

    (carry, _, travelling), _ = jax.lax.scan(turn, (carry, keys, travelling), jnp.arange(1, size))
    return carry, _pass_on(travelling)


def _queries(q, segments) -> Queries:
    return Queries(q, segments, _starts(q.shape[0], q.shape[-2], jax.lax.axis_index(CONTEXT)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segments, rule):
    return _forward(q, k, v, segments, rule)[0]


def _forward(q, k, v, segments, rule):
    queries = _queries(q, segments)

    def run(state, keys, travelling, pairs):
        def body(state, i, j):
            return blockwise.forward_pair(state, i, j, queries, keys, rule)

        return blockwise.scan_pairs(_inside(body, rule, queries, keys), state, pairs), travelling

    state, _ = _turns(run, blockwise.begin(q), Keys(k, v, segments), (), rule.prefix)
    out, log_z = state.finish(v.dtype)
    return out, (q, k, v, segments, out, log_z)


def _backward(rule, residuals, d_out):
    q, k, v, segments, out, log_z = residuals
    queries, outputs = _queries(q, segments), blockwise.saved(out, d_out, log_z)

    def run(dq, keys, travelling, pairs):
        def body(grads, i, j):
            return blockwise.backward_pair(grads, i, j, queries, keys, outputs, rule)

        grads = blockwise.scan_pairs(_inside(body, rule, queries, keys), Grads(dq, *travelling), pairs)
        return grads.dq, (grads.dk, grads.dv)

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dq, (dk, dv) = _turns(run, dq, Keys(k, v, segments), (dk, dv), rule.prefix)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
