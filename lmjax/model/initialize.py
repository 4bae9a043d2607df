"""Initial weights, by `config.init`.

normal   N(0, std²)
scaled   the same, residual outputs with std / sqrt(2 L): their sum keeps its variance (GPT-2; Radford et al., 2019)
fan_in   N(0, 1 / fan_in), residual outputs divided by sqrt(2 L) as well; embeddings N(0, std²)

With `config.mup` these are the base model's, and the layers' products get less with the width; see `lmjax/model/transfer.py`.
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
        self, shape: tuple[int, ...], fan_in: int | None = None, residual: bool = False, output: bool = False
    ) -> Float[Array, "..."]:
        """A weight; `fan_in` None for embeddings, `residual` for a product whose output is added to the residual stream,
        `output` for the one that makes logits."""
        config, std = self.config, self.config.init_std
        if fan_in is not None:
            base = 1.0 / math.sqrt(fan_in / config.width_ratio) if config.init == "fan_in" else std
            std = base if output else base / math.sqrt(config.width_ratio)
        if residual and config.init != "normal":
            std /= math.sqrt(2 * config.base_layers)
        return std * jax.random.normal(self.rngs.params(), shape)
