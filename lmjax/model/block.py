"""One layer, pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from lmjax.model.attention import Attention, Mask
from lmjax.model.cache import LayerCache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dropout
from lmjax.model.initialize import Initializer
from lmjax.model.mlp import Mlp
from lmjax.model.norm import Norm
from lmjax.sharding.mesh import constrain

BRANCH = "branch_output"  # the name by which remat "block_outputs" keeps them


class Block(nnx.Module):
    """Attention and MLP around the residual stream."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.config = config
        self.attention_norm = Norm(config)
        self.attention = Attention(config, init)
        self.mlp_norm = Norm(config)
        self.mlp = Mlp(config, init)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Mask,
        types: Dtypes,
        key: PRNGKeyArray | None = None,
        cache: LayerCache | None = None,
        kind: str = "global",
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """The residual stream after the layer, which is of a `kind` in `config.pattern`.

        `key` turns dropout on, `cache` is read and returned written.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        branch, cache = self.attention(self.attention_norm(x), positions, mask, types, cache, kind)
        x = x + dropout(checkpoint_name(branch, BRANCH), self.config.dropout, keys[0])
        branch = self.mlp(self.mlp_norm(x), types)
        x = x + dropout(checkpoint_name(branch, BRANCH), self.config.dropout, keys[1])
        return constrain(x, "batch", None, None), cache
