"""Gradients that cross the `data` axis compressed, where that is the slow one (slices joined over a data-centre network).

Each replica has its own gradient g_r (`lmjax/train/step.py`) and what it could not send before, e_r:

    bfloat16   Σ_r round(g_r), then rounded again: half the bytes of an exact all-reduce
    int8       x_r = g_r + e_r in blocks of a scale and codes of 8 bits: a quarter   Seide et al., 2014; Tang et al., 2021 (2102.02888)
    topk       the largest share of x_r, values with their indices                   Stich et al., 2018 (1809.07599)

The first two are a reduce-scatter (all-to-all of codes, summed in float32) and an all-gather of the sum's codes, whose rounding error is
the owner's of that part. Error feedback: nothing is lost, Σ_r e_r is exactly what has not reached the parameters yet.

A device exchanges its own shard with the same shard of other replicas; only leaves that lie over the same axes share a message, so that
what several devices hold stays equal on them.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmjax.axes import DATA, EXPERT, STAGE
from lmjax.config import need
from lmjax.optim.config import CompressConfig
from lmjax.sharding import mesh

WITH_FEEDBACK = ("int8", "topk")


def check(config: CompressConfig, sizes: dict[str, int]) -> None:
    """A `UserError` where there is nothing to compress, or another axis already keeps `data` to itself."""
    if config.kind == "none":
        return
    need(
        sizes[DATA] > 1,
        f"config.compress.kind={config.kind!r} compresses gradients between replicas; config.mesh.data={sizes[DATA]} has one: take 'none'",
    )
    for axis in (STAGE, EXPERT):
        need(
            sizes[axis] == 1,
            f"config.compress.kind={config.kind!r} does not go with config.mesh.{axis}={sizes[axis]}: take 'none'",
        )


def initial(config: CompressConfig, params: Any) -> Any:
    """What each replica of the ambient mesh has not sent yet, [R, …] of each parameter: nothing; None without error feedback."""
    if config.kind not in WITH_FEEDBACK:
        return None
    return jax.tree.map(lambda p: jnp.zeros((mesh.size(DATA), *p.shape), jnp.float32), params)


def with_replicas(spec: PartitionSpec) -> PartitionSpec:
    """Where [R, …] of an array at `spec` lives."""
    return PartitionSpec(DATA, *spec)


def encode(config: CompressConfig, x: Float[Array, "R n"]) -> tuple[Array, ...]:
    """Codes and scales of parts."""
    if config.kind == "bfloat16":
        # As integers: a compiler may widen floats on the way.
        return (jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)
    blocks = x.reshape(x.shape[0], -1, config.block)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    return jnp.round(blocks / jnp.where(scales > 0, scales, 1.0)).astype(jnp.int8), scales


def decode(config: CompressConfig, codes: tuple[Array, ...]) -> Float[Array, "R n"]:
    """The parts that codes stand for."""
    if config.kind == "bfloat16":
        return jax.lax.bitcast_convert_type(codes[0], jnp.bfloat16).astype(jnp.float32)
    values, scales = codes
    return (values * scales).reshape(values.shape[0], -1)


def exchange_codes(config: CompressConfig, x: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """(Σ_r x_r as it arrived, what this replica did not send), each replica summing its part."""
    replicas = mesh.size(DATA)
    multiple = replicas * (config.block if config.kind == "int8" else 1)
    parts = jnp.pad(x, (0, -x.size % multiple)).reshape(replicas, -1)
    codes = encode(config, parts)
    own = sum(decode(config, tuple(jax.lax.all_to_all(c, DATA, 0, 0) for c in codes)))
    own_codes = encode(config, own[None])
    total = decode(config, tuple(jax.lax.all_gather(c[0], DATA) for c in own_codes))
    left = (parts - decode(config, codes)).at[jax.lax.axis_index(DATA)].add(own - decode(config, own_codes)[0])
    return total.reshape(-1)[: x.size], left.reshape(-1)[: x.size]


def exchange_largest(config: CompressConfig, x: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The same of the numbers of largest magnitude."""
    count = max(1, round(config.share * x.size))
    size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))  # what is no number must arrive, so that the step is skipped
    places = jax.lax.top_k(size, count)[1]
    values, all_places = (jax.lax.all_gather(a, DATA, tiled=True) for a in (x[places], places))
    return jnp.zeros_like(x).at[all_places].add(values), x.at[places].set(0.0)


def reduce(config: CompressConfig, grads: Any, residual: Any, specs: Any) -> tuple[Any, Any]:
    """(Σ_r of the replicas' gradients, laid out by `specs`; what is left for the next step). Inputs are trees of [R, …]."""
    leaves, tree = jax.tree.flatten(grads)
    flat_specs = tree.flatten_up_to(specs)
    exchange = exchange_largest if config.kind == "topk" else exchange_codes
    groups: dict[frozenset, list[int]] = {}
    for i, spec in enumerate(flat_specs):
        axes = itertools.chain.from_iterable((part,) if isinstance(part, str) else part or () for part in spec)
        groups.setdefault(frozenset(axes), []).append(i)

    def local(*mine):
        totals, lefts = [None] * len(mine), [None] * len(mine)
        for members in groups.values():
            results = exchange(config, jnp.concatenate([mine[i].reshape(-1) for i in members]))
            ends = list(itertools.accumulate(mine[i].size for i in members))
            for out, result in zip((totals, lefts), results, strict=True):
                for i, piece in zip(members, jnp.split(result, ends[:-1]), strict=True):
                    out[i] = piece.reshape(mine[i].shape)
        return [total[0] for total in totals], lefts

    feedback = config.kind in WITH_FEEDBACK
    sent = [g + e for g, e in zip(leaves, jax.tree.leaves(residual), strict=True)] if feedback else leaves
    places = [with_replicas(spec) for spec in flat_specs]
    totals, lefts = jax.shard_map(
        local,
        in_specs=tuple(places),
        out_specs=(list(flat_specs), places),
        axis_names=mesh.automatic_axes(),
        check_vma=False,
    )(*sent)
    return tree.unflatten(totals), tree.unflatten(lefts) if feedback else None
