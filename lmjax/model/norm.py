"""Normalization over the model width.

rmsnorm(x)   = x / sqrt(mean(x²) + ε) · scale                       Zhang & Sennrich, 2019 (arXiv 1910.07467)
layernorm(x) = (x - mean(x)) / sqrt(var(x) + ε) · scale (+ bias)    Ba et al., 2016 (arXiv 1607.06450)
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lmjax.model.config import ModelConfig


def rms_normalize(x: Float[Array, "*dims"], scale: Float[Array, "*normed"], epsilon: float) -> Float[Array, "*dims"]:
    """RMS norm over the last dims, those of `scale`; statistics in float32, the result in x's dtype."""
    wide = x.astype(jnp.float32)
    dims = tuple(range(-scale.ndim, 0))
    inverse = jnp.reciprocal(jnp.sqrt(jnp.mean(wide * wide, axis=dims, keepdims=True) + epsilon))
    return (wide * inverse * scale).astype(x.dtype)


class Norm(nnx.Module):
    """RMS or layer norm, by `config.norm`."""

    def __init__(self, config: ModelConfig):
        self.config = config
        # Replicated: a norm's D numbers are not worth a gather.
        self.scale = nnx.Param(jnp.ones(config.d_model), axes=("norm",))
        if config.norm_bias:
            self.bias = nnx.Param(jnp.zeros(config.d_model), axes=("norm",))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Statistics in float32, the result in x's dtype."""
        if self.config.norm == "rmsnorm":
            return rms_normalize(x, self.scale[...], self.config.norm_epsilon)
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        out = rms_normalize(centered, self.scale[...], self.config.norm_epsilon)
        return (out + self.bias[...] if self.config.norm_bias else out).astype(x.dtype)
