"""Removes exact repeats: whole documents, or the paragraphs or lines of documents, by 128-bit hashes (xxh3).

Of equal documents one survives. A paragraph or line that stands in the corpus before is cut out of its document, and a document
of which too little is left goes; with it go pieces that stood in it first and were cut out of others.
"""

import dataclasses
import itertools
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import xxhash

from lmjax.config import need
from lmjax.data.dedup import LOST, START_CHARACTERS, Dedup, days, largest_of, size_label
from lmjax.data.document import Document, to_bytes
from lmjax.data.engine import Engine, Task
from lmjax.data.sketches import (
    DROPPED,
    Lookup,
    Outcomes,
    Part,
    document_at,
    load_parts,
    own,
    runs_of,
    write_outcome,
    write_records,
)
from lmjax.data.sortmerge import Run, RunWriter, merged, open_whole, ranges, write_packed
from lmjax.data.stage import Drop, Shard, Tally, Verdict

RECORD = np.dtype(
    [("hash", "u8"), ("low", "u8"), ("key", "f8"), ("place", "u8"), ("piece", "u4"), ("day", "f4")]
)  # sorted in this order: a group is of equal hash and low, its survivor comes first
PIECE = np.dtype([("place", "u8"), ("piece", "u4")])
BREAK = {"paragraph": re.compile(r"(\n{2,})"), "line": re.compile(r"(\n)")}


@dataclasses.dataclass(frozen=True)
class ExactDedup(Dedup):
    """Exact repeats; `keep` says which document of a group survives, and at which document a piece stays."""

    name: ClassVar[str] = "exact_dedup"
    reason: ClassVar[str] = "exact_duplicate"
    sketched: ClassVar[tuple[str, ...]] = ("level", "ignore", "min_length")
    record: ClassVar[np.dtype] = RECORD

    level: Literal["document", "paragraph", "line"] = "document"  # what is compared; paragraphs end at blank lines
    ignore: tuple[Literal["space", "case"], ...] = (
        "space",
    )  # differences that do not count: runs of white space, case
    min_length: int = 30  # characters; shorter paragraphs and lines ("}", "Yes.") repeat without being copies
    min_repeats: int = 2  # occurrences in the corpus from which on a paragraph or line stays only once
    min_left: float = 0.2  # share of the characters: a document of which less is left is dropped

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.min_length >= 1, f"exact_dedup.min_length={self.min_length} must be at least 1 character")
        need(self.min_repeats >= 2, f"exact_dedup.min_repeats={self.min_repeats} must be at least 2")
        need(0 <= self.min_left <= 1, f"exact_dedup.min_left={self.min_left} must be in [0, 1]")
        whole_documents = self.level == "document"
        need(whole_documents or self.within_days is None, "exact_dedup.within_days is for level='document'")

    def normal(self, text: str) -> str:
        """What is compared."""
        text = " ".join(text.split()) if "space" in self.ignore else text
        return text.lower() if "case" in self.ignore else text

    def sketch(self, documents: Iterable[Document], folder: Path, earlier: bool) -> dict[str, int]:
        """A record for each document, or for each piece that is long enough."""
        runs, row = RunWriter(folder), -1
        with write_packed(folder / "ids") as ids:
            for row, document in enumerate(documents):
                ids.add(to_bytes(document.id))
                numbers, texts = self.pieces(document.text)
                digests = b"".join(xxhash.xxh3_128_digest(to_bytes(text)) for text in texts)
                halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
                records = np.empty(len(halves), RECORD)
                records["hash"], records["low"], records["piece"] = halves[:, 0], halves[:, 1], numbers
                records["key"], records["place"] = self.priority(document, earlier), row
                records["day"] = days(document.meta.get(self.date_field))
                runs.add(records)
        return {"documents": row + 1, **runs.close()}

    def pieces(self, text: str) -> tuple[list[int], list[str]]:
        """Numbers and normal forms of what is compared of a text."""
        if self.level == "document":
            return [0], [self.normal(text)]
        normal = map(self.normal, BREAK[self.level].split(text)[::2])
        kept = [(number, piece) for number, piece in enumerate(normal) if len(piece) >= self.min_length]
        return [number for number, _ in kept], [piece for _, piece in kept]

    def find(
        self, parts: Sequence[Part], records: int, folder: Path, engine: Engine
    ) -> tuple[list[str], dict[str, Any]]:
        """Groups of equal documents."""
        tasks = [
            Task(f"group/{i:05d}", group_documents, (self, folder, f"group/{i:05d}", *bounds))
            for i, bounds in enumerate(ranges(records))
        ]
        made = engine.run(tasks, folder, f"{self.name}: group")
        return [name for names in made for name in names], {}

    def decide(self, shards: Sequence[Shard], folder: Path, engine: Engine) -> dict[str, Path]:
        """See `GlobalStage`."""
        if self.level == "document":
            return super().decide(shards, folder, engine)
        _, records = self.sketch_all(shards, folder, engine)
        tasks = [
            Task(f"group/{i:05d}", group_pieces, (self, folder, f"group/{i:05d}", *bounds))
            for i, bounds in enumerate(ranges(records))
        ]
        made = engine.run(tasks, folder, f"{self.name}: group")
        outcomes = [name for m in made for name in m["outcomes"]]
        tasks = [
            Task(f"settle/{i:05d}", settle_pieces, (folder, i, shard.key, outcomes)) for i, shard in enumerate(shards)
        ]
        engine.run(tasks, folder, f"{self.name}: decide")
        largest = largest_of(g for m in made for g in m["largest"])
        tasks = [Task(f"show/{i}", show_piece, (self, folder, *group)) for i, group in enumerate(largest)]
        sizes = sum((Counter(m["sizes"]) for m in made), Counter())
        report = {
            "clusters": sum(sizes.values()),
            "sizes": {size_label(power): sizes[power] for power in sorted(sizes, key=int)},
            "largest": list(engine.run(tasks, folder, f"{self.name}: largest")),
        }
        return self.close(shards, report, folder, engine)

    def carry_out(self, document: Document, decision: Any, tally: Tally) -> Verdict:
        """Drops a copy, or cuts repeated pieces out."""
        if self.level == "document":
            return super().carry_out(document, decision, tally)
        text = self.without(document.text, decision["pieces"])
        left = len(text) / len(document.text)
        if left < self.min_left or not text.strip():
            tally.add(LOST, document.source)
            return Drop("mostly_duplicate", {"left": round(left, 4)})
        tally.add("repeated_pieces", f"{self.level}s", len(decision["pieces"]))
        tally.add("repeated_pieces", "characters", len(document.text) - len(text))
        return dataclasses.replace(document, text=text)

    def without(self, text: str, removed: Sequence[int]) -> str:
        """The text without some of its pieces; each goes with the break before it, the first that stays has none."""
        parts, gone = BREAK[self.level].split(text), set(removed)
        stay = [i for i in range(0, len(parts), 2) if i // 2 not in gone]
        return "".join(parts[i] if i == stay[0] else parts[i - 1] + parts[i] for i in stay)


def same_group(records: np.ndarray) -> np.ndarray:
    """For each record but the first, whether it belongs to the one before it."""
    return (records["hash"][1:] == records["hash"][:-1]) & (records["low"][1:] == records["low"][:-1])


def group_documents(stage: ExactDedup, folder: Path, name: str, low: int, high: int | None) -> list[str]:
    """Finds the copies within a range of hashes."""
    parts = load_parts(folder)
    mine, outcomes = own(parts), Outcomes(folder, name, write_outcome)
    find = Copies() if stage.within_days is None else RecentCopies(stage.within_days, mine)
    for block in merged(runs_of(parts, RECORD), low, high):
        copies, survivors = find(block)
        copies &= block["place"] < mine  # earlier corpora lose nothing
        dropped = np.empty(int(copies.sum()), DROPPED)
        dropped["place"], dropped["survivor"], dropped["similarity"] = block["place"][copies], survivors[copies], 1
        outcomes.add(dropped)
    return outcomes.flush()


class Copies:
    """Which records are copies, and of which document: the first of their group."""

    def __init__(self) -> None:
        self.head = np.empty(0, RECORD)  # of the group that may go on in the next block

    def __call__(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        records = np.concatenate([self.head, block])
        same = np.concatenate([[False], same_group(records)])
        heads = np.maximum.accumulate(np.where(same, 0, np.arange(len(records))))
        extra = len(self.head)
        self.head = records[heads[-1:]]
        return same[extra:], records["place"][heads][extra:]


class RecentCopies:
    """The same, where copies further apart in time do not count: each record against the survivors around its day."""

    def __init__(self, within_days: float, mine: int):
        self.within_days, self.mine = within_days, mine
        self.group: tuple[int, int] | None = None
        self.days: list[float] = []  # of the group's survivors, sorted
        self.places: list[int] = []

    def __call__(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        copies, survivors = np.zeros(len(block), bool), block["place"].copy()
        for i, (high, low, _, place, _, day) in enumerate(block.tolist()):
            if (high, low) != self.group:
                self.group, self.days, self.places = (high, low), [], []
            at = bisect_left(self.days, day)
            near = [k for k in (at - 1, at) if 0 <= k < len(self.days) and abs(self.days[k] - day) <= self.within_days]
            if near and place < self.mine:
                copies[i] = True
                survivors[i] = self.places[min(near, key=lambda k: (abs(self.days[k] - day), self.places[k]))]
            elif day == day:  # no date: nobody's copy
                self.days.insert(at, day)
                self.places.insert(at, place)
        return copies, survivors


# ------------------------------------------------------------------------------------------------------------------- pieces


def group_pieces(stage: ExactDedup, folder: Path, name: str, low: int, high: int | None) -> dict[str, Any]:
    """Finds the repeated pieces within a range of hashes."""
    parts = load_parts(folder)
    mine, outcomes = own(parts), Outcomes(folder, name, write_records)
    sizes, largest = Counter(), []
    for head, size, copies in repeats(merged(runs_of(parts, RECORD), low, high), stage.min_repeats):
        if len(copies):
            copies = copies[copies["place"] < mine]
            removed = np.empty(len(copies), PIECE)
            removed["place"], removed["piece"] = copies["place"], copies["piece"]
            outcomes.add(removed)
        if size:
            sizes[str((size - 1).bit_length())] += 1
            largest.append((size, int(head["place"]), int(head["piece"])))
        if len(largest) > 1000:
            largest = largest_of(largest)
    largest = largest_of(largest)
    return {"outcomes": outcomes.flush(), "sizes": sizes, "largest": largest}


def repeats(blocks: Iterable[np.ndarray], least: int) -> Iterator[tuple[np.void | None, int, np.ndarray]]:
    """(first record, size, copies) of the groups of at least `least` records; a group that spans blocks comes in pieces, its
    size with the last."""
    rest, head, size = (
        np.empty(0, RECORD),
        None,
        0,
    )  # rest: a group that is still too small; head: one that is not, of `size`
    for block in blocks:
        records = np.concatenate([rest, block])
        edges = [0, *(np.flatnonzero(~same_group(records)) + 1).tolist(), len(records)]
        bounds = np.array(edges)
        if head is not None:
            more = edges[1] if (records[0]["hash"], records[0]["low"]) == (head["hash"], head["low"]) else 0
            size += more
            yield head, 0, records[:more]
            if more == len(records):
                rest = records[:0]
                continue
            yield head, size, records[:0]
            bounds, head = (bounds[1:] if more else bounds), None
        last = int(bounds[-2])
        for i in np.flatnonzero(np.diff(bounds)[:-1] >= least).tolist():
            start, stop = int(bounds[i]), int(bounds[i + 1])
            yield records[start], stop - start, records[start + 1 : stop]
        rest = records[last:]
        if len(rest) >= least:
            head, size = rest[0], len(rest)
            yield head, 0, rest[1:]
            rest = rest[:0]
    if head is not None:
        yield head, size, rest[:0]


def settle_pieces(folder: Path, number: int, key: str, outcomes: Sequence[str]) -> None:
    """Writes which pieces of each document of a shard go."""
    part = load_parts(folder)[number]
    with open_whole(folder / "decisions" / f"{key}.jsonl") as file:
        runs = [Run(folder / name, PIECE) for name in outcomes]
        for place, pieces in pieces_of(merged(runs, part.start, part.start + part.count)):
            line = json.dumps([place - part.start, {"pieces": pieces}], separators=(",", ":"))
            file.write(line.encode() + b"\n")


def pieces_of(blocks: Iterable[np.ndarray]) -> Iterator[tuple[int, list[int]]]:
    """(place, numbers of its pieces) in order."""
    pairs = itertools.chain.from_iterable(block.tolist() for block in blocks)
    for place, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield place, [piece for _, piece in group]


def show_piece(stage: ExactDedup, folder: Path, size: int, place: int, piece: int) -> dict[str, Any]:
    """A piece that repeats often, for the report."""
    lookup = Lookup(load_parts(folder))
    part = lookup.part(place)
    shown = {"size": size, "survivor": lookup.id(place), "members": [], "text": None}
    lookup.close()
    if part.documents:
        text = document_at(part.documents, place - part.start).text
        shown["text"] = BREAK[stage.level].split(text)[2 * piece][:START_CHARACTERS]
    return shown
