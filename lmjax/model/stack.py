"""The layers: their parameters stacked, and a scan over what repeats.

A parameter is stacked over the layers that have it: attention and norms over all, `mlp` over those with an MLP, `moe` over those
with experts. `lmjax.model.pattern` says what each layer is and what repeats.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from lmjax.axes import FSDP
from lmjax.model import module
from lmjax.model.block import BRANCH, Block
from lmjax.model.cache import Cache, LayerCache
from lmjax.model.config import ModelConfig
from lmjax.model.initialize import Initializer
from lmjax.model.module import Params
from lmjax.model.pattern import Kind, Segment, segments
from lmjax.model.router import RouterStats
from lmjax.sharding.gather import keep_all_but_gathered
from lmjax.sharding.mesh import is_manual

REMAT_POLICIES = {
    "none": keep_all_but_gathered,  # where weights are gathered; elsewhere there is nothing to recompute
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "block_outputs": jax.checkpoint_policies.save_only_these_names(BRANCH),
}
OWN = {"mlp": False, "moe": True}  # what only layers without, or with, experts have

Layer = Callable[..., tuple[Array, LayerCache | None, RouterStats | None]]


@functools.lru_cache(maxsize=32)
def _block(config: ModelConfig) -> module.Abstract:
    """A layer's structure, where all layers are alike."""
    return module.abstract(lambda: Block(config, Initializer(config, nnx.Rngs(params=0))))


def block(config: ModelConfig, kind: Kind, weights: Params) -> Block:
    """One layer over its parameters, to be used inside a trace."""
    return module.merge(_block(config.with_all(kind.experts)), weights)


def init(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Initial parameters of all layers, each drawn from its own key."""
    keys = jax.random.split(key, config.num_layers)
    drawn, places = {}, {}
    for experts in sorted(set(config.expert_layers)):
        alike, places[experts] = config.with_all(experts), np.flatnonzero(np.equal(config.expert_layers, experts))

        def draw(key, config=alike):
            return module.arrays(Block(config, Initializer(config, nnx.Rngs(params=key))))

        drawn[experts] = jax.vmap(draw)(keys[places[experts]])
    if len(drawn) == 1:
        return next(iter(drawn.values()))
    own = {name: drawn[experts].pop(name) for name, experts in OWN.items()}
    order = np.argsort(np.concatenate([places[experts] for experts in drawn]))
    return own | jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *drawn.values())


def logical_axes(config: ModelConfig) -> Params:
    """The logical axes of the layers' parameters."""
    tree: Params = {}
    for experts in set(config.expert_layers):
        tree |= module.axes(_block(config.with_all(experts)))
    return jax.tree.map(lambda names: ("layers", *names), tree, is_leaf=lambda x: isinstance(x, tuple))


def layer_axes(config: ModelConfig, kind: Kind) -> Params:
    """The logical axes of one layer's parameters."""
    return module.axes(_block(config.with_all(kind.experts)))


def run(
    config: ModelConfig,
    layers: Params,
    layer: Layer,
    x: Float[Array, "B T D"],
    numbers: Int[Array, " L"],
    cache: Cache | None,
    unroll: bool,
) -> tuple[Float[Array, "B T D"], Cache | None, RouterStats | None]:
    """Runs x through layers.

    Args:
      config: the decoder; its `remat` is applied where there is no cache.
      layers: their parameters: of all layers, or of a part of them like the first.
      layer: layer(kind, weights, x, number, cache) → x, the cache as written, and what a router did.
      x: the residual stream.
      numbers: of the layers.
      cache: see `lmjax.model.cache.empty_cache`.
      unroll: write out all layers.

    Returns:
      x, the cache as written, and what the routers did, stacked over the layers with experts.
    """
    parts, written, routed = segments(config, len(numbers)), [], []
    shared = {name: layers[name] for name in layers if name not in OWN}
    stacks = [split((shared, numbers), [len(part.kinds) * part.repeats for part in parts])]
    for name, experts in OWN.items():
        sizes = [part.repeats * sum(kind.experts == experts for kind in part.kinds) for part in parts]
        stacks.append(split(layers[name], sizes) if name in layers else [None] * len(parts))
    for number, (part, *pieces) in enumerate(zip(parts, *stacks, strict=True)):
        caches = (None,) * len(part.kinds) if cache is None else cache[number]
        body = rematerialized(config, layer, unroll or part.repeats == 1) if cache is None else layer
        x, caches, stats = scan(part, body, x, pieces, caches, unroll)
        written.append(caches)
        routed += [] if stats is None else [stats]
    stats = jax.tree.map(lambda *each: jnp.concatenate(each), *routed) if routed else None
    return x, None if cache is None else tuple(written), stats


def rematerialized(config: ModelConfig, layer: Layer, written_out: bool) -> Layer:
    """The layer by the config's policy. Out of a loop the compiler must be kept from joining what is computed twice."""
    if config.remat == "none" and not is_manual(FSDP):
        return layer
    policy = REMAT_POLICIES[config.remat]
    return jax.checkpoint(layer, policy=policy, prevent_cse=written_out, static_argnums=(0,))


def scan(
    part: Segment, layer: Layer, x: Array, pieces: list[Any], caches: tuple[Any, ...], unroll: bool
) -> tuple[Array, tuple[Any, ...], Any]:
    """`jax.lax.scan` over the repetitions of a segment; `pieces` are the layers' (shared, numbers), MLPs and experts, stacked."""
    single = len(part.kinds) == 1
    if not single:
        pieces = jax.tree.map(lambda a: a.reshape(part.repeats, -1, *a.shape[1:]), pieces)

    def period(x, item):
        """Layers one after another."""
        pieces, caches = item
        (alike, mlps, experts), results = ([piece] if single else unstacked(piece) for piece in pieces), []
        own = {False: ("mlp", iter(mlps)), True: ("moe", iter(experts))}
        for kind, (weights, number), cache in zip(part.kinds, alike, caches, strict=True):
            name, rest = own[kind.experts]
            x, *result = layer(kind, {**weights, name: next(rest)}, x, number, cache)
            results.append(result)
        caches, stats = zip(*results, strict=True)
        return x, (caches, joined([each for each in stats if each is not None], single))

    x, (caches, stats) = jax.lax.scan(period, x, (pieces, caches), unroll=part.repeats if unroll else 1)
    return x, caches, stats if single else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stats)


def joined(stats: list[RouterStats], single: bool) -> RouterStats | None:
    """Those of a period, stacked; of a period of one layer, that one's."""
    if not stats:
        return None
    return stats[0] if single else jax.tree.map(lambda *each: jnp.stack(each), *stats)


def split(tree: Any, sizes: list[int]) -> list[Any]:
    """Cuts the leading dim; none for a size of 0. Split and not indexed, whose gradients would be padded with zeros and added."""
    if len(sizes) == 1:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    pieces = zip(*(jnp.split(leaf, np.cumsum(sizes)[:-1]) for leaf in leaves), strict=True)
    return [structure.unflatten(piece) if size else None for piece, size in zip(pieces, sizes, strict=True)]


def unstacked(tree: Any) -> list[Any]:
    """A tree for each index of the leading dim; none where there is no array."""
    leaves, structure = jax.tree.flatten(tree)
    return [structure.unflatten(each) for each in zip(*map(jnp.unstack, leaves), strict=True)]
