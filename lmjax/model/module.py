"""NNX modules as functions over plain dicts: at every boundary parameters are a nested dict of arrays."""

from typing import Any

import jax
from flax import nnx

Params = dict[str, Any]
Abstract = tuple[nnx.GraphDef, nnx.State]  # a module's structure, with shapes for arrays


def abstract(make) -> Abstract:
    """The structure of the module that `make()` gives."""
    return nnx.split(nnx.eval_shape(make), nnx.Param, ...)[:2]


def arrays(module: nnx.Module) -> Params:
    """Its parameters."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def axes(structure: Abstract) -> Params:
    """The logical axes of each parameter, in a tree like `arrays`'."""
    tree: Params = {}
    for path, variable in nnx.to_flat_state(structure[1]):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = variable.get_metadata()["axes"]
    return tree


def merge(structure: Abstract, params: Params) -> Any:
    """The module over these parameters, to be used inside a trace."""
    graph, state = structure
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: `replace_by_pure_dict` writes in place
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
