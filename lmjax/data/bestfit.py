"""Best-fit packing: rows of whole documents, as an index that is prepared once for a source and a row length.

A document of n tokens gives n // T rows of its own, and what is left of it (all of it, where n < T) goes into the fullest row
that still has room: best-fit decreasing (Ding et al., 2024: "Fewer truncations improve language modeling", arXiv 2404.10830).
So no document that fits into a row is cut, every token stands in one row of each epoch, and padding fills what is left over.

Items of one length are placed at once. A bin with room r takes r // n items of n tokens before another one is touched, exactly
as if they came singly, so the work is a few array operations for each length, not a search for each document.

    DIR/<source>-<T>-<key>/pieces.npy      uint64, the token of the source at which each piece begins, row after row
                           rows.npy        uint64, R + 1 cumulative counts of the rows' pieces
                           manifest.json   what it was made from, padding and cuts, hashes

A piece ends where its document ends, at most T tokens on: nothing else needs to be stored. Documents are packed in groups of
`GROUP`, so memory does not grow with the corpus. The seed of a run has no part in this: it orders the rows of an epoch.
"""

import bisect
import dataclasses
import functools
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from lmjax.data.pack import epoch_keys, expand, permute
from lmjax.data.shards import sealed, verify_file
from lmjax.data.source import Source
from lmjax.errors import UserError
from lmjax.files import MANIFEST, Manifest, code_version, read_manifest, sha256_json, write_manifest

VERSION = 1  # of the map (source, T) → rows: part of every run's fingerprint
GROUP = 1 << 20  # documents, or rows of tokens, that are packed together
PIECES, ROWS = "pieces.npy", "rows.npy"
STALE_S = 86_400  # after which an unfinished folder is that of a process which was killed


# ------------------------------------------------------------------------------------------------------------------ packing


def best_fit(lengths: Integer[np.ndarray, " N"], capacity: int) -> Int64[np.ndarray, " N"]:
    """The bin of each item by best-fit decreasing; items of one length are taken in their order.

    Args:
      lengths: from 1 to `capacity`.
      capacity: of a bin.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    bins, space, opened = np.empty(len(lengths), np.int64), Space(), 0
    for size, first, count in zip((-sizes).tolist(), firsts.tolist(), counts.tolist()):
        items = order[first : first + count]
        while len(items):
            room, found = space.take(size)
            if not len(found):  # no bin has room: open as many as these items fill
                room, missing = capacity, -(-len(items) // (capacity // size))
                found, opened = np.arange(opened, opened + missing), opened + missing
            each = room // size
            used = min(len(found), -(-len(items) // each))
            placed = min(len(items), used * each)
            bins[items[:placed]] = np.repeat(found[:used], each)[:placed]
            items = items[placed:]
            last = placed - (used - 1) * each  # items in the last bin
            space.put(room, found[used:])
            space.put(room - each * size, found[: used - 1])
            space.put(room - last * size, found[used - 1 : used])
    return bins


class Space:
    """Bins by the room that they have left."""

    def __init__(self) -> None:
        self.rooms: list[int] = []  # that some bin has, ascending
        self.bins: dict[int, list[np.ndarray]] = {}

    def put(self, room: int, bins: Int64[np.ndarray, " M"]) -> None:
        """Adds bins; those without room are done with."""
        if room == 0 or not len(bins):
            return
        if room not in self.bins:
            bisect.insort(self.rooms, room)
            self.bins[room] = []
        self.bins[room].append(bins)

    def take(self, size: int) -> tuple[int, Int64[np.ndarray, " M"]]:
        """The least room that holds `size`, and some bins that have it, removed; (0, none) where there is none."""
        place = bisect.bisect_left(self.rooms, size)
        if place == len(self.rooms):
            return 0, np.empty(0, np.int64)
        room = self.rooms[place]
        found = self.bins[room].pop()
        if not self.bins[room]:
            del self.bins[room], self.rooms[place]
        return room, found


class Packed(NamedTuple):
    """Rows of a group of documents."""

    pieces: Int64[np.ndarray, " P"]  # token at which each begins, row after row
    counts: Int64[np.ndarray, " R"]  # pieces of each row
    documents: int  # with a token
    cut: int  # longer than a row
    cut_concat: float  # that concatenation would cut, on average over its shifts


def pack_group(offsets: Int64[np.ndarray, " M"], seq_len: int) -> Packed:
    """Rows of the documents [offsets[i], offsets[i + 1])."""
    lengths = np.diff(offsets)
    whole, rest = np.divmod(lengths, seq_len)
    owner, nth = expand(whole)
    (short,) = np.nonzero(rest)
    bins = best_fit(rest[short], seq_len)
    order = np.lexsort((-rest[short], bins))  # row after row, the longest piece of each first
    pieces = np.concatenate([offsets[owner] + nth * seq_len, (offsets[1:] - rest)[short][order]])
    counts = np.concatenate([np.ones(len(owner), np.int64), np.bincount(bins)])
    cut_concat = np.minimum(np.maximum(lengths - 1, 0) / seq_len, 1).sum()
    return Packed(
        pieces, counts, int((lengths > 0).sum()), int((lengths > seq_len).sum()), float(cut_concat)
    )  # fmt: skip


def groups(offsets: np.ndarray, seq_len: int, size: int) -> Iterator[Int64[np.ndarray, " M"]]:
    """The offsets of neighbouring documents, at most `size` of them or `size` rows of tokens (or one document)."""
    first, count = 0, len(offsets) - 1
    while first < count:
        tokens = np.uint64(int(offsets[first]) + size * seq_len)
        last = int(np.searchsorted(offsets, tokens, side="right")) - 1
        last = min(max(last, first + 1), first + size, count)
        yield offsets[first : last + 1].astype(np.int64)
        first = last


# ------------------------------------------------------------------------------------------------------------------- index


@dataclasses.dataclass(frozen=True)
class Index:
    """The prepared rows of a source for one row length; opened when it is read, so it pickles to its path."""

    folder: str
    seq_len: int  # T

    @property
    def rows(self) -> np.ndarray:
        """uint64, R + 1 cumulative counts of pieces, memory-mapped."""
        return open_map(os.path.join(self.folder, ROWS))

    @property
    def pieces(self) -> np.ndarray:
        """uint64, the token at which each piece begins, memory-mapped."""
        return open_map(os.path.join(self.folder, PIECES))

    @property
    def num_rows(self) -> int:
        """R, rows of an epoch."""
        return len(self.rows) - 1

    def windows(self, source: Source, seed: int, first_epoch: int, counters: Integer[np.ndarray, " W"]) -> "RowWindows":
        """The windows of the rows number `counters`, counted from the beginning of an epoch."""
        epochs, rows = np.divmod(counters, self.num_rows)
        epochs = epochs + first_epoch
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            rows[here] = permute(rows[here], self.num_rows, epoch_keys(seed, source.name, epoch)[0])
        first = self.rows[rows].astype(np.int64)
        owner, nth = expand(self.rows[rows + 1].astype(np.int64) - first)
        starts = self.pieces[first[owner] + nth]  # uint64, as the offsets are
        document = np.searchsorted(source.offsets, starts, side="right") - 1
        left = (source.offsets[document + 1] - starts).astype(np.int64)
        widths = np.minimum(left, self.seq_len)
        before = np.cumsum(widths) - widths
        columns = before - before[np.searchsorted(owner, owner)]
        return RowWindows(epochs, starts.astype(np.int64), widths, owner, columns, (left > widths).astype(np.int64))


class RowWindows(NamedTuple):
    """The windows that fill rows, row after row."""

    epochs: Int64[np.ndarray, " W"]  # of each row
    starts: Int64[np.ndarray, " P"]  # token of the source at which each window begins
    widths: Int64[np.ndarray, " P"]  # tokens of it that stand in the row
    owner: Int64[np.ndarray, " P"]  # whose window it is
    columns: Int64[np.ndarray, " P"]  # where in the row it begins
    following: Int64[np.ndarray, " P"]  # 1 where the token behind it is its last target


@functools.lru_cache(1024)
def open_map(path: str) -> np.ndarray:
    """A memory map, for as long as the process lives: an index is never written twice."""
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); remove its folder, and the next start makes it again"
        ) from error


def index_of(source: Source, seq_len: int, packing_dir: os.PathLike | str) -> Index:
    """Where the index of a source stands, whether or not it is there yet."""
    key = sha256_json([VERSION, GROUP, source.fingerprint, seq_len])[:16]
    return Index(os.path.join(packing_dir, f"{source.name}-{seq_len}-{key}"), seq_len)


def prepare_index(source: Source, index: Index, full: bool = True) -> Manifest:
    """Makes the index unless it is there, else verifies it; processes may do this at the same time.

    Args:
      source: has at least one token.
      index: made by `index_of`.
      full: hash an index that is found; otherwise compare sizes.

    Raises:
      UserError: the index is damaged, or the folder cannot be written.
    """
    folder = pathlib.Path(index.folder)
    if not (folder / MANIFEST).exists():
        try:
            make_index(source, index, folder)
        except OSError as error:
            raise UserError(f"cannot write the rows of best_fit to {folder}: {error.strerror or error}") from error
    manifest = read_manifest(folder, "pack")
    for file in manifest.content["files"]:
        verify_file(folder / file["name"], file, full)
    return manifest


def make_index(source: Source, index: Index, folder: pathlib.Path) -> None:
    """Writes the index beside its place, then moves it there whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):
        if time.time() - stale.stat().st_mtime > STALE_S:
            shutil.rmtree(stale, ignore_errors=True)
    begun, unfinished = time.monotonic(), folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    unfinished.mkdir()
    try:
        counts = write_rows(source, index.seq_len, unfinished)
        files = [{"name": name} | sealed(unfinished / name) for name in (PIECES, ROWS)]
        config = {"seq_len": index.seq_len, "version": VERSION, "group": GROUP}
        seconds = round(time.monotonic() - begun, 3)
        inputs = {source.name: source.fingerprint}
        write_manifest(unfinished, Manifest("pack", inputs, config, counts, {"files": files}, code_version(), seconds))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster, and its index is the same
            if not (folder / MANIFEST).exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_rows(source: Source, seq_len: int, folder: pathlib.Path) -> dict[str, Any]:
    """Packs a source; returns what a person wants to know."""
    documents, cut, cut_concat, tokens = 0, 0, 0.0, source.num_tokens
    with NpyWriter(folder / PIECES) as pieces, NpyWriter(folder / ROWS) as rows:
        rows.write(np.zeros(1, np.int64))
        for offsets in groups(source.offsets, seq_len, GROUP):
            packed = pack_group(offsets, seq_len)
            rows.write(pieces.count + np.cumsum(packed.counts))
            pieces.write(packed.pieces)
            documents, cut, cut_concat = documents + packed.documents, cut + packed.cut, cut_concat + packed.cut_concat
    num_rows = rows.count - 1
    return {
        "documents": documents,
        "tokens": tokens,
        "rows": num_rows,
        "rows_concat": max(1, tokens // seq_len),
        "padding_tokens": num_rows * seq_len - tokens,
        "padding_share": (num_rows * seq_len - tokens) / (num_rows * seq_len),
        "cut_documents": cut,
        "cut_share": cut / documents,
        "cut_share_concat": cut_concat / documents,
    }


class NpyWriter:
    """A one-dimensional uint64 `.npy` file whose length is known when it is closed."""

    def __init__(self, path: pathlib.Path):
        self.file: IO[bytes] = path.open("wb")
        self.count = 0

    def write(self, values: Int64[np.ndarray, " N"]) -> None:
        """Appends values."""
        if not self.count:
            self.header()
        self.file.write(values.astype("<u8").tobytes())
        self.count += len(values)

    def header(self) -> None:
        """Writes the header: of one size whatever the count (NumPy leaves room for its digits)."""
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(
            self.file, {"descr": "<u8", "fortran_order": False, "shape": (self.count,)}
        )

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.header()
        self.file.close()


def describe(source: str, seq_len: int, manifest: Manifest) -> str:
    """An index in one line."""
    counts = manifest.counts
    return (
        f"best_fit: {source}, {counts['rows']:,} rows of {seq_len}, {counts['padding_share']:.2%} padding; "
        f"{counts['cut_share']:.2%} of {counts['documents']:,} documents are cut "
        f"(concat: {counts['rows_concat']:,} rows, {counts['cut_share_concat']:.2%})"
    )
