"""Initial weights, by `config.init`.

normal   N(0, std²)
scaled   the same, residual outputs with std / sqrt(2 L): their sum keeps its variance (GPT-2; Radford et al., 2019)
fan_in   N(0, 1 / fan_in), residual outputs divided by sqrt(2 L) as well; embeddings N(0, std²)
"""

import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from lmjax.model.config import ModelConfig


class Initializer:
    """Draws one float32 weight after another from a stream of keys."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, self.rngs = config, rngs

    def __call__(
        self, shape: tuple[int, ...], fan_in: int | None = None, residual: bool = False
    ) -> Float[Array, "..."]:
        """A weight; `fan_in` None for embeddings, `residual` for a product whose output is added to the residual stream."""
        std = self.config.init_std
        if self.config.init == "fan_in" and fan_in is not None:
            std = 1.0 / math.sqrt(fan_in)
        if residual and self.config.init != "normal":
            std /= math.sqrt(2 * self.config.num_layers)
        return std * jax.random.normal(self.rngs.params(), shape)
