"""What sketches of shards are to later tasks: parts of the corpus, single documents by their place, and what was found of them.

A document's place is its number in the corpus; documents of earlier corpora come after all others.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmjax.data.document import Document
from lmjax.data.sortmerge import BLOCK_RECORDS, Packed, Run, write_run
from lmjax.data.written import read_written
from lmjax.files import read_json

DROPPED = np.dtype([("place", "u8"), ("survivor", "u8"), ("similarity", "f4")])
CLUSTER = np.dtype([("survivor", "u8"), ("place", "u8")])
OPEN_FILES = 64  # packed files that a task keeps open


class Part(NamedTuple):
    """A shard, of this corpus or of an earlier one, and its sketch."""

    documents: str  # file of documents; empty where an index took its place
    sketch: str  # folder
    start: int  # the place of its first document
    count: int
    runs: int  # sorted files of records
    earlier: str | None  # the folder of the earlier corpus


def load_parts(folder: Path) -> list[Part]:
    """All parts, as `decide` wrote them."""
    return [Part(*part) for part in read_json(folder / "parts.json")]


class Lookup:
    """Finds what the sketches keep of single documents, by their place."""

    def __init__(self, parts: Sequence[Part]):
        self.parts, self.starts = parts, [part.start for part in parts]
        self.total = parts[-1].start + parts[-1].count if parts else 0
        self.opened: dict[str, Packed] = {}

    def part(self, place: int) -> Part:
        """The part that holds a place."""
        return self.parts[bisect_right(self.starts, place) - 1]  # of equal starts the last: the others are empty

    def get(self, name: str, place: int) -> bytes:
        """The item of a packed file."""
        part = self.part(place)
        path = f"{part.sketch}/{name}"
        if path not in self.opened:
            if len(self.opened) >= OPEN_FILES:
                self.opened.pop(next(iter(self.opened))).close()
            self.opened[path] = Packed(Path(path))
        return self.opened[path][place - part.start]

    def id(self, place: int) -> str:
        """A document's id."""
        return self.get("ids", place).decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Closes all files."""
        for packed in self.opened.values():
            packed.close()
        self.opened.clear()


def own(parts: Sequence[Part]) -> int:
    """How many documents this corpus has: places from there on are of earlier ones."""
    return sum(part.count for part in parts if part.earlier is None)


class Outcomes:
    """Collects what a task finds, and writes it in files of bounded size."""

    def __init__(self, folder: Path, name: str, write: Callable[[Path, str, np.ndarray], Any]):
        self.folder, self.name, self.write = folder, name, write
        self.names: list[str] = []
        self.blocks: list[np.ndarray] = []
        self.held = 0  # records in them, counted as they come: there may be a block for each record

    def add(self, block: np.ndarray) -> None:
        """Appends records."""
        if not len(block):
            return
        self.blocks.append(block)
        self.held += len(block)
        if self.held >= BLOCK_RECORDS:
            self.flush()

    def flush(self) -> list[str]:
        """Writes what is left; returns the names of all files."""
        if self.blocks:
            self.names.append(f"{self.name}.{len(self.names)}")
            self.write(self.folder, self.names[-1], np.concatenate(self.blocks))
        self.blocks, self.held = [], 0
        return self.names


def write_records(folder: Path, name: str, records: np.ndarray) -> None:
    """A sorted run of records."""
    write_run(folder / name, records)


def write_outcome(folder: Path, name: str, dropped: np.ndarray) -> None:
    """Who is dropped, for whom: sorted by the dropped and by the survivors."""
    write_run(folder / f"{name}.places", dropped)
    clusters = np.empty(len(dropped), CLUSTER)
    clusters["survivor"], clusters["place"] = dropped["survivor"], dropped["place"]
    write_run(folder / f"{name}.clusters", clusters)


def document_at(path: str, row: int) -> Document:
    """One document of a shard."""
    return next(itertools.islice(read_written(path), row, None))


def runs_of(parts: Sequence[Part], dtype: np.dtype) -> list[Run]:
    """The parts' runs of records, with places of the whole corpus."""
    return [Run(Path(part.sketch) / f"run{i}", dtype, part.start) for part in parts for i in range(part.runs)]
