"""The true matrices of a decoder's weights, which are stored stacked over layers and fused (`lmjax/optim/shapes.py` says how)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmjax.optim.shapes import MATRICES, piece_shapes, stack_shapes
from lmjax.sharding import mesh, rules


def leaf_name(path: tuple) -> str:
    """The last part of a parameter's path."""
    return str(path[-1].key)


def order(name: str, ndim: int) -> tuple[int, ...]:
    """The dims of a piece, those that count matrices first, then in, then out."""
    into, out = MATRICES[name]
    return (*(dim for dim in range(ndim) if dim not in (*into, *out)), *into, *out)


def pieces(name: str, weight: Array) -> list[Array]:
    """The fused products of a weight, by `piece_shapes`."""
    if name != "qkv":
        return [weight]
    queries, both = jnp.split(weight, [weight.shape[3] - 2], axis=3)
    return [queries[:, None], jnp.moveaxis(both, 3, 1)[..., None, :]]


def fused(name: str, parts: Sequence[Array]) -> Array:
    """The weight of `pieces`."""
    if name != "qkv":
        return parts[0]
    queries, both = parts
    return jnp.concatenate([queries[:, 0], jnp.moveaxis(both[..., 0, :], 1, 3)], axis=3)


def split(name: str, weight: Array) -> list[Float[Array, "_ _ _"]]:
    """Stacks [n, in, out] of the weight's true matrices."""
    shapes = stack_shapes(name, weight.shape)
    parts = zip(pieces(name, weight), shapes, strict=True)
    return [jnp.transpose(piece, order(name, piece.ndim)).reshape(shape) for piece, shape in parts]


def join(name: str, stacks: Sequence[Float[Array, "_ _ _"]], weight: Array) -> Array:
    """The inverse of `split`, in the shape of `weight`."""
    parts = []
    for stack, shape in zip(stacks, piece_shapes(name, weight.shape), strict=True):
        dims = order(name, len(shape))
        inverse = sorted(range(len(shape)), key=dims.__getitem__)
        parts.append(jnp.transpose(stack.reshape([shape[dim] for dim in dims]), inverse))
    return fused(name, parts)


class Dealer:
    """Runs functions of stacks [n, …], with n dealt over the devices that hold different parts of a weight: each matrix whole on one of
    them, none on all. A number that does not divide is filled up with zeros.

    One stack is dealt after another: that bounds the memory, and XLA:CPU can hang where many collectives are ready at once.
    """

    def __init__(self) -> None:
        self.done: Array | None = None  # 0, once the stack before is through

    def __call__(self, function: Callable[..., Any], stacks: Any, *whole: Array) -> Any:
        """`function(stacks, *whole)` of a tree of stacks; `whole` are the same on all devices."""
        axes = rules.RULES["matrices"]
        shards, count = math.prod(map(mesh.size, axes)), jax.tree.leaves(stacks)[0].shape[0]
        if shards == 1:
            return function(stacks, *whole)
        if self.done is not None:
            stacks = jax.tree.map(lambda x: x + self.done, stacks)
        filled = jax.tree.map(lambda x: jnp.pad(x, [(0, -count % shards)] + [(0, 0)] * (x.ndim - 1)), stacks)
        dealt = jax.shard_map(
            function,
            in_specs=(PartitionSpec(axes), *(PartitionSpec() for _ in whole)),
            out_specs=PartitionSpec(axes),
            axis_names=mesh.automatic_axes(),
            check_vma=False,
        )(filled, *whole)
        self.done = 0 * sum(jnp.sum(x.reshape(x.shape[0], -1)[:, 0]) for x in jax.tree.leaves(dealt))
        return jax.tree.map(lambda x: x[:count], dealt)
