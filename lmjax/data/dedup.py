"""What the stages that remove duplicates share: which document of a group survives, corpora of before, decisions, the report.

Each shard is sketched by a task of its own, which writes sorted records; tasks over ranges of hashes merge them and find the
groups (`sortmerge.py`, `sketches.py`); then each shard gets its decisions. Nothing depends on how the corpus is cut into shards.
"""

import dataclasses
import datetime
import email.utils
import heapq
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.engine import Engine, Task
from lmjax.data.inputs import published
from lmjax.data.sketches import CLUSTER, DROPPED, Lookup, Part, document_at, load_parts
from lmjax.data.sortmerge import Packed, Run, RunWriter, merged, open_whole, write_packed
from lmjax.data.stage import Drop, GlobalStage, Shard, Tally, Verdict
from lmjax.data.written import SUFFIX, read_written
from lmjax.errors import UserError
from lmjax.files import read_json, read_manifest, sha256_file, write_json

log = logging.getLogger(__name__)

LARGEST = 10  # clusters that the report shows
MEMBERS = 5  # of them
START_CHARACTERS = 200  # of their text
INDEX = "index.json"
LARGE = 1e300  # a number in meta from which on it is none: JSON holds infinity, and integers that no float holds
LOST = "lost_as_duplicates"  # the tally of dropped documents by source


@dataclasses.dataclass(frozen=True)
class Dedup(GlobalStage):
    """The options that all kinds of duplicates share."""

    keep: Literal["first", "oldest", "newest", "longest", "best"] = "first"  # survives; ties: the first in the corpus
    date_field: str = "date"  # of meta, for oldest, newest and within_days: ISO 8601, an HTTP date, or Unix seconds
    score_field: str = "quality"  # of meta, for best: a number, the higher the better
    within_days: float | None = None  # copies further apart, or without a date, are no duplicates: recurring texts stay
    earlier: tuple[str, ...] = ()  # folders of earlier preparations: what stands there survives, new copies of it go
    index: bool = (
        False  # publish sketches of the survivors, about as large as the texts, for later runs' `earlier`. What stages
    )
    # after this one drop stands there, too: let filters run before it
    alarm_share: float = 0.5  # a source that loses more than this share of its documents is told loudly

    reason: ClassVar[str] = "duplicate"  # of a drop
    sketched: ClassVar[tuple[str, ...]] = ()  # options that shape a sketch: an index made with others does not serve
    record: ClassVar[np.dtype]  # of a sketch's run
    packed: ClassVar[tuple[str, ...]] = ("ids",)  # packed files of a sketch

    def __post_init__(self) -> None:
        need(
            self.within_days is None or self.within_days >= 0,
            f"{self.name}.within_days={self.within_days} must be at least 0, or none",
        )
        need(0 < self.alarm_share <= 1, f"{self.name}.alarm_share={self.alarm_share} must be in (0, 1]")
        need(bool(self.date_field and self.score_field), f"{self.name}.date_field and score_field must name fields")

    def files(self) -> Sequence[str]:
        """The earlier corpora, which must be finished."""
        for folder in self.earlier:
            read_manifest(folder)
        return self.earlier

    # what the kinds differ in

    def sketch(self, documents: Iterable[Document], folder: Path, earlier: bool) -> dict[str, int]:
        """Writes the sketch of a shard: its runs and its packed files. Returns how many `documents`, `records` and `runs`."""
        raise NotImplementedError

    def find(
        self, parts: Sequence[Part], records: int, folder: Path, engine: Engine
    ) -> tuple[list[str], dict[str, Any]]:
        """Finds the duplicates: names of outcomes (see `write_outcome`) in `folder`, and lines for the report."""
        raise NotImplementedError

    # what they share

    def priority(self, document: Document, earlier: bool) -> float:
        """Of two duplicates the one with the smaller number survives."""
        if earlier:
            return -math.inf
        if self.keep == "longest":
            return -float(len(document.text))
        if self.keep == "best":
            return -score(document.meta.get(self.score_field))
        if self.keep == "first":
            return 0.0
        day = days(document.meta.get(self.date_field))
        return math.inf if math.isnan(day) else -day if self.keep == "newest" else day

    def decide(self, shards: Sequence[Shard], folder: Path, engine: Engine) -> dict[str, Path]:
        """See `GlobalStage`."""
        parts, records = self.sketch_all(shards, folder, engine)
        outcomes, told = self.find(parts, records, folder, engine)
        tasks = [
            Task(f"settle/{i:05d}", settle, (self, folder, i, shard_key(shards, i), outcomes))
            for i in range(len(parts))
        ]
        settled = engine.run(tasks, folder, f"{self.name}: decide")
        largest = largest_of(cluster for s in settled for cluster in s["largest"])
        tasks = [Task(f"show/{i}", show, (folder, *cluster)) for i, cluster in enumerate(largest)]
        sizes = sum((Counter(s["sizes"]) for s in settled), Counter())
        report = {
            "clusters": sum(sizes.values()),
            "sizes": {size_label(power): sizes[power] for power in sorted(sizes, key=int)},
            "largest": list(engine.run(tasks, folder, f"{self.name}: largest")),
            **told,
        }
        return self.close(shards, report, folder, engine)

    def sketch_all(self, shards: Sequence[Shard], folder: Path, engine: Engine) -> tuple[list[Part], int]:
        """Sketches what has no sketch yet; the parts in order (also as `parts.json`), and the number of all records."""
        tasks = [
            Task(f"sketch/{shard.key}", sketch, (self, str(shard.path), folder / "sketch" / shard.key, False))
            for shard in shards
        ]
        earlier: list[str | None] = [None] * len(tasks)
        for number, name in enumerate(self.earlier):
            known = self.indexed(Path(name))
            for i, path in enumerate(earlier_documents(Path(name)) if known is None else known):
                key = f"earlier/{number:02d}/{i:05d}"
                function, source = (sketch, str(path)) if known is None else (check, str(path))
                target = folder / "sketch" / key if known is None else path
                tasks.append(Task(f"sketch/{key}", function, (self, source, target, True)))
                earlier.append(name)
        made = engine.run(tasks, folder, f"{self.name}: sketch")
        starts = itertools.accumulate((m["documents"] for m in made), initial=0)
        parts = [
            Part(
                "" if task.function is check else task.arguments[1],
                str(task.arguments[2]),
                start,
                m["documents"],
                m["runs"],
                name,
            )
            for task, m, start, name in zip(tasks, made, starts, earlier, strict=False)
        ]
        write_json(folder / "parts.json", parts)
        return parts, sum(m["records"] for m in made)

    def close(self, shards: Sequence[Shard], report: dict[str, Any], folder: Path, engine: Engine) -> dict[str, Path]:
        """Writes the report and, where wanted, the index; returns the shards' decisions."""
        documents: Counter = Counter()
        for shard in shards:
            documents[shard.source] += shard.documents
        write_json(folder / "report.json", {**report, "documents": documents})
        if self.index:
            publish(self, shards, folder, engine)
        return {shard.key: folder / "decisions" / f"{shard.key}.jsonl" for shard in shards}

    def carry_out(self, document: Document, decision: Any, tally: Tally) -> Verdict:
        """Drops a copy; the detail names who survives, and where it stands in an earlier corpus."""
        tally.add(LOST, document.source)
        return Drop("in_earlier_corpus" if "folder" in decision else self.reason, decision)

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """Clusters, their sizes, the largest ones, and what each source lost."""
        report = read_json(folder / "report.json")
        documents, lost = report.pop("documents"), tally.get(LOST, {})
        shares = {name: lost.get(name, 0) / max(1, count) for name, count in documents.items()}
        report["share_lost"] = {name: round(share, 6) for name, share in shares.items()}
        report["alarms"] = [
            f"source {name!r} loses {share:.0%} of its documents as duplicates (alarm_share is {self.alarm_share:.0%})"
            for name, share in shares.items()
            if share > self.alarm_share
        ]
        for alarm in report["alarms"]:
            log.warning("%s: %s", self.name, alarm)
        return report

    # indexes

    def sketch_options(self) -> dict[str, Any]:
        """What two sketches must share to be compared."""
        options = json.loads(json.dumps({name: getattr(self, name) for name in self.sketched}))
        dated = self.date_field if self.within_days is not None else None
        return {"stage": self.name, "version": self.version, "date_field": dated, **options}

    def indexed(self, folder: Path) -> list[Path] | None:
        """The sketches that an earlier run published, or none that serves."""
        index = folder / self.name / INDEX
        if not index.exists():
            return None
        published = read_json(index)
        if published["options"] != self.sketch_options():
            log.warning(
                "%s: the index in %s was made with other options: its documents are read again", self.name, folder
            )
            return None
        return [index.parent / name for name in sorted(published["parts"])]


def shard_key(shards: Sequence[Shard], number: int) -> str | None:
    """Of a part; none for those of earlier corpora, which get no decisions."""
    return shards[number].key if number < len(shards) else None


def score(value: Any) -> float:
    """A score, or the worst one: of what is no finite number, too."""
    return float(value) if type(value) in (int, float) and abs(value) < LARGE else -math.inf


def days(value: Any) -> float:
    """A date as days since 1970, or NaN. A date without a zone is UTC."""
    if type(value) in (int, float):
        return float(value) / 86400 if abs(value) < LARGE else math.nan
    if not isinstance(value, str):
        return math.nan
    for parse in (datetime.datetime.fromisoformat, email.utils.parsedate_to_datetime):
        try:
            date = parse(value.strip())
            date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
            return date.timestamp() / 86400
        except (ValueError, TypeError, OverflowError, IndexError):
            continue
    return math.nan


def earlier_documents(folder: Path) -> list[Path]:
    """The files of documents of a finished folder."""
    paths = [folder / name for name in published(read_manifest(folder))]
    if not paths:
        raise UserError(f"{folder} holds no documents (*{SUFFIX}): it cannot serve as an earlier corpus")
    return paths


# ------------------------------------------------------------------------------------------------------------------- tasks


def sketch(stage: Dedup, path: str, folder: Path, earlier: bool) -> dict[str, int]:
    """The task that sketches a shard."""
    return stage.sketch(read_written(path), folder, earlier)


def check(stage: Dedup, path: str, folder: Path, _: bool) -> dict[str, int]:
    """The task that trusts a part of an index once its hashes agree."""
    published = read_json(folder.parent / INDEX)["parts"][folder.name]
    for name, sha256 in published["files"].items():
        if not (folder / name).exists() or sha256_file(folder / name) != sha256:
            raise UserError(f"{folder / name} is not what its index says (sha256 differs): prepare that corpus again")
    return {key: published[key] for key in ("documents", "records", "runs")}


def settle(stage: Dedup, folder: Path, number: int, key: str | None, outcomes: Sequence[str]) -> dict[str, Any]:
    """Writes the decisions on a shard, and counts the clusters whose survivors it holds."""
    parts = load_parts(folder)
    part, lookup = parts[number], Lookup(parts)
    bounds = (part.start, part.start + part.count)
    if key is not None:
        runs = [Run(folder / f"{name}.places", DROPPED) for name in outcomes]
        with open_whole(folder / "decisions" / f"{key}.jsonl") as file:
            for block in merged(runs, *bounds):
                for place, survivor, similarity in block.tolist():
                    decision = {"survivor": lookup.id(survivor), "similarity": round(similarity, 4)}
                    if (name := lookup.part(survivor).earlier) is not None:
                        decision["folder"] = name
                    file.write(json.dumps([place - part.start, decision], separators=(",", ":")).encode() + b"\n")
    sizes, largest = Counter(), []
    runs = [Run(folder / f"{name}.clusters", CLUSTER) for name in outcomes]
    for survivor, count, members in clusters(merged(runs, *bounds)):
        sizes[str(count.bit_length())] += 1  # with the survivor: count + 1, from 2^(k-1) + 1 to 2^k
        largest.append((count + 1, survivor, members))
        if len(largest) > 100:
            largest = largest_of(largest)
    lookup.close()
    return {"sizes": sizes, "largest": largest_of(largest)}


def largest_of(clusters: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Of (size, place of the survivor, …) the largest; of equals the first in the corpus."""
    return heapq.nlargest(LARGEST, clusters, key=lambda cluster: (cluster[0], -cluster[1]))


def size_label(power: str) -> str:
    """Of a bucket of sizes: 2, 3-4, 5-8 …"""
    low, high = 2 ** (int(power) - 1) + 1, 2 ** int(power)
    return str(high) if low == high else f"{low}-{high}"


def clusters(blocks: Iterable[np.ndarray]) -> Iterator[tuple[int, int, list[int]]]:
    """(survivor, number of dropped, the first of them) from records sorted by survivor."""
    current, count, members = -1, 0, []
    for block in blocks:
        edges = np.flatnonzero(np.diff(block["survivor"])) + 1
        for start, stop in itertools.pairwise([0, *edges.tolist(), len(block)]):
            survivor = int(block["survivor"][start])
            if survivor != current:
                if count:
                    yield current, count, members
                current, count, members = survivor, 0, []
            members += block["place"][start : min(stop, start + MEMBERS - len(members))].tolist()
            count += stop - start
    if count:
        yield current, count, members


def show(folder: Path, size: int, survivor: int, members: Sequence[int]) -> dict[str, Any]:
    """A large cluster for the report."""
    lookup = Lookup(load_parts(folder))
    part = lookup.part(survivor)
    text = document_at(part.documents, survivor - part.start).text[:START_CHARACTERS] if part.documents else None
    shown = {
        "size": size,
        "survivor": lookup.id(survivor),
        "members": [lookup.id(place) for place in members],
        "text": text,
    }
    lookup.close()
    return shown


# ------------------------------------------------------------------------------------------------------------------- index


def publish(stage: Dedup, shards: Sequence[Shard], folder: Path, engine: Engine) -> None:
    """Writes the sketches of the survivors to `publish`, for later runs."""
    tasks = [Task(f"publish/{i:05d}", publish_part, (stage, folder, i, shard.key)) for i, shard in enumerate(shards)]
    made = engine.run(tasks, folder, f"{stage.name}: index")
    parts = {f"{i:05d}": part for i, part in enumerate(made)}
    write_json(folder / "publish" / INDEX, {"options": stage.sketch_options(), "parts": parts})


def dropped(stage: Dedup, part: Part, path: Path) -> Iterator[int]:
    """The rows of a shard that go, by its decisions; a document of which pieces go may go itself."""
    decisions = dict(stage.decisions(path))
    yield from (row for row, decision in decisions.items() if "survivor" in decision)
    if any("pieces" in decision for decision in decisions.values()):
        for row, document in enumerate(read_written(part.documents)):
            if row in decisions and isinstance(stage.carry_out(document, decisions[row], Tally()), Drop):
                yield row


def publish_part(stage: Dedup, folder: Path, number: int, key: str) -> dict[str, Any]:
    """One shard's sketch without the documents that were dropped."""
    part, target = load_parts(folder)[number], folder / "publish" / f"{number:05d}"
    stays = np.ones(part.count, bool)
    stays[list(dropped(stage, part, folder / "decisions" / f"{key}.jsonl"))] = False
    rows = np.cumsum(stays) - 1
    for name in stage.packed:
        packed = Packed(Path(part.sketch) / name)
        with write_packed(target / name) as writer:
            for row in np.flatnonzero(stays).tolist():
                writer.add(packed[row])
        packed.close()
    writer = RunWriter(target)
    for number in range(part.runs):
        run = Run(Path(part.sketch) / f"run{number}", stage.record)
        records = run.read(0, run.size)
        records = records[stays[records["place"]]]
        records["place"] = rows[records["place"]]
        records["key"] = -math.inf
        writer.add(records)
    made = writer.close()
    hashes = {path.name: sha256_file(path) for path in sorted(target.iterdir()) if path.name[0] != "."}
    return {"documents": int(stays.sum()), **made, "files": hashes}
