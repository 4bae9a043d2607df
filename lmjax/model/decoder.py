"""The decoder: token ids → hidden states → logits.

NNX modules define it; at every boundary parameters are a nested dict of float32 arrays, the layers stacked along a leading L.
    params = init(config, key)
    hidden = forward(config, params, tokens, positions, mask, types)      [B T D]
    logits = unembed(config, params, hidden, types)                       [B T V]
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from lmjax.axes import CONTEXT
from lmjax.model import rope
from lmjax.model.attention import Mask
from lmjax.model.block import BRANCH, Block, scaled
from lmjax.model.blockwise import soft_cap
from lmjax.model.cache import Cache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dense, dropout
from lmjax.model.initialize import Initializer
from lmjax.model.norm import Norm
from lmjax.model.router import RouterStats
from lmjax.sharding.mesh import constrain, is_manual, platform

Params = dict[str, Any]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "block_outputs": jax.checkpoint_policies.save_only_these_names(BRANCH),
}


class Embed(nnx.Module):
    """Token embeddings, and learned positions where the config has them."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.token = nnx.Param(init((config.vocab_size, config.d_model)), axes=("vocab", "embed"))
        if config.position == "learned":
            self.position = nnx.Param(init((config.max_length, config.d_model)), axes=(None, "embed"))
        if config.prefix_dim is not None:
            self.prefix = nnx.Param(
                init((config.prefix_dim, config.d_model), fan_in=config.prefix_dim), axes=(None, "embed")
            )


class Head(nnx.Module):
    """The output product of an untied decoder."""

    def __init__(self, config: ModelConfig, init: Initializer):
        shape = (config.d_model, config.vocab_size)
        self.kernel = nnx.Param(init(shape, fan_in=config.d_model, output=True), axes=("embed", "vocab"))


Layer = Callable[[Array, Any], tuple[Array, tuple[Any, Any]]]


def scan_pattern(
    bodies: Sequence[Layer], x: Array, layers: Any, caches: Sequence[Any], unroll: bool
) -> tuple[Array, tuple[Any, ...], Any]:
    """`jax.lax.scan` over stacked layers, whose bodies repeat: whole periods are scanned, the rest is written out.

    Args:
      bodies: body(x, (layer, cache)) → (x, (cache, out)), one for each layer of a period.
      x: what passes through.
      layers: arrays with a leading L.
      caches: for each body, those of its layers stacked; they may differ in shape.
      unroll: write out all.

    Returns:
      x, the caches as written, and each layer's out, stacked.
    """
    period, num_layers = len(bodies), jax.tree.leaves(layers)[0].shape[0]
    periods = num_layers // period
    if period == 1:
        x, (cache, out) = jax.lax.scan(bodies[0], x, (layers, caches[0]), unroll=num_layers if unroll else 1)
        return x, (cache,), out

    def run(x, item):
        """Up to a period of layers, one after another."""
        layers, caches = item
        # Unstacked and not indexed, whose gradients would be padded with zeros and added.
        results = []
        for body, cache, *layer in zip(bodies, caches, *map(jnp.unstack, jax.tree.leaves(layers)), strict=False):
            x, result = body(x, (tree.unflatten(layer), cache))
            results.append(result)
        caches, outs = zip(*results, strict=True)
        return x, (caches, jax.tree.map(lambda *out: jnp.stack(out), *outs))

    leaves, tree = jax.tree.flatten(layers)
    whole, rest = map(tree.unflatten, zip(*(jnp.split(a, [periods * period]) for a in leaves), strict=True))
    whole = jax.tree.map(lambda a: a.reshape(periods, period, *a.shape[1:]), whole)
    item = whole, jax.tree.map(lambda a: a[:periods], tuple(caches))
    x, (written, out) = jax.lax.scan(run, x, item, unroll=max(periods, 1) if unroll else 1)
    out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)
    if num_layers % period == 0:
        return x, written, out
    last = tuple(caches)[: num_layers % period]
    x, (last, more) = run(x, (rest, jax.tree.map(lambda a: a[periods], last)))
    ended = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), written[: len(last)], last)
    return x, (*ended, *written[len(last) :]), jax.tree.map(lambda *a: jnp.concatenate(a), out, more)


class Decoder(nnx.Module):
    """Embeddings, L stacked layers, a final norm, and a head where untied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, Initializer(config, rngs))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, Initializer(config, rngs))

        self.layers = stack(rngs)
        self.final_norm = Norm(config)
        if not config.tie_embeddings:
            self.head = Head(config, Initializer(config, rngs))

    def enter(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], types: Dtypes) -> Float[Array, "B T D"]:
        """Embeds tokens, and adds positions where they are added."""
        config = self.config
        # Rows are looked up in a table whose D is whole: a lookup in a table cut along D is not partitioned by the batch.
        # Nor are its rows cut where `context` is manual: XLA's partitioner aborts on such a lookup (jax 0.12).
        x = constrain(self.embed.token[...], None if is_manual(CONTEXT) else "vocab", None)[tokens]
        if config.scale_embeddings:  # by the root as an activation, rounded: Gemma was trained so
            x = x.astype(types.activation) * jnp.asarray(math.sqrt(config.d_model), types.activation)
        if config.position == "learned":
            x = x + self.embed.position[...][positions]
        elif config.position == "sinusoidal":
            x = x + rope.sinusoidal(positions, config.d_model)
        return constrain(x.astype(types.activation), "batch", None, None)

    def enter_prefix(
        self, x: Float[Array, "B T D"], prefix: Float[Array, "B P I"], positions: Array, mask: Mask, types: Dtypes
    ) -> tuple[Float[Array, "B _ D"], Array, Mask]:
        """Embeddings with projected features before them, and positions and mask of both: they belong to the row's first document."""
        rows, length = prefix.shape[:2]
        x = jnp.concatenate([dense(prefix, self.embed.prefix[...], types), x], axis=1)
        places = jnp.broadcast_to(jnp.arange(length), (rows, length))
        segments = mask.segments
        if segments is not None:
            segments = jnp.concatenate([jnp.ones((rows, length), segments.dtype), segments], axis=1)
        mask = dataclasses.replace(mask, segments=segments, prefix=length)
        return x, jnp.concatenate([places, positions + length], axis=1), mask

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Mask,
        types: Dtypes,
        key: PRNGKeyArray | None,
        cache: Cache | None,
        unroll: bool,
        prefix: Float[Array, "B P I"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None, RouterStats | None]:
        """Hidden states after the final norm, the cache as written, and what the routers of experts did."""
        config = self.config
        keys = [None, None] if key is None else jax.random.split(key)
        x = self.enter(tokens, positions, types)
        if prefix is not None:
            x, positions, mask = self.enter_prefix(x, prefix, positions, mask, types)
        x = dropout(x, config.dropout, keys[0])
        graph, layers = nnx.split(self.layers)

        def body(kind, x, layer):
            (weights, layer_key), layer_cache = layer
            x, *out = nnx.merge(graph, weights)(x, positions, mask, types, layer_key, layer_cache, kind)
            return x, tuple(out)

        bodies = {kind: functools.partial(body, kind) for kind in set(config.pattern)}
        if config.remat != "none" and cache is None:
            remat = functools.partial(jax.checkpoint, policy=REMAT_POLICIES[config.remat], prevent_cse=unroll)
            bodies = {kind: remat(one) for kind, one in bodies.items()}
        layer_keys = None if key is None else jax.random.split(keys[1], config.num_layers)
        caches = [None] * len(config.pattern) if cache is None else cache
        bodies = [bodies[kind] for kind in config.pattern]
        x, written, routed = scan_pattern(bodies, x, (layers, layer_keys), caches, unroll)
        cache = None if cache is None else written
        x = x if prefix is None else x[:, prefix.shape[1] :]
        return scaled(self.final_norm(x), 1.0 / config.width_ratio), cache, routed


# ------------------------------------------------------------------------------------------------------- plain boundaries


def init(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Initial parameters, float32; a function of (config, key) alone."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=key)), nnx.Param))


@functools.lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder's structure, with shapes for arrays."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))), nnx.Param, ...)[:2]


def logical_axes(config: ModelConfig) -> Params:
    """The logical axes of every parameter, in a tree like `init`'s."""
    _, state = _abstract(config)
    flat = {path: variable.get_metadata()["axes"] for path, variable in nnx.to_flat_state(state)}
    tree: Params = {}
    for path, names in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = ("layers", *names) if path[0] == "layers" else names
    return tree


def merge(config: ModelConfig, params: Params) -> Decoder:
    """The module over these parameters, to be used inside a trace."""
    graph, state = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: `replace_by_pure_dict` writes in place
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Mask,
    types: Dtypes,
    key: PRNGKeyArray | None = None,
    cache: Cache | None = None,
) -> tuple[Float[Array, "B T D"], Cache | None]:
    """Hidden states [B T D] in `types.activation`, and the cache. `key` turns dropout on."""
    return forward_routed(config, params, tokens, positions, mask, types, key, cache)[:2]


def forward_routed(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Mask,
    types: Dtypes,
    key: PRNGKeyArray | None = None,
    cache: Cache | None = None,
    prefix: Float[Array, "B P I"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache | None, RouterStats | None]:
    """`forward`, and what the routers of all layers did; none where the MLPs are dense.

    `prefix` holds features that stand before the text, see one another, and are seen by the row's first document.
    """
    unroll = config.scan == "off" or (config.scan == "auto" and platform() == "cpu")
    return merge(config, params)(tokens, positions, mask, types, key, cache, unroll, prefix)


def output_weights(config: ModelConfig, params: Params) -> Float[Array, "D V"]:
    """The product that makes logits: the head, or the transposed embeddings where tied."""
    return params["embed"]["token"].T if config.tie_embeddings else params["head"]["kernel"]


def unembed(config: ModelConfig, params: Params, hidden: Float[Array, "B T D"], types: Dtypes) -> Float[Array, "B T V"]:
    """Logits, float32."""
    logits = dense(hidden, output_weights(config, params), types).astype(jnp.float32)
    return constrain(soft_cap(logits, config.logit_softcap), "batch", None, "vocab")
