"""The one dense product, and dropout.

Tokens are flattened to one dim before every product: the weight gradient of a three-dim `x @ w` makes XLA on CPU write
slow transposes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Dtypes(NamedTuple):
    """Dtypes of a forward pass. Parameters, softmax statistics and logits are float32 whatever these are."""

    matmul: jnp.dtype  # operands of dense products
    activation: jnp.dtype  # everything between them


def dtypes(precision: str, platform: str) -> Dtypes:
    """Dtypes for a `config.train.precision` on a platform ("cpu", "gpu", "tpu").

    A CPU gains from half precision in the products alone; elsewhere activations are half precision too, for memory.
    """
    matmul = jnp.dtype(precision)
    return Dtypes(matmul, jnp.dtype("float32") if platform == "cpu" else matmul)


def dense(
    x: Float[Array, "B T *In"], w: Float[Array, "*InOut"], types: Dtypes, in_dims: int = 1
) -> Float[Array, "B T *Out"]:
    """x · w over the last `in_dims` dims of x and the first of w; operands in `types.matmul`, sums in float32."""
    batch, length = x.shape[:2]
    fan_in, out = math.prod(w.shape[:in_dims]), w.shape[in_dims:]
    flat = x.astype(types.matmul).reshape(batch * length, fan_in) @ w.astype(types.matmul).reshape(fan_in, -1)
    return flat.astype(types.activation).reshape(batch, length, *out)


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zeroes each element with probability `rate`, scales the rest by 1 / (1 - rate); without a key, the identity."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
