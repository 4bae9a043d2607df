"""The decoder: token ids → hidden states → logits.

NNX modules define it; at every boundary parameters are a nested dict of float32 arrays, the layers' stacked.
    params = init(config, key)
    hidden = forward(config, params, tokens, positions, mask, types)      [B T D]
    logits = unembed(config, params, hidden, types)                       [B T V]
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from lmjax.axes import FSDP, STAGE
from lmjax.model import module, pipeline, rope, stack
from lmjax.model.attention import Mask
from lmjax.model.block import scaled, whole
from lmjax.model.blockwise import soft_cap
from lmjax.model.cache import NOWHERE, Cache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dense, dropout, fold_in
from lmjax.model.initialize import Initializer
from lmjax.model.module import Params
from lmjax.model.norm import Norm
from lmjax.model.router import RouterStats
from lmjax.sharding.gather import gather, gather_tree, look_up, scattered_first
from lmjax.sharding.mesh import constrain, is_inside, is_manual, manual_rows, own_rows, platform, shards, size
from lmjax.sharding.stages import schedule


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


class Decoder(nnx.Module):
    """Embeddings, a final norm, and a head where untied; the layers between them come as an argument, see `lmjax.model.stack`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, Initializer(config, rngs))

        self.final_norm = Norm(config)
        if not config.tie_embeddings:
            self.head = Head(config, Initializer(config, rngs))

    def enter(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], types: Dtypes) -> Float[Array, "B T D"]:
        """Embeds tokens, and adds positions where they are added."""
        config = self.config
        if is_manual(FSDP):
            x = look_up(self.embed.token[...], tokens, types.activation, types.summed)
        else:
            # Rows are looked up in a table whose D is whole: a lookup in a table cut along D is not partitioned by the batch.
            # Nor are its rows cut where `context` is manual: XLA's partitioner aborts on such a lookup (jax 0.12).
            x = constrain(self.embed.token[...], None if is_inside() else "vocab", None)[tokens]
        if config.scale_embeddings:  # by the root as an activation, rounded: Gemma was trained so
            x = x.astype(types.activation) * jnp.asarray(math.sqrt(config.d_model), types.activation)
        if config.position == "learned":
            x = x + gather(self.embed.position[...], (None, "embed"), jnp.float32)[positions]
        elif config.position == "sinusoidal":
            x = x + rope.sinusoidal(positions, config.d_model)
        return constrain(x.astype(types.activation), "batch", None, None)

    def enter_prefix(
        self, x: Float[Array, "B T D"], prefix: Float[Array, "B P I"], positions: Array, mask: Mask, types: Dtypes
    ) -> tuple[Float[Array, "B _ D"], Array, Mask]:
        """Embeddings with projected features before them, and positions and mask of both: they belong to the row's first document."""
        rows, length = prefix.shape[:2]
        x = jnp.concatenate(
            [dense(prefix, gather(self.embed.prefix[...], (None, "embed"), types.matmul, types.summed), types), x],
            axis=1,
        )
        places = jnp.broadcast_to(jnp.arange(length), (rows, length))
        segments = mask.segments
        if segments is not None:
            segments = jnp.concatenate([jnp.ones((rows, length), segments.dtype), segments], axis=1)
        queries = mask.query_places
        if queries is not None:  # of a cache
            queries = jnp.concatenate([places, jnp.where(queries < NOWHERE, queries + length, NOWHERE)], axis=1)
        mask = dataclasses.replace(mask, segments=segments, query_places=queries, prefix=length)
        return x, jnp.concatenate([places, positions + length], axis=1), mask

    def __call__(
        self,
        layers: Params,
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
        x = self.enter(tokens, positions, types)
        if prefix is not None:
            x, positions, mask = self.enter_prefix(x, prefix, positions, mask, types)
        row_keys = None if key is None else own_rows(jax.random.split(key, len(x) * manual_rows()))
        x = dropout(x, config.dropout, fold_in(row_keys, config.num_layers))

        def run(x, layers, numbers, rows, cache=None):
            """Consecutive layers of these numbers, from and to a residual stream of these rows."""
            positions, segments, keys = rows
            seen = dataclasses.replace(mask, segments=segments)

            def layer(kind, weights, x, number, cache):
                weights = gather_tree(weights, stack.layer_axes(config, kind), types.matmul, types.summed)
                block = stack.block(config, kind, weights)
                return block(x, positions, seen, types.in_layers(), fold_in(keys, number), cache, kind.attention)

            return stack.run(config, layers, layer, x, numbers, cache, unroll)

        rows, numbers = (positions, mask.segments, row_keys), jnp.arange(config.num_layers)
        if size(STAGE) > 1 and cache is None:
            of_replica = len(x) // shards("rows") * (size(STAGE) if is_manual(STAGE) else 1)
            plan = schedule(size(STAGE), config.stage_repeats, of_replica, config.micro_batches)
            x, routed = pipeline.run(lambda *part: run(*part)[::2], x, layers, numbers, rows, plan, unroll)
        else:
            x, cache, routed = run(x, layers, numbers, rows, cache)
        x = whole(x, config.split_tokens and cache is None)
        x = x if prefix is None else x[:, prefix.shape[1] :]
        return scaled(self.final_norm(x), 1.0 / config.width_ratio), cache, routed


# ------------------------------------------------------------------------------------------------------- plain boundaries


def init(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Initial parameters, float32; a function of (config, key) alone."""
    rngs = nnx.Rngs(params=key)
    return {**module.arrays(Decoder(config, rngs)), "layers": stack.init(config, rngs.params())}


@functools.lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> module.Abstract:
    """The structure of all but the layers."""
    return module.abstract(lambda: Decoder(config, nnx.Rngs(params=0)))


def logical_axes(config: ModelConfig) -> Params:
    """The logical axes of every parameter, in a tree like `init`'s."""
    return {**module.axes(_abstract(config)), "layers": stack.logical_axes(config)}


def merge(config: ModelConfig, params: Params) -> Decoder:
    """The module over these parameters, to be used inside a trace."""
    return module.merge(_abstract(config), {name: params[name] for name in params if name != "layers"})


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
    return merge(config, params)(params["layers"], tokens, positions, mask, types, key, cache, unroll, prefix)


def output_weights(
    config: ModelConfig, params: Params, hidden: Float[Array, "B T D"], types: Dtypes
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"]]:
    """The hidden states, and the product that makes logits of them, gathered: the head, or the transposed embeddings where tied."""
    kernel = params["embed"]["token"] if config.tie_embeddings else params["head"]["kernel"]
    names = ("vocab", "embed") if config.tie_embeddings else ("embed", "vocab")
    hidden, kernel = scattered_first(hidden, kernel)
    weights = gather(kernel, names, types.matmul, types.summed)
    return hidden, weights.T if config.tie_embeddings else weights


def unembed(config: ModelConfig, params: Params, hidden: Float[Array, "B T D"], types: Dtypes) -> Float[Array, "B T V"]:
    """Logits, float32."""
    hidden, weights = output_weights(config, params, hidden, types)
    logits = dense(hidden, weights, types).astype(jnp.float32)
    return constrain(soft_cap(logits, config.logit_softcap), "batch", None, "vocab")
