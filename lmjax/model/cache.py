"""The key-value cache of generation, by the segments of layers: a slot for every place, or a ring of as many as a window.

In a ring, place p stands in slot p mod slots; what it overwrites is outside the window of every query from p on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lmjax.model.config import ModelConfig
from lmjax.model.pattern import segments
from lmjax.sharding.mesh import constrain

NOWHERE = 2**30  # the place of what is never written (padding of a prompt) and of slots that nothing was written to


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B S K H]; or of several, with a leading L."""

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]
    places: Int[Array, "*L B S"] | None = None  # of the tokens in a ring's slots; none: slot and place are one

    def slots(self, places: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Where tokens at these places are written; past the end, and so nowhere, for padding and for what a ring has no room for."""
        if self.places is None:
            return places
        size = self.keys.shape[1]
        last = jnp.max(jnp.where(places < NOWHERE, places, -1), axis=1, keepdims=True)
        return jnp.where((places < NOWHERE) & (places > last - size), places % size, size)

    def write(self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], places: Int[Array, "B T"]) -> "LayerCache":
        """Puts each row's keys and values into the slots of `places`; what stood there is overwritten."""
        at = jnp.arange(k.shape[0])[:, None], self.slots(places)
        keys = self.keys.at[at].set(k.astype(self.keys.dtype), mode="drop")
        values = self.values.at[at].set(v.astype(self.values.dtype), mode="drop")
        keys, values = (constrain(x, "rows", None, "kv_heads", None) for x in (keys, values))
        if self.places is None:
            return LayerCache(keys, values)
        return LayerCache(keys, values, constrain(self.places.at[at].set(places, mode="drop"), "rows", None))

    def seen_by(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], places: Int[Array, "B T"]
    ) -> tuple["LayerCache", Array, Array, Array | None]:
        """The cache with a call's tokens written in, and what these may see: keys, values and, where they are no indices, places."""
        written = self.write(k, v, places)
        if self.places is None or k.shape[1] == 1:
            return written, written.keys, written.values, written.places
        # Several tokens: what the later ones overwrite in a ring, the first may still see.
        keys, values = (
            jnp.concatenate([old, new.astype(old.dtype)], axis=1) for old, new in ((self.keys, k), (self.values, v))
        )
        return written, keys, values, jnp.concatenate([self.places, places], axis=1)


Cache = tuple[
    tuple[LayerCache, ...], ...
]  # by segment, for each layer of its period, those of its repetitions, stacked


def empty_cache(config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> Cache:
    """A cache for `batch` rows of up to `length` tokens. Unwritten slots are never seen: the mask ends at the query's place."""
    return tuple(
        tuple(_empty(config, part.repeats, batch, length, config.window(kind.attention), dtype) for kind in part.kinds)
        for part in segments(config, config.num_layers)
    )


def _empty(
    config: ModelConfig, layers: int, batch: int, length: int, window: int | None, dtype: jnp.dtype
) -> LayerCache:
    is_ring = window is not None and window < length
    shape = (layers, batch, window if is_ring else length, config.kv_heads, config.dim_head)
    zeros = constrain(jnp.zeros(shape, dtype), None, "rows", None, "kv_heads", None)
    places = constrain(jnp.full(shape[:3], NOWHERE), None, "rows", None) if is_ring else None
    return LayerCache(zeros, jax.tree.map(jnp.copy, zeros), places)
