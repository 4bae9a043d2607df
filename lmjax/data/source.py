"""A source: the documents of one part of a corpus in stored order, by random access over its shards.

Holds names and counts only; the offsets are memory-mapped and the shard files are opened when they are read, in whichever
process that happens, so nothing here grows with the corpus and a source pickles to a few kilobytes.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from jaxtyping import Integer

from lmjax.config import did_you_mean
from lmjax.data.shards import DOCUMENTS, OFFSETS, local
from lmjax.errors import UserError
from lmjax.files import read_manifest, sha256_json

# An open shard holds its index: 12 bytes a document. The number of open ones is bounded, a corpus is not.
MAX_OPEN_SHARDS = 256


@dataclasses.dataclass(frozen=True)
class Source:
    """Reads the documents of one source of one split. Safe in threads; pickles without its open files."""

    folder: str  # holds the shards of this source
    name: str
    split: str
    num_documents: int
    num_tokens: int  # special ids included
    num_bytes: int  # UTF-8 bytes of the texts, for bits per byte
    shards: tuple[str, ...]  # file names
    records: tuple[int, ...]  # documents in each shard
    dtype: str  # of the stored ids
    vocab_size: int
    tokenizer: str  # fingerprint
    bos_id: int | None  # the id before each document, none where there is none
    eos_id: int | None
    fingerprint: str  # of the content: equal fingerprints hold equal tokens in equal order
    manifest: str  # fingerprint of the shard folder

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """uint64, N + 1 cumulative token counts, memory-mapped: document i is [offsets[i], offsets[i + 1])."""
        return np.load(os.path.join(self.folder, OFFSETS), mmap_mode="r")

    @functools.cached_property
    def first_document(self) -> np.ndarray:
        """The number of the first document of each shard."""
        return np.cumsum((0, *self.records[:-1]))

    def read(self, indices: Integer[np.ndarray, " N"]) -> list[np.ndarray]:
        """The ids of documents, by one batched read for each shard that holds some."""
        shard_of = np.searchsorted(self.first_document, indices, side="right") - 1
        documents: list[np.ndarray] = [np.empty(0, self.dtype)] * len(indices)
        for shard in np.unique(shard_of).tolist():
            (where,) = np.nonzero(shard_of == shard)
            path = os.path.join(self.folder, self.shards[shard])
            records = read_records(path, self.fingerprint, (indices[where] - self.first_document[shard]).tolist())
            for i, record in zip(where.tolist(), records, strict=True):
                documents[i] = np.frombuffer(record, self.dtype)
        self.check_lengths(indices, documents)
        return documents

    def check_lengths(self, indices: Integer[np.ndarray, " N"], documents: Sequence[np.ndarray]) -> None:
        """Offsets that do not belong to the shards would cut rows at the wrong tokens without a word."""
        lengths = np.fromiter(map(len, documents), np.uint64, len(documents))
        (wrong,) = np.nonzero(self.offsets[indices + 1] - self.offsets[indices] != lengths)
        if wrong.size:
            path = os.path.join(self.folder, OFFSETS)
            raise UserError(f"{path} does not fit the shards at document {indices[wrong[0]]}: copy the folder again")

    def document(self, index: int) -> dict[str, Any]:
        """{id, source, meta} of a document."""
        (record,) = read_records(os.path.join(self.folder, DOCUMENTS), self.fingerprint, [int(index)])
        return json.loads(record)


@functools.lru_cache(MAX_OPEN_SHARDS)
def open_reader(path: str, fingerprint: str) -> ArrayRecordReader:
    """The open file, for as long as the source is the same; the least recently used one is closed when there are many."""
    options = "readahead_buffer_size:0,max_parallelism:0"  # random access
    reader = ArrayRecordReader(path, options=options, file_reader_buffer_size=1 << 15)
    if not reader.ok():  # cut at a block's end it would give empty records
        raise RuntimeError("its index is damaged")
    return reader


def read_records(path: str, fingerprint: str, indices: list[int]) -> list[bytes]:
    """Records of an ArrayRecord file by number; a damaged or missing file is a `UserError` that names it."""
    try:
        return open_reader(path, fingerprint).read(indices)
    except (RuntimeError, IndexError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again or redo `lmjax tokenize`") from error


def open_source(folder: os.PathLike | str, split: str, name: str) -> Source:
    """One source of a folder made by `lmjax tokenize`."""
    for source in open_sources([folder], split):
        if source.name == name:
            return source
    known = [source.name for source in open_sources([folder], split)]
    raise UserError(f"{folder} has no source {name!r} in split {split!r}{did_you_mean(name, known)}")


def open_sources(folders: Sequence[os.PathLike | str], split: str) -> tuple[Source, ...]:
    """All sources of a split over several shard folders, sorted by name.

    Raises:
      UserError: a name stands in two folders, or the folders were not made with one tokenizer.
    """
    found: dict[str, Source] = {}
    for folder in folders:
        for source in folder_sources(folder, split):
            if source.name in found:
                raise UserError(f"source {source.name!r} is in {found[source.name].folder} and in {source.folder}")
            for other in list(found.values())[:1]:
                check_same_ids(other, source)
            found[source.name] = source
    return tuple(found[name] for name in sorted(found))


def folder_sources(folder: os.PathLike | str, split: str) -> list[Source]:
    """All sources of a split of one folder."""
    root = local(folder)
    manifest = read_manifest(root, "tokenize")
    content = manifest.content
    if split not in content["splits"]:
        raise UserError(f"{folder} has no split {split!r}{did_you_mean(split, content['splits'])}")
    encoding = {key: content[key] for key in ("dtype", "vocab_size", "tokenizer", "bos_id", "eos_id")}
    return [
        Source(
            folder=str(root / split / name),
            name=name,
            split=split,
            num_documents=entry["documents"],
            num_tokens=entry["tokens"],
            num_bytes=entry["bytes"],
            shards=tuple(shard["name"] for shard in entry["shards"]),
            records=tuple(shard["records"] for shard in entry["shards"]),
            fingerprint=sha256_json([encoding, entry]),
            manifest=manifest.fingerprint(),
            **encoding,
        )
        for name, entry in content["splits"][split].items()
    ]


def check_same_ids(a: Source, b: Source) -> None:
    """Ids of two tokenizers must never meet in one batch."""
    for what in ("tokenizer", "dtype", "bos_id", "eos_id"):
        if getattr(a, what) != getattr(b, what):
            raise UserError(
                f"{a.folder} and {b.folder} differ in {what} ({getattr(a, what)} and {getattr(b, what)}):"
                " tokenize both with the same tokenizer and config"
            )
