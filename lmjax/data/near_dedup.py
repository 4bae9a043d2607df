"""Removes near-duplicates: MinHash or SimHash finds the candidates, their shingles decide (Broder 1997; Charikar 2002).

A document is dropped if and only if it was found similar to a document that survives; so nothing that is merely a
neighbour's neighbour is swallowed. Buckets of texts that share a band are merged in order of priority. Each document is compared
with the bucket's leaders, those that resemble no leader before them: a page repeated a hundred thousand times costs one
comparison a copy. What follows a leader that is itself dropped elsewhere is decided in another round, without the dropped.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lmjax.config import need
from lmjax.data import minhash
from lmjax.data.dedup import Dedup, days
from lmjax.data.document import Document, to_bytes
from lmjax.data.engine import Engine, Task
from lmjax.data.sketches import DROPPED, Lookup, Outcomes, Part, load_parts, own, runs_of, write_outcome, write_records
from lmjax.data.sortmerge import Run, RunWriter, merged, open_whole, ranges, write_packed

RECORD = np.dtype([("hash", "u8"), ("key", "f8"), ("place", "u8"), ("day", "f4")])
EDGE = np.dtype([("key", "f8"), ("member", "u8"), ("leader", "u8"), ("similarity", "f4"), ("partial", "u1")])
KEPT, UNDECIDED, GONE = 0, 1, 2  # a document's state between rounds, one byte each
SHINGLES = 1 << 15  # of a longer text the smallest hashes stand for all: an error of a quarter of a per cent
SKETCHES = 1 << 10  # that become records at a time
WHOLE_BUCKET = 8  # documents in a bucket up to which all are compared with all
LEADERS = 64  # of a bucket that a document is compared with
REMEMBERED = 1 << 12  # comparisons that a task does not repeat in other bands
EDGES = 1 << 12  # that are Python objects at a time
ROUNDS = 20  # after which what is undecided stays


@dataclasses.dataclass(frozen=True)
class NearDedup(Dedup):
    """Near-duplicates: of each group one survives, chosen by `keep`."""

    name: ClassVar[str] = "near_dedup"
    reason: ClassVar[str] = "near_duplicate"
    sketched: ClassVar[tuple[str, ...]] = ("method", "ngram", "bands", "rows", "seed", "verify", "max_bits")
    record: ClassVar[np.dtype] = RECORD
    packed: ClassVar[tuple[str, ...]] = ("ids", "shown")

    method: Literal["minhash", "simhash"] = "minhash"
    # Jaccard similarity from which on texts are duplicates: above the bands' knee (0.72), so few are missed
    threshold: float = 0.8
    # words of a shingle; none: 5 for minhash, 3 for simhash. Shorter texts are never duplicates
    ngram: int | None = None
    bands: int = 14  # of a signature; more find more candidates: knee at (1 / bands)^(1 / rows)
    rows: int = 8  # hashes of a band
    seed: int = 1  # of the permutations
    # what candidates are compared by: exact, or ± 0.04 in a third of the space
    verify: Literal["shingles", "signature"] = "shingles"
    max_bits: int = 3  # simhash: duplicates differ in at most so many of 64 bits

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 < self.threshold <= 1, f"near_dedup.threshold={self.threshold} must be in (0, 1]")
        need(self.ngram is None or self.ngram >= 1, f"near_dedup.ngram={self.ngram} must be at least 1 word")
        need(self.bands >= 1 and self.rows >= 1, "near_dedup.bands and rows must be at least 1")
        need(0 <= self.seed < 1 << 32, f"near_dedup.seed={self.seed} must be in [0, 2^32)")
        need(0 <= self.max_bits <= 8, f"near_dedup.max_bits={self.max_bits} must be in [0, 8]")

    # ------------------------------------------------------------------------------------------------------------ sketches

    @property
    def words(self) -> int:
        """Of a shingle."""
        return self.ngram or (5 if self.method == "minhash" else 3)

    def sketch(self, documents: Iterable[Document], folder: Path, earlier: bool) -> dict[str, int]:
        """Records of all bands of all documents, and what candidates are compared by."""
        hasher = minhash.MinHasher(self.bands * self.rows, self.seed)
        runs, block, number = RunWriter(folder), [], -1
        with write_packed(folder / "ids") as ids, write_packed(folder / "shown") as shown:
            for number, document in enumerate(documents):
                ids.add(to_bytes(document.id))
                shingles = minhash.shingle_hashes(document.text, self.words)
                if not len(shingles):
                    shown.add(b"")
                    continue
                made = minhash.simhash(shingles) if self.method == "simhash" else hasher.signature(shingles)
                exact = self.method == "minhash" and self.verify == "shingles"
                shown.add((shingles[:SHINGLES] if exact else made).tobytes())
                day = days(document.meta.get(self.date_field))
                block.append((made, self.priority(document, earlier), number, day))
                if len(block) >= SKETCHES:
                    runs.add(self.records(block))
                    block = []
        if block:
            runs.add(self.records(block))
        return {"documents": number + 1, **runs.close()}

    def records(self, block: Sequence[tuple[np.ndarray, float, int, float]]) -> np.ndarray:
        """A record for each bucket of each text."""
        sketches, *columns = zip(*block, strict=True)
        hashes = self.hashes(np.array(sketches, np.uint64))
        records = np.empty(hashes.shape, RECORD)
        records["hash"] = hashes
        for name, column in zip(("key", "place", "day"), columns, strict=True):
            records[name] = np.array(column, RECORD[name])[:, None]
        return records.ravel()

    def hashes(self, sketches: np.ndarray) -> np.ndarray:
        """Of the buckets that each text falls into."""
        if self.method == "simhash":
            return minhash.print_hashes(sketches, self.max_bits)
        return minhash.band_hashes(sketches, self.bands)

    def similarity(self, left: np.ndarray, right: np.ndarray) -> float:
        """Of two texts by what their sketches show; duplicates from `limit` on."""
        if self.method == "simhash":
            return 1 - minhash.bits_apart(left, right) / 64
        if self.verify == "signature":
            return minhash.agreement(left, right)
        return minhash.jaccard(left, right, SHINGLES)

    @property
    def limit(self) -> float:
        """The least similarity of duplicates."""
        return 1 - self.max_bits / 64 if self.method == "simhash" else self.threshold

    # ------------------------------------------------------------------------------------------------------------ deciding

    def find(
        self, parts: Sequence[Part], records: int, folder: Path, engine: Engine
    ) -> tuple[list[str], dict[str, Any]]:
        """Rounds of comparing and deciding, until nothing is undecided."""
        bounds = ranges(records)
        buckets: list[list[str] | None] = [None] * len(bounds)
        outcomes, counts, undecided, number = [], Counter(), 0, 0
        for number in range(ROUNDS):
            key = f"round{number:02d}"
            tasks = [
                Task(f"{key}/compare/{i:05d}", compare, (self, folder, number, i, *bounds[i], buckets[i]))
                for i in range(len(bounds))
            ]
            made = engine.run(tasks, folder, f"{self.name}: compare")
            buckets = [m["buckets"] for m in made] if number == 0 else buckets
            edges = [name for m in made for name in m["edges"]]
            for m in made:
                counts.update(m["counts"])
            (end,) = engine.run(
                [Task(f"{key}/resolve", resolve, (folder, number, edges))], folder, f"{self.name}: resolve"
            )
            outcomes, undecided = outcomes + end["outcomes"], end["undecided"]
            if not undecided:
                break
        told = {name: counts[name] for name in ("compared", "beyond_leaders")}
        return outcomes, {"rounds": number + 1, "undecided_kept": undecided, **told}


# ---------------------------------------------------------------------------------------------------------------- comparing


def state_path(folder: Path, number: int) -> Path:
    """The states after a round."""
    return folder / f"round{number:02d}" / "state"


def compare(
    stage: NearDedup, folder: Path, number: int, part: int, low: int, high: int | None, buckets: Sequence[str] | None
) -> dict[str, Any]:
    """Compares the documents of each bucket within a range of hashes; writes who resembles whom.

    The first round finds the buckets of two and more, and keeps their records for the others.
    """
    parts, name = load_parts(folder), f"round{number:02d}/{{}}{part:05d}"
    mine, compared = own(parts), Buckets(stage, Lookup(parts), Outcomes(folder, name.format("edges"), write_records))
    kept = Outcomes(folder, name.format("buckets"), write_records)
    if buckets is None:
        for records in shared(merged(runs_of(parts, RECORD), low, high)):
            kept.add(records)
            compared.add(records, records["place"] >= mine)
    else:
        state = np.memmap(state_path(folder, number - 1), np.uint8, "r")
        for records in merged([Run(folder / name, RECORD) for name in buckets]):
            states = state[records["place"]]
            compared.add(records[states != GONE], states[states != GONE] == KEPT)
    return {"buckets": kept.flush(), **compared.close()}


def shared(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Of sorted records those that share their hash with another."""
    held, last = None, None  # a record without a companion so far; or the hash of a bucket that may go on
    for block in blocks:
        records = block if held is None else np.concatenate([held, block])
        same = records["hash"][1:] == records["hash"][:-1]
        before = np.concatenate([[last is not None and records["hash"][0] == last], same])
        held, last = (None, records["hash"][-1]) if before[-1] else (records[-1:].copy(), None)
        chosen = before | np.concatenate([same, [False]])
        yield records[chosen]


class Member:
    """A document of a bucket that others are compared with."""

    def __init__(self, key: float, place: int, day: float, kept: bool):
        self.key, self.place, self.day, self.kept = key, place, day, kept
        self.leads = True  # resembles none before it
        self.sketch: np.ndarray | None = None  # read when first needed


class Buckets:
    """Compares the members of one bucket after another."""

    def __init__(self, stage: NearDedup, lookup: Lookup, edges: Outcomes):
        self.stage, self.lookup, self.edges = stage, lookup, edges
        self.counts: Counter = Counter(compared=0, beyond_leaders=0)
        self.remembered: dict[tuple[int, int], float] = {}
        self.found: list[tuple[float, int, int, float, int]] = []
        self.hash, self.size = -1, 0
        self.members: list[Member] = []  # of the bucket: all of a small one, the leaders of others

    def add(self, records: np.ndarray, kept: np.ndarray) -> None:
        """The next records in order, and which of them are decided to stay."""
        for (bucket, key, place, day), decided in zip(records.tolist(), kept.tolist(), strict=True):
            if bucket != self.hash:
                self.hash, self.size, self.members = bucket, 0, []
            self.size += 1
            if self.size == WHOLE_BUCKET + 1:
                self.members = [member for member in self.members if member.leads]
            self.meet(Member(key, place, day, decided))
            if len(self.found) >= EDGES:
                self.flush()

    def meet(self, new: Member) -> None:
        """Compares a document with those before it, and lets it lead where it resembles none."""
        small = self.size <= WHOLE_BUCKET
        for member in self.members:
            if new.kept and member.kept:
                continue
            similarity = self.similarity(member, new)
            if similarity < self.stage.limit:
                continue
            new.leads = new.kept
            if new.kept:  # and the other, though before it, is undecided
                self.found.append((member.key, member.place, new.place, similarity, not small))
                continue
            self.found.append((new.key, new.place, member.place, similarity, not small))
            if not small:
                break
        if small or (new.leads and len(self.members) < LEADERS):
            self.members.append(new)
        else:
            self.counts["beyond_leaders"] += new.leads

    def similarity(self, left: Member, right: Member) -> float:
        """Of two documents; 0 where they are too far apart in time."""
        days = self.stage.within_days
        if days is not None and not abs(left.day - right.day) <= days:
            return 0.0
        pair = (left.place, right.place)
        if pair not in self.remembered:
            if len(self.remembered) >= REMEMBERED:
                self.remembered.clear()
            self.counts["compared"] += 1
            self.remembered[pair] = self.stage.similarity(self.sketch(left), self.sketch(right))
        return self.remembered[pair]

    def sketch(self, member: Member) -> np.ndarray:
        """What a document is compared by."""
        if member.sketch is None:
            member.sketch = np.frombuffer(self.lookup.get("shown", member.place), np.uint64)
        return member.sketch

    def flush(self) -> None:
        """Hands the edges on."""
        self.edges.add(np.array(self.found, EDGE))
        self.found = []

    def close(self) -> dict[str, Any]:
        """The names of the edges' files, and what was counted."""
        self.flush()
        self.lookup.close()
        return {"edges": self.edges.flush(), "counts": self.counts}


# ----------------------------------------------------------------------------------------------------------------- deciding


def resolve(folder: Path, number: int, edges: Sequence[str]) -> dict[str, Any]:
    """Decides in order of priority: who resembles a document that stays goes; who waits for another is left to the next round."""
    parts, undecided = load_parts(folder), 0
    dropped = Outcomes(folder, f"round{number:02d}/dropped", write_outcome)
    with open_whole(state_path(folder, number)) as file:
        begin_states(file, parts, None if number == 0 else state_path(folder, number - 1))
        file.flush()
        state = np.memmap(file.name, np.uint8, "r+") if file.tell() else np.empty(0, np.uint8)
        for block, members in by_member(merged([Run(folder / name, EDGE) for name in edges])):
            rows = []
            for member, start, stop in members:
                lot, survivor, similarity = verdict(block[start:stop], state)
                state[member] = lot
                undecided += lot == UNDECIDED
                if lot == GONE:
                    rows.append((member, survivor, similarity))
            dropped.add(np.array(rows, DROPPED))
        if isinstance(state, np.memmap):
            state.flush()
    return {"outcomes": dropped.flush(), "undecided": undecided}


def begin_states(file: Any, parts: Sequence[Part], before: Path | None) -> None:
    """The states of all documents but those that an edge says more of: whoever was undecided stays."""
    if before is None:
        total = parts[-1].start + parts[-1].count if parts else 0
        file.write(bytes([KEPT]) * total)
        return
    with before.open("rb") as old:
        while states := old.read(1 << 20):
            file.write(states.replace(bytes([UNDECIDED]), bytes([KEPT])))


def verdict(edges: Sequence[tuple[float, int, int, float, int]], state: np.ndarray) -> tuple[int, int, float]:
    """What becomes of a document that resembles others, and for whom: the most similar of those that stay."""
    best, waits = (-1.0, 0), False
    for _, _, leader, similarity, partial in edges:
        lot = state[leader]
        if lot == KEPT:
            best = max(best, (similarity, -leader))
        waits |= lot == UNDECIDED or bool(partial)
    if best[0] >= 0:
        return GONE, -best[1], best[0]
    return UNDECIDED if waits else KEPT, 0, 0.0


def by_member(
    blocks: Iterable[np.ndarray],
) -> Iterator[tuple[list[tuple[float, int, int, float, int]], list[tuple[int, int, int]]]]:
    """Edges in blocks that part no member's, and for each member where its edges stand."""
    rest = np.empty(0, EDGE)
    for block in itertools.chain(blocks, [None]):
        records = rest if block is None else np.concatenate([rest, block])
        edges = [0, *(np.flatnonzero(np.diff(records["member"])) + 1).tolist(), len(records)]
        if block is not None:
            rest, edges = records[edges[-2] :].copy(), edges[:-1]
        members = records["member"].tolist()
        yield records.tolist(), [(members[a], a, b) for a, b in itertools.pairwise(edges) if b > a]
