"""The one dense product, and dropout.

Tokens are flattened to one dim before every product: the weight gradient of a three-dim `x @ w` makes XLA on CPU write
slow transposes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from lmjax.axes import CONTEXT, TENSOR
from lmjax.model import fp8
from lmjax.sharding import context, mesh


class Dtypes(NamedTuple):
    """Dtypes of a forward pass. Parameters, softmax statistics and logits are float32 whatever these are."""

    matmul: jnp.dtype  # operands of dense products
    activation: jnp.dtype  # everything between them
    layers: jnp.dtype | None = None  # operands of the layers' products, where they are of another dtype
    summed: jnp.dtype | None = None  # gradients of split weights while they are summed; none: as computed

    def in_layers(self) -> "Dtypes":
        """Dtypes for what is inside a layer."""
        return self if self.layers is None else self._replace(matmul=self.layers)


def dtypes(precision: str, platform: str) -> Dtypes:
    """Dtypes for a `config.train.precision` on a platform ("cpu", "gpu", "tpu").

    A CPU gains from half precision in the products alone; elsewhere activations are half precision too, for memory.
    Eight bits are for the layers' products; the rest is bfloat16.
    """
    eight = precision in ("fp8", "fp8_emulated")
    matmul = jnp.dtype("bfloat16" if eight else precision)
    return Dtypes(matmul, jnp.dtype("float32") if platform == "cpu" else matmul, fp8.FORWARD if eight else None)


def dense(
    x: Float[Array, "B T *In"], w: Float[Array, "*InOut"], types: Dtypes, in_dims: int = 1
) -> Float[Array, "B T *Out"]:
    """x · w over the last `in_dims` dims of x and the first of w; operands in `types.matmul`, the result in `types.activation`."""
    batch, length = x.shape[:2]
    out = w.shape[in_dims:]
    flat = x.reshape(batch * length, -1)
    # Merging gate and up with an F that is split would gather the whole weight: the dims that come out stay apart.
    # Elsewhere they are one: on a CPU this is faster.
    w = w.reshape(flat.shape[1], *(out if mesh.size(TENSOR) > 1 else (-1,)))
    if types.matmul == fp8.FORWARD:
        product = fp8.product(flat, w, types.activation)
    else:
        flat, w = flat.astype(types.matmul), w.astype(types.matmul)
        product = jnp.tensordot(flat, w, axes=1, preferred_element_type=types.activation)
    return product.reshape(batch, length, *out)


def fold_in(keys: Key[Array, "B"] | None, number: int | Array) -> Key[Array, "B"] | None:
    """The keys of the rows for a purpose of this number."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: Float[Array, "B T *dims"], rate: float, keys: Key[Array, "B"] | None) -> Float[Array, "B T *dims"]:
    """Zeroes each element with probability `rate`, scales the rest by 1 / (1 - rate); without keys, the identity.

    Each row has its key and is drawn as a whole, so that nothing depends on how rows and tokens lie over devices.
    """
    if keys is None or rate == 0.0:
        return x
    split = mesh.is_manual(CONTEXT)
    shape = (x.shape[1] * (mesh.size(CONTEXT) if split else 1), *x.shape[2:])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys)
    kept = context.own_tokens(kept) if split else kept
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)
