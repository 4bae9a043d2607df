"""The inputs of a preparation in parts that tasks read, and their hashes."""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from lmjax.config import need
from lmjax.data.engine import Engine, Task
from lmjax.data.inputs import find_files, published
from lmjax.data.split import check_source
from lmjax.data.written import SUFFIX
from lmjax.errors import UserError
from lmjax.files import MANIFEST, UNFINISHED, is_remote, read_manifest, sha256_file, sha256_json

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """One source: a part of the corpus with a name of its own in counts and mixtures."""

    paths: tuple[str, ...]  # files, folders, globs; WARC, WET, HTML, text, JSON lines, Parquet
    text_field: str = "text"  # of JSON lines and Parquet; the other fields become meta
    id_field: str | None = "id"  # holds an id, unique in its source; where it is missing the id is `path#line`

    def __post_init__(self) -> None:
        need(self.text_field != self.id_field, f"config.sources: text_field and id_field are both {self.text_field!r}")


@dataclasses.dataclass(frozen=True)
class Unit:
    """Input files that are read together: a big one, or some small ones that follow one another."""

    source: str
    number: int
    files: tuple[tuple[str, str], ...]  # (name that ids begin with, path)
    sha256: tuple[str, ...]  # of each file
    written: bool  # the project's own form, made by an earlier stage
    text_field: str
    id_field: str | None

    @property
    def key(self) -> str:
        """Names the unit's receipt."""
        return f"{self.source}/{self.number:05d}"

    def identity(self) -> list[Any]:
        """What the documents depend on: not where the files lie."""
        names = [name for name, _ in self.files]
        return [self.source, names, list(self.sha256), self.written, self.text_field, self.id_field]


def open_units(
    sources: Mapping[str, InputConfig], shard_bytes: int, documents: Sequence[str], source: str | None
) -> list[Unit]:
    """What is read, in parts; their hashes come later.

    Raises:
      UserError: there is nothing, it is in a bucket, or a source's name cannot be one.
    """
    for path in (*documents, *(path for given in sources.values() for path in given.paths)):
        check_local(path)
    sources = dict(sources)
    made: dict[str, list[tuple[str, str, str]]] = {}
    raw = []
    for path in documents:
        if any((Path(path) / name).exists() for name in (MANIFEST, UNFINISHED)):
            add_made(made, path)
        else:
            raw.append(path)
    if raw:
        sources[check_source(source, {**sources, **made})] = InputConfig(tuple(raw))
    elif source is not None:
        raise UserError(f"--source {source} names raw files, but the inputs' sources have names: {', '.join(made)}")
    units = []
    for name, given in sources.items():
        check_source(name, made)
        files, skipped = find_files(given.paths)
        if skipped:
            log.warning("source %s: %d files have an unknown extension and are left out", name, skipped)
        groups = group_files(files, shard_bytes)
        units += [
            Unit(name, i, tuple(group), (), False, given.text_field, given.id_field) for i, group in enumerate(groups)
        ]
    for name, files in made.items():
        units += [
            Unit(name, i, ((file, path),), (sha256,), True, "text", "id")
            for i, (file, path, sha256) in enumerate(files)
        ]
    if not units:
        raise UserError("nothing to prepare: give --documents PATH … --source NAME, or config.sources")
    return units


def check_local(path: os.PathLike | str) -> None:
    """Preparation maps, locks and renames files: a `UserError` where a path is in a bucket."""
    why = "preparation reads and writes files of a disk: copy them with `gcloud storage cp -r`, or mount the bucket"
    need(not is_remote(path), f"{os.fspath(path)}: {why}")


def add_made(made: dict[str, list[tuple[str, str, str]]], folder: str) -> None:
    """The sources of a folder that a stage made."""
    manifest = read_manifest(folder)
    files = [] if manifest.stage == "split" else published(manifest)
    if not files:
        raise UserError(f"{folder} was made by `lmjax {manifest.stage}`: it holds no documents to prepare")
    for name in files:
        sha256 = manifest.content["files"][name]
        made.setdefault(name.removesuffix(SUFFIX), []).append((name, str(Path(folder) / name), sha256))


def group_files(files: Sequence[tuple[str, epath.Path]], max_bytes: int) -> list[list[tuple[str, str]]]:
    """Files that follow one another, together up to `max_bytes` where they are small."""
    groups: list[list[tuple[str, str]]] = []
    size = 0
    for name, path in files:
        length = path.stat().length
        if not groups or size + length > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append((name, os.fspath(path)))
        size += length
    return groups


def hash_units(units: Sequence[Unit], work: Path, engine: Engine) -> list[Unit]:
    """Units with the hash of each file: hashed once, for as long as its size and time of change stay."""
    tasks = []
    for unit in (unit for unit in units if not unit.written):
        paths = [path for _, path in unit.files]
        seen = [(path, (stat := os.stat(path)).st_size, stat.st_mtime_ns) for path in paths]
        tasks.append(Task(sha256_json(seen)[:24], hash_files, (paths,)))
    hashes = iter(engine.run(tasks, work / "inputs", "hashing the inputs"))
    return [unit if unit.written else dataclasses.replace(unit, sha256=tuple(next(hashes))) for unit in units]


def hash_files(paths: Sequence[str]) -> list[str]:
    """The sha256 of files."""
    return [sha256_file(path) for path in paths]


def hash_sources(units: Sequence[Unit]) -> dict[str, str]:
    """source → hash of its files' names and contents, and of the fields that are read of them."""
    files: dict[str, list] = {}
    for unit in units:
        files.setdefault(unit.source, [[unit.text_field, unit.id_field]]).extend(
            [name, sha] for (name, _), sha in zip(unit.files, unit.sha256, strict=True)
        )
    return {source: sha256_json(names) for source, names in files.items()}


def fingerprint(path: str) -> str:
    """Hash of the content of a file, or of all files of a folder."""
    root = Path(path)
    if root.is_file():
        return sha256_file(root)
    if (root / MANIFEST).exists():
        return read_manifest(root).fingerprint()
    if not root.is_dir():
        raise UserError(f"no such file or folder: {path}")
    files = sorted(file for file in root.rglob("*") if file.is_file())
    return sha256_json([(file.relative_to(root).as_posix(), sha256_file(file)) for file in files])
