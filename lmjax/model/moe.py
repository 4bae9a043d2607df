"""Mixture of experts: every token runs through k of E MLPs, which the router chooses.

    y = Σ_{e chosen} gate_e · down_e(act(up_e(x)))   (+ shared MLP)

Choices are sorted by expert, the tokens' rows are gathered in that order, and each expert's rows are multiplied together:

    dropless   all of them, in one product of groups of unequal size
    capacity   the first C = ⌈factor · T k / E⌉ of each row of the batch, in buckets; a token that finds its expert full passes by on the
               residual stream. By row and in the order of tokens, so that drops depend on nothing that comes later or stands beside

Each device sorts its own rows, or its own tokens of rows that `context` splits. Where experts are split over the mesh, buckets of
rows go to their devices and back by all-to-all (Lepikhin et al., 2020, 2006.16668); a dropless bucket holds the worst case.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lmjax.axes import EXPERT, TENSOR
from lmjax.model import router
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes
from lmjax.model.grouped import grouped_dot
from lmjax.model.initialize import Initializer
from lmjax.model.mlp import ACTIVATIONS, Mlp
from lmjax.model.router import RouterStats, Routes
from lmjax.sharding import mesh
from lmjax.sharding.context import before_halves, manual_shards


class Weights(NamedTuple):
    """A layer's arrays, or a device's part of them."""

    router: Float[Array, "D E"]
    bias: Float[Array, "E"] | None
    up: Float[Array, "E D M F"]
    down: Float[Array, "E F D"]


# Where they are while they are used: whole over fsdp.
PLACES = Weights(router=(None, None), bias=(None,), up=("experts", None, None, "mlp"), down=("experts", "mlp", None))


class Moe(nnx.Module):
    """Weights: router (D, E), router_bias (E) where it balances; expert_up (E, D, M, F) and expert_down (E, F, D), each as an MLP's;
    shared, an MLP, and shared_gate (D)."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.config = config
        moe, width, hidden, halves = config.moe, config.d_model, config.hidden, 2 if config.gated else 1
        experts = moe.num_experts
        self.router = nnx.Param(init((width, experts), fan_in=width, output=True), axes=("embed", "experts"))
        self.expert_up = nnx.Param(
            init((experts, width, halves, hidden), fan_in=width), axes=("experts", "embed", None, "mlp")
        )
        self.expert_down = nnx.Param(
            init((experts, hidden, width), fan_in=hidden, residual=True), axes=("experts", "mlp", "embed")
        )
        if moe.bias_rate:
            self.router_bias = nnx.Param(jnp.zeros(experts), axes=("norm",))
        if moe.shared_d_ff:
            self.shared = Mlp(config, init, moe.shared_d_ff)
        if moe.shared_gate:
            self.shared_gate = nnx.Param(init((width,), fan_in=width, output=True), axes=("norm",))

    def __call__(
        self, x: Float[Array, "B T D"], segments: Int[Array, "B T"] | None, types: Dtypes, dropless: bool
    ) -> tuple[Float[Array, "B T D"], RouterStats]:
        """The branch's output, before the residual sum, and what the router did. Tokens of segment 0 run through no expert;
        `dropless` overrules a capacity."""
        moe = self.config.moe
        weights = Weights(
            router=self.router[...] / self.config.width_ratio,
            bias=self.router_bias[...] if moe.bias_rate else None,
            up=self.expert_up[...].astype(types.matmul),
            down=self.expert_down[...].astype(types.matmul),
        )
        valid = jnp.ones(x.shape[:2], bool) if segments is None else segments != 0

        def local(x, valid, weights):
            return mix(self.config, x, valid, weights, types, dropless or moe.capacity_factor is None)

        out, stats = on_own_rows(local)(x, valid, weights)
        if not moe.shared_d_ff:
            return out, stats
        shared = self.shared(x, types)
        if moe.shared_gate:
            gate = self.shared_gate[...] / self.config.width_ratio
            shared = shared * jax.nn.sigmoid(x @ gate.astype(x.dtype))[..., None]
        return out + shared, stats


def on_own_rows(local):
    """`local(x, valid, weights)` on each device's rows, experts and hidden units."""
    if not mesh.is_split():
        return local
    places, rows = Weights(*(mesh.spec(*axes) for axes in PLACES)), mesh.spec("rows")
    return jax.shard_map(
        local,
        in_specs=(rows, rows, places),
        out_specs=(rows, rows),
        axis_names=mesh.automatic_axes(),
        check_vma=False,
    )


def mix(
    config: ModelConfig,
    x: Float[Array, "B T D"],
    valid: Bool[Array, "B T"],
    weights: Weights,
    types: Dtypes,
    dropless: bool,
) -> tuple[Float[Array, "B T D"], RouterStats]:
    """Routes rows, runs them through the experts, and sums what comes back."""
    routes, stats = router.route(config.moe, x, weights.router, weights.bias, valid)
    flat = x.astype(types.matmul).reshape(-1, x.shape[-1])
    if dropless:
        mixed = without_drops(config, flat, routes, valid, weights, types)
    else:
        mixed, kept = with_capacity(config, flat, routes, valid, weights, types)
        stats = stats._replace(dropped=jnp.sum(stats.load - kept, axis=-1))
    out = jnp.einsum("btkd,btk->btd", mixed.reshape(*routes.gates.shape, -1), routes.gates.astype(mixed.dtype))
    return (jax.lax.psum(out, TENSOR) if mesh.size(TENSOR) > 1 else out), stats


# -------------------------------------------------------------------------------------------------------------------- rows


class Plan(NamedTuple):
    """How choices, numbered by token and rank, lie in a buffer of rows; a number past the end is none."""

    there: Int[Array, "rows"]  # choice of each row
    slot: Int[Array, "choices"]  # row of each choice


@jax.custom_vjp
def moved(
    x: Float[Array, "tokens D"], there: Int[Array, "rows"], back: Int[Array, "tokens _"]
) -> Float[Array, "rows D"]:
    """Rows `there` of x, zeros where there is none; `back` lists where each row of x went, so that the gradient is a gather, too."""
    return x.at[there].get(mode="fill", fill_value=0)


def _moved_backward(back, d_out):
    return jnp.sum(d_out.at[back].get(mode="fill", fill_value=0), axis=1), None, None


moved.defvjp(lambda x, there, back: (moved(x, there, back), back), _moved_backward)


class Sorted(NamedTuple):
    """Choices in the order of their groups; those of no group come last."""

    order: Int[Array, "choices"]  # choice at each place
    place: Int[Array, "choices"]  # of each choice
    sizes: Int[Array, "groups"]
    starts: Int[Array, "groups"]


def by_group(groups: Int[Array, "choices"], num_groups: int) -> Sorted:
    """Sorts choices by group, in order inside each; a group past the end is none."""
    order = jnp.argsort(groups, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    bounds = jnp.searchsorted(groups[order], jnp.arange(num_groups + 1, dtype=groups.dtype)).astype(jnp.int32)
    return Sorted(order, place, jnp.diff(bounds), bounds[:-1])


def in_buckets(groups: Int[Array, "choices"], by: Sorted, size: int) -> Plan:
    """The first `size` choices of each group in a bucket of its own."""
    none, num_groups = groups.size, by.sizes.size
    rank = jnp.arange(size)
    there = jnp.where(
        rank < by.sizes[:, None], by.order.at[by.starts[:, None] + rank].get(mode="fill", fill_value=none), none
    )
    rank = by.place - by.starts.at[groups].get(mode="fill", fill_value=0)
    slot = jnp.where((groups < num_groups) & (rank < size), groups * size + rank, num_groups * size)
    return Plan(there.reshape(-1), slot)


def end_to_end(groups: Int[Array, "choices"], by: Sorted) -> Plan:
    """All choices of each group, one group after the other."""
    none = groups.size
    real = jnp.arange(none) < jnp.sum(by.sizes)
    return Plan(jnp.where(real, by.order, none), jnp.where(groups < by.sizes.size, by.place, none))


def enter(x: Float[Array, "tokens D"], plan: Plan, top_k: int) -> Float[Array, "rows D"]:
    """The tokens' rows, in the buffer."""
    return moved(x, plan.there // top_k, plan.slot.reshape(-1, top_k))


def leave(rows: Float[Array, "rows D"], plan: Plan) -> Float[Array, "choices D"]:
    """What each choice came to; zeros for those that found no place."""
    return moved(rows, plan.slot, plan.there[:, None])


# ----------------------------------------------------------------------------------------------------------------- experts


def without_drops(
    config: ModelConfig,
    x: Float[Array, "tokens D"],
    routes: Routes,
    valid: Bool[Array, "B T"],
    weights: Weights,
    types: Dtypes,
) -> Float[Array, "choices D"]:
    """What every choice came to."""
    moe, shards = config.moe, mesh.size(EXPERT)
    experts = jnp.where(valid[..., None], routes.experts, moe.num_experts).reshape(-1)
    by = by_group(experts, moe.num_experts)
    if shards == 1:
        plan = end_to_end(experts, by)
        return leave(grouped_mlp(config, enter(x, plan, moe.top_k), by.sizes, weights, types), plan)
    own = moe.num_experts // shards  # experts of a device
    bucket = x.shape[0] * min(moe.top_k, own)  # a token has no more choices on one device
    devices = Sorted(by.order, by.place, by.sizes.reshape(shards, own).sum(1), by.starts[::own])
    plan = in_buckets(experts // own, devices, bucket)
    rows = jax.lax.all_to_all(enter(x, plan, moe.top_k), EXPERT, 0, 0, tiled=True)
    sizes = jax.lax.all_to_all(by.sizes, EXPERT, 0, 0, tiled=True).reshape(shards, own)
    # Of each bucket that came, the expert of each row: they are sorted by it.
    ends = jnp.cumsum(sizes, axis=1)
    here = jnp.sum(jnp.arange(bucket)[:, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32).reshape(-1)
    by = by_group(here, own)
    inner = end_to_end(here, by)
    rows = leave(grouped_mlp(config, enter(rows, inner, 1), by.sizes, weights, types), inner)
    return leave(jax.lax.all_to_all(rows, EXPERT, 0, 0, tiled=True), plan)


def with_capacity(
    config: ModelConfig,
    x: Float[Array, "tokens D"],
    routes: Routes,
    valid: Bool[Array, "B T"],
    weights: Weights,
    types: Dtypes,
) -> tuple[Float[Array, "choices D"], Float[Array, "B E"]]:
    """What each choice came to, zeros for those that were dropped; and how many each expert kept of each row."""
    moe, shards = config.moe, mesh.size(EXPERT)
    (rows, length), experts = valid.shape, moe.num_experts
    whole = length * manual_shards()
    capacity = min(math.ceil(moe.capacity_factor * whole * moe.top_k / experts), whole)
    groups = jnp.where(valid[..., None], routes.experts + experts * jnp.arange(rows)[:, None, None], rows * experts)
    groups = groups.reshape(-1)
    by = by_group(groups, rows * experts)
    if manual_shards() > 1:
        groups = first_of_row(groups, by, jnp.arange(groups.size) // moe.top_k % length >= length // 2, capacity)
        by, capacity = by_group(groups, rows * experts), min(capacity, length)
    plan = in_buckets(groups, by, capacity)
    buckets = enter(x, plan, moe.top_k).reshape(rows, experts, capacity, -1).swapaxes(0, 1)
    buckets = buckets.reshape(experts, rows * capacity, -1)
    if shards > 1:
        buckets = jax.lax.all_to_all(buckets, EXPERT, 0, 1, tiled=True)
    hidden = jnp.einsum("ecd,edmf->ecmf", buckets, weights.up, preferred_element_type=types.activation)
    hidden = activate(config, hidden).astype(types.matmul)
    out = jnp.einsum("ecf,efd->ecd", hidden, weights.down, preferred_element_type=types.activation)
    if shards > 1:
        out = jax.lax.all_to_all(out, EXPERT, 1, 0, tiled=True)
    out = out.reshape(experts, rows, capacity, -1).swapaxes(0, 1).reshape(rows * experts * capacity, -1)
    return leave(out, plan), jnp.minimum(by.sizes, capacity).reshape(rows, experts).astype(jnp.float32)


def first_of_row(
    groups: Int[Array, "choices"], by: Sorted, later: Bool[Array, "choices"], capacity: int
) -> Int[Array, "choices"]:
    """The groups, rows of experts, without choices past the first `capacity` of a row whose tokens are split over `context`.

    `later` tells a device's second chunk of a row from its first.
    """
    none = by.sizes.size
    counts = jnp.stack([jnp.zeros(none, jnp.int32).at[groups].add(half, mode="drop") for half in (~later, later)])
    before = before_halves(counts)
    before = before.at[1].add(-counts[0])  # which the place among this device's own counts already
    rank = by.place - by.starts.at[groups].get(mode="fill", fill_value=0)
    rank += jnp.where(later, *(half.at[groups].get(mode="fill", fill_value=0) for half in before[::-1]))
    return jnp.where(rank < capacity, groups, none)


def grouped_mlp(
    config: ModelConfig, rows: Float[Array, "rows D"], sizes: Int[Array, "E"], weights: Weights, types: Dtypes
) -> Float[Array, "rows D"]:
    """Rows sorted by expert, each through its own."""
    experts, width, halves, hidden = weights.up.shape
    up = grouped_dot(rows, weights.up.reshape(experts, width, -1), sizes, types.activation)
    up = activate(config, up.reshape(-1, halves, hidden)).astype(types.matmul)
    return grouped_dot(up, weights.down, sizes, types.activation)


def activate(config: ModelConfig, hidden: Float[Array, "*dims M F"]) -> Float[Array, "*dims F"]:
    """The activation, times the up product where gated."""
    first, *second = jnp.unstack(hidden, axis=-2)
    activation = ACTIVATIONS[config.activation](first)
    return activation * second[0] if config.gated else activation
