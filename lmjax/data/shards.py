"""Shards: documents → token ids → ArrayRecord files and a manifest.

    OUT/<split>/<source>/00000.array_record …       record = the ids of one document, raw little-endian
                         offsets.npy                uint64, N + 1 cumulative token counts: read memory-mapped
                         documents.array_record     record i = JSON {id, source, meta} of document i, for `lmjax trace`
    OUT/manifest.json                               counts, and the size and sha256 of each file

Documents are shuffled once, here (`shuffle.py`), and encoded in any number of processes: the bytes do not depend on it. What
reads shards is in `source.py`.
"""

import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from etils import epath

from lmjax.config import did_you_mean, is_free, to_dict
from lmjax.data.config import ShardsConfig
from lmjax.data.document import Document, to_bytes
from lmjax.data.shuffle import collect, deal
from lmjax.data.written import SUFFIX, read_written
from lmjax.errors import UserError
from lmjax.files import Manifest, is_remote, read_manifest, run_stage, sha256_file
from lmjax.tokenizers.base import Tokenizer
from lmjax.tokenizers.build import load

OFFSETS, DOCUMENTS = "offsets.npy", "documents.array_record"
IDS_WRITER = "group_size:1,uncompressed"  # random access: one read is one document, and nothing to decode
RECORDS_WRITER = "group_size:64"  # read rarely
BUCKET_BYTES = 1 << 28  # of text that is sorted in memory
TASK_BYTES = 1 << 20  # of JSON lines that a worker encodes at a time; less text than that is not worth a process

Progress = Callable[[str, int, int], None]  # ("train/code", documents done, documents in all)
Encode = Callable[[Iterable[list[bytes]]], Iterator[list]]  # blocks of JSON lines → blocks of Encoded, in order


def write_shards(
    documents: os.PathLike | str,
    tokenizer: Tokenizer | os.PathLike | str,
    out: os.PathLike | str,
    config: ShardsConfig,
    progress: Progress | None = None,
) -> tuple[Manifest, bool]:
    """Encodes every split and source of a folder made by `lmjax split`.

    Args:
      documents: holds `<split>/<source>.jsonl.zst` and the manifest.
      tokenizer: one, or the folder that holds it; is pickled to the encoding processes.
      out: a folder on a disk (or a mounted bucket): shards are read by random access and memory maps.
      progress: called after each encoded block.

    Returns:
      The manifest, and whether the stage was skipped because the folder already holds it.

    Raises:
      UserError: another output stands in `out`, or the documents are not what their manifest says.
    """
    documents, out = epath.Path(documents), local(out)
    tokenizer = load(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
    made = read_manifest(documents, "split")
    inputs = {"documents": made.fingerprint(), "tokenizer": tokenizer.fingerprint()}
    decides = {key: value for key, value in to_dict(config).items() if not is_free(ShardsConfig, key)}

    def make(folder: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
        encoding = Encoding.of(tokenizer, config)
        splits: dict[str, dict[str, Any]] = {}
        with encoder(encoding, min(config.num_workers, made.counts["bytes"] // TASK_BYTES)) as encode:
            for split, sources in made.counts["splits"].items():
                splits[split] = {}
                for source, amount in sources.items():
                    given = Given(f"{split}/{source}", written(documents, made, split, source), amount["bytes"])
                    splits[split][source] = write_source(given, pathlib.Path(folder), encode, config, progress)
        totals = [source for split in splits.values() for source in split.values()]
        counts = {key: sum(total[key] for total in totals) for key in ("documents", "tokens", "bytes")}
        content = {
            "tokenizer": inputs["tokenizer"],
            "vocab_size": tokenizer.vocab_size,
            "dtype": encoding.dtype,
            "bos_id": encoding.bos_id,
            "eos_id": encoding.eos_id,
            "splits": splits,
        }
        return counts, content

    return run_stage(out, "tokenize", inputs, decides, make)


def local(folder: os.PathLike | str) -> pathlib.Path:
    """The folder, or a `UserError` where it is in a bucket: ArrayRecord and memory maps need a file system."""
    if is_remote(folder):
        raise UserError(
            f"{os.fspath(folder)}: shards are written to a disk; then copy them with `gcloud storage cp -r`"
        )
    return pathlib.Path(folder)


class Given(NamedTuple):
    """One source of one split, to be written."""

    name: str  # "<split>/<source>"
    documents: Iterable[Document]
    text_bytes: int


def written(folder: epath.Path, made: Manifest, split: str, source: str) -> Iterable[Document]:
    """The documents of a source of a split; one that got none has no file."""
    name = f"{split}/{source}{SUFFIX}"
    sha256 = made.content["files"].get(name)
    return () if sha256 is None else read_written(folder / name, sha256)


def write_source(
    given: Given, out: pathlib.Path, encode: Encode, config: ShardsConfig, progress: Progress | None
) -> dict[str, Any]:
    """Shuffles and encodes a source; returns its part of the manifest."""
    folder = out / given.name
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".shuffle-") as scratch:
        num_buckets = 1 + given.text_bytes // BUCKET_BYTES
        buckets, total = deal(given.documents, f"{config.seed}/{given.name}", pathlib.Path(scratch), num_buckets)
        writer = SourceWriter(folder, total, config.shard_tokens)
        for block in encode(blocks(collect(buckets, given.name))):
            for document in block:
                writer.add(document)
            if progress is not None:
                progress(given.name, writer.documents, total)
        return writer.close()


# ----------------------------------------------------------------------------------------------------------------- encoding


class Encoded(NamedTuple):
    """One document as it is stored."""

    ids: bytes  # raw little-endian
    tokens: int
    text_bytes: int  # UTF-8 bytes of the text
    record: bytes  # JSON {id, source, meta}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a document becomes a record; goes to the worker processes."""

    tokenizer: Tokenizer
    dtype: str
    bos_id: int | None
    eos_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ShardsConfig) -> "Encoding":
        """16-bit ids where the whole vocabulary fits, 32-bit ones elsewhere."""
        dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        bos_id = tokenizer.bos_id if config.add_bos else None
        return cls(tokenizer, dtype, bos_id, tokenizer.eos_id if config.add_eos else None)

    def __call__(self, lines: Sequence[bytes]) -> list[Encoded]:
        """Encodes a block of JSON lines."""
        documents = [json.loads(line) for line in lines]
        batch = self.tokenizer.encode_batch([document["text"] for document in documents])
        return [self.encoded(document, ids) for document, ids in zip(documents, batch, strict=True)]

    def encoded(self, document: dict[str, Any], ids: np.ndarray) -> Encoded:
        """One document, with the special ids around it."""
        parts = [[] if special is None else [special] for special in (self.bos_id, self.eos_id)]
        ids = np.concatenate([parts[0], ids, parts[1]]).astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
            raise ValueError(f"document {document['id']!r}: ids {ids.min()} to {ids.max()} leave the vocabulary")
        kept = {key: document.get(key) for key in ("id", "source", "meta")}
        text_bytes = len(to_bytes(document["text"]))
        return Encoded(ids.astype(self.dtype).tobytes(), ids.size, text_bytes, json.dumps(kept).encode())


def blocks(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines in blocks of about TASK_BYTES."""
    block, size = [], 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= TASK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


@contextlib.contextmanager
def encoder(encoding: Encoding, num_workers: int) -> Iterator[Encode]:
    """A function blocks of lines → blocks of documents in the same order, in this process or in `num_workers` others."""
    if num_workers <= 1:
        yield lambda tasks: map(encoding, tasks)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(num_workers, context, initializer=set_encoding, initargs=(encoding,)) as pool:

        def encode(tasks: Iterable[list[bytes]]) -> Iterator[list[Encoded]]:
            pending: collections.deque = collections.deque()  # bounded, unlike Executor.map
            for task in tasks:
                pending.append(pool.submit(encode_block, task))
                if len(pending) > 2 * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

        yield encode


worker: dict[str, Encoding] = {}  # what this encoding process was started with


def set_encoding(encoding: Encoding) -> None:
    """Starts an encoding process: the tokenizer travels once, not with each block."""
    worker["encoding"] = encoding


def encode_block(lines: list[bytes]) -> list[Encoded]:
    """Encodes a block in an encoding process."""
    return worker["encoding"](lines)


# ------------------------------------------------------------------------------------------------------------------ writing


class SourceWriter:
    """Writes the shards of one source; holds one document at a time."""

    def __init__(self, folder: pathlib.Path, num_documents: int, shard_tokens: int):
        self.folder, self.shard_tokens = folder, shard_tokens
        self.documents = self.tokens = self.text_bytes = 0
        self.shards: list[dict[str, Any]] = []
        self.shard: ArrayRecordWriter | None = None
        self.records = ArrayRecordWriter(str(folder / DOCUMENTS), RECORDS_WRITER)
        self.offsets = np.lib.format.open_memmap(folder / OFFSETS, mode="w+", dtype="<u8", shape=(num_documents + 1,))

    def add(self, document: Encoded) -> None:
        """Appends a document; a shard is closed once it holds `shard_tokens`, and a document is never cut."""
        if self.shard is None:
            name = f"{len(self.shards):05d}.array_record"
            self.shards.append({"name": name, "records": 0, "tokens": 0})
            self.shard = ArrayRecordWriter(str(self.folder / name), IDS_WRITER)
        self.shard.write(document.ids)
        self.records.write(document.record)
        self.documents += 1
        self.tokens += document.tokens
        self.text_bytes += document.text_bytes
        self.offsets[self.documents] = self.tokens
        self.shards[-1]["records"] += 1
        self.shards[-1]["tokens"] += document.tokens
        if self.shards[-1]["tokens"] >= self.shard_tokens:
            self.close_shard()

    def close_shard(self) -> None:
        """Ends the open shard, if there is one."""
        if self.shard is not None:
            self.shard.close()
            self.shards[-1] |= sealed(self.folder / self.shards[-1]["name"])
        self.shard = None

    def close(self) -> dict[str, Any]:
        """Ends all files; the source's part of the manifest."""
        self.close_shard()
        self.records.close()
        if self.documents + 1 != len(self.offsets):
            raise RuntimeError(
                f"{self.folder}: {self.documents} documents of {len(self.offsets) - 1} came out of the shuffle"
            )
        self.offsets.flush()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.text_bytes,
            "shards": self.shards,
            "files": [{"name": name} | sealed(self.folder / name) for name in (OFFSETS, DOCUMENTS)],
        }


def sealed(path: pathlib.Path) -> dict[str, Any]:
    """Size and hash of a finished file."""
    return {"file_bytes": path.stat().st_size, "sha256": sha256_file(path)}


# ---------------------------------------------------------------------------------------------------------------- verifying


def verify_shards(folder: os.PathLike | str, splits: Sequence[str] | None = None, full: bool = True) -> Manifest:
    """Checks the files of a shard folder against its manifest, before a run trusts them.

    Args:
      folder: made by `lmjax tokenize`.
      splits: the ones to check; none: all.
      full: read and hash every byte (about 1 GB/s); otherwise sizes and record counts only, which finds files that are
        missing, cut short or replaced, and not a flipped bit (the reader finds those when it comes to the record). Of
        shards in a bucket only the sizes: they are hashed when they are fetched.

    Raises:
      UserError: names the first file that differs and how.
    """
    folder = epath.Path(folder)
    manifest = read_manifest(folder, "tokenize")
    known = manifest.content["splits"]
    for split in known if splits is None else splits:
        if split not in known:
            raise UserError(f"{folder} has no split {split!r}{did_you_mean(split, known)}")
        for source, entry in known[split].items():
            listed = list_sizes(folder / split / source) if is_remote(folder) else None
            for file in entry["shards"] + entry["files"]:
                verify_file(folder / split / source / file["name"], file, full, listed)
    return manifest


def list_sizes(folder: epath.Path) -> dict[str, int]:
    """Name → bytes of the objects of a folder in a bucket, by one listing."""
    import fsspec

    system, path = fsspec.core.url_to_fs(os.fspath(folder))
    try:
        return {os.path.basename(entry["name"]): entry["size"] for entry in system.ls(path, detail=True)}
    except FileNotFoundError:
        return {}


def verify_file(
    path: os.PathLike | str, expected: dict[str, Any], full: bool, listed: dict[str, int] | None = None
) -> None:
    """One file against its line in the manifest; `listed`: the sizes of those of a bucket, none for a local one."""
    path = epath.Path(path)
    if path.name not in listed if listed is not None else not path.exists():
        raise UserError(f"{path} is missing: copy the shards again or redo `lmjax tokenize`")
    size = path.stat().length if listed is None else listed[path.name]
    if size < expected["file_bytes"]:
        raise UserError(f"{path} is truncated: {size} of {expected['file_bytes']} bytes; copy it again")
    if size > expected["file_bytes"] or (full and listed is None and sha256_file(path) != expected["sha256"]):
        raise UserError(f"{path}: content differs from the manifest; copy it again or redo `lmjax tokenize`")
    if listed is None and "records" in expected and (records := count_records(path)) != expected["records"]:
        raise UserError(f"{path} holds {records} records, the manifest says {expected['records']}; copy it again")


def count_records(path: os.PathLike | str) -> int:
    """Records of an ArrayRecord file; 0 where its index is damaged, as the library itself reports."""
    return ArrayRecordReader(os.fspath(path)).num_records()
