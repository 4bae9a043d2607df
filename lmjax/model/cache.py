"""The key-value cache of generation: a slot for every place, stacked over layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lmjax.model.config import ModelConfig
from lmjax.sharding.mesh import constrain


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B S K H]; or of all, with a leading L."""

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]

    def write(self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], places: Int[Array, "B T"]) -> "LayerCache":
        """Puts each row's keys and values into its slots `places`; what stood there is overwritten."""
        rows = jnp.arange(k.shape[0])[:, None]
        keys = self.keys.at[rows, places].set(k.astype(self.keys.dtype))
        values = self.values.at[rows, places].set(v.astype(self.values.dtype))
        return LayerCache(*(constrain(x, "batch", None, "kv_heads", None) for x in (keys, values)))


def empty_cache(config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of `length` slots for `batch` rows. Unwritten slots are never seen: the mask ends at the query's place."""
    shape = (config.num_layers, batch, length, config.kv_heads, config.dim_head)
    zeros = constrain(jnp.zeros(shape, dtype), None, "batch", None, "kv_heads", None)
    return LayerCache(zeros, jax.tree.map(jnp.copy, zeros))
