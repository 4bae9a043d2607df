"""Packing: rows of T tokens as windows over a source's stream of documents, each found in O(log N) from the offsets.

A source of N tokens is a circle. Epoch e turns it by shift(e) and cuts it into R = max(1, N // T) windows; row r of the epoch
is the window

    [shift(e) + permute_e(r) T, … + T + 1)      the last token is only a target

so every row of an epoch is read exactly once, each epoch has other rows in another order, and nothing is stored: `permute_e`
is a generalized Feistel network over the smallest near-square rectangle that holds R cells, walked along its cycle until it
lands below R (Black and Rogaway, 2002: "Ciphers with arbitrary finite domains"). Fewer than T tokens are left out of an
epoch, others each time; a source shorter than T repeats.

Where T changes within a run, U is the longest one and the epoch is cut into windows of U, in their permuted order a tape on
which each stage goes on where the one before stopped: no token is read twice in an epoch, and a change leaves out fewer than U.
A stage's shorter rows are permuted once more, among those it reads of the epoch, so that neighbours on the tape do not meet in
a batch.

Documents that meet in a row are pieces: attention, positions and targets stay inside one. Best-fit packing is in `bestfit.py`.
"""

import hashlib
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer, UInt64

from lmjax.batch import Batch
from lmjax.data.hashing import mix
from lmjax.data.source import Source

VERSION = 1  # of the map (seed, source, row) → tokens: part of every run's fingerprint
ROUNDS = 12  # of the Feistel network: fewer leave the orders of a handful of rows measurably uneven


# ------------------------------------------------------------------------------------------------------------------- epochs


def rows_per_epoch(num_tokens: int, seq_len: int) -> int:
    """R."""
    return max(1, num_tokens // seq_len)


class Windows(NamedTuple):
    """Where rows begin, in the order asked."""

    epochs: Int64[np.ndarray, " B"]
    starts: Int64[np.ndarray, " B"]  # token of the source


class Stretch(NamedTuple):
    """What a stage of a run reads of a source: a part of the tape of its epochs, one after another."""

    seq_len: int  # T of the stage's rows
    unit: int  # U, the longest T of the run; T divides it
    start: int  # token of the tape at which the first row begins, a multiple of T
    stop: int | None  # token of the tape behind the last row; none: there is no last one
    number: int  # of the stage


def stretch_windows(source: Source, stretch: Stretch, seed: int, counters: Integer[np.ndarray, " B"]) -> Windows:
    """The windows of a source's rows number `counters` of a stage."""
    per_epoch, unit = rows_per_epoch(source.num_tokens, stretch.unit), stretch.unit
    tape = stretch.start + counters * stretch.seq_len
    epochs, within = np.divmod(tape, per_epoch * unit)
    starts = np.zeros_like(within)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        keys, shift = epoch_keys(seed, source.name, epoch)
        if stretch.seq_len < unit:
            within[here] = shuffle_stretch(source, stretch, seed, epoch, per_epoch * unit, within[here])
        units, columns = np.divmod(within[here], unit)
        turned = permute(units, per_epoch, keys) * unit + columns
        starts[here] = (turned + shift % source.num_tokens) % source.num_tokens
    return Windows(epochs, starts)


def shuffle_stretch(
    source: Source, stretch: Stretch, seed: int, epoch: int, length: int, within: Int64[np.ndarray, " B"]
) -> Int64[np.ndarray, " B"]:
    """Places in an epoch of `length` tokens → the same, permuted among the rows that the stage reads of it."""
    first = max(stretch.start - epoch * length, 0)
    stop = length if stretch.stop is None else min(stretch.stop - epoch * length, length)
    keys, _ = epoch_keys(seed, f"{source.name}/{stretch.number}", epoch)
    rows = permute((within - first) // stretch.seq_len, (stop - first) // stretch.seq_len, keys)
    return first + rows * stretch.seq_len


def epoch_keys(seed: int, source: str, epoch: int) -> tuple[UInt64[np.ndarray, " R"], int]:
    """The round keys of an epoch's permutation, and a number below 2^128 that shifts its windows."""
    digest = hashlib.shake_256(f"{seed}/{source}/{epoch}".encode()).digest(8 * ROUNDS + 16)
    return np.frombuffer(digest[:-16], "<u8"), int.from_bytes(digest[-16:], "little")


def permute(index: Integer[np.ndarray, " B"], size: int, keys: UInt64[np.ndarray, " R"]) -> Int64[np.ndarray, " B"]:
    """The keyed permutation of 0 … size - 1 at `index`."""
    height = math.isqrt(size - 1) + 1
    width = -(-size // height)
    out = feistel(index.astype(np.uint64), height, width, keys)
    while (outside := out >= size).any():  # the rectangle has fewer than `height` cells too many
        out[outside] = feistel(out[outside], height, width, keys)
    return out.astype(np.int64)


def feistel(
    value: UInt64[np.ndarray, " B"], height: int, width: int, keys: UInt64[np.ndarray, " R"]
) -> UInt64[np.ndarray, " B"]:
    """A permutation of the cells of a rectangle: in turn each coordinate is shifted by a hash of the other one."""
    row, column = np.divmod(value, np.uint64(width))
    for row_key, column_key in keys.reshape(-1, 2):
        row = (row + mix(column + row_key) % np.uint64(height)) % np.uint64(height)
        column = (column + mix(row + column_key) % np.uint64(width)) % np.uint64(width)
    return row * np.uint64(width) + column


# ------------------------------------------------------------------------------------------------------------------- pieces


class Pieces(NamedTuple):
    """Parts of documents that tile windows, in order of window and column."""

    window: Int64[np.ndarray, " P"]
    column: Int64[np.ndarray, " P"]  # where in the window the piece begins
    document: Int64[np.ndarray, " P"]
    start: Int64[np.ndarray, " P"]  # where in the document the piece begins
    length: Int64[np.ndarray, " P"]  # at least 1


def pieces(offsets: np.ndarray, starts: Int64[np.ndarray, " B"], widths: Int64[np.ndarray, " B"]) -> Pieces:
    """The pieces of the windows [start, start + width) of a circular stream; a window of width 0 has none.

    Args:
      offsets: uint64, cumulative token counts of the documents; may be a memory map, and only O(log N) of it is touched.
      starts: below offsets[-1].
      widths: may pass the end of the stream, any number of times.
    """
    total = int(offsets[-1])
    ends = starts + widths
    laps = np.where(widths > 0, (ends - 1) // total + 1, 0)  # a window that passes the end is a span on each lap
    window, lap = expand(laps)
    lap = lap * total
    begin = np.maximum(starts[window], lap)
    end = np.minimum(ends[window], lap + total)
    column = begin - starts[window]
    begin, end = begin - lap, end - lap

    # uint64, as the offsets are: any other type would make NumPy convert the whole memory map
    first = np.searchsorted(offsets, begin.astype(np.uint64), side="right") - 1
    last = np.searchsorted(offsets, (end - 1).astype(np.uint64), side="right") - 1
    span, nth = expand(last - first + 1)
    document = first[span] + nth
    document_start = offsets[document].astype(np.int64)
    piece_start = np.maximum(document_start, begin[span])
    length = np.minimum(offsets[document + 1].astype(np.int64), end[span]) - piece_start
    full = length > 0  # empty documents have no piece
    result = (window[span], column[span] + piece_start - begin[span], document, piece_start - document_start, length)
    return Pieces(*(np.asarray(array)[full] for array in result))


def expand(counts: Integer[np.ndarray, " N"]) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """(2, 0, 3) → ((0, 0, 2, 2, 2), (0, 1, 0, 1, 2)): whose item each is, and which of its items."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


# ------------------------------------------------------------------------------------------------------------------ packing


class Rows:
    """B rows of T + 1 tokens that are filled source by source, then cut into inputs and targets."""

    def __init__(self, batch_rows: int, seq_len: int):
        shape = (batch_rows, seq_len + 1)
        self.tokens, self.segment_ids, self.positions = (np.zeros(shape, np.int32) for _ in range(3))

    def fill(
        self,
        source: Source,
        rows: Integer[np.ndarray, " W"],
        starts: Int64[np.ndarray, " W"],
        widths: Int64[np.ndarray, " W"],
    ) -> None:
        """Writes windows of a source into rows; what a window does not reach stays padding."""
        self.write(source, rows, pieces(source.offsets, starts, widths))

    def write(self, source: Source, rows: Integer[np.ndarray, " W"], found: Pieces) -> None:
        """Writes pieces of a source into rows; `found.window` is an index into `rows`, ascending."""
        unique, which = np.unique(found.document, return_inverse=True)
        documents = source.read(unique)
        width = self.tokens.shape[1]
        first = np.searchsorted(found.window, found.window)
        segment = np.arange(len(first)) - first + 1
        begin = rows[found.window] * width + found.column
        tokens, segment_ids, positions = (
            array.reshape(-1) for array in (self.tokens, self.segment_ids, self.positions)
        )
        ramp = np.arange(width, dtype=np.int32)
        columns = (begin, begin + found.length, which, found.start, found.start + found.length, segment)
        for at, to, document, start, stop, number in zip(*(column.tolist() for column in columns)):
            tokens[at:to] = documents[document][start:stop]
            segment_ids[at:to] = number
            positions[at:to] = ramp[: to - at]

    def batch(self) -> Batch:
        """Inputs, and the next token of the same document as target."""
        segment_ids = self.segment_ids[:, :-1]
        same = (segment_ids == self.segment_ids[:, 1:]) & (segment_ids > 0)
        return Batch(
            tokens=np.ascontiguousarray(self.tokens[:, :-1]),
            targets=self.tokens[:, 1:] * same,
            loss_weights=same.astype(np.float32),
            segment_ids=np.ascontiguousarray(segment_ids),
            positions=np.ascontiguousarray(self.positions[:, :-1]),
        )


def document_rows(
    source: Source, seed: int, counters: Integer[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """(epoch, document) of a source's rows number `counters`, where each is one document: permuted anew in each epoch."""
    epochs, within = np.divmod(counters, source.num_documents)
    documents = np.zeros_like(within)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        documents[here] = permute(within[here], source.num_documents, epoch_keys(seed, source.name, epoch)[0])
    return epochs, documents


def document_spans(
    source: Source, seq_len: int, documents: Int64[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """Where documents start, how much of each stands in its row, and whether a token behind that is its last target."""
    starts, stops = (source.offsets[documents + n].astype(np.int64) for n in (0, 1))
    widths = np.minimum(stops - starts, seq_len)
    return starts % max(source.num_tokens, 1), widths, (stops - starts > widths).astype(np.int64)
