"""Files: paths local and remote (etils.epath), atomic writes, hashes, and the manifest that ends every stage.

Every stage reads folders and writes a new one. `manifest.json` is written last and says what the folder was made from; a
folder without one is unfinished and is never read by the next stage.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

import lmjax
from lmjax.errors import UserError

MANIFEST = "manifest.json"
TEMPORARY = ".tmp"  # ends the name of a file that is being written
UNFINISHED = ".unfinished"  # stands in a folder of ours from before its first file until after its manifest


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value, independent of the order of keys."""
    return sha256_bytes(json.dumps(value, sort_keys=True, ensure_ascii=True).encode())


def sha256_file(path: os.PathLike | str) -> str:
    """Hex sha256 of a file's content, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with epath.Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_remote(path: os.PathLike | str) -> bool:
    """Whether a path lies in a bucket."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def whole(path: os.PathLike | str) -> Iterator[epath.Path]:
    """A temporary name beside `path`, which takes its place when all went well: the file is whole or absent.

    In a bucket it is `path` itself: an object appears when its upload ends.
    """
    path = epath.Path(path)
    if is_remote(path):
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: os.PathLike | str, data: bytes | str) -> None:
    """Writes a file that is either whole or absent."""
    with whole(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: os.PathLike | str, value: Any) -> None:
    """Writes readable JSON atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, text.encode("utf-8", "backslashreplace"))  # a lone surrogate (of a file name) becomes its escape


def read_json(path: os.PathLike | str) -> Any:
    """Reads JSON; a missing or broken file is a `UserError` with its name."""
    path = epath.Path(path)
    if not path.exists():
        raise UserError(f"no such file: {path}")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); was it cut short?") from error


def code_version() -> str:
    """The version of lmjax, with the commit (and `+dirty`) where the source is a git checkout."""
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        run = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty=+dirty", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return lmjax.__version__
    return f"{lmjax.__version__}-{run.stdout.strip()}" if run.returncode == 0 else lmjax.__version__


# --------------------------------------------------------------------------------------------------------------- manifests


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder was made from, and what it holds."""

    stage: str  # the verb that made it
    inputs: dict[str, str]  # name of each input → hash of its manifest (or of its file)
    config: dict[str, Any]  # the resolved config of the stage
    counts: dict[str, Any]  # what a person wants to know: documents, tokens, bytes …
    content: dict[str, Any]  # what the next stage needs; holds the hashes of the files
    code: str  # version of lmjax that made it: recorded, not compared
    seconds: float  # how long it took

    def fingerprint(self) -> str:
        """Hash of what was made and from what; two folders with equal fingerprints are interchangeable."""
        kept = {key: getattr(self, key) for key in ("stage", "inputs", "config", "counts", "content")}
        return sha256_json(kept)


def write_manifest(folder: os.PathLike | str, manifest: Manifest) -> None:
    """Ends a stage: call it last."""
    write_json(epath.Path(folder) / MANIFEST, dataclasses.asdict(manifest))


def read_manifest(folder: os.PathLike | str, stage: str | None = None) -> Manifest:
    """The manifest of a finished folder; a `UserError` if it is missing, unfinished, or of another stage."""
    folder = epath.Path(folder)
    if not folder.exists():
        raise UserError(f"no such folder: {folder}")
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder} holds no {MANIFEST}: it is not the output of a stage, or the stage did not finish")
    try:
        manifest = Manifest(**read_json(folder / MANIFEST))
    except TypeError as error:
        raise UserError(f"{folder / MANIFEST} is not a manifest of this version: {error}") from error
    if stage is not None and manifest.stage != stage:
        raise UserError(f"{folder} was made by `lmjax {manifest.stage}`, but the output of `lmjax {stage}` is needed")
    return manifest


def run_stage(
    folder: os.PathLike | str,
    stage: str,
    inputs: Mapping[str, str],
    config: Mapping[str, Any],
    make: Callable[[epath.Path], tuple[dict[str, Any], dict[str, Any]]],
) -> tuple[Manifest, bool]:
    """Runs `make(folder)` unless the folder already holds the same stage of the same inputs and config.

    Args:
      folder: the output folder.
      stage: the verb.
      inputs: name → fingerprint of each input.
      config: the resolved config as JSON values.
      make: writes the files into the (emptied) folder, returns (counts, content).

    Returns:
      The manifest, and whether the stage was skipped.

    Raises:
      UserError: the folder holds something else; nothing of the user's is ever deleted.
    """
    folder = epath.Path(folder)
    inputs, config = dict(inputs), json.loads(json.dumps(dict(config)))
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if (manifest.stage, manifest.inputs, manifest.config) == (stage, inputs, config):
            return manifest, True
        wanted = {"stage": stage, "inputs": inputs, "config": config}
        changed = [name for name, value in wanted.items() if getattr(manifest, name) != value]
        raise UserError(
            f"{folder} holds an output made from other {' and '.join(changed)}; choose another --out or remove it"
        )
    claim(folder, stage)
    empty(folder)
    start = time.monotonic()
    counts, content = make(folder)
    seconds = round(time.monotonic() - start, 3)
    manifest = Manifest(stage, inputs, config, counts, content, code_version(), seconds)
    write_manifest(folder, manifest)
    (folder / UNFINISHED).unlink()
    return manifest, False


def check_apart(out: os.PathLike | str, inputs: Iterable[os.PathLike | str]) -> None:
    """An output folder holds no input, which emptying it would delete, and lies in none, which would then read it as input.

    Args:
      out: the folder.
      inputs: files and folders; of a glob only that which begins in `out`, what else it means is known by its files.

    Raises:
      UserError: one of them does not stand apart.
    """
    own = real_parts(out)
    for path in inputs:
        parts = real_parts(path)
        if parts[: len(own)] == own:
            raise UserError(f"--out {out} is, or holds, the input {path}, which it would delete; choose another --out")
        if own[: len(parts)] == parts:
            raise UserError(
                f"--out {out} lies in the input {path}, which would then hold its output; choose another --out"
            )


def real_parts(path: os.PathLike | str) -> tuple[str, ...]:
    """The parts of a path, links followed; of one in a bucket as they are written."""
    text = os.fspath(path)
    return tuple((text.rstrip("/") if is_remote(text) else os.path.realpath(text)).split("/"))


def claim(folder: epath.Path, stage: str) -> None:
    """Makes a folder ours by a marker, which stands there until its manifest is written.

    Raises:
      UserError: it holds something else, or cannot be written.
    """
    marker = folder / UNFINISHED
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --out")
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise UserError(f"{folder} is not empty and is not the output of a stage; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(stage)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def empty(folder: epath.Path, keep: Sequence[str] = ()) -> None:
    """Empties a claimed folder but for what `keep` names; the marker stays: a kill in here leaves the folder ours."""
    for child in list(folder.iterdir()):
        if child.name not in (UNFINISHED, *keep):
            child.rmtree() if child.is_dir() else child.unlink()
