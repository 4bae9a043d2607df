"""Choosing the next token from logits.

    temperature 0   the largest logit
    top_k           exactly the k most likely ids, ties broken by id
    top_p           the most likely ids up to and including the one whose probability crosses p (Holtzman et al., 2020, 1904.09751)

Both apply to the distribution after the temperature, top_k first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lmjax.config import need


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0  # divides the logits; 0: greedy
    top_k: int | None = None  # none: all ids
    top_p: float | None = None  # none: all ids
    seed: int = 0

    def __post_init__(self):
        need(self.temperature >= 0, f"temperature={self.temperature} must not be negative")
        need(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} must be at least 1")
        need(self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")


def filtered(logits: Float[Array, "B V"], sampling: Sampling) -> tuple[Float[Array, "B V"], Int[Array, "B V"]]:
    """Logits from the most likely down, those that are cut off at -inf; and the ids they belong to."""
    ids = jnp.argsort(-logits, axis=-1, stable=True)
    sorted_logits = jnp.take_along_axis(logits, ids, axis=-1) / sampling.temperature
    ranks = jnp.arange(logits.shape[-1])
    if sampling.top_k is not None:
        sorted_logits = jnp.where(ranks < sampling.top_k, sorted_logits, -jnp.inf)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(sorted_logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        sorted_logits = jnp.where((before < sampling.top_p) | (ranks == 0), sorted_logits, -jnp.inf)
    return sorted_logits, ids


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, keys: Key[Array, " B"], num_ids: int | None = None
) -> Int[Array, "B"]:
    """One id for each row.

    Args:
      logits: float32.
      sampling: static.
      keys: one for each row, so that a row's draw does not depend on the rows beside it.
      num_ids: ids from here on are padding of the vocabulary and are never drawn.
    """
    if num_ids is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < num_ids, logits, -jnp.inf)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sorted_logits, ids = filtered(logits, sampling)
    chosen = jax.vmap(jax.random.categorical)(keys, sorted_logits)
    return jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)
