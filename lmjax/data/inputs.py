"""The files that a user's paths mean: files, folders (recursively) and globs, local or remote, always in the same order."""

import glob
import json
import os
from collections import Counter
from collections.abc import Sequence

from etils import epath

from lmjax.data.written import SUFFIX
from lmjax.errors import UserError
from lmjax.files import MANIFEST, UNFINISHED, Manifest, is_remote, read_manifest

TEXT_SUFFIXES = (".txt", ".md")  # one document a file
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # one document a line
PARQUET_SUFFIX = ".parquet"  # one document a row
HTML_SUFFIXES = (".html", ".htm", ".xhtml", ".html.gz", ".htm.gz", ".xhtml.gz")  # one document a file
# one document a record; `x.warc.wet.gz` is a WET file
WARC_SUFFIXES = (".warc", ".warc.gz", ".warc.zst", ".wet", ".wet.gz", ".wet.zst")
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, PARQUET_SUFFIX, *HTML_SUFFIXES, *WARC_SUFFIXES)


def find_files(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> tuple[list[tuple[str, epath.Path]], int]:
    """(name, path) of each file, each once: arguments in their order, what they hold sorted by name.

    The name is relative to the folder that was named (or to the fixed part of a glob), so that ids do not depend on the
    machine; where two names are equal, the whole paths take their place. Of a folder that a stage made only its documents are
    meant: not its work, its record of events, or what it set aside.

    Returns:
      The files, and how many others were left out for their extension.

    Raises:
      UserError: an argument means no file, or a file of an unknown extension.
    """
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not paths:
        raise UserError("no input paths are given")
    found: dict[str, tuple[str, epath.Path]] = {}  # by the file itself, which two paths may name
    skipped = 0
    for path in paths:
        files, others = expand(os.fspath(path))
        skipped += others
        for name, file in files:
            found.setdefault(os.fspath(file) if is_remote(file) else os.path.realpath(file), (name, file))
    uses = Counter(name for name, _ in found.values())
    return [(name if uses[name] == 1 else os.fspath(file), file) for name, file in found.values()], skipped


def expand(text: str) -> tuple[list[tuple[str, epath.Path]], int]:
    """The files that one argument means, and how many it leaves out."""
    path = epath.Path(text)
    if path.is_dir():
        root, candidates = path, walk(path, set())
    elif path.exists():
        if known_suffix(path) is None:
            raise UserError(f"{path} has no known extension: {', '.join(SUFFIXES)}")
        return [(path.name, path)], 0
    elif glob.has_magic(text):
        fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        root = epath.Path(*path.parts[:fixed]) if fixed else epath.Path(".")
        candidates = [match for match in root.glob(os.path.join(*path.parts[fixed:])) if not match.is_dir()]
    else:
        raise UserError(f"no such file or folder: {text}")
    files = [file for file in candidates if known_suffix(file) is not None]
    if not files:
        raise UserError(f"{text} holds no file with a known extension: {', '.join(SUFFIXES)}")
    return sorted((file.relative_to(root).as_posix(), file) for file in files), len(candidates) - len(files)


def walk(folder: epath.Path, seen: set[str]) -> list[epath.Path]:
    """All files below a folder, hidden ones and manifests left out; `seen` breaks circles of links."""
    if (real := os.path.realpath(folder)) in seen:
        return []
    seen.add(real)
    files = []
    try:
        children = sorted(folder.iterdir(), key=lambda path: path.name)
        if {MANIFEST, UNFINISHED} & {child.name for child in children} and is_made(folder):
            return [folder / name for name in published(read_manifest(folder))]
        for child in children:
            if child.name.startswith(".") or child.name == MANIFEST:
                continue
            files += walk(child, seen) if child.is_dir() else [child]
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror or error}") from error
    return files


def is_made(folder: epath.Path) -> bool:
    """Whether a stage made a folder, or began to; a `manifest.json` may also be a file of the user's."""
    if not (folder / MANIFEST).exists():
        return (folder / UNFINISHED).exists()
    try:
        return {"stage", "inputs", "content"} <= json.loads((folder / MANIFEST).read_bytes()).keys()
    except (ValueError, AttributeError):
        return False


def published(manifest: Manifest) -> list[str]:
    """The files of documents in a folder that a stage made; those of a split lie in folders of their own."""
    names = [name for name in manifest.content.get("files", {}) if name.endswith(SUFFIX)]
    return sorted(name for name in names if manifest.stage == "split" or "/" not in name)


def known_suffix(path: epath.Path) -> str | None:
    """The extension that says how a file is read, or None."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
