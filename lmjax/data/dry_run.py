"""`lmjax prepare --dry-run`: the stages on a sample, and what that says of the whole: documents and tokens of each source.

The sample is the first documents of files spread evenly over a source. It goes through the very stages in a temporary folder. What
only shows over the whole (copies far apart, caps) is told as a lower bound of what is dropped.
"""

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from lmjax.data import passes, prepare, publish
from lmjax.data.compression import Fault, decompressed, raw_blocks, salvaged, small_blocks
from lmjax.data.engine import Engine, LocalEngine, Progress
from lmjax.data.inputs import PARQUET_SUFFIX, WARC_SUFFIXES, known_suffix
from lmjax.data.mixture import Budget, budget
from lmjax.data.read import RECORD_BYTES, Counts
from lmjax.data.report import collect
from lmjax.data.stage import GlobalStage, Shard
from lmjax.data.units import Unit, fingerprint, open_units
from lmjax.data.web import OPENING, read_archive
from lmjax.data.written import SUFFIX, DocumentWriter
from lmjax.errors import UserError
from lmjax.files import sha256_file

SPREAD = 10  # files of a source that the sample comes from
STEP_BYTES = 512  # of a file that is measured


@dataclasses.dataclass
class Sampled:
    """The sample of a source, and how much of the source it is."""

    documents: int = 0
    text_bytes: int = 0
    file_bytes: float = 0  # of the files, as far as they were read
    whole: bool = True  # no file was left before its end


def estimate(
    config: prepare.PrepareConfig,
    documents: Sequence[str],
    source: str | None,
    num_documents: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What preparing would give.

    Args:
      config: as for `prepare`.
      documents: as for `prepare`.
      source: as for `prepare`.
      num_documents: of each source's sample.
      progress: is told of tasks done.

    Returns:
      {"stages": rows of the sample, "sources": {source: {files, file_bytes, sampled, documents, tokens, exact}}, "dealt": {source
      that `deal_by` makes: {documents, tokens, exact}}, "budget": the mixture's rows, "whole_only": the stages whose drops a
      sample understates}.
    """
    stages = [getattr(config, name) for name in config.stages]
    hashes = {stage.name: {path: fingerprint(path) for path in stage.files()} for stage in stages}
    units = open_units(config.sources, config.shard_bytes, documents, source)
    prepare.check_sources(stages, units)
    with tempfile.TemporaryDirectory(prefix="lmjax-dry-run-") as folder:
        sampled, drawn = {}, []
        for name in dict.fromkeys(unit.source for unit in units):
            path = Path(folder) / f"{name}{SUFFIX}"
            sampled[name] = write_sample([unit for unit in units if unit.source == name], path, num_documents)
            drawn.append(Unit(name, 0, ((path.name, str(path)),), (sha256_file(path),), True, "text", "id"))
        with LocalEngine(0, progress) as engine:
            done = prepare.run_passes(config, stages, drawn, hashes, Path(folder) / prepare.WORK, engine)
            values = collect(config.tokenizer, done)
            sources = {name: extrapolate(name, units, sampled[name], values) for name in sampled}
            dealt = deal(config, sources, done[-1].shards, Path(folder) / prepare.WORK, engine)
    tokens = {name: row["tokens"] for name, row in (dealt or sources).items()}
    whole_only = [stage.name for stage in stages if isinstance(stage, GlobalStage)]
    rows = [{"stage": stage["stage"], **stage["total"]} for stage in values["stages"]]
    mixed = run_budget(config, tokens)
    return {"stages": rows, "sources": sources, "dealt": dealt, "budget": mixed, "whole_only": whole_only}


def deal(
    config: prepare.PrepareConfig, sources: dict[str, Any], shards: Sequence[Shard], work: Path, engine: Engine
) -> dict[str, dict[str, Any]]:
    """What the sources that `deal_by` makes hold: of the estimate of theirs as much as of its sample."""
    dealt: dict[str, dict[str, Any]] = {}
    for name, row in sources.items() if config.deal_by else ():
        own = [shard for shard in shards if shard.source == name]
        documents, text_bytes = (max(1, sum(getattr(s, key) for s in own)) for key in ("documents", "text_bytes"))
        for shard in publish.deal(own, config.deal_by, work, engine):
            part = dealt.setdefault(shard.source, {"documents": 0.0, "tokens": 0.0, "exact": row["exact"]})
            part["documents"] += row["documents"] * shard.documents / documents
            part["tokens"] += row["tokens"] * shard.text_bytes / text_bytes
    return {
        name: row | {key: round(row[key]) for key in ("documents", "tokens")} for name, row in sorted(dealt.items())
    }


def run_budget(config: prepare.PrepareConfig, tokens: dict[str, int]) -> list[Budget]:
    """What a run reads of each source; where its length is not given, as many tokens as there are.

    A source that has none left takes no part, but its name is known.
    """
    by_name = [config.data.weights, config.data.max_epochs, config.data.max_tokens]
    named = {name for given in (*by_name, *(stage.weights for stage in config.data.stages)) for name in given}
    tokens = {name: count for name, count in tokens.items() if count or name in named}
    if not any(tokens.values()):
        raise UserError("no document of the sample is left: there is nothing to mix")
    return budget(tokens, config.data, config.run_tokens or sum(tokens.values()), config.run_steps)


def write_sample(units: Sequence[Unit], path: Path, num_documents: int) -> Sampled:
    """Writes the first documents of some units."""
    some = units[:: max(1, len(units) // SPREAD)]
    sampled, each = Sampled(whole=len(some) == len(units)), -(-num_documents // len(some))
    with DocumentWriter(path) as writer:
        for unit in some:
            left = each
            for i, file in enumerate(unit.files):
                one = dataclasses.replace(unit, files=(file,), sha256=unit.sha256[i : i + 1])
                taken, used, whole = write_first(one, writer, left)
                left -= taken
                sampled.file_bytes += used
                sampled.whole &= whole
        sampled.documents, sampled.text_bytes = writer.documents, writer.bytes
    if not sampled.documents:
        raise UserError(f"the source {units[0].source} holds no document that can be read")
    return sampled


def write_first(unit: Unit, writer: DocumentWriter, most: int) -> tuple[int, float, bool]:
    """Writes the first documents of a file; how many, the bytes of the file that they took, and whether it held no more."""
    if most == 0:
        return 0, 0.0, False
    ((_, path),) = unit.files
    counts, before = Counts(), writer.documents
    found = passes.unit_documents(unit, counts)
    for document in itertools.islice(found, most):
        writer.write(document)
    records, left_out = counts.read, sum(counts.left_out.values())
    whole = next(found, None) is None
    used = float(os.path.getsize(path)) if whole else used_bytes(path, records + left_out)
    return writer.documents - before, used, whole


def used_bytes(path: str, records: int) -> float:
    """The bytes of a file, as it lies on the disk, up to the end of its first records.

    A block of text comes out of many compressed bytes at once: within it the records count the same.
    """
    suffix, size = known_suffix(epath.Path(path)), os.path.getsize(path)
    if suffix == PARQUET_SUFFIX:
        import pyarrow.parquet as pq

        return size * records / max(1, pq.read_metadata(path).num_rows)
    fed = read = 0
    with open(path, "rb") as file:

        def blocks() -> Iterator[bytes]:
            nonlocal fed
            for block in small_blocks(raw_blocks(file), STEP_BYTES):
                fed += len(block)
                yield block

        with contextlib.suppress(Fault):
            start = 0
            for found in record_counts(blocks(), str(suffix), epath.Path(path)):
                if found and read + found >= records:
                    return start + (fed - start) * (records - read) / found
                read, start = read + found, fed if found else start
    return float(size)


def record_counts(blocks: Iterator[bytes], suffix: str, path: epath.Path) -> Iterator[int]:
    """How many records end in one piece of a file after another."""
    if suffix in WARC_SUFFIXES:
        return (1 for _ in read_archive(salvaged(blocks, suffix, path, OPENING), RECORD_BYTES))
    return filled_lines(decompressed(blocks, suffix, path))


def filled_lines(blocks: Iterable[bytes]) -> Iterator[int]:
    """How many lines end in each block; blank ones are no records."""
    begun = b""  # of the line that goes on: whether it holds anything
    for block in blocks:
        *ended, rest = (begun + block).split(b"\n")
        yield sum(1 for line in ended if line.strip())
        begun = rest.strip()[:1]


def extrapolate(source: str, units: Sequence[Unit], sampled: Sampled, values: dict[str, Any]) -> dict[str, Any]:
    """The sample's outcome, times how often it goes into the source."""
    files = [file for unit in units if unit.source == source for _, file in unit.files]
    size = sum(Path(file).stat().st_size for file in files)
    times = 1.0 if sampled.whole else max(1.0, size / max(1.0, sampled.file_bytes))
    last = values["stages"][-1]["sources"][source]
    return {
        "files": len(files),
        "file_bytes": size,
        "sampled": sampled.documents,
        "documents": round(last["kept"] * times),
        "tokens": round(last["tokens_kept"] * times),
        "exact": sampled.whole,
    }


def show(estimated: dict[str, Any]) -> None:
    """Prints the estimate."""
    from rich.console import Console

    for table in tables(estimated):
        Console().print(table)
    for name in estimated["whole_only"]:
        print(f"{name} was tried on the sample alone: over the whole it drops more")


def tables(estimated: dict[str, Any]) -> Iterator[Any]:
    """The stages on the sample, the sources, the budget."""
    from rich.table import Table

    stages = Table("stage", "read", "kept", "dropped, most for", "documents/s", title="the sample")
    for row in estimated["stages"]:
        reasons = sorted(row["dropped"].items(), key=lambda item: -item[1])[:3]
        speed = f"{row['read'] / row['seconds']:,.0f}" if row["seconds"] > 0 else ""
        stages.add_row(
            row["stage"], f"{row['read']:,}", f"{row['kept']:,}", ", ".join(f"{r} {n}" for r, n in reasons), speed
        )
    yield stages
    sources = Table(
        "source", "files", "bytes", "sampled", "documents kept", "tokens kept", title="the whole, estimated"
    )
    for name, row in estimated["sources"].items():
        about = "" if row["exact"] else "about "
        sources.add_row(
            name, f"{row['files']:,}", f"{row['file_bytes']:,}", f"{row['sampled']:,}", f"{about}{row['documents']:,}",
            f"{about}{row['tokens']:,}",
        )  # fmt: skip
    for name, row in estimated["dealt"].items():
        about = "" if row["exact"] else "about "
        sources.add_row(name, "", "", "", f"{about}{row['documents']:,}", f"{about}{row['tokens']:,}")
    yield sources
    mixture = Table(
        "source", "share of the run", "tokens read", "epochs", title="the run's tokens (config.data, config.run_tokens)"
    )
    for row in estimated["budget"]:
        mixture.add_row(row.source, f"{row.share:.2%}", f"{row.tokens_read:,}", f"{row.epochs:.2f}")
    yield mixture
