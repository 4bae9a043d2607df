"""Shards through stages: the tasks of `lmjax prepare` that touch documents, each a function of files to files.

A pass takes every shard through one stage or several, document by document. In a pass's folder:

    kept/<source>/00012.jsonl.zst        the documents that go on
    events/<source>/00012.jsonl.zst      what happened to the others, and what was changed: one line an event
    aside/<source>/00012.jsonl.zst       whole documents on which a stage failed
    receipts/<source>/00012.json         the counts; written last, so a shard is done once and for all or not at all

What a stage `keeps` (answers that were paid for) lies beside the passes' folders, which are named by all options.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard
from etils import epath

from lmjax.config import need
from lmjax.data import read
from lmjax.data.compression import decompressed, raw_blocks, split_lines
from lmjax.data.document import Document, draw, to_bytes
from lmjax.data.engine import Engine, Task, receipt
from lmjax.data.stage import SAMPLES, Counts, Event, GlobalStage, MapStage, Sample, Shard, Stage, add_sample, run, timed
from lmjax.data.units import Unit
from lmjax.data.written import SUFFIX, ZSTD_LEVEL, DocumentWriter, read_written
from lmjax.files import read_json, sha256_file, whole, write_json

VALUES = 500  # of the field that documents are dealt by: each is an open file
VALUE_CHARACTERS = 100  # of one: it names a file

# -------------------------------------------------------------------------------------------------------------------- files


class LineWriter:
    """Writes JSON lines to a zstd file; where no line comes, no file: one of an earlier try is removed."""

    def __init__(self, path: Path):
        self.path, self.stack, self.stream = path, contextlib.ExitStack(), None
        path.unlink(missing_ok=True)

    def write(self, value: Any) -> None:
        """Appends a line."""
        if self.stream is None:
            file = open(self.stack.enter_context(whole(self.path)), "wb")  # noqa: SIM115
            compressor = zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=True)
            self.stream = self.stack.enter_context(contextlib.closing(compressor.stream_writer(file)))
        self.stream.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


def read_lines(path: Path) -> Iterator[Any]:
    """What a `LineWriter` wrote."""
    with path.open("rb") as file:
        for line in split_lines(decompressed(raw_blocks(file), SUFFIX, epath.Path(path))):
            yield json.loads(line)


# ------------------------------------------------------------------------------------------------------------------ profile


class Profile:
    """What the documents of a shard are like, for the report."""

    def __init__(self) -> None:
        self.lengths: collections.Counter = collections.Counter()  # characters, by powers of two
        self.languages: collections.Counter = collections.Counter()
        self.samples: list[Sample] = []

    def see(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The same documents."""
        for document in documents:
            self.lengths[len(document.text).bit_length()] += 1
            self.languages[str(document.meta.get("language") or "unknown")] += 1
            add_sample(self.samples, "kept", document, lambda meta=document.meta: meta)
            yield document

    def close(self) -> dict[str, Any]:
        """As JSON."""
        lengths = {f"{2**bits}": number for bits, number in sorted(self.lengths.items())}
        return {"lengths_below": lengths, "languages": dict(sorted(self.languages.items())), "samples": self.samples}


# -------------------------------------------------------------------------------------------------------------------- tasks


def read_unit(unit: Unit, folder: Path, shard_bytes: int) -> dict[str, Any]:
    """Reads input files into shards of about `shard_bytes` of text."""
    start, counts, profile, shards = time.perf_counter(), read.Counts(), Profile(), []
    with LineWriter(folder / "aside" / f"{unit.key}{SUFFIX}") as aside:
        counts.quarantine = lambda where, why, raw: aside.write(
            {"stage": "read", "where": where, "why": why, "raw": escape(raw)}
        )
        documents = profile.see(unit_documents(unit, counts))
        first = next(documents, None)
        while first is not None:
            path = folder / "kept" / f"{unit.key}-{len(shards):03d}{SUFFIX}"
            first, numbers = write_some(path, first, documents, shard_bytes)
            shards.append({"path": str(path.relative_to(folder)), **numbers})
    return {
        "source": unit.source,
        "shards": shards,
        "counts": read_counts(counts, sum(shard["bytes"] for shard in shards), time.perf_counter() - start),
        "profile": profile.close(),
    }


def read_counts(counts: read.Counts, text_bytes: int, seconds: float) -> dict[str, Any]:
    """The counts of reading in the form of a stage's."""
    if counts.read != counts.kept + counts.failed:
        raise RuntimeError(f"reading lost count: {counts}")
    failed = [[draw(failure, "sample/failed", 0), failure, "", None] for failure in counts.failures]
    return {
        "read": counts.read,
        "added": 0,
        "kept": counts.kept,
        "dropped": {},
        "failed": counts.failed,
        "changed": counts.repaired,
        "bytes_read": text_bytes,
        "bytes_kept": text_bytes,
        "tally": {"left out": dict(sorted(counts.left_out.items()))} if counts.left_out else {},
        "samples": {"failed": sorted(failed)} if failed else {},
        "seconds": seconds,
    }


def unit_documents(unit: Unit, counts: read.Counts) -> Iterator[Document]:
    """The documents of a unit."""
    if not unit.written:
        for name, path in unit.files:
            origin = read.Origin(name, unit.source, unit.text_field, unit.id_field, counts)
            yield from read.read_file(epath.Path(path), origin)
        return
    for (_, path), sha256 in zip(unit.files, unit.sha256, strict=True):
        for document in read_written(path, sha256):
            counts.keep()
            yield document


def write_some(
    path: Path, document: Document, more: Iterator[Document], text_bytes: int
) -> tuple[Document | None, dict[str, Any]]:
    """Writes a document and those that follow, until there are `text_bytes`; returns the one after them, and the numbers."""
    following: Document | None = document
    with whole(path) as temporary, DocumentWriter(temporary) as writer:
        while following is not None and writer.bytes < text_bytes:
            writer.write(following)
            following = next(more, None)
    return following, {**writer.counts(), "sha256": sha256_file(path)}


def escape(raw: bytes) -> str:
    """Bytes as a text of JSON that gives them back: UTF-8 where they are, escapes elsewhere."""
    return raw.decode("utf-8", "surrogateescape")


def map_shard(stages: Sequence[MapStage], shard: Shard, folder: Path) -> dict[str, Any]:
    """A shard through consecutive map stages; what each `fit` made lies in `folder/fit/<stage>`."""

    def chain(counts: Sequence[Counts]) -> Iterator[Document]:
        documents = read_written(shard.path, shard.sha256)
        for stage, count in zip(stages, counts, strict=True):
            documents = run(stage, documents, count, own_folder(folder, stage))
        return documents

    return write_shard([stage.name for stage in stages], shard, folder, chain)


def global_shard(stage: GlobalStage, shard: Shard, decided: Path, folder: Path) -> dict[str, Any]:
    """Carries the decisions of a global stage out on a shard."""

    def chain(counts: Sequence[Counts]) -> Iterator[Document]:
        (count,) = counts
        documents = timed(count.reading(read_written(shard.path, shard.sha256)), count, -1)
        return timed(stage.process(documents, count, decided), count, 1)

    return write_shard([stage.name], shard, folder, chain)


def deal_shard(shard: Shard, field: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A shard's documents by the value of a field of meta, each value a source of its own; source → its part.

    Raises:
      UserError: the field has too many values.
    """
    parts: dict[str, DocumentWriter] = {}
    with contextlib.ExitStack() as stack:
        for document in read_written(shard.path, shard.sha256):
            source = f"{shard.source}-{value_name(document.meta.get(field))}"
            if source not in parts:
                many = f"config.deal_by={field!r} has more than {VALUES} values, each of which would be a source"
                need(len(parts) < VALUES, f"{many}: name a field of few, such as language")
                path = stack.enter_context(whole(folder / "dealt" / source / f"{shard.number:05d}{SUFFIX}"))
                parts[source] = stack.enter_context(DocumentWriter(path))
            parts[source].write(dataclasses.replace(document, source=source))
    dealt = {source: folder / "dealt" / source / f"{shard.number:05d}{SUFFIX}" for source in parts}
    return {
        source: {"path": str(path.relative_to(folder)), **parts[source].counts(), "sha256": sha256_file(path)}
        for source, path in dealt.items()
    }


def value_name(value: Any) -> str:
    """A value as part of a file's name. One that had to be altered ends with its hash, so that different values stay apart."""
    text = "unknown" if value is None or value == "" else str(value)
    name = re.sub(r"[^A-Za-z0-9_.]+", "_", text)[:VALUE_CHARACTERS]  # no `-`, which stands before it
    return name if name == text else f"{name.rstrip('_')}_{hashlib.sha256(to_bytes(text)).hexdigest()[:8]}"


def to_shard(source: str, number: int, folder: Path, made: dict[str, Any]) -> Shard:
    """A shard as a task's receipt tells of it."""
    return Shard(source, number, folder / made["path"], made["documents"], made["bytes"], made["sha256"])


def write_shard(names: Sequence[str], shard: Shard, folder: Path, chain: Any) -> dict[str, Any]:
    """Writes what becomes of a shard; returns its receipt."""
    path = folder / "kept" / f"{shard.key}{SUFFIX}"
    profile = Profile()
    with (
        LineWriter(folder / "events" / f"{shard.key}{SUFFIX}") as events,
        LineWriter(folder / "aside" / f"{shard.key}{SUFFIX}") as aside,
        whole(path) as temporary,
        DocumentWriter(temporary) as writer,
    ):

        def record(event: Event, document: Document) -> None:
            events.write({**event._asdict(), "source": shard.source})
            if event.what == "failed":
                aside.write({"stage": event.stage, "why": event.detail, "document": vars(document)})

        counts = [Counts(name, record) for name in names]
        for document in profile.see(chain(counts)):
            writer.write(document)
    numbers = {"path": str(path.relative_to(folder)), **writer.counts(), "sha256": sha256_file(path)}
    return {
        "source": shard.source,
        "shards": [numbers],
        "counts": [count.close() for count in counts],
        "profile": profile.close(),
    }


def own_folder(folder: Path, stage: Stage) -> Path:
    """Where a stage may keep files, in the folder of its pass."""
    return folder / ("decide" if isinstance(stage, GlobalStage) else f"fit/{stage.name}")


def fit(stage: MapStage, shards: Sequence[Shard], folder: Path) -> dict[str, float]:
    """Makes what a stage needs before its first document."""
    start, own = time.perf_counter(), own_folder(folder, stage)
    own.mkdir(parents=True, exist_ok=True)
    if stage.keeps is not None:
        keep_beside(own / stage.keeps, folder.parent / stage.keeps)
    stage.fit([shard.path for shard in shards], own)
    return {"seconds": time.perf_counter() - start}


def keep_beside(link: Path, kept: Path) -> None:
    """A stage's folder that lies beside those of the passes; the link is relative, so that all can be moved."""
    kept.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(kept, link.parent), target_is_directory=True)


def decide(stage: GlobalStage, shards: Sequence[Shard], folder: Path, engine: Engine) -> dict[str, Path]:
    """A global stage's decisions, each shard one file; made once."""
    own, done = own_folder(folder, stage), receipt(folder, Task(f"decide/{stage.name}", decide))
    if not done.exists():
        start = time.perf_counter()
        own.mkdir(parents=True, exist_ok=True)
        paths = stage.decide(shards, own, engine)
        if missing := {shard.key for shard in shards} - paths.keys():
            raise RuntimeError(f"{stage.name} gave no decisions for {sorted(missing)[:3]}")
        names = {key: str(path.relative_to(own)) for key, path in paths.items()}
        write_json(done, {"paths": names, "seconds": time.perf_counter() - start})
    return {key: own / name for key, name in read_json(done)["paths"].items()}


def seconds_before(stage: Stage, folder: Path) -> float:
    """What a stage's fit, or its decisions, took; with several workers the time that went by."""
    kind = "decide" if isinstance(stage, GlobalStage) else "fit"
    done = receipt(folder, Task(f"{kind}/{stage.name}", fit))
    return read_json(done)["seconds"] if done.exists() else 0.0


def pass_tasks(
    stages: Sequence[MapStage | GlobalStage], shards: Sequence[Shard], folder: Path, engine: Engine
) -> list[Task]:
    """A task for each shard of a pass, after what must come before them: fits, or decisions."""
    (first, *_) = stages
    if isinstance(first, GlobalStage):
        paths = decide(first, shards, folder, engine)
        return [Task(shard.key, global_shard, (first, shard, paths[shard.key], folder)) for shard in shards]
    fits = [
        Task(f"fit/{stage.name}", fit, (stage, shards, folder))
        for stage in stages
        if type(stage).fit is not MapStage.fit
    ]
    engine.run(fits, folder, "learning " + ", ".join(stage.name for stage in stages))
    return [Task(shard.key, map_shard, (tuple(stages), shard, folder)) for shard in shards]


@dataclasses.dataclass(frozen=True)
class Pass:
    """Stages that ran together, and what came of it."""

    stages: tuple[Stage, ...]  # none: the reading
    folder: Path
    shards: list[Shard]
    receipts: Sequence[dict[str, Any]]


def forget_failed(done: Pass) -> None:
    """Takes back the receipts of shards with failures that may pass, so that the next run judges these shards anew."""
    for shard, part in zip(done.shards, done.receipts, strict=True):
        failed = [
            counts["failed"] for stage, counts in zip(done.stages, part["counts"], strict=True) if stage.tries_again
        ]
        if any(failed):
            receipt(done.folder, Task(shard.key, map_shard)).unlink()


# ------------------------------------------------------------------------------------------------------------------ merging


def merge_counts(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of many shards as one: numbers add up, samples keep the smallest draws."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = add(merged[key], value) if key in merged else value
    return merged


def add(a: Any, b: Any) -> Any:
    """Sum of numbers, of dicts by key, and of lists of samples."""
    if isinstance(a, dict):
        return {
            key: add(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in sorted({*a, *b})
        }
    if isinstance(a, list):
        return sorted([*a, *b], key=lambda sample: sample[:2])[:SAMPLES]
    return a + b


def rows(done: Pass) -> list[list[dict[str, Any]]]:
    """The counts of a pass: for each of its stages those of each source."""
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for part in done.receipts:  # one at a time: their samples together would grow with the corpus
        for i, counts in enumerate(part["counts"] if done.stages else [part["counts"]]):
            key = (i, part["source"])
            merged[key] = merge_counts([merged[key], counts]) if key in merged else counts
    return [
        [{"source": source, **counts} for (number, source), counts in merged.items() if number == i]
        for i in range(max(1, len(done.stages)))
    ]
