"""One layer: x + attention(norm(x)), then x + mlp(norm(x)).

`config.block` says where the norms are: before each branch, after it (x + norm(attention(x))), or both."""

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from lmjax.model.attention import Attention, Mask
from lmjax.model.cache import LayerCache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dropout, fold_in
from lmjax.model.initialize import Initializer
from lmjax.model.mlp import Mlp
from lmjax.model.moe import Moe
from lmjax.model.norm import Norm
from lmjax.model.router import RouterStats
from lmjax.sharding.mesh import constrain

BRANCH = "branch_output"  # the name by which remat "block_outputs" keeps them


def scaled(x: Float[Array, "B T D"], scale: float) -> Float[Array, "B T D"]:
    """scale · x, and x itself for 1."""
    return x if scale == 1.0 else x * scale


def normed(norm: Norm | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """norm(x), where there is one."""
    return x if norm is None else norm(x)


def between(x: Float[Array, "B T D"], split: bool) -> Float[Array, "B T D"]:
    """Outside the products: with its tokens split over `tensor`, which makes of the sum of a product's parts a reduce-scatter."""
    return constrain(x, "rows", "between", None) if split else x


def whole(x: Float[Array, "B T D"], split: bool) -> Float[Array, "B T D"]:
    """As a product's input, gathered."""
    return constrain(x, "rows", None, None) if split else x


class Block(nnx.Module):
    """Attention and MLP around the residual stream."""

    def __init__(self, config: ModelConfig, init: Initializer):
        self.config = config
        before, after = config.block != "post", config.block != "pre"
        self.attention_norm = Norm(config) if before else None
        self.attention = Attention(config, init)
        self.attention_post_norm = Norm(config) if after else None
        self.mlp_norm = Norm(config) if before else None
        self.mlp_post_norm = Norm(config) if after else None
        if config.moe is None:
            self.mlp = Mlp(config, init)
        else:
            self.moe = Moe(config, init)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Mask,
        types: Dtypes,
        keys: Key[Array, "B"] | None = None,
        cache: LayerCache | None = None,
        kind: str = "global",
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, RouterStats | None]:
        """The residual stream after the layer, which is of a `kind` in `config.pattern`, and what a router of experts did.

        `keys`, of the rows, turn dropout on, `cache` is read and returned written.
        """
        split = self.config.split_tokens and cache is None
        x = between(x, split)
        branch, cache = self.attention(
            whole(normed(self.attention_norm, x), split), positions, mask, types, cache, kind
        )
        branch = normed(self.attention_post_norm, checkpoint_name(between(branch, split), BRANCH))
        branch = scaled(branch, self.config.branch_scale)
        x = x + dropout(branch, self.config.dropout, fold_in(keys, 0))
        branch, routed = self.feed_forward(whole(normed(self.mlp_norm, x), split), mask, types, cache is not None)
        branch = normed(self.mlp_post_norm, checkpoint_name(between(branch, split), BRANCH))
        branch = scaled(branch, self.config.branch_scale)
        x = x + dropout(branch, self.config.dropout, fold_in(keys, 1))
        return constrain(x, "rows", "between" if split else None, None), cache, routed

    def feed_forward(
        self, x: Float[Array, "B T D"], mask: Mask, types: Dtypes, cached: bool
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """The MLP's branch, or that of the experts with what their router did; with a cache no expert is ever full."""
        if self.config.moe is None:
            return self.mlp(x, types), None
        return self.moe(x, mask.segments, types, dropless=cached)
