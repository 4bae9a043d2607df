"""Which parameters an optimizer treats how, by their place in the tree."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

# Matrices, by name: (dims that are summed over, dims that come out), after the leading L of the layers. Dims in neither are
# separate matrices: the query, key and value slots of qkv, the gate and the up product.
MATRICES = {
    "qkv": ((1,), (2, 4)),
    "out": ((1, 2, 3), (4,)),
    "up": ((1,), (3,)),
    "down": ((1,), (2,)),
    "expert_up": ((2,), (4,)),
    "expert_down": ((2,), (3,)),
}
ROUTER = ("router",)
EMBEDDINGS = ("token", "position")
HEAD = ("kernel",)


def leaf_name(path: tuple) -> str:
    """The last part of a parameter's path."""
    return str(path[-1].key)


def decay_mask(params: Any, decay_embeddings: bool) -> Any:
    """True for what weight decay pulls to zero: matrices and the head; norms and biases never."""
    decayed = (*MATRICES, *ROUTER, *HEAD, *(EMBEDDINGS if decay_embeddings else ()))
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path) in decayed, params)


def layer_matrices(params: Any) -> Any:
    """True for the layers' matrices."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_name(path) in MATRICES, params)


def muon_dimensions(params: Any) -> Any:
    """`MuonDimensionNumbers` for the layers' matrices, None for all that Adam updates: embeddings, head, norms, biases."""

    def numbers(path, _):
        name = leaf_name(path)
        return MuonDimensionNumbers(*MATRICES[name]) if name in MATRICES else None

    return jax.tree_util.tree_map_with_path(numbers, params)
