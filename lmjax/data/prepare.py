"""`lmjax prepare`: from a raw crawl to clean, counted, traceable documents, by the stages that the config names, in its order.

    OUT/<source>.jsonl.zst        the documents; `lmjax split` reads them
    OUT/report.html, report.json  what was kept, dropped and changed, by stage, source and reason, with samples
    OUT/events/<source>.jsonl.zst what each stage did to each document, for `lmjax prepare --explain ID`
    OUT/aside/<source>.jsonl.zst  records and documents that could not be read or judged, whole
    OUT/<stage>/…                 what a stage publishes, such as the contamination flags of each benchmark
    OUT/work                      every stage's output by shard: a changed config redoes what it changes, a kill costs a shard

The work of a pass is found again by what decides it: the options of its stages, the content of the files they read, the
content of the shards that come in. Answers of a model, which cost money, are found by the request alone (`work/answers`), and
stay for as long as a stage asks for them. None of it depends on workers, machines or the engine, so neither does the output.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from etils import epath

from lmjax.config import did_you_mean, free, is_free, need, to_dict
from lmjax.data import passes, publish, report
from lmjax.data.c4 import C4
from lmjax.data.clean import Clean
from lmjax.data.code import Code
from lmjax.data.config import DataConfig
from lmjax.data.decontaminate import Decontaminate
from lmjax.data.engine import Engine, Progress, Task, open_engine
from lmjax.data.exact_dedup import ExactDedup
from lmjax.data.fineweb import FineWeb
from lmjax.data.gopher_quality import GopherQuality
from lmjax.data.gopher_repetition import GopherRepetition
from lmjax.data.language import Language
from lmjax.data.license import License
from lmjax.data.near_dedup import NearDedup
from lmjax.data.pii import Pii
from lmjax.data.quality import Quality
from lmjax.data.safety import Safety
from lmjax.data.semantic import SemanticDedup
from lmjax.data.simple import Simple
from lmjax.data.stage import GlobalStage, MapStage, Shard, Stage
from lmjax.data.synthetic import Synthetic
from lmjax.data.units import InputConfig, Unit, check_local, fingerprint, hash_sources, hash_units, open_units
from lmjax.data.url import Url
from lmjax.errors import RunError, UserError
from lmjax.files import (
    MANIFEST,
    TEMPORARY,
    UNFINISHED,
    Manifest,
    check_apart,
    claim,
    code_version,
    empty,
    read_manifest,
    sha256_json,
    write_manifest,
)  # fmt: skip

log = logging.getLogger(__name__)

VERSION = 1  # of reading and of the form of shards
WORK = "work"


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Which stages, in which order, and the options of each."""

    sources: dict[str, InputConfig] = dataclasses.field(default_factory=dict)  # or --documents on the command line
    stages: tuple[str, ...] = ()  # names of the sections below; one that judges each document alone may stand twice
    shard_bytes: int = 32_000_000  # of text: what a task works on, and what a kill may cost
    max_failed_share: float = 0.01  # of a source's documents that may fail in the reading or a stage: more is an error
    # a field of meta, such as language: each of its values becomes a source (web → web-en, web-de)
    deal_by: str | None = None
    tokenizer: str | None = free(None)  # made by `lmjax tokenizer`: the report's tokens are measured by it, not guessed
    save: Literal["stage", "pass"] = free("stage")
    # stage: each stage's output is kept, so that a changed option redoes it and what follows; pass: stages that judge
    # documents one by one run in one go, which saves disk and time
    keep_work: bool = free(True)  # False: OUT/work is removed at the end, and a changed config begins anew
    data: DataConfig = dataclasses.field(default_factory=DataConfig, metadata={"free": True})
    # the mixture of the run that will read this: --dry-run tells the tokens of each source
    run_tokens: int | None = free(None)  # of that run; none: as many as are kept
    run_steps: int = free(1)  # of that run, where its mixture changes by step
    engine: Literal["local", "ray"] = free("local")
    num_workers: int = free(1)  # processes of the local engine
    ray_address: str | None = free(None)  # of a running cluster; none: one is started here
    # the stages, each with its options
    url: Url = dataclasses.field(default_factory=Url)
    clean: Clean = dataclasses.field(default_factory=Clean)
    language: Language = dataclasses.field(default_factory=Language)
    gopher_repetition: GopherRepetition = dataclasses.field(default_factory=GopherRepetition)
    gopher_quality: GopherQuality = dataclasses.field(default_factory=GopherQuality)
    c4: C4 = dataclasses.field(default_factory=C4)
    fineweb: FineWeb = dataclasses.field(default_factory=FineWeb)
    simple: Simple = dataclasses.field(default_factory=Simple)
    code: Code = dataclasses.field(default_factory=Code)
    license: License = dataclasses.field(default_factory=License)
    quality: Quality = dataclasses.field(default_factory=Quality)
    exact_dedup: ExactDedup = dataclasses.field(default_factory=ExactDedup)
    near_dedup: NearDedup = dataclasses.field(default_factory=NearDedup)
    semantic_dedup: SemanticDedup = dataclasses.field(default_factory=SemanticDedup)
    decontaminate: Decontaminate = dataclasses.field(default_factory=Decontaminate)
    safety: Safety = dataclasses.field(default_factory=Safety)
    synthetic: Synthetic = dataclasses.field(default_factory=Synthetic)
    pii: Pii = dataclasses.field(default_factory=Pii)

    def __post_init__(self):
        need(self.shard_bytes >= 1, f"config.shard_bytes={self.shard_bytes} must be at least 1")
        need(0 <= self.max_failed_share <= 1, f"config.max_failed_share={self.max_failed_share} must be a share")
        need(self.run_tokens is None or self.run_tokens > 0, f"config.run_tokens={self.run_tokens} must be positive")
        need(self.run_steps > 0, f"config.run_steps={self.run_steps} must be positive")
        need(self.num_workers >= 0, f"config.num_workers={self.num_workers} must not be negative")
        for name in self.stages:
            need(
                isinstance(getattr(self, name, None), Stage),
                f"config.stages: no stage {name!r}{did_you_mean(name, stage_names(type(self)))}",
            )
            stage = getattr(self, name)
            keeps = isinstance(stage, GlobalStage) or type(stage).fit is not MapStage.fit
            once = self.stages.count(name) == 1
            need(once or not keeps, f"config.stages: {name!r} can stand once only: what it learns is kept by its name")


def stage_names(cls: type) -> list[str]:
    """Every stage that a config of a class can name."""
    factories = {field.name: field.default_factory for field in dataclasses.fields(cls)}
    return [name for name, made in factories.items() if isinstance(made, type) and issubclass(made, Stage)]


def decides(config: Any) -> dict[str, Any]:
    """The fields of a config that the output depends on."""
    return {key: value for key, value in to_dict(config).items() if not is_free(type(config), key)}


# -------------------------------------------------------------------------------------------------------------------- passes


def read_pass(config: PrepareConfig, units: Sequence[Unit], work: Path, engine: Engine) -> passes.Pass:
    """Reads the inputs into shards."""
    identity = [VERSION, config.shard_bytes, [unit.identity() for unit in units]]
    folder = work / f"00-read-{sha256_json(identity)[:12]}"
    tasks = [Task(unit.key, passes.read_unit, (unit, folder, config.shard_bytes)) for unit in units]
    receipts = engine.run(tasks, folder, "reading")
    numbers: dict[str, int] = {}
    shards = []
    for receipt in receipts:
        for made in receipt["shards"]:
            number = numbers[receipt["source"]] = numbers.get(receipt["source"], -1) + 1
            shards.append(passes.to_shard(receipt["source"], number, folder, made))
    return passes.Pass((), folder, shards, receipts)


def group_stages(stages: Sequence[Stage], save: str) -> list[tuple[Stage, ...]]:
    """Stages that run in one go: never across one that must see all documents first."""
    groups: list[list[Stage]] = []
    for stage in stages:
        alone = save == "stage" or isinstance(stage, GlobalStage) or getattr(stage, "fits", False)
        if groups and not alone and isinstance(groups[-1][-1], MapStage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return [tuple(group) for group in groups]


def stage_pass(
    number: int,
    stages: tuple[Stage, ...],
    shards: Sequence[Shard],
    hashes: dict[str, dict[str, str]],
    work: Path,
    engine: Engine,
) -> passes.Pass:
    """Takes all shards through the stages of a pass."""
    parts = [[stage.name, stage.version, decides(stage), list(hashes[stage.name].values())] for stage in stages]
    identity = [parts, [(shard.key, shard.sha256) for shard in shards]]
    names = "+".join(stage.name for stage in stages)
    names = names if len(names) <= 60 else f"{stages[0].name}+{len(stages) - 2}+{stages[-1].name}"
    folder = work / f"{number:02d}-{names}-{sha256_json(identity)[:12]}"
    receipts = engine.run(passes.pass_tasks(stages, shards, folder, engine), folder, names)
    after = [
        passes.to_shard(shard.source, shard.number, folder, receipt["shards"][0])
        for shard, receipt in zip(shards, receipts, strict=True)
    ]
    return passes.Pass(stages, folder, after, receipts)


def check_budget(config: PrepareConfig, done: passes.Pass) -> None:
    """Too many failures are an error: of the input where it was read, of ours in a stage."""
    for name, rows in zip([stage.name for stage in done.stages] or ["read"], passes.rows(done), strict=True):
        for row in rows:
            if row["failed"] <= config.max_failed_share * row["read"]:
                continue
            told = f"{row['failed']} of {row['read']} documents of {row['source']} failed in {name}"
            allowed = f"more than config.max_failed_share={config.max_failed_share:g} allows"
            why = f"{told}, {allowed}; the first: {first_failure(row)}"
            if done.stages:
                passes.forget_failed(done)
                raise RunError(why)
            raise UserError(why)
    if not done.stages and not done.shards:
        raise UserError("the inputs hold no document")


def first_failure(row: dict[str, Any]) -> str:
    """An example."""
    _, name, _, why = row["samples"]["failed"][0]
    return name if why is None else f"{name}: {why}"


# ------------------------------------------------------------------------------------------------------------------ the whole


def prepare(
    config: PrepareConfig,
    out: os.PathLike | str,
    documents: Sequence[str] = (),
    source: str | None = None,
    progress: Progress | None = None,
) -> tuple[Manifest, bool]:
    """Prepares documents.

    Args:
      config: sources, stages and their options.
      out: the folder; one that an earlier preparation made is brought up to date.
      documents: more inputs: folders that a stage made (each of their files is a source), or raw files, folders and globs.
      source: names the raw ones, all together.
      progress: is told of tasks done.

    Returns:
      The manifest, and whether nothing was to do.

    Raises:
      UserError: inputs or options are wrong, or too many records cannot be read.
      RunError: a stage failed on too many documents.
    """
    start = time.monotonic()
    check_local(out)
    stages = [getattr(config, name) for name in config.stages]
    warn_unused(config)
    files = {stage.name: list(stage.files()) for stage in stages}
    named = [path for given in config.sources.values() for path in given.paths]
    named += [path for paths in files.values() for path in paths]
    check_apart(out, [*documents, *named, *([config.tokenizer] if config.tokenizer else [])])
    units = open_units(config.sources, config.shard_bytes, documents, source)
    check_sources(stages, units)
    check_apart(out, (path for unit in units for _, path in unit.files))  # a link may lead to it
    out = Path(out)
    with claimed(out), open_engine(config.engine, config.num_workers, config.ray_address, progress) as engine:
        work = out / WORK
        units = hash_units(units, work, engine)
        hashes = {name: {path: fingerprint(path) for path in paths} for name, paths in files.items()}
        inputs = {f"source {name}": value for name, value in hash_sources(units).items()}
        inputs |= {f"file {path}": value for found in hashes.values() for path, value in found.items()}
        identity = {name: to_dict(config)[name] for name in ("stages", "shard_bytes", "max_failed_share", "deal_by")}
        identity |= {stage.name: decides(stage) for stage in stages}
        identity["versions"] = {"read": VERSION, **{stage.name: stage.version for stage in stages}}
        if (out / MANIFEST).exists():
            manifest = read_manifest(out, "prepare")
            if (manifest.inputs, manifest.config) == (inputs, identity):
                return manifest, True
            (out / MANIFEST).unlink()
        empty(epath.Path(out), keep=(WORK,))
        remove_temporary(work)
        done = run_passes(config, stages, units, hashes, work, engine)
        values = report.collect(config.tokenizer, done)
        counts, content = publish.publish(publish.deal(done[-1].shards, config.deal_by, work, engine), done, out)
        report.write(values, out)
        seconds = round(time.monotonic() - start, 3)
        manifest = Manifest("prepare", inputs, identity, counts, content, code_version(), seconds)
        write_manifest(out, manifest)
        clean_work(config, done, work)
    return manifest, False


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """The folder is ours, and no other process works in it."""
    if (out / MANIFEST).exists():
        read_manifest(out, "prepare")  # another stage's output is not for us to change
    else:
        claim(epath.Path(out), "prepare")
    marker = out / UNFINISHED
    with open(marker, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another `lmjax prepare` is working in {out}") from error
        yield
        marker.unlink()


def check_sources(stages: Sequence[Stage], units: Sequence[Unit]) -> None:
    """Every source that an option names is read. Where `deal_by` makes sources, stages see those of before."""
    known = {unit.source for unit in units}
    for stage in stages:
        for option, names in stage.sources_named().items():
            for name in names:
                need(
                    name in known,
                    f"config.{stage.name}.{option}: no source {name!r} is read{did_you_mean(name, known)}",
                )


def warn_unused(config: PrepareConfig) -> None:
    """Options of a stage that does not run are told, not obeyed in silence."""
    defaults = type(config)()
    for name in stage_names(type(config)):
        if name not in config.stages and getattr(config, name) != getattr(defaults, name):
            log.warning("config.%s is set, but %r is not among config.stages", name, name)


def run_passes(
    config: PrepareConfig,
    stages: Sequence[Stage],
    units: Sequence[Unit],
    hashes: dict[str, dict[str, str]],
    work: Path,
    engine: Engine,
) -> list[passes.Pass]:
    """The reading, then all stages."""
    done = [read_pass(config, units, work, engine)]
    check_budget(config, done[0])
    for number, group in enumerate(group_stages(stages, config.save), 1):
        done.append(stage_pass(number, group, done[-1].shards, hashes, work, engine))
        check_budget(config, done[-1])
    return done


def remove_temporary(work: Path) -> None:
    """What a kill left half written."""
    for path in work.rglob(f".*{TEMPORARY}"):
        path.unlink()


def clean_work(config: PrepareConfig, done: Sequence[passes.Pass], work: Path) -> None:
    """Removes the work of other configs, or all of it."""
    dear = {stage.keeps for one in done for stage in one.stages}
    kept = {one.folder.name for one in done} | dear | {"inputs"} if config.keep_work else set()
    for folder in work.iterdir():
        if folder.name not in kept:  # what was dealt lies in the output, too
            shutil.rmtree(folder)
