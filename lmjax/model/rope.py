"""Positions: rotary angles on queries and keys, or a table added to the embeddings.

    rope:        (x₁, x₂) → (x₁ cos θ - x₂ sin θ, x₂ cos θ + x₁ sin θ),  θ = position · base^(-2i/H)   Su et al., 2021 (2104.09864)
    sinusoidal:  sin and cos of position · 10000^(-2i/D)                                               Vaswani et al., 2017 (1706.03762)

Rope pairs dim i with dim i + H/2, as Hugging Face's Llama does. Longer rows slow the angles (`slowed`): linear (Chen et al.,
2023, 2306.15595), YaRN (Peng et al., 2023, 2309.00071), Llama 3.1 (Dubey et al., 2024, 2407.21783).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lmjax.model.config import RopeScaling


def angles(
    positions: Int[Array, "B T"], dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "B T _"], Float[Array, "B T _"]]:
    """(cos, sin) of every position and frequency, float32, dim/2 each; yarn's are longer than 1, for sharper scores."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is not None:
        frequency = frequency * slowed(scaling, dim, theta)
    angle = positions[..., None].astype(jnp.float32) * frequency
    if scaling is None or scaling.kind != "yarn":
        return jnp.cos(angle), jnp.sin(angle)
    length = scaling.attention_factor
    length = 0.1 * math.log(scaling.factor) + 1.0 if length is None else length
    return length * jnp.cos(angle), length * jnp.sin(angle)


def slowed(scaling: RopeScaling, dim: int, theta: float) -> Float[np.ndarray, " half"]:
    """What each frequency is multiplied by: 1 where it stays, 1 / factor where it is slowed, in between on the ramp."""
    pairs = np.arange(dim // 2)
    if scaling.kind == "linear":
        kept = np.zeros(dim // 2)
    elif scaling.kind == "llama3":
        turns = scaling.original_length * theta ** (-2.0 * pairs / dim) / (2 * math.pi)  # over the rows of pre-training
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:

        def pair_that_turns(count: float) -> float:
            """Where 2π count = original_length · theta^(-2 pair / dim)."""
            return dim * math.log(scaling.original_length / (count * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
        kept = 1 - (pairs - first) / max(last - first, 0.001)
    kept = np.clip(kept, 0.0, 1.0)
    return (kept + (1 - kept) / scaling.factor).astype(np.float32)


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
