"""Which items, given as sequences of words, a text holds, whole or in part.

Item and text meet as words: lower case, without signs, white space and line breaks. Windows of w words are found by a polynomial
hash modulo 2^64, whatever w, from sums of prefixes:

    H(i) = Σ_{j<i} code(word_j) · b^j        hash(i, w) = (H(i + w) - H(i)) · b^-i

so a text costs one pass for its words and a few array operations for each length of window.
"""

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from jaxtyping import Bool, Int, UInt64

from lmjax.data import hashing
from lmjax.data.document import to_bytes
from lmjax.data.words import split_words
from lmjax.files import read_json, write_atomic

SAME = str.maketrans({"’": "'", "\u00ad": None, "\u200c": None, "\u200d": None})
SHOWN_CHARACTERS = 300  # of the words that a document shares with an item
KINDS = ("exact", "field", "ngram")  # the whole item, one of its fields whole, a part


# ---------------------------------------------------------------------------------------------------------------------- words


def content_words(text: str) -> list[str]:
    """Words without signs, folded so that case and the form of an apostrophe make no difference."""
    return fold([word for word in split_words(text) if len(word) > 1 or word.isalnum()])  # signs stand alone


def fold(words: list[str]) -> list[str]:
    """All words in one go; none holds a line break. Soft hyphens and joiners are seen by nobody, so by no comparison."""
    text = "\n".join(words)
    return (text if text.isascii() else text.translate(SAME)).casefold().split("\n") if words else []


def word_spans(text: str) -> Int[np.ndarray, "W 2"]:
    """Where each of `content_words` begins and ends in the text: only white space stands between its words."""
    spans, place = [], 0
    for word in split_words(text):
        start = text.index(word, place)
        place = start + len(word)
        if len(word) > 1 or word.isalnum():
            spans.append((start, place))
    return np.array(spans, np.int64).reshape(-1, 2)


def word_code(word: str) -> int:
    """64 random-looking bits that stand for a word, never 0: that is a word of no item."""
    return xxhash.xxh3_64_intdigest(to_bytes(word)) or 1


class Windows:
    """Hashes of all windows of any length over a sequence of words' codes."""

    def __init__(self, codes: UInt64[np.ndarray, " W"]):
        self.codes = codes
        powers, self.inverses = hashing.powers(len(codes) + 1)
        self.prefix = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * powers[:-1], out=self.prefix[1:])
        self.unknown = np.zeros(len(codes) + 1, np.int64)
        np.cumsum(codes == 0, out=self.unknown[1:])

    def hashes(self, places: Int[np.ndarray, " P"], width: int | Int[np.ndarray, " P"]) -> UInt64[np.ndarray, " P"]:
        """Of the windows of `width` words (one number, or one for each) that begin at `places`."""
        return (self.prefix[places + width] - self.prefix[places]) * self.inverses[places]

    def known(self, width: int) -> Int[np.ndarray, " P"]:
        """The places whose windows hold no word that is in no item: only there can an item be."""
        if width > len(self.codes):
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.unknown[width:] == self.unknown[:-width])


# ---------------------------------------------------------------------------------------------------------------------- index


class Item(NamedTuple):
    """One item of a benchmark, and the parts that are sought: its whole text first, then its fields."""

    benchmark: str
    name: str
    parts: tuple[tuple[str, ...], ...]  # words


class Found(NamedTuple):
    """What a document shares with the benchmarks."""

    items: dict[int, str]  # item → "exact", "field" or "ngram"; in order of their place in the document
    shared: str  # the first words that are shared
    spans: Int[np.ndarray, "S 2"]  # all that is shared, as characters of the text


NOTHING = Found({}, "", np.zeros((0, 2), np.int64))


class Index:
    """The items, and which windows of words belong to which of them.

    Args:
      lists: JSON: `benchmark`, `names` and `unsought` (why, or null) of each item; `words` of all.
      tables: `width`, `hash`, `part` and `offset` of each window, sorted so; and of each part of an item `part_item`, `part_width`,
        `part_hash` and `part_whole` (it is all of the item's text).
    """

    def __init__(self, lists: dict[str, Any], tables: dict[str, np.ndarray]):
        self.lists, self.tables = lists, tables
        self.benchmark: list[str] = lists["benchmark"]
        self.names: list[str] = lists["names"]
        self.unsought: list[str | None] = lists["unsought"]
        self.codes = {word: word_code(word) for word in lists["words"]}
        widths, starts = np.unique(tables["width"], return_index=True)
        bounds = [*starts.tolist(), len(tables["width"])]
        self.spans = [(int(w), a, b) for w, a, b in zip(widths, bounds, bounds[1:], strict=False)]

    def search(self, text: str) -> Found:
        """What a text shares with the items."""
        words = content_words(text)
        codes = np.fromiter(map(self.codes.get, words, itertools.repeat(0)), np.uint64, len(words))
        windows, hits = Windows(codes), []
        for width, low, high in self.spans:
            places = windows.known(width)
            if not len(places):
                break  # nor are there wider ones
            hits.append(self.hits(windows, places, width, low, high))
        return self.found(text, words, windows, np.concatenate(hits)) if any(map(len, hits)) else NOTHING

    def hits(
        self, windows: Windows, places: Int[np.ndarray, " P"], width: int, low: int, high: int
    ) -> Int[np.ndarray, "H 2"]:
        """(place, row of the tables) of each window of one width that is an item's."""
        table = self.tables["hash"][low:high]
        hashes = windows.hashes(places, width)
        first = np.searchsorted(table, hashes)
        hit = np.flatnonzero(table[np.minimum(first, len(table) - 1)] == hashes)
        if not len(hit):
            return np.zeros((0, 2), np.int64)
        counts = np.searchsorted(table, hashes[hit], "right") - first[hit]
        rows = np.repeat(first[hit] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum()) + low
        return np.stack([np.repeat(places[hit], counts), rows], axis=1)

    def found(self, text: str, words: list[str], windows: Windows, hits: Int[np.ndarray, "H 2"]) -> Found:
        """The items that were hit, how much of each, and where."""
        tables = self.tables
        widths = tables["width"][hits[:, 1]].astype(np.int64)
        order = np.lexsort((hits[:, 1], -widths, hits[:, 0]))
        starts, rows, widths = hits[order, 0], hits[order, 1], widths[order]
        parts = tables["part"][rows]
        kinds = np.where(self.stands(windows, starts - tables["offset"][rows], parts), 1, 2)  # places in KINDS
        kinds -= (kinds == 1) & tables["part_whole"][parts]
        items: dict[int, int] = {}
        for item, kind in zip(tables["part_item"][parts].tolist(), kinds.tolist(), strict=True):
            items[item] = min(kind, items.get(item, kind))
        stops = np.maximum.accumulate(starts + widths)
        new = np.flatnonzero(np.concatenate([[True], starts[1:] > stops[:-1]]))  # merged where they touch
        spans, last = word_spans(text), np.append(new[1:], len(starts)) - 1
        merged = np.stack([spans[starts[new], 0], spans[stops[last] - 1, 1]], axis=1)
        shared = " ".join(words[starts[0] : starts[0] + widths[0]])[:SHOWN_CHARACTERS]
        return Found({item: KINDS[kind] for item, kind in items.items()}, shared, merged)

    def stands(
        self, windows: Windows, starts: Int[np.ndarray, " H"], parts: Int[np.ndarray, " H"]
    ) -> Bool[np.ndarray, " H"]:
        """Whether the whole of each part begins at its place."""
        widths = self.tables["part_width"][parts]
        inside = (starts >= 0) & (starts + widths <= len(windows.codes))
        safe = np.where(inside, starts, 0)
        return inside & (windows.hashes(safe, np.where(inside, widths, 0)) == self.tables["part_hash"][parts])


def build_index(items: Sequence[Item], ngram: int, min_words: int, max_items: int) -> Index:
    """The index of items.

    Args:
      ngram: words that a text and an item must share; a shorter item is sought whole.
      min_words: items and fields of fewer are not sought.
      max_items: a window of more items is a template and says nothing.
    """
    parts = [(number, part) for number, item in enumerate(items) for part in item.parts if len(part) >= min_words]
    words = sorted({word for _, part in parts for word in part})
    codes = {word: word_code(word) for word in words}
    tables: dict[str, Any] = {
        "part_item": np.array([number for number, _ in parts], np.int64),
        "part_width": np.array([len(part) for _, part in parts], np.int64),
        "part_whole": np.array([part is items[number].parts[0] for number, part in parts], bool),
        "part_hash": np.zeros(len(parts), np.uint64),
    }
    columns: list[list[np.ndarray]] = [[np.zeros(0, np.uint64)] for _ in range(4)]
    for number, (_, part) in enumerate(parts):
        windows = Windows(np.array([codes[word] for word in part], np.uint64))
        tables["part_hash"][number] = windows.hashes(np.zeros(1, np.int64), len(part))[0]
        width = min(ngram, len(part))
        offsets = windows.known(width)
        filled = (np.full_like(offsets, width), windows.hashes(offsets, width), np.full_like(offsets, number), offsets)
        for column, more in zip(columns, filled, strict=True):
            column.append(more.astype(np.uint64))
    rows = sorted_rows(*map(np.concatenate, columns), tables, max_items)
    sought = set(tables["part_item"][rows["part"]].tolist())
    lists = {
        "benchmark": [item.benchmark for item in items],
        "names": [item.name for item in items],
        "unsought": [why_unsought(number in sought, item, min_words) for number, item in enumerate(items)],
        "words": words,
    }
    return Index(lists, tables | rows)


def sorted_rows(
    width: np.ndarray, hashed: np.ndarray, part: np.ndarray, offset: np.ndarray, tables: dict, max_items: int
) -> dict[str, np.ndarray]:
    """The windows in order, without those of a template; of a long field the first that is left, the others are its item's."""
    part, offset = part.astype(np.int64), offset.astype(np.int64)
    order = np.lexsort((offset, part, hashed, width))
    width, hashed, part, offset = width[order], hashed[order], part[order], offset[order]
    item = tables["part_item"][part]  # rises with part
    new = np.ones(len(width), bool)
    new[1:] = (width[1:] != width[:-1]) | (hashed[1:] != hashed[:-1])
    first_of_item, first_of_part = new.copy(), new.copy()
    first_of_item[1:] |= item[1:] != item[:-1]
    first_of_part[1:] |= part[1:] != part[:-1]
    window = np.cumsum(new) - 1
    keep = first_of_part & (np.bincount(window, first_of_item)[window] <= max_items)
    earliest = np.full(len(tables["part_item"]), np.iinfo(np.int64).max)
    np.minimum.at(earliest, part[keep], offset[keep])
    keep &= tables["part_whole"][part] | (offset == earliest[part])
    return {
        "width": width[keep].astype(np.uint32),
        "hash": hashed[keep],
        "part": part[keep],
        "offset": offset[keep],
    }


def why_unsought(sought: bool, item: Item, min_words: int) -> str | None:
    """Why nothing of an item is sought, or None."""
    if sought:
        return None
    return "too_short" if len(item.parts[0]) < min_words else "template"


def write_index(folder: Path, index: Index) -> None:
    """Equal items give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **index.tables)
    write_atomic(folder / "windows.npz", buffer.getvalue())
    write_atomic(folder / "items.json", json.dumps(index.lists))  # ASCII: lone surrogates stand as escapes


def read_index(folder: Path) -> Index:
    """What `write_index` wrote."""
    with np.load(folder / "windows.npz", allow_pickle=False) as tables:
        return Index(read_json(folder / "items.json"), dict(tables))
