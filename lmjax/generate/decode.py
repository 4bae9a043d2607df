"""Autoregressive decoding with a key-value cache, for a batch of prompts of unequal length.

Prompts stand at the left of their rows. Prefill runs them at once, padding included: padding comes after each prompt, so no
prompt token sees it, and it is not written to the cache. Then each step runs one token of each row, at that row's own place.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from lmjax.config import need
from lmjax.generate.sample import Sampling, sample
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.cache import NOWHERE, Cache, empty_cache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes
from lmjax.sharding.mesh import batch_shards
from lmjax.tokenizers.base import Tokenizer

PROMPT_BUCKET = 32  # prompts are padded to a multiple: few lengths, few compilations
FINISHED = -1  # in place of the tokens of a row that has ended


def _next_token(config, params, hidden, sampling, num_ids, types, key):
    logits = decoder.unembed(config, params, hidden, types)[:, 0]
    if key.ndim:  # each row has its own
        return sample(logits, sampling, key, num_ids)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return sample(logits, sampling, keys, num_ids)


def _at(key, count):
    return jax.vmap(lambda row: jax.random.fold_in(row, count))(key) if key.ndim else jax.random.fold_in(key, count)


@functools.partial(jax.jit, static_argnames=("config", "sampling", "num_ids", "types", "length"))
def prefill(
    config: ModelConfig,
    params: decoder.Params,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    key: Key[Array, ""] | Key[Array, "B"],
    sampling: Sampling,
    num_ids: int,
    types: Dtypes,
    length: int,
    prefix: Float[Array, "B _ I"] | None = None,
) -> tuple[Int[Array, "B"], Cache]:
    """Runs the prompts; the first new token of each row, and the cache of `length` slots."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = empty_cache(config, tokens.shape[0], length, types.activation)
    mask = Mask(query_places=jnp.where(places < lengths[:, None], places, NOWHERE))
    hidden, cache, _ = decoder.forward_routed(config, params, tokens, places, mask, types, cache=cache, prefix=prefix)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return _next_token(config, params, last, sampling, num_ids, types, key), cache


@functools.partial(
    jax.jit, static_argnames=("config", "sampling", "num_ids", "types", "before"), donate_argnames=("cache",)
)
def decode_step(
    config: ModelConfig,
    params: decoder.Params,
    tokens: Int[Array, "B"],
    places: Int[Array, "B"],
    cache: Cache,
    key: Key[Array, ""] | Key[Array, "B"],
    sampling: Sampling,
    num_ids: int,
    types: Dtypes,
    before: int,
) -> tuple[Int[Array, "B"], Cache]:
    """Runs one token of each row at its place, `before` of which are of features; the next token of each, and the cache."""
    places = places[:, None]
    positions = (
        places if config.position == "rope" else places - before
    )  # what is added to a token counts the text alone
    mask = Mask(query_places=places)
    hidden, cache = decoder.forward(config, params, tokens[:, None], positions, mask, types, cache=cache)
    return _next_token(config, params, hidden, sampling, num_ids, types, key), cache


def generate(
    config: ModelConfig,
    params: decoder.Params,
    prompts: Sequence[np.ndarray],
    max_tokens: int,
    sampling: Sampling,
    types: Dtypes,
    num_ids: int,
    eos_id: int | None = None,
    seeds: Sequence[int] | None = None,
    prefix: Float[np.ndarray, "B P I"] | None = None,
) -> Iterator[np.ndarray]:
    """Yields one new token for each prompt at a time, FINISHED once a row has produced `eos_id`; ends when all have.

    Args:
      config, params: the decoder.
      prompts: ids of each prompt, at least one id each.
      max_tokens: new tokens at most.
      sampling: how to draw; the draw of a row depends on its index and the seed, not on its neighbours.
      types: dtypes of the forward pass; the cache is in `types.activation`.
      num_ids: the tokenizer's vocabulary; larger ids are never drawn.
      eos_id: where a row stops; the id itself is yielded.
      seeds: one for each prompt, of 32 bits, in place of `sampling.seed` and the index: the draw is the prompt's own.
      prefix: features that stand before each prompt.

    Raises:
      UserError: an empty prompt, an id that the model does not have, or more places than learned positions.
    """
    need(all(len(prompt) for prompt in prompts), "a prompt is empty: begin it with a token, such as <bos>")
    need(max(int(max(p)) for p in prompts) < config.vocab_size, "a prompt holds an id outside config.model.vocab_size")
    need(max_tokens >= 0, f"max_tokens={max_tokens} must not be negative")
    longest = max(len(prompt) for prompt in prompts)
    if config.position == "learned":
        need(
            longest + max_tokens <= config.max_length,
            f"{longest} prompt + {max_tokens} new tokens exceed config.model.max_length={config.max_length}",
        )
    width = -(-longest // PROMPT_BUCKET) * PROMPT_BUCKET
    rows = -(-len(prompts) // batch_shards()) * batch_shards()
    tokens = np.zeros((rows, width), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    key = jax.random.key(sampling.seed)
    if seeds is not None:
        key = jax.vmap(jax.random.key)(np.array([*seeds, *[0] * (rows - len(seeds))], np.uint32))
    before = 0 if prefix is None else prefix.shape[1]  # places of features
    if prefix is not None:
        need(
            prefix.shape[2] == config.prefix_dim,
            f"features have width {prefix.shape[2]}; config.model.prefix_dim={config.prefix_dim}",
        )
        prefix = np.concatenate([prefix, np.zeros((rows - len(prefix), *prefix.shape[1:]), prefix.dtype)])
    static = {"sampling": sampling, "num_ids": num_ids, "types": types}
    done = np.arange(rows) >= len(prompts)
    length = before + max(width, longest + max_tokens)
    new, cache = prefill(config, params, tokens, lengths, _at(key, 0), length=length, prefix=prefix, **static)
    for count in range(1, max_tokens + 1):
        host = np.where(done, FINISHED, np.asarray(new))
        yield host[: len(prompts)]
        done = done | (host == eos_id)
        if done.all() or count == max_tokens:
            return
        places = before + lengths + (count - 1)
        new, cache = decode_step(config, params, new, places, cache, _at(key, count), before=before, **static)


def stream_text(tokens: Iterator[np.ndarray], tokenizer: Tokenizer, count: int) -> Iterator[list[str]]:
    """The text that each row gains with each token; a character of several tokens comes when it is whole."""
    ids: list[list[int]] = [[] for _ in range(count)]
    shown = [""] * count
    for new in tokens:
        gained = []
        for row, token in enumerate(new.tolist()):
            if token != FINISHED:
                ids[row].append(token)
            text = tokenizer.decode(ids[row])
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the first bytes of a character that is still to come
            gained.append(whole[len(shown[row]) :])
            shown[row] = whole if len(whole) > len(shown[row]) else shown[row]
        yield gained
    yield [tokenizer.decode(ids[row])[len(shown[row]) :] for row in range(count)]
