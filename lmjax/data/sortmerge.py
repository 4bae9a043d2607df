"""Sorting and grouping records of a corpus by files: memory does not grow with the corpus.

A task for each shard writes a run: records of one dtype, raw, sorted by all fields in their order. The first field of what is
grouped is a hash, so equal parts of its range hold about equally many records, and a task for each part merges its slices of
all runs, block by block. Numbers that a later task looks up one at a time (a document's id, its shingles) lie in a `Packed` file.
"""

import bisect
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmjax.files import whole

RANGE_RECORDS = 1 << 21  # that a task merges; it holds but a block of them
RUN_RECORDS = 1 << 18  # that a sketch holds before it writes them
BLOCK_RECORDS = 1 << 14  # that a merge holds at a time, over all its runs
LEAST_BLOCK = 16  # records of a run that are read at a time, however many runs there are


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[Any]:
    """A binary file to write that is there whole or not at all."""
    with whole(path) as temporary, temporary.open("wb") as file:
        yield file


def in_order(records: np.ndarray) -> np.ndarray:
    """Records sorted by all their fields in order."""
    return records[np.lexsort([records[name] for name in reversed(records.dtype.names)])]


def write_run(path: Path, records: np.ndarray) -> int:
    """Sorts records and writes them; returns how many."""
    with open_whole(path) as file:
        in_order(records).tofile(file)
    return len(records)


class RunWriter:
    """Collects records in any order and writes them as runs of bounded size: FOLDER/run0, run1 …"""

    def __init__(self, folder: Path):
        self.folder = folder
        self.blocks: list[np.ndarray] = []
        self.held = self.records = self.runs = 0

    def add(self, records: np.ndarray) -> None:
        """Appends records."""
        self.blocks.append(records)
        self.held += len(records)
        if self.held >= RUN_RECORDS:
            self.close()

    def close(self) -> dict[str, int]:
        """Writes what is left; returns the numbers of `records` and `runs`."""
        if self.held:
            self.records += write_run(self.folder / f"run{self.runs}", np.concatenate(self.blocks))
            self.runs += 1
        self.blocks, self.held = [], 0
        return {"records": self.records, "runs": self.runs}


class Run:
    """A sorted file of records, opened for each read: a merge may have thousands.

    Args:
      path: the file.
      dtype: of a record.
      base: is added to the field `place`: a run counts its documents from 0.
    """

    def __init__(self, path: Path, dtype: np.dtype, base: int = 0):
        self.path, self.dtype, self.base = path, dtype, base
        self.size = os.path.getsize(path) // dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Records by their numbers."""
        records = np.fromfile(self.path, self.dtype, stop - start, offset=start * self.dtype.itemsize)
        if self.base:
            records["place"] += np.uint64(self.base)
        return records

    def find(self, bound: Any) -> int:
        """How many records have a smaller first field."""
        name, size = self.dtype.names[0], self.dtype.itemsize
        with self.path.open("rb") as file:

            def first(number: int) -> Any:
                return np.frombuffer(os.pread(file.fileno(), size, number * size), self.dtype)[name][0]

            if name == "place":
                bound = max(0, bound - self.base)
            return bisect.bisect_left(range(self.size), bound, key=first)


def ranges(records: int) -> list[tuple[int, int | None]]:
    """Parts of the range of a 64-bit hash, one for each `RANGE_RECORDS` records: [low, high), None for the end."""
    parts = max(1, -(-records // RANGE_RECORDS))
    edges = [(i << 64) // parts for i in range(parts)]
    return list(zip(edges, [*edges[1:], None], strict=True))


@dataclasses.dataclass
class Cursor:
    """How far a run has been read."""

    run: Run
    start: int
    stop: int
    held: int = 0  # records in the pool


def merged(runs: Iterable[Run], low: int | None = None, high: int | None = None) -> Iterator[np.ndarray]:
    """The records of all runs in order, in blocks; where bounds are given, those whose first field is in [low, high)."""
    runs = list(runs)
    if not runs:
        return
    dtype, cursors = runs[0].dtype, []
    for run in runs:
        start = 0 if low is None else run.find(low)
        stop = run.size if high is None else run.find(high)
        if stop > start:
            cursors.append(Cursor(run, start, stop))
    block = max(LEAST_BLOCK, BLOCK_RECORDS // max(1, len(cursors)))
    pool, owner = np.empty(0, dtype), np.empty(0, np.int64)
    while True:
        parts, owners = [pool], [owner]
        for number, cursor in enumerate(cursors):
            wanted = min(block - cursor.held, cursor.stop - cursor.start)
            if wanted > 0:
                parts.append(cursor.run.read(cursor.start, cursor.start + wanted))
                owners.append(np.full(wanted, number))
                cursor.start, cursor.held = cursor.start + wanted, cursor.held + wanted
        pool, owner = np.concatenate(parts), np.concatenate(owners)
        if not len(pool):
            return
        order = np.lexsort([pool[name] for name in reversed(dtype.names)])
        pool, owner = pool[order], owner[order]
        cut = safe(owner, cursors)
        yield pool[:cut]
        for number, count in enumerate(np.bincount(owner[:cut], minlength=len(cursors)).tolist()):
            cursors[number].held -= count
        pool, owner = pool[cut:].copy(), owner[cut:]


def safe(owner: np.ndarray, cursors: Sequence[Cursor]) -> int:
    """How many records of the sorted pool no unread one precedes: up to the first that is the last read of an unfinished run."""
    last = np.full(len(cursors), -1)
    last[owner] = np.arange(len(owner))  # of equal indices the last one wins
    waiting = [int(last[i]) for i, cursor in enumerate(cursors) if cursor.start < cursor.stop]
    return min(waiting) + 1 if waiting else len(owner)


# ------------------------------------------------------------------------------------------------------------------- packed


class PackedWriter:
    """Writes arrays of differing lengths one after another; the offsets follow when it closes."""

    def __init__(self, file: Any, offsets: Any):
        self.file, self.offsets, self.ends = file, offsets, [0]

    def add(self, data: bytes) -> None:
        """Appends an item."""
        self.file.write(data)
        self.ends.append(self.ends[-1] + len(data))

    def close(self) -> None:
        """Writes the offsets."""
        np.array(self.ends, np.uint64).tofile(self.offsets)


@contextlib.contextmanager
def write_packed(path: Path) -> Iterator[PackedWriter]:
    """A `Packed` file to fill: `path` and, beside it, `path.offsets`."""
    with open_whole(path.with_name(f"{path.name}.offsets")) as offsets, open_whole(path) as file:
        writer = PackedWriter(file, offsets)
        yield writer
        writer.close()


class Packed:
    """Items of differing lengths, read one at a time: by `pread`, since pages of a map would count as memory in use."""

    def __init__(self, path: Path):
        self.data = os.open(path, os.O_RDONLY)
        self.offsets = os.open(path.with_name(f"{path.name}.offsets"), os.O_RDONLY)

    def __getitem__(self, number: int) -> bytes:
        start, stop = np.frombuffer(os.pread(self.offsets, 16, 8 * number), np.uint64).tolist()
        return os.pread(self.data, stop - start, start)

    def close(self) -> None:
        """Closes the files."""
        os.close(self.data)
        os.close(self.offsets)
