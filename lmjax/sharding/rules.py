"""The table from logical axes to mesh axes: the only place that says how anything is sharded. No jax.

A parameter names the logical axis of each of its dims where it is made (`lmjax/model`); an activation names them where it
is constrained. Logical axes that are not in the table are replicated.
"""

import functools

from lmjax.axes import DATA, EXPERT, FSDP, STAGE, TENSOR

RULES: dict[str, str | tuple[str, ...]] = {
    "batch": (DATA, STAGE, FSDP, EXPERT),  # rows, around the layers
    "rows": (DATA, FSDP, EXPERT),  # rows of a micro-batch, inside a layer
    "between": TENSOR,  # T of activations between the products, with config.model.split_tokens
    "layers": STAGE,  # L
    "embed": FSDP,  # D of a weight; activations keep D whole
    "kv_heads": TENSOR,  # K: a shard holds whole groups of query heads with their key and value
    "mlp": TENSOR,  # F
    "experts": EXPERT,  # E
    "vocab": TENSOR,  # V
    "matrices": (STAGE, FSDP, EXPERT, TENSOR),  # whole matrices, dealt to be orthogonalized or decomposed (lmjax/optim)
}

Spec = tuple[str | tuple[str, ...] | None, ...]


@functools.cache
def spec(axes: tuple[str | None, ...], fsdp: bool = True) -> Spec:
    """Mesh axes for the logical axes of an array; `fsdp=False` leaves the weights whole over that axis."""
    mesh_axes = [RULES.get(axis) if axis is not None else None for axis in axes]
    return tuple(None if axis == FSDP and not fsdp else axis for axis in mesh_axes)


def statistic_spec(shape: tuple[int, ...], parameter: tuple[int, ...], place: Spec, sizes: dict[str, int]) -> Spec:
    """Where a leaf of the optimizer's state lives that belongs to a parameter (which lives at `place`) and has another shape.

    As its parameter, where its dims stand for the same and divide; else its first dim that divides is cut over all axes that cut
    matrices, or over fsdp; else it is whole.
    """
    place = (*place, *(None,) * (len(parameter) - len(place)))
    same = len(shape) == len(parameter) and shape[:1] == parameter[:1]
    if same and not any(size % num_shards(axes, sizes) for size, axes in zip(shape, place, strict=True)):
        return place
    for axes in (RULES["matrices"], FSDP):
        for dim, size in enumerate(shape):
            if size % num_shards(axes, sizes) == 0:
                return (None,) * dim + (axes,)
    return ()


def num_shards(axis: str | tuple[str, ...] | None, sizes: dict[str, int]) -> int:
    """Into how many pieces a dim is cut."""
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    product = 1
    for name in names:
        product *= sizes[name]
    return product
