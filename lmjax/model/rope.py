"""Positions: rotary angles on queries and keys, or a table added to the embeddings.

    rope:        (x₁, x₂) → (x₁ cos θ - x₂ sin θ, x₂ cos θ + x₁ sin θ),  θ = position · base^(-2i/H)   Su et al., 2021 (2104.09864)
    sinusoidal:  sin and cos of position · 10000^(-2i/D)                                               Vaswani et al., 2017 (1706.03762)

Rope pairs dim i with dim i + H/2, as Hugging Face's Llama does.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def angles(positions: Int[Array, "B T"], dim: int, theta: float) -> tuple[Float[Array, "B T _"], Float[Array, "B T _"]]:
    """(cos, sin) of every position and frequency, float32, dim/2 each."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T _"], sin: Float[Array, "B T _"]
) -> Float[Array, "B T *heads H"]:
    """Rotates the last dim of queries or keys, in float32."""
    heads = (1,) * (x.ndim - 3)
    cos, sin = (a.reshape(*a.shape[:2], *heads, a.shape[-1]) for a in (cos, sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def sinusoidal(positions: Int[Array, "B T"], dim: int) -> Float[Array, "B T D"]:
    """The table of Vaswani et al., sines then cosines, float32."""
    cos, sin = angles(positions, dim + dim % 2, 10_000.0)
    return jnp.concatenate([sin, cos], axis=-1)[..., :dim]
