"""The shapes of what optimizers keep, by a parameter's name and shape. No jax: `lmjax plan` counts by them, too.

A layer's weight holds stacks of true matrices, [n, in, out]: of `qkv` (L, D, K, G + 2, H) all query heads together are one D × K·G·H
matrix a layer; keys and values are two more. Gate and up are two; every expert has its own. Embeddings, head, norms and biases
hold none.
"""

import math

# By name: (dims that are summed over, dims that come out); all others count matrices. Of `qkv`: in each of its two pieces,
# queries [L, 1, D, K, G, H], keys and values [L, 2, D, K, 1, H].
MATRICES = {
    "qkv": ((2,), (3, 4, 5)),
    "out": ((1, 2, 3), (4,)),
    "up": ((1,), (3,)),
    "down": ((1,), (2,)),
    "expert_up": ((2,), (4,)),
    "expert_down": ((2,), (3,)),
}

# Along which dim 8-bit moments have blocks: one that fsdp does not cut. What is not named keeps 32 bits.
BLOCK_DIMS = {"qkv": -1, "out": -2, "up": -1, "down": -2, "expert_up": -1, "expert_down": -2, "kernel": -1}


def piece_shapes(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of the fused products of a weight; keys and values, alike in shape, are one piece."""
    if name != "qkv":
        return [shape]
    layers, width, heads, slots, dim = shape
    return [(layers, 1, width, heads, slots - 2, dim), (layers, 2, width, heads, 1, dim)]


def stack_shapes(name: str, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """[n, in, out] of each stack of a weight's true matrices."""
    stacks = []
    for piece in piece_shapes(name, shape):
        into, out = (math.prod(piece[dim] for dim in dims) for dims in MATRICES[name])
        stacks.append((math.prod(piece) // (into * out), into, out))
    return stacks


def side(size: int, block: int) -> int:
    """Of a SOAP block: the largest divisor of `size` that is at most `block`."""
    return next(b for b in range(min(size, block), 0, -1) if size % b == 0)


def scales_shape(name: str, shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Of the scales beside 8-bit codes."""
    dim = BLOCK_DIMS[name] % len(shape)
    count = -(-shape[dim] // min(block, shape[dim]))
    return (*shape[:dim], count, *shape[dim + 1 :])
