"""Bytes of the optimizer's state on each device, exactly: what each optimizer keeps of a parameter, and where that lives."""

import math
from collections.abc import Callable

from lmjax.model.config import ModelConfig
from lmjax.optim.config import OptimConfig
from lmjax.optim.shapes import BLOCK_DIMS, MATRICES, scales_shape, side, stack_shapes
from lmjax.plan import params
from lmjax.sharding import rules

FACTOR_ABOVE = 128  # adafactor factors arrays whose two largest dims reach this (optax's default)
FLOAT32_BYTES, CODE_BYTES = 4, 1

Shape = tuple[int, ...]
Leaves = list[tuple[Shape, int]]  # (shape, bytes of a number)


def like_parameter(copies: int) -> Callable[[str, Shape, OptimConfig], Leaves]:
    """That many moments."""
    return lambda name, shape, optim: [(shape, FLOAT32_BYTES)] * copies


def factored(name: str, shape: Shape, optim: OptimConfig) -> Leaves:
    """Adafactor's means over each of the two largest dims; all where those are small."""
    by_size = sorted(range(len(shape)), key=shape.__getitem__)[-2:]
    if len(shape) < 2 or shape[by_size[0]] < FACTOR_ABOVE:
        return [(shape, FLOAT32_BYTES)]
    return [(tuple(size for i, size in enumerate(shape) if i != dim), FLOAT32_BYTES) for dim in by_size]


def quantized(name: str, shape: Shape, optim: OptimConfig) -> Leaves:
    """Codes and scales of two moments."""
    if name not in BLOCK_DIMS:
        return [(shape, FLOAT32_BYTES)] * 2
    return [(shape, CODE_BYTES), (scales_shape(name, shape, optim.quantize_block), FLOAT32_BYTES)] * 2


def orthogonal(name: str, shape: Shape, optim: OptimConfig) -> Leaves:
    """Muon's momentum, or Adam's moments."""
    return [(shape, FLOAT32_BYTES)] * (1 if name in MATRICES else 2)


def preconditioned(name: str, shape: Shape, optim: OptimConfig) -> Leaves:
    """SOAP's momentum, and for each block V, two statistics and two bases; or Adam's moments."""
    if name not in MATRICES:
        return [(shape, FLOAT32_BYTES)] * 2
    leaves = [shape]
    for count, *sizes in stack_shapes(name, shape):
        sides = [side(size, optim.soap_block) for size in sizes]
        blocks = count, math.prod(sizes) // math.prod(sides)
        leaves += [(*blocks, *sides), *((*blocks, b, b) for b in sides for _ in range(2))]
    return [(leaf, FLOAT32_BYTES) for leaf in leaves]


STATES: dict[str, Callable[[str, Shape, OptimConfig], Leaves]] = {
    "adamw": like_parameter(2),
    "lion": like_parameter(1),
    "adafactor": factored,
    "adamw_8bit": quantized,
    "muon": orthogonal,
    "soap": preconditioned,
}


def state_bytes(model: ModelConfig, sizes: dict[str, int], optim: OptimConfig) -> int:
    """Bytes on a device of a mesh of these `sizes`; the state is cut over fsdp whatever `config.mesh.zero` is."""
    axes, total = params.logical_axes(model), 0
    for path, shape in params.parameter_shapes(model).items():
        place = rules.spec(axes[path])
        for leaf, width in STATES[optim.name](path.rsplit("/", 1)[-1], shape, optim):
            spec = place if leaf == shape else rules.statistic_spec(leaf, shape, place, sizes)
            total += width * math.prod(leaf) // math.prod(rules.num_shards(axis, sizes) for axis in spec)
    return total
