"""FLOPs of a compiled step on one device, read from its optimized HLO text. No jax.

Two for each multiply-add of a dot or a convolution (what TPUs make of dots), times the trip counts of the loops around: XLA's own
`cost_analysis` counts a loop's body once. A spatial dim of a convolution multiplies only where window and input meet: a batch of
products is written as one with a padded window. XLA does not see into kernels: `kernels` lists them.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from lmjax.plan import hlo

_NAMED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ([a-z]+\d*\w*)\[([\d,]*)\]")
_PRODUCT = re.compile(r" (convolution|dot|ragged-dot)\((.*?)\)(.*)")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_PART = re.compile(r"(\w+)=([\dx_\-]+)")
_KERNEL = re.compile(r'%?([\w.\-]+) = .* custom-call\((.*)\), custom_call_target="tpu_custom_call"')

Shape = tuple[int, ...]


def runs(text: str) -> dict[str, int]:
    """How often each computation runs in one run of the program; of a conditional, every branch.

    Raises:
      ValueError: the text does not tell how often a loop runs.
    """
    computations, entry = hlo.split(text)
    found: collections.Counter[str] = collections.Counter()

    def visit(name: str, times: int) -> None:
        found[name] += times
        for line in computations.get(name, ()):
            if "-done(" in line or "-update(" in line:
                continue  # the same computation was named at the start
            loop = hlo.WHILE.search(line)
            if loop:
                count = hlo.trip_count(line, *(computations[part] for part in loop.groups()))
                if count is None:
                    raise ValueError(f"a loop whose trip count is not told: {line.strip()[:200]}")
                visit(loop.group(2), times * count)
            for called in hlo.called(line):
                visit(called, times)

    visit(entry, 1)
    return {name: times for name, times in found.items() if name in computations}


def flops(text: str) -> float:
    """FLOPs of one run of the program on one device; a `ValueError` for a loop whose trip count the text does not tell."""
    computations, _ = hlo.split(text)
    return sum(times * sum(products(computations[name])) for name, times in runs(text).items())


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A program of its own, into which XLA does not see."""

    name: str  # without the number that XLA adds
    operands: tuple[Shape, ...]
    times: int  # in one run of the program


def kernels(text: str) -> list[Kernel]:
    """Every call of a kernel on one device."""
    computations, _ = hlo.split(text)
    found = []
    for name, times in runs(text).items():
        shapes = named_shapes(computations[name])
        for line in computations[name]:
            call = _KERNEL.search(line)
            if call:
                operands = (shapes.get(operand) for operand in re.findall(r"%([\w.\-]+)", call.group(2)))
                kernel = re.sub(r"[.\d]+$|\.clone", "", call.group(1))
                found.append(Kernel(kernel, tuple(filter(None, operands)), times))
    return found


def named_shapes(lines: list[str]) -> dict[str, Shape]:
    """The shapes of a computation's arrays."""
    named = filter(None, map(_NAMED.match, lines))
    return {one.group(1): tuple(int(size) for size in one.group(3).split(",") if size) for one in named}


def products(lines: list[str]) -> Iterator[float]:
    """FLOPs of each product in a computation."""
    shapes = named_shapes(lines)
    for line in lines:
        found, named = _PRODUCT.search(line), _NAMED.match(line)
        if found and named:
            kind, operands, rest = found.groups()
            left, right = (shapes[name] for name in re.findall(r"%([\w.\-]+)", operands)[:2])
            out = shapes[named.group(1)]
            yield convolution_flops(out, left, right, rest) if kind == "convolution" else dot_flops(out, left, rest)


def dot_flops(out: Shape, left: Shape, rest: str) -> float:
    """2 · numbers that come out · numbers that are summed for each; of a ragged dot, whose rows each meet one matrix, too."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else [len(left) - 1]
    return 2.0 * math.prod(out) * math.prod(left[dim] for dim in dims)


def convolution_flops(out: Shape, left: Shape, right: Shape, rest: str) -> float:
    """2 · batch · features in · features out · pairs of output and window places that meet, for each spatial dim."""
    left_dims, right_dims, out_dims = _LABELS.search(rest).groups()
    parts = dict(_PART.findall(window_of(rest)))
    total = 2.0 * out[out_dims.index("b")] * out[out_dims.index("f")] * right[right_dims.index("i")]
    for place, dim in enumerate(sorted(filter(str.isdigit, out_dims))):
        size = right[right_dims.index(dim)]
        window = {name: parts[name].split("x")[place] for name in parts}
        total *= meetings(out[out_dims.index(dim)], left[left_dims.index(dim)], size, window)
    return total


def window_of(rest: str) -> str:
    """What stands in `window={…}`."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    return found.group(1) if found else ""


def meetings(out: int, left: int, size: int, window: dict[str, str]) -> int:
    """Pairs of an output's and a window's place that meet a number of the input, and no padding or hole."""
    stride, low = int(window.get("stride", 1)), int(window.get("pad", "0_0").split("_")[0])
    holes, step = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    reach = (left - 1) * holes + 1
    places = (o * stride + k * step - low for o in range(out) for k in range(size))
    return sum(1 for place in places if 0 <= place < reach and place % holes == 0)
