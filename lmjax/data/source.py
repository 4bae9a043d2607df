"""A source: the documents of one part of a corpus in stored order, by random access over its shards.

Holds names and counts only; the offsets are memory-mapped and the shard files are opened when they are read, in whichever
process that happens, so nothing here grows with the corpus and a source pickles to a few kilobytes.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath
from jaxtyping import Integer

from lmjax.config import did_you_mean
from lmjax.data.cache import RemoteFile, ShardCache
from lmjax.data.shards import DOCUMENTS, OFFSETS
from lmjax.errors import UserError
from lmjax.files import is_remote, read_manifest, sha256_json

# An open shard holds its index: 12 bytes a document. The number of open ones is bounded, a corpus is not.
MAX_OPEN_SHARDS = 256
ATTEMPTS = 3  # to open a shard that makes room for another one between its fetch and its opening


@dataclasses.dataclass(frozen=True)
class Remote:
    """Fetches the files of a source that is in a bucket."""

    cache: ShardCache
    files: dict[str, RemoteFile]  # by name

    def fetch(self, name: str) -> str:
        """The local copy of a file."""
        return self.cache.fetch(self.files[name])


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
    remote: Remote | None = None  # where the folder is in a bucket

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """uint64, N + 1 cumulative token counts, memory-mapped: document i is [offsets[i], offsets[i + 1])."""
        return np.load(self.path(OFFSETS), mmap_mode="r")

    @functools.cached_property
    def first_document(self) -> np.ndarray:
        """The number of the first document of each shard."""
        return np.cumsum((0, *self.records[:-1]))

    def path(self, name: str) -> str:
        """The file of that name on a disk; fetched there first where it is in a bucket."""
        return os.path.join(self.folder, name) if self.remote is None else self.remote.fetch(name)

    def shard_of(self, documents: Integer[np.ndarray, " N"]) -> Integer[np.ndarray, " N"]:
        """The number of the shard that holds each document."""
        return np.searchsorted(self.first_document, documents, side="right") - 1

    def read(self, indices: Integer[np.ndarray, " N"]) -> list[np.ndarray]:
        """The ids of documents, by one batched read for each shard that holds some."""
        shard_of = self.shard_of(indices)
        documents: list[np.ndarray] = [np.empty(0, self.dtype)] * len(indices)
        for shard in np.unique(shard_of).tolist():
            (where,) = np.nonzero(shard_of == shard)
            wanted = (indices[where] - self.first_document[shard]).tolist()
            records = read_records(self.path, self.shards[shard], self.fingerprint, wanted)
            for i, record in zip(where.tolist(), records, strict=True):
                documents[i] = np.frombuffer(record, self.dtype)
        self.check_lengths(indices, documents)
        return documents

    def check_lengths(self, indices: Integer[np.ndarray, " N"], documents: Sequence[np.ndarray]) -> None:
        """Offsets that do not belong to the shards would cut rows at the wrong tokens without a word."""
        lengths = np.fromiter(map(len, documents), np.uint64, len(documents))
        (wrong,) = np.nonzero(self.offsets[indices + 1] - self.offsets[indices] != lengths)
        if wrong.size:
            raise UserError(
                f"{os.path.join(self.folder, OFFSETS)} does not fit the shards at document {indices[wrong[0]]}: copy the folder again"
            )

    def document(self, index: int) -> dict[str, Any]:
        """{id, source, meta} of a document."""
        (record,) = read_records(self.path, DOCUMENTS, self.fingerprint, [int(index)])
        return json.loads(record)


@functools.lru_cache(MAX_OPEN_SHARDS)
def open_reader(path: str, fingerprint: str) -> ArrayRecordReader:
    """The open file, for as long as the source is the same; the least recently used one is closed when there are many."""
    options = "readahead_buffer_size:0,max_parallelism:0"  # random access
    reader = ArrayRecordReader(path, options=options, file_reader_buffer_size=1 << 15)
    if not reader.ok():  # cut at a block's end it would give empty records
        raise RuntimeError("its index is damaged")
    return reader


def read_records(place: Callable[[str], str], name: str, fingerprint: str, indices: list[int]) -> list[bytes]:
    """Records of an ArrayRecord file by number, `place` giving its path; a damaged or missing one is a `UserError`."""
    for attempt in range(ATTEMPTS):
        path = place(name)
        try:
            return open_reader(path, fingerprint).read(indices)
        except (RuntimeError, IndexError, ValueError) as error:
            if attempt + 1 < ATTEMPTS and not os.path.exists(path):
                continue  # the cache needed the room before it was open
            raise wrong(path, error) from error
    raise AssertionError("unreachable")


def wrong(path: str, error: Exception) -> UserError:
    """What to say of a file that cannot be read."""
    return UserError(f"{path} cannot be read ({error}); copy it again or redo `lmjax tokenize`")


def open_source(folder: os.PathLike | str, split: str, name: str) -> Source:
    """One source of a folder made by `lmjax tokenize`."""
    for source in open_sources([folder], split):
        if source.name == name:
            return source
    known = [source.name for source in open_sources([folder], split)]
    raise UserError(f"{folder} has no source {name!r} in split {split!r}{did_you_mean(name, known)}")


def open_sources(
    folders: Sequence[os.PathLike | str], split: str, cache: ShardCache | None = None
) -> tuple[Source, ...]:
    """All sources of a split over several shard folders, sorted by name; `cache` takes the files of those in a bucket.

    Raises:
      UserError: a name stands in two folders, or the folders were not made with one tokenizer.
    """
    found: dict[str, Source] = {}
    for folder in folders:
        for source in folder_sources(folder, split, cache):
            if source.name in found:
                raise UserError(f"source {source.name!r} is in {found[source.name].folder} and in {source.folder}")
            for other in list(found.values())[:1]:
                check_same_ids(other, source)
            found[source.name] = source
    return tuple(found[name] for name in sorted(found))


def folder_sources(folder: os.PathLike | str, split: str, cache: ShardCache | None) -> list[Source]:
    """All sources of a split of one folder."""
    root = epath.Path(folder)
    if is_remote(folder) and cache is None:
        raise UserError(f"{folder} is in a bucket: set config.data.cache_dir to a folder on a local disk")
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
            remote=Remote(cache, remote_files(root / split / name, entry)) if is_remote(folder) else None,
            **encoding,
        )
        for name, entry in content["splits"][split].items()
    ]


def remote_files(folder: epath.Path, entry: dict[str, Any]) -> dict[str, RemoteFile]:
    """The files of a source in a bucket, from its part of the manifest."""
    kept = {file["name"] for file in entry["files"]}
    return {
        file["name"]: RemoteFile(
            f"{os.fspath(folder)}/{file['name']}", file["file_bytes"], file["sha256"], file["name"] in kept
        )
        for file in entry["shards"] + entry["files"]
    }


def check_same_ids(a: Source, b: Source) -> None:
    """Ids of two tokenizers must never meet in one batch."""
    for what in ("tokenizer", "dtype", "bos_id", "eos_id"):
        if getattr(a, what) != getattr(b, what):
            raise UserError(
                f"{a.folder} and {b.folder} differ in {what} ({getattr(a, what)} and {getattr(b, what)}):"
                " tokenize both with the same tokenizer and config"
            )
