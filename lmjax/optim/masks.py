"""Which parameters weight decay reaches, by their place in the tree."""

from typing import Any

import jax

from lmjax.optim.matrices import leaf_name
from lmjax.optim.shapes import MATRICES

ROUTER = ("router",)
EMBEDDINGS = ("token", "position")
HEAD = ("kernel",)


def decay_mask(params: Any, decay_embeddings: bool) -> Any:
    """True for what weight decay pulls to zero: matrices and the head; norms and biases never."""
    decayed = (*MATRICES, *ROUTER, *HEAD, *(EMBEDDINGS if decay_embeddings else ()))
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path) in decayed, params)


def layer_matrices(params: Any) -> Any:
    """True for the layers' matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path) in MATRICES, params)
