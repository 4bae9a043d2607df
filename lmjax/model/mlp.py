"""The MLP: down(act(up(x))), or down(act(gate(x)) · up(x)) where gated (Shazeer, 2020, arXiv 2002.05202)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dense
from lmjax.model.initialize import Initializer
from lmjax.sharding.mesh import constrain

ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Mlp(nnx.Module):
    """Weights: up (D, M, F) with M = 2 where gated, gate then up, so that a shard of F holds both; down (F, D)."""

    def __init__(self, config: ModelConfig, init: Initializer, hidden: int | None = None):
        self.config = config
        width, hidden, halves = config.d_model, hidden or config.hidden, 2 if config.gated else 1
        self.up = nnx.Param(init((width, halves, hidden), fan_in=width), axes=("embed", None, "mlp"))
        self.down = nnx.Param(init((hidden, width), fan_in=hidden, residual=True), axes=("mlp", "embed"))
        if config.mlp_bias:
            self.up_bias = nnx.Param(jnp.zeros((halves, hidden)), axes=(None, "mlp"))
            self.down_bias = nnx.Param(jnp.zeros(width), axes=("norm",))

    def __call__(self, x: Float[Array, "B T D"], types: Dtypes) -> Float[Array, "B T D"]:
        """The branch's output, before the residual sum."""
        hidden = dense(x, self.up[...], types)
        if self.config.mlp_bias:
            hidden = hidden + self.up_bias[...].astype(hidden.dtype)
        first, *second = jnp.unstack(hidden, axis=2)  # not two slices, whose gradients would be padded and added
        activation = ACTIVATIONS[self.config.activation](first)
        activation = activation * second[0] if self.config.gated else activation
        out = dense(constrain(activation, "rows", None, "mlp"), self.down[...], types)
        return out + self.down_bias[...].astype(out.dtype) if self.config.mlp_bias else out
