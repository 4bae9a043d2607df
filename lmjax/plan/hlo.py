"""The collectives of a compiled step, read from its optimized HLO text. No jax.

`jax.stages.Compiled.as_text()` names every computation and what calls it; a collective runs as often as the product of the trip counts of
the loops around it. One that the compiler runs beside other work (start and done, or in parts of fused computations) counts once.

On a ring of n devices, for the whole array of S bytes (that which is gathered, or was not yet scattered), each device sends

    all-gather, reduce-scatter, all-to-all    S (n - 1) / n
    all-reduce                                2 S (n - 1) / n
    collective-permute                        S
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
SCATTER = (
    "all-reduce-scatter"  # a TPU's fused computation, written as an all-reduce and a slice, which is a reduce-scatter
)
INVOLUNTARY = (
    "Involuntary full rematerialization"  # XLA's warning, on stderr, that it gathers an array to lay it out anew
)

Groups = tuple[tuple[int, ...], ...]  # ids of devices in the order of the mesh; for a permute, (source, target)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"%?([\w.\-]+) = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_WORK = re.compile(r" (fusion|convolution|dot|custom-call|while|call|sort|reduce|scatter|gather)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, each device's view."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of what comes out on one device
    groups: Groups
    times: int  # in one run of the program
    asynchronous: bool  # other work runs beside it
    op: str  # where it comes from, as jax names it

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return 2 if self.kind == "collective-permute" else len(self.groups[0])

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole array, once: gathered, or before it is scattered."""
        total = sum(array_bytes(dtype, shape) for dtype, shape in self.arrays)
        return total * self.group_size if self.kind == "reduce-scatter" else total

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends on a ring, all times together."""
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.times * self.whole_bytes * factor

    def scattered(self) -> "Collective":
        """The reduce-scatter that sums the same; its arrays are vectors of a device's share."""
        shares = tuple((dtype, (math.prod(shape) // self.group_size,)) for dtype, shape in self.arrays)
        return dataclasses.replace(self, kind="reduce-scatter", arrays=shares)

    def axes(self, sizes: dict[str, int]) -> tuple[str, ...]:
        """The mesh axes over which it goes, given the mesh's sizes in its order."""
        ids = np.array(self.groups)
        places = np.stack(np.unravel_index(ids, tuple(sizes.values())))
        moved = np.any(places != places[..., :1], axis=(1, 2))
        return tuple(name for name, moves in zip(sizes, moved, strict=True) if moves)


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array of HLO, "bf16" or "pred" and its shape."""
    bits = _BITS.search(dtype)
    return math.prod(shape) * (int(bits.group()) if bits else 8) // 8


def collectives(text: str) -> list[Collective]:
    """Every collective of a program, in the order of its text.

    Raises:
      ValueError: one runs in a loop whose trip count the text does not tell, or over groups that are written in no known way.
    """
    computations, entry = split(text)
    found: dict[tuple, Collective] = {}

    def visit(name: str, loop: str, times: int | None) -> None:
        lines = computations.get(name, [])
        for place, line in enumerate(lines):
            if "-done(" in line or "async-update(" in line:
                continue
            match = _COLLECTIVE.search(line)
            if match:
                chain = re.search(
                    r'chain_id="(\d+)"', line
                )  # of parts; a channel is no name: jax gives them all the same
                key = (loop, chain.group(1)) if chain else (name, match.group(1))
                beside = "async" in name or (bool(match.group(4)) and works_before_done(lines, place, match.group(1)))
                one = parse(line, match, times, beside)
                one = one.scattered() if name.startswith(SCATTER) else one
                first = found.get(key, one)  # later parts of the same: it runs beside what is between them
                found[key] = dataclasses.replace(first, asynchronous=first.asynchronous or one.asynchronous)
                continue
            inner = WHILE.search(line)
            if inner:
                count = trip_count(line, *(computations.get(part, []) for part in inner.groups()))
                visit(inner.group(2), inner.group(2), None if None in (count, times) else count * times)
            for inside in called(line):
                visit(inside, loop, times)

    visit(entry, entry, 1)
    return list(found.values())


def split(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the first that runs."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            lines = computations[head.group(2)] = []
            entry = head.group(2) if head.group(1) else entry
        else:
            lines.append(line)
    return computations, entry


def called(line: str) -> Iterator[str]:
    """The computations that a line calls, but for those of a loop."""
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def works_before_done(lines: list[str], place: int, name: str) -> bool:
    """Whether anything is computed between a start and its done: else it is waited for."""
    for line in lines[place + 1 :]:
        if "-done(" in line and re.search(rf"%{re.escape(name)}\b", line):
            return False
        if _WORK.search(line):
            return True
    return False


def trip_count(loop: str, condition: list[str], body: list[str]) -> int | None:
    """How often a loop runs; none: not told.

    As the compiler notes it, or from a condition `counter < constant` and what the body adds: an unrolled loop counts by twos.
    """
    known = re.search(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)', loop)
    if known:
        return int(known.group(1))
    root = next((line for line in condition if "ROOT" in line and "direction=LT" in line), "")
    compared = re.findall(r"%([\w.\-]+)", root.partition("compare(")[2])
    bounds = [value for name, value in constants(condition).items() if name in compared]
    elements = re.findall(r"%([\w.\-]+) = .*get-tuple-element\(.*index=(\d+)", "\n".join(condition))
    places = [int(place) for name, place in elements if name in compared]
    if len(bounds) != 1:
        return None
    return -(-bounds[0] // (increment(body, places[0]) if len(places) == 1 else 1))


def increment(body: list[str], place: int) -> int:
    """What a loop's body adds to the counter at that place of its tuple; 1 where it does not tell."""
    root = next((line for line in body if "ROOT" in line), "")
    operands = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2])
    made = [line for line in body if place < len(operands) and re.match(rf"\s*%{re.escape(operands[place])} = ", line)]
    added = re.findall(r"%([\w.\-]+)", made[0].partition(" add(")[2]) if made else []
    steps = [value for name, value in constants(body).items() if name in added]
    return steps[0] if len(steps) == 1 else 1


def constants(lines: list[str]) -> dict[str, int]:
    """Integer constants by their names."""
    found = re.findall(r"%([\w.\-]+) = [su]32\[\][^ ]* constant\((\d+)\)", "\n".join(lines))
    return {name: int(value) for name, value in found}


def parse(line: str, match: re.Match, times: int | None, beside: bool) -> Collective:
    """A collective from its line; `beside`: other work runs meanwhile."""
    name, result, kind, start = match.groups()
    if times is None:
        raise ValueError(f"{name} runs in a loop whose trip count is not told: {line.strip()[:200]}")
    op = re.search(r'op_name="([^"]*)"', line)
    arrays = outputs(kind, result, bool(start))
    return Collective(kind, arrays, groups_of(line), times, beside, op.group(1) if op else "")


def outputs(kind: str, result: str, start: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The arrays of a result; the type of a start holds its operands, too."""
    arrays = tuple(
        (dtype, tuple(int(size) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", result))
    )
    if start and kind == "collective-permute":
        return arrays[1:2]
    if start and kind != "all-reduce":
        return arrays[len(arrays) // 2 :]
    return arrays


def groups_of(line: str) -> Groups:
    """The groups of devices of a collective, or the pairs of a permute."""
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    listed = pairs or re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed:
        return tuple(tuple(map(int, re.findall(r"\d+", part))) for part in re.findall(r"\{([^}]*)\}", listed.group(1)))
    iota = _IOTA.search(line)
    if iota:
        shape, *order = (_numbers(part) for part in iota.groups())
        return _rows(_iota(*order).reshape(shape))
    mesh = _MESH.search(line)
    if mesh:
        return _rows(_over_mesh(*mesh.groups()))
    raise ValueError(f"groups of devices written in an unknown way: {line.strip()[:300]}")


def _numbers(part: str | None) -> tuple[int, ...] | None:
    return tuple(map(int, part.split(","))) if part else None


def _iota(dims: tuple[int, ...], order: tuple[int, ...] | None) -> np.ndarray:
    return np.arange(math.prod(dims)).reshape(dims).transpose(order)


def _over_mesh(axes: str, dims: str | None, order: str | None, over: str) -> np.ndarray:
    """Groups over some axes of a mesh, "'x'=2,'y'=4", or over a part of one, "'y':(1)2": its first factor of 2."""
    sizes = {name: [int(size)] for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    chosen = []
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over):
        if part:
            (size,) = sizes[name]
            sizes[name] = [int(before), int(part), size // int(before) // int(part)]
        chosen.append((name, 1 if part else 0))
    places = [(name, i) for name, parts in sizes.items() for i in range(len(parts))]
    shape = [size for parts in sizes.values() for size in parts]
    ids = np.arange(math.prod(shape)) if dims is None else _iota(_numbers(dims), _numbers(order))
    rest = [place for place in places if place not in chosen]
    ids = ids.reshape(shape).transpose([places.index(place) for place in rest + chosen])
    return ids.reshape(-1, math.prod(sizes[name][i] for name, i in chosen))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))
