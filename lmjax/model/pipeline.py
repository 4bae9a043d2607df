"""Layers in a pipeline: each stage of the mesh holds a part of them, and micro-batches of rows pass from stage to stage.

One tick is one `vmap` over the stages, whose leading dim is split over the mesh, and a step to the next stage along it (Xu et al., 2021,
arXiv 2105.04663). The schedule is `lmjax.sharding.stages`. Rows wait before the first
tick, and after the last, on all stages alike: those of a group of S micro-batches travel round in S ticks, and the first stage swaps
the one that comes by against the one that it finished. In the bubble stages work on what nobody reads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lmjax.axes import DATA, STAGE
from lmjax.sharding import mesh
from lmjax.sharding.mesh import constrain
from lmjax.sharding.stages import Schedule

BY_ROUND, STAGES = PartitionSpec(None, STAGE), PartitionSpec(STAGE)  # [R, S, …] and [S, …]

# stage(x, weights, numbers, rows) → (x, out), with the rows of a micro-batch and the layers of a chunk; leaves of out are [layers, B, …]
Stage = Callable[[Array, Any, Array, Any], tuple[Array, Any]]


def run(stage: Stage, x: Array, weights: Any, numbers: Array, rows: Any, plan: Schedule) -> tuple[Array, Any]:
    """x after all layers, and what each layer gave out, [layers, B, …].

    Args:
      stage: runs a chunk of consecutive layers.
      x: [B, T, D], B split over "batch".
      weights: arrays stacked over all layers, or over those that have them: equal parts belong to the chunks.
      numbers: of the layers [L].
      rows: arrays with a leading B, which belong to the rows of x.
      plan: of this many rows.
    """
    if mesh.size(DATA) == 1:
        return run_replica(stage, x, weights, numbers, rows, plan)

    # Replicas apart, whose gradients are summed once: the compiler alone would sum them at every tick.
    def replica(x, weights, numbers, rows):
        return run_replica(stage, x, weights, numbers, rows, plan)

    whole, own = PartitionSpec(), PartitionSpec(DATA)
    return jax.shard_map(
        replica,
        in_specs=(own, whole, whole, own),
        out_specs=(own, PartitionSpec(None, DATA)),
        axis_names={DATA},
        check_vma=False,
    )(x, weights, numbers, rows)


def run_replica(stage: Stage, x: Array, weights: Any, numbers: Array, rows: Any, plan: Schedule) -> tuple[Array, Any]:
    """`run` of the rows of one replica."""
    leaves, tree = jax.tree.flatten(weights)
    chunks = [deal(w, plan) for w in leaves]
    rows = jax.tree.map(lambda a: merge_places(micro_batches(a, plan)), rows)
    numbers = numbers.reshape(plan.repeats, plan.stages, -1)
    visits = (np.arange(plan.ticks), *plan.visits())
    stages = jax.vmap(stage, spmd_axis_name=STAGE)

    def tick(carry, visit):
        time, rounds, micro = visit
        state, waiting, chunks = carry
        group = time // plan.chunks % plan.groups
        passing = jax.lax.dynamic_index_in_dim(waiting, group, axis=1, keepdims=False)
        state, passing = swap(state, passing, time % plan.chunks < plan.stages)
        pairs = [of_round(w, rounds) for w in chunks]
        chunks, own = ([pair[i] for pair in pairs] for i in (0, 1))
        own_rows = jax.tree.map(lambda a: a[micro], rows)
        state, out = stages(state, tree.unflatten(own), numbers[rounds, jnp.arange(plan.stages)], own_rows)
        waiting = jax.lax.dynamic_update_index_in_dim(waiting, roll(passing), group, axis=1)
        return (roll(state), waiting, chunks), out

    waiting = micro_batches(x, plan)
    start = jnp.zeros_like(waiting[:, 0]), waiting, chunks
    (state, waiting, _), outs = jax.lax.scan(tick, start, visits)
    _, passing = swap(state, waiting[:, 0], True)
    # A group takes the place of the one after it.
    waiting = jnp.concatenate([waiting[:, 1:], roll(passing)[:, None]], axis=1)
    return whole_batch(waiting, plan), jax.tree.map(lambda a: by_layer(a, plan), outs)


# -------------------------------------------------------------------------------------------------------------------- rows


def replicas() -> int:
    """Into how many pieces the rows of a micro-batch are cut."""
    return mesh.shards("rows")


def micro_batches(a: Array, plan: Schedule) -> Array:
    """[B, …] → [S, groups, B / M, …]; each device keeps its rows."""
    apart = a.reshape(replicas(), plan.stages, plan.groups, -1, *a.shape[1:])
    apart = jnp.moveaxis(apart, 0, 2)
    return constrain(
        apart.reshape(plan.stages, plan.groups, -1, *a.shape[1:]), "layers", None, "rows", *[None] * (a.ndim - 1)
    )


def whole_batch(a: Array, plan: Schedule) -> Array:
    """Back again."""
    apart = a.reshape(plan.stages, plan.groups, replicas(), -1, *a.shape[3:])
    whole = jnp.moveaxis(apart, 2, 0).reshape(-1, *a.shape[3:])
    return constrain(whole, "batch", *[None] * (whole.ndim - 1))


def merge_places(a: Array) -> Array:
    """[S, groups, rows, …] → [M, rows, …], all of them on every stage: they are small, and each stage takes those of its micro-batch."""
    merged = a.reshape(-1, *a.shape[2:])
    return constrain(merged, None, "rows", *[None] * (merged.ndim - 2))


def swap(state: Array, passing: Array, now: Array | bool) -> tuple[Array, Array]:
    """Exchanges what the first stage holds, `now` or not at all."""
    here = (jnp.arange(state.shape[0]) == 0) & now
    here = here.reshape(-1, *[1] * (state.ndim - 1))
    return jnp.where(here, passing, state), jnp.where(here, state, passing)


def roll(state: Array) -> Array:
    """From each stage to the next, and from the last to the first."""
    stages = state.shape[0]
    pairs = [(s, (s + 1) % stages) for s in range(stages)]
    return on_stages(lambda x: jax.lax.ppermute(x, STAGE, pairs), STAGES, STAGES)(state)


def on_stages(local: Callable[..., Array], before: Any, after: PartitionSpec) -> Callable[..., Array]:
    """`local` on each stage's part of arrays; the compiler partitions over the other axes."""
    return jax.shard_map(local, in_specs=before, out_specs=after, axis_names={STAGE}, check_vma=False)


def by_layer(outs: Array, plan: Schedule) -> Array:
    """[ticks, S, layers of a chunk, rows of a micro-batch, …] → [layers, B, …], without the bubble's."""
    found = jax.vmap(lambda a, times: a[times], in_axes=(1, 1), out_axes=1)(outs, plan.times())
    repeats, stages, places, groups, layers, _, *dims = found.shape  # [R, S, place, group, layers, rows, …]
    found = found.reshape(repeats, stages, places, groups, layers, replicas(), -1, *dims)
    found = jnp.moveaxis(found, (4, 5), (2, 3))
    return found.reshape(repeats * stages * layers, -1, *dims)


# ----------------------------------------------------------------------------------------------------------------- weights


@jax.custom_vjp
def of_round(chunks: Array, rounds: Array) -> tuple[Array, Array]:
    """[R, S, …] as it came, and [S, …]: for each stage the chunk of its round.

    The chunks go on from tick to tick so that in the backward pass their gradient does, and each tick adds to its own chunk alone.
    """
    return chunks, on_stages(_taken, (BY_ROUND, STAGES), STAGES)(chunks, rounds)


def _taken(chunks, rounds):
    return jax.lax.dynamic_index_in_dim(chunks, rounds[0], keepdims=False)


def _added(sums, rounds, grads):
    added = _taken(sums, rounds) + grads
    return jax.lax.dynamic_update_index_in_dim(sums, added, rounds[0], 0)


def _of_round_backward(rounds, cotangents):
    return on_stages(_added, (BY_ROUND, STAGES, STAGES), BY_ROUND)(cotangents[0], rounds, cotangents[1]), None


of_round.defvjp(lambda chunks, rounds: (of_round(chunks, rounds), rounds), _of_round_backward)


def deal(w: Array, plan: Schedule) -> Array:
    """[L, …], whose equal parts the stages hold, → [R, S, L / (R S), …], of which stage s gets [:, s].

    With several rounds, R permutes move each device's chunks d R … d R + R - 1 to their stages. At turn j device d sends the one of its
    number (j + d // (S / g)) % R, g = gcd(R, S): no two go to one stage.
    """
    stages, repeats = plan.stages, plan.repeats
    if repeats == 1:
        return w.reshape(1, stages, -1, *w.shape[1:])
    devices, turns = np.arange(stages), np.arange(repeats)[:, None]
    sent = (turns + devices // (stages // np.gcd(repeats, stages))) % repeats  # [turn, device]
    chunk = devices * repeats + sent
    kept = np.zeros_like(sent)  # [turn, stage]: the round of the chunk that comes
    np.put_along_axis(kept, chunk % stages, chunk // stages, axis=1)

    def local(w):
        device = jax.lax.axis_index(STAGE)
        chunks = w.reshape(repeats, -1, *w.shape[1:])
        out = jnp.zeros_like(chunks)
        for turn in range(repeats):
            leaving = jax.lax.dynamic_index_in_dim(chunks, jnp.asarray(sent)[turn, device], keepdims=False)
            pairs = [(int(d), int(c % stages)) for d, c in zip(devices, chunk[turn], strict=True)]
            coming = jax.lax.ppermute(leaving, STAGE, pairs)
            out = jax.lax.dynamic_update_index_in_dim(out, coming, jnp.asarray(kept)[turn, device], 0)
        return out[:, None]

    return on_stages(local, STAGES, BY_ROUND)(w)
