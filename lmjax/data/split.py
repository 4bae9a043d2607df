"""Documents to train, validation and test.

The side of a document is decided by the hash of its text and the seed alone:

    u = hash(hash(text), seed) in [0, 1):    test if u < test,    validation if u < test + validation,    train elsewhere

The inner hash is the `group` that a preparation gives to a document of which it makes others (`document.grouped`): with it or
without, a document is on the same side. So copies of a text fall on one side, and documents that are added later move none.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from lmjax.config import to_dict
from lmjax.data.config import SplitConfig
from lmjax.data.document import Document, draw, grouped
from lmjax.data.inputs import find_files, published
from lmjax.data.read import Counts, read_documents
from lmjax.data.written import SUFFIX, DocumentWriter, read_written
from lmjax.errors import UserError
from lmjax.files import MANIFEST, UNFINISHED, Manifest, check_apart, read_manifest, run_stage, sha256_file, sha256_json

SPLITS = ("train", "validation", "test")
Reader = Callable[[Counts], Iterator[Document]]
Paths = str | os.PathLike | Sequence[str | os.PathLike]

log = logging.getLogger(__name__)


def split_documents(
    inputs: Paths, out: os.PathLike | str, config: SplitConfig, source: str | None = None
) -> tuple[Manifest, bool]:
    """Writes `OUT/{train,validation,test}/<source>.jsonl.zst` and the manifest.

    Args:
      inputs: folders of documents that a stage made (each of their files is a source), or raw files, folders and globs.
      out: the folder.
      config: shares and seed; fields of raw records.
      source: names the raw inputs, all together.

    Returns:
      The manifest, and whether the stage was skipped because the folder already holds it. In its counts read = kept +
      failed, and kept = the documents over all splits and sources.

    Raises:
      UserError: no document was read, or a split with a share got none of so few.
    """
    check_apart(out, [inputs] if isinstance(inputs, str | os.PathLike) else inputs)
    readers, fingerprints = open_inputs(inputs, source, config)
    return run_stage(out, "split", fingerprints, to_dict(config), lambda folder: write_splits(readers, folder, config))


def side(document: Document, config: SplitConfig) -> str:
    """The split that a document belongs to: by its text, or by its `meta["group"]` where it has one.

    A group holds what must not be divided, such as a module's source and its docstrings.
    """
    u = draw(str(grouped(document).meta["group"]), "split", config.seed)
    if u < config.test:
        return "test"
    return "validation" if u < config.test + config.validation else "train"


# ------------------------------------------------------------------------------------------------------------------ reading


def open_inputs(inputs: Paths, source: str | None, config: SplitConfig) -> tuple[dict[str, Reader], dict[str, str]]:
    """Each source's reader, and the fingerprint of what it reads."""
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    raw = [path for path in paths if not any((epath.Path(path) / name).exists() for name in (MANIFEST, UNFINISHED))]
    readers, fingerprints = {}, {}
    for path in paths:
        if path not in raw:
            manifest = read_manifest(path)
            for name, reader in made_sources(epath.Path(path), manifest).items():
                if name in readers:
                    raise UserError(f"two inputs hold the source {name!r}: split them apart")
                readers[name], fingerprints[name] = reader, manifest.fingerprint()
    if raw or not paths:
        name = check_source(source, readers)
        files, _ = find_files(raw)
        fingerprints[name] = sha256_json([(name, sha256_file(path)) for name, path in files])
        readers[name] = lambda counts: read_documents(raw, name, counts, config.text_field, config.id_field)
    elif source is not None:
        raise UserError(f"--source {source} names raw files, but the inputs' sources have names: {', '.join(readers)}")
    return readers, fingerprints


def check_source(source: str | None, taken: Mapping[str, Any]) -> str:
    """The name of the raw inputs' source, which names files, too."""
    if source is None:
        raise UserError("raw files need the name of their source: --source NAME")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", source):
        raise UserError(f"--source {source!r} names files: use letters, digits, '_', '.' and '-'")
    if source in taken:
        raise UserError(f"two inputs hold the source {source!r}: split them apart")
    return source


def made_sources(folder: epath.Path, manifest: Manifest) -> dict[str, Reader]:
    """The readers of a folder that a stage made, by source; each compares the file with the manifest."""

    def read(counts: Counts, path: epath.Path, sha256: str) -> Iterator[Document]:
        for document in read_written(path, sha256):
            counts.keep()
            yield document

    hashes = manifest.content.get("files", {})
    readers = {
        name.removesuffix(SUFFIX): lambda counts, path=folder / name, sha256=hashes[name]: read(counts, path, sha256)
        for name in ([] if manifest.stage == "split" else published(manifest))
    }
    if not readers:
        raise UserError(f"{folder} was made by `lmjax {manifest.stage}`: it holds no documents to split")
    return readers


# ------------------------------------------------------------------------------------------------------------------ writing


def write_splits(
    readers: Mapping[str, Reader], folder: epath.Path, config: SplitConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes every source of every split; returns (counts, content) of the manifest."""
    counts, splits, files = Counts(), {split: {} for split in shares(config)}, {}
    for source, reader in readers.items():
        writers = write_source(reader(counts), source, folder, config)
        for split in splits:
            writer = writers.get(split)
            splits[split][source] = writer.counts() if writer else {"documents": 0, "bytes": 0}
            if writer:
                files[f"{split}/{source}{SUFFIX}"] = sha256_file(writer.path)
            else:
                log.warning("the source %s has no document in %s", source, split)
    check_shares(splits, counts, config)
    totals = {
        key: sum(source[key] for sources in splits.values() for source in sources.values())
        for key in ("documents", "bytes")
    }
    return {**totals, **counts.numbers(), "splits": splits}, {"files": files, "failures": counts.failures}


def write_source(
    documents: Iterator[Document], source: str, folder: epath.Path, config: SplitConfig
) -> dict[str, DocumentWriter]:
    """Deals the documents of a source to its splits; only splits that got one have a file."""
    writers: dict[str, DocumentWriter] = {}
    with contextlib.ExitStack() as stack:
        for document in documents:
            split = side(document, config)
            if split not in writers:
                writers[split] = stack.enter_context(DocumentWriter(folder / split / f"{source}{SUFFIX}"))
            writers[split].write(document)
    return writers


def shares(config: SplitConfig) -> dict[str, float]:
    """The share of each split that has one."""
    wanted = {"train": 1 - config.validation - config.test, "validation": config.validation, "test": config.test}
    return {split: wanted[split] for split in SPLITS if wanted[split] > 0}


def check_shares(splits: Mapping[str, Any], counts: Counts, config: SplitConfig) -> None:
    """A `UserError` if nothing was read, or if a split that was asked for is empty: the next stages would fail on it."""
    if not counts.kept:
        first = f"; the first of {counts.failed} failures: {counts.failures[0]}" if counts.failures else ""
        raise UserError(f"the inputs hold no document{first}")
    for split, share in shares(config).items():
        if not any(source["documents"] for source in splits[split].values()):
            raise UserError(
                f"none of the {counts.kept} documents fell into {split} (a share of {share:g}):"
                f" give more documents, raise config.{split}, or set it to 0"
            )
