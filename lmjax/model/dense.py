"""The one dense product, and dropout.

Tokens are flattened to one dim before every product: the weight gradient of a three-dim `x @ w` makes XLA on CPU write
slow transposes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from lmjax.axes import CONTEXT, TENSOR
from lmjax.sharding import context, mesh


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
    """x · w over the last `in_dims` dims of x and the first of w; operands in `types.matmul`, the result in `types.activation`."""
    batch, length = x.shape[:2]
    out = w.shape[in_dims:]
    flat = x.astype(types.matmul).reshape(batch * length, -1)
    w = w.astype(types.matmul).reshape(flat.shape[1], *out)
    if mesh.size(TENSOR) > 1:
        # Merging gate and up with an F that is split would gather the whole weight: the dims that come out stay apart.
        product = jnp.tensordot(flat, w, axes=1, preferred_element_type=types.activation)
    else:
        # On a CPU this is faster than the same product with more dims.
        product = jnp.matmul(flat, w.reshape(flat.shape[1], -1), preferred_element_type=types.activation)
    return product.reshape(batch, length, *out)


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Zeroes each element with probability `rate`, scales the rest by 1 / (1 - rate); without a key, the identity."""
    if key is None or rate == 0.0:
        return x
    if mesh.is_manual(CONTEXT):
        # Drawn for whole rows, so that it does not depend on the number of devices.
        rows, length, *dims = x.shape
        kept = context.own_tokens(jax.random.bernoulli(key, 1.0 - rate, (rows, length * mesh.size(CONTEXT), *dims)))
    else:
        kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
