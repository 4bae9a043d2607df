"""Layers in a pipeline: each stage of the mesh holds a part of them, and micro-batches of rows pass from stage to stage.

At every tick each device runs layers of its stage, and passes what comes out on to the next stage (Huang et al., 2018, arXiv 1811.06965).
The schedule is `lmjax.sharding.stages`. Each stage keeps its rows of the batch, in groups, before the first tick and after the last: the
S micro-batches of a group, one on each stage, travel round in S ticks, and the first stage swaps the one that comes by against the one
that it finished. In the bubble stages work on what nobody reads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from lmjax.axes import DATA, STAGE
from lmjax.sharding import mesh
from lmjax.sharding.stages import Schedule

# stage(x, weights, numbers, rows) → (x, out), with the rows of a micro-batch and the layers of a chunk; leaves of out are [layers, B, …]
Stage = Callable[[Array, Any, Array, Any], tuple[Array, Any]]


def run(
    stage: Stage, x: Array, weights: Any, numbers: Array, rows: Any, plan: Schedule, unroll: bool = False
) -> tuple[Array, Any]:
    """x after all layers, and what each layer gave out, [layers, B, …].

    Args:
      stage: runs a chunk of consecutive layers.
      x: [B, T, D], B split over "batch".
      weights: arrays stacked over all layers, or over those that have them: equal parts belong to the chunks.
      numbers: of the layers [L].
      rows: arrays with a leading B, which belong to the rows of x.
      plan: of the rows of a replica.
      unroll: write out all ticks.
    """
    if mesh.is_manual(STAGE):
        return run_stage(stage, x, weights, numbers, rows, plan, unroll)
    # Replicas apart, too: their gradients are summed once, where the compiler alone would sum them at every tick.
    own = mesh.restrict(PartitionSpec((DATA, STAGE)), mesh.automatic_axes())

    def local(x, weights, numbers, rows):
        return run_stage(stage, x, weights, numbers, rows, plan, unroll)

    return jax.shard_map(
        local,
        in_specs=(own, PartitionSpec(STAGE), PartitionSpec(), own),
        out_specs=(own, PartitionSpec(None, *own)),
        axis_names={DATA, STAGE} & mesh.automatic_axes(),
        check_vma=False,
    )(x, weights, numbers, rows)


def run_stage(
    stage: Stage, x: Array, weights: Any, numbers: Array, rows: Any, plan: Schedule, unroll: bool
) -> tuple[Array, Any]:
    """`run` on one stage of one replica: with its rows around the layers, and its part of the weights."""
    leaves, tree = jax.tree.flatten(weights)
    here = jax.lax.axis_index(STAGE)
    numbers = numbers.reshape(plan.repeats, plan.stages, -1)[:, here]
    rounds, micros = (jnp.asarray(each)[:, here] for each in plan.visits())
    rows = jax.tree.map(lambda a: on_all_stages(micro_batches(a, plan)), rows)

    def tick(carry, visit):
        time, number, micro = visit
        state, waiting, chunks = carry
        group = time // plan.chunks % plan.groups
        passing = jax.lax.dynamic_index_in_dim(waiting, group, keepdims=False)
        state, passing = swap(state, passing, time % plan.chunks < plan.stages)
        chunks, own = zip(*(of_round(w, number) for w in chunks), strict=True)
        state, out = stage(state, tree.unflatten(own), numbers[number], jax.tree.map(lambda a: a[micro], rows))
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, roll(passing, plan), group, 0)
        return (roll(state, plan), waiting, chunks), out

    waiting = micro_batches(x, plan)
    start = jnp.zeros_like(waiting[0]), waiting, tuple(deal(w, plan) for w in leaves)
    visits = np.arange(plan.ticks), rounds, micros
    (state, waiting, _), outs = jax.lax.scan(tick, start, visits, unroll=plan.ticks if unroll else 1)
    _, passing = swap(state, waiting[0], True)
    # A group takes the place of the one after it.
    waiting = jnp.concatenate([waiting[1:], roll(passing, plan)[None]])
    times = jnp.asarray(plan.times())[:, here]  # [R, place, group]
    return whole_batch(waiting), jax.tree.map(lambda a: by_layer(a[times]), outs)


# -------------------------------------------------------------------------------------------------------------------- rows


def micro_batches(a: Array, plan: Schedule) -> Array:
    """[B, …] of a stage → [groups, B / groups, …], row b in group b mod groups: each device keeps its share of every one."""
    return jnp.moveaxis(a.reshape(-1, plan.groups, *a.shape[1:]), 1, 0)


def whole_batch(a: Array) -> Array:
    """Back again."""
    return jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:])


def on_all_stages(a: Array) -> Array:
    """[groups, rows, …] of each stage → [M, rows, …] of all: they are small, and each stage takes those of its micro-batch."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(on_all_stages(jax.random.key_data(a)), impl=jax.random.key_impl(a))
    return jax.lax.all_gather(a, STAGE, tiled=True)


def swap(state: Array, passing: Array, now: Array | bool) -> tuple[Array, Array]:
    """Exchanges what the first stage holds, `now` or not at all."""
    here = (jax.lax.axis_index(STAGE) == 0) & now
    return jnp.where(here, passing, state), jnp.where(here, state, passing)


def roll(state: Array, plan: Schedule) -> Array:
    """From each stage to the next, and from the last to the first."""
    return jax.lax.ppermute(state, STAGE, [(s, (s + 1) % plan.stages) for s in range(plan.stages)])


def by_layer(out: Array) -> Array:
    """[R, place, groups, layers of a chunk, rows, …] of this stage's layers → [layers, B, …] of all, for this stage's rows."""
    out = jax.lax.all_to_all(out, STAGE, 1, 1, tiled=True)  # the rows that began at this place, by stage
    out = jnp.moveaxis(out, 3, 2)  # [R, S, layers, groups, rows, …]
    out = out.reshape(-1, *out.shape[3:])
    return jax.vmap(whole_batch)(out)


# ----------------------------------------------------------------------------------------------------------------- weights


@jax.custom_vjp
def of_round(chunks: Array, number: Int[Array, ""]) -> tuple[Array, Array]:
    """[R, …] as it came, and the chunk of a round.

    The chunks go on from tick to tick so that in the backward pass their gradient does, and each tick adds to its own chunk alone.
    """
    return chunks, jax.lax.dynamic_index_in_dim(chunks, number, keepdims=False)


def _of_round_backward(number, cotangents):
    sums, grads = cotangents
    added = jax.lax.dynamic_index_in_dim(sums, number, keepdims=False) + grads
    return jax.lax.dynamic_update_index_in_dim(sums, added, number, 0), None


of_round.defvjp(lambda chunks, number: (of_round(chunks, number), number), _of_round_backward)


def deal(w: Array, plan: Schedule) -> Array:
    """This stage's equal part of a stack of layers [L / S, …] → its chunks [R, L / (R S), …].

    With several rounds, R permutes move each device's chunks d R … d R + R - 1 to their stages. At turn j device d sends the one of its
    number (j + d // (S / g)) % R, g = gcd(R, S): no two go to one stage.
    """
    stages, repeats = plan.stages, plan.repeats
    chunks = w.reshape(repeats, -1, *w.shape[1:])
    if repeats == 1:
        return chunks
    devices, turns = np.arange(stages), np.arange(repeats)[:, None]
    sent = (turns + devices // (stages // np.gcd(repeats, stages))) % repeats  # [turn, device]
    chunk = devices * repeats + sent
    kept = np.zeros_like(sent)  # [turn, stage]: the round of the chunk that comes
    np.put_along_axis(kept, chunk % stages, chunk // stages, axis=1)
    device, out = jax.lax.axis_index(STAGE), jnp.zeros_like(chunks)
    for turn in range(repeats):
        leaving = jax.lax.dynamic_index_in_dim(chunks, jnp.asarray(sent)[turn, device], keepdims=False)
        pairs = [(int(d), int(c % stages)) for d, c in zip(devices, chunk[turn], strict=True)]
        coming = jax.lax.ppermute(leaving, STAGE, pairs)
        out = jax.lax.dynamic_update_index_in_dim(out, coming, jnp.asarray(kept)[turn, device], 0)
    return out
