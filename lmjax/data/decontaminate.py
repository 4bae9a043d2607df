"""Decontamination: documents that hold items of evaluation sets are dropped, or those passages are cut out of them.

An item and a document meet as sequences of words: lower case, without signs, white space and line breaks. They meet in
`ngram` consecutive words (13: Brown et al. 2020, 2005.14165, appendix C), or, where an item is shorter, in all of its words. What
is too short to be known again, or stands in too many items (a template: "Answer the following question …"), is not sought;
the report names it. What many documents share (a licence that an item quotes) cannot be known in one pass: it is found like
the rest, and shows as an item of many `documents`.

Windows of w words are found by a polynomial hash modulo 2^64, whatever w, from sums of prefixes:

    H(i) = Σ_{j<i} code(word_j) · b^j        hash(i, w) = (H(i + w) - H(i)) · b^-i

so a document costs one pass for its words and a few array operations for each length of window.
"""

import collections
import dataclasses
import functools
import io
import itertools
import json
import logging
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import xxhash
from etils import epath
from jaxtyping import Bool, Int, UInt64

from lmjax.config import did_you_mean, need
from lmjax.data.compression import Fault, decompressed, raw_blocks, split_lines
from lmjax.data.document import Document, to_bytes
from lmjax.data.inputs import LINE_SUFFIXES, PARQUET_SUFFIX, find_files, known_suffix
from lmjax.data.read import decode
from lmjax.data.stage import Apply, Drop, MapStage, Tally, Verdict
from lmjax.data.words import split_words
from lmjax.errors import UserError
from lmjax.files import read_json, write_atomic

log = logging.getLogger(__name__)

ID_FIELDS = ("id", "task_id", "question_id", "qid", "idx")  # the first that an item has names it
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
FIELD_WORDS = 8  # a shorter field is not sought apart from its item: the least n of Brown et al.
NAMED = 1000  # items of a benchmark that the report names; all stand in the published file
SAME = str.maketrans({"’": "'", "\u00ad": None, "\u200c": None, "\u200d": None})
SHOWN_CHARACTERS = 300  # of the words that a document shares with an item

KINDS = ("exact", "field", "ngram")  # the whole item, one of its fields whole, a part


@dataclasses.dataclass(frozen=True)
class Decontaminate(MapStage):
    """Drops documents that hold benchmark items, or cuts these passages out."""

    name: ClassVar[str] = "decontaminate"

    benchmarks: dict[str, str] = dataclasses.field(default_factory=dict)  # name → file, folder or glob of its items:
    # JSON lines (also .gz, .zst) and Parquet, one item a record; .txt and .md, one item a line
    fields: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # benchmark → the fields that make an
    # item's text; where it is not named: all fields that hold texts or lists of texts
    ngram: int = 13  # words; Brown et al. 2020 use 8 to 13 by the length of the items, others 12
    min_words: int = 5  # 1 to ngram; items with fewer words are not sought, or "yes" would match everything
    max_items: int = 10  # an n-gram of more items than this is a template of theirs and says nothing
    action: Literal["drop", "cut"] = "drop"  # cut: as Brown et al., the passage and `window` around it
    window: int = 200  # characters that are cut on either side of a shared passage
    max_pieces: int = 10  # a document that falls into more is dropped
    min_piece: int = 200  # characters; shorter pieces are discarded

    def __post_init__(self) -> None:
        need(self.ngram >= 2, f"ngram={self.ngram} must be at least 2")
        need(1 <= self.min_words <= self.ngram, f"min_words={self.min_words} must be in 1 … ngram={self.ngram}")
        need(self.max_items >= 1, f"max_items={self.max_items} must be at least 1")
        need(self.window >= 0, f"window={self.window} must not be negative")
        need(self.max_pieces >= 1, f"max_pieces={self.max_pieces} must be at least 1")
        need(self.min_piece >= 0, f"min_piece={self.min_piece} must not be negative")
        for benchmark in self.fields:
            known = benchmark in self.benchmarks
            need(known, f"fields.{benchmark}: no such benchmark{did_you_mean(benchmark, self.benchmarks)}")
            need(bool(self.fields[benchmark]), f"fields.{benchmark} must name at least one field")

    def files(self) -> Sequence[str]:
        """The benchmarks' files."""
        if not self.benchmarks:
            log.warning("decontaminate has no benchmarks (name → path of the items): nothing is compared")
        return [str(path) for where in self.benchmarks.values() for _, path in find_files(where)[0]]

    def fit(self, shards: Sequence[Path], folder: Path) -> None:
        """Writes the index of all items."""
        write_index(folder, build_index(self))

    def open(self, folder: Path) -> Apply:
        """Loads the index."""
        return functools.partial(self.judge, read_index(folder))

    def judge(self, index: "Index", document: Document, tally: Tally) -> Verdict:
        """Looks for items in a document, and counts each that is found."""
        found = index.search(document.text)
        if not found.items:
            return document
        for item, kind in found.items.items():
            tally.add(f"contaminated/{index.benchmark[item]}", index.names[item])
            tally.add(f"contaminated_{kind}/{index.benchmark[item]}", index.names[item])
        first, kind = next(iter(found.items.items()))
        detail = {"benchmark": index.benchmark[first], "item": index.names[first], "matched": kind}
        detail |= {"ngram": found.shared, "items": len(found.items)}
        if self.action == "drop":
            return Drop("contaminated", detail)
        return self.cut(document, found.spans, detail, tally)

    def cut(self, document: Document, spans: Int[np.ndarray, "S 2"], detail: dict[str, Any], tally: Tally) -> Verdict:
        """What is left of a document without the shared passages and their surroundings."""
        pieces = pieces_between(document.text, spans, self.window)
        kept = [piece for piece in pieces if len(piece) >= self.min_piece]
        if len(pieces) > self.max_pieces:
            return Drop("contaminated_throughout", detail | {"pieces": len(pieces)})
        if not kept:
            return Drop("contaminated", detail | {"pieces": 0})
        tally.add("contaminated_cut", "documents")
        tally.add("contaminated_cut", "pieces", len(kept))
        tally.add("contaminated_cut", "characters", len(document.text) - sum(map(len, kept)))
        meta = document.meta | {"cut": [detail["benchmark"], detail["item"]]}
        if len(kept) == 1:
            return dataclasses.replace(document, text=kept[0], meta=meta)
        return [
            dataclasses.replace(document, id=f"{document.id}#cut-{number}", text=piece, meta=meta)
            for number, piece in enumerate(kept)
        ]

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """Each benchmark's share, its items by name, and a flag for each item in `publish/<benchmark>.jsonl`."""
        index, report = read_index(folder), {}
        places = collections.defaultdict(list)
        for item, benchmark in enumerate(index.benchmark):
            places[benchmark].append(item)
        for benchmark in self.benchmarks:
            counts = {kind: tally.get(f"contaminated_{kind}/{benchmark}", {}) for kind in KINDS}
            lines = [self.flag(index, item, counts) for item in places[benchmark]]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            write_atomic(folder / "publish" / f"{benchmark}.jsonl", text)
            found = [line for line in lines if line["contaminated"]]
            unsought = [line for line in lines if not line["sought"]]
            report[benchmark] = {
                "items": len(lines),
                "found": len(found),
                "share": len(found) / len(lines) if lines else 0.0,
                "documents": sum(line["documents"] for line in found),
                "found_items": [line["item"] for line in found[:NAMED]],
                "not_sought": collections.Counter(line["why"] for line in unsought),
                "not_sought_items": [line["item"] for line in unsought[:NAMED]],
            }
        return report

    def flag(self, index: "Index", item: int, counts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """An item's line: whether training text held it, in how many documents, and how much of it at most."""
        name, why = index.names[item], index.unsought[item]
        documents = {kind: int(counts[kind].get(name, 0)) for kind in KINDS}
        return {
            "item": name,
            "contaminated": any(documents.values()),
            "documents": sum(documents.values()),
            "matched": next((kind for kind in KINDS if documents[kind]), None),
            "sought": why is None,
            **({} if why is None else {"why": why}),
        }


def pieces_between(text: str, spans: Int[np.ndarray, "S 2"], window: int) -> list[str]:
    """The text between spans that are widened by `window` characters; pieces of white space alone are left out."""
    pieces, place = [], 0
    for start, stop in spans.tolist():  # apart, in rising order
        if start - window > place:
            pieces.append(text[place : start - window])
        place = stop + window
    pieces.append(text[place:])
    return [piece for piece in pieces if piece and not piece.isspace()]


# ------------------------------------------------------------------------------------------------------------------- words


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
        powers, self.inverses = base_powers(len(codes) + 1)
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


def base_powers(count: int) -> tuple[UInt64[np.ndarray, " N"], UInt64[np.ndarray, " N"]]:
    """b^0 … and their inverses, modulo 2^64; kept, and made anew only when a longer text comes."""
    powers, inverses = _powers(1 << max(10, (count - 1).bit_length()))
    return powers[:count], inverses[:count]


@functools.lru_cache(maxsize=64)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    rows = []
    for base in (BASE, pow(BASE, -1, 1 << 64)):
        row = np.full(count, base, np.uint64)
        row[0] = 1
        rows.append(np.cumprod(row))
    return rows[0], rows[1]


# ------------------------------------------------------------------------------------------------------------------- items


class Item(NamedTuple):
    """One item of a benchmark, and the parts that are sought: its whole text first, then its fields."""

    benchmark: str
    name: str
    parts: tuple[tuple[str, ...], ...]  # words


def read_items(stage: Decontaminate) -> Iterator[Item]:
    """The items of all benchmarks, in order.

    Raises:
      UserError: a file cannot be read, a record is no item, or none has a field that the config names.
    """
    for benchmark, where in stage.benchmarks.items():
        names: set[str] = set()
        count = 0
        for place, record in itertools.chain.from_iterable(read_records(*file) for file in find_files(where)[0]):
            name, texts = item_texts(record, stage.fields.get(benchmark), place)
            name = name if name not in names else f"{name}@{place}"
            names.add(name)
            count += 1
            fields = [tuple(content_words(unicodedata.normalize("NFC", text))) for text in texts]
            whole = tuple(itertools.chain.from_iterable(fields))
            parts = dict.fromkeys([whole, *(field for field in fields if len(field) >= FIELD_WORDS)])
            yield Item(benchmark, name, tuple(parts))
        need(count > 0, f"benchmarks.{benchmark}: {where} holds no items")


def read_records(name: str, path: epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of a benchmark's file, which must be whole: what could not be read could not be sought."""
    suffix = known_suffix(path)
    with path.open("rb") as file:
        if suffix == PARQUET_SUFFIX:
            import pyarrow.parquet as pq

            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in pq.ParquetFile(file).iter_batches(256))
            yield from ((f"{name}#{number}", row) for number, row in enumerate(rows, 1))
            return
        try:
            for number, line in enumerate(split_lines(decompressed(raw_blocks(file), suffix, path)), 1):
                text = decode(line)[0]
                if text.strip():
                    yield f"{name}#{number}", as_record(text, suffix in LINE_SUFFIXES)
        except (Fault, ValueError, RecursionError) as error:
            raise UserError(f"benchmark {path}, line {number}: {error}") from error


def as_record(line: str, is_json: bool) -> dict[str, Any]:
    """A line of a file as an item's fields."""
    record = json.loads(line) if is_json else line
    return record if isinstance(record, dict) else {"text": record}


def item_texts(record: dict[str, Any], fields: tuple[str, ...] | None, place: str) -> tuple[str, list[str]]:
    """An item's name, and its texts by field."""
    key = next((key for key in ID_FIELDS if type(record.get(key)) in (str, int) and record[key] != ""), None)
    for field in fields or ():
        need(field in record, f"benchmark item {place} has no field {field!r}{did_you_mean(field, record)}")
    values = [record[field] for field in fields or record if fields or field != key]
    return place if key is None else str(record[key]), [text for value in values if (text := all_text(value))]


def all_text(value: Any) -> str:
    """The texts in a value, one after another; numbers and flags are none."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    return "\n".join(filter(None, map(all_text, value))) if isinstance(value, list) else ""


# ------------------------------------------------------------------------------------------------------------------- index


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


def build_index(stage: Decontaminate) -> Index:
    """Reads all items; see `Index`."""
    items = list(read_items(stage))
    parts = [(number, part) for number, item in enumerate(items) for part in item.parts if len(part) >= stage.min_words]
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
        width = min(stage.ngram, len(part))
        offsets = windows.known(width)
        filled = (np.full_like(offsets, width), windows.hashes(offsets, width), np.full_like(offsets, number), offsets)
        for column, more in zip(columns, filled, strict=True):
            column.append(more.astype(np.uint64))
    rows = sorted_rows(*map(np.concatenate, columns), tables, stage)
    sought = set(tables["part_item"][rows["part"]].tolist())
    lists = {
        "benchmark": [item.benchmark for item in items],
        "names": [item.name for item in items],
        "unsought": [why_unsought(number in sought, item, stage) for number, item in enumerate(items)],
        "words": words,
    }
    return Index(lists, tables | rows)


def sorted_rows(
    width: np.ndarray, hashed: np.ndarray, part: np.ndarray, offset: np.ndarray, tables: dict, stage: Decontaminate
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
    keep = first_of_part & (np.bincount(window, first_of_item)[window] <= stage.max_items)
    earliest = np.full(len(tables["part_item"]), np.iinfo(np.int64).max)
    np.minimum.at(earliest, part[keep], offset[keep])
    keep &= tables["part_whole"][part] | (offset == earliest[part])
    return {
        "width": width[keep].astype(np.uint32),
        "hash": hashed[keep],
        "part": part[keep],
        "offset": offset[keep],
    }


def why_unsought(sought: bool, item: Item, stage: Decontaminate) -> str | None:
    """Why nothing of an item is sought, or None."""
    if sought:
        return None
    return "too_short" if len(item.parts[0]) < stage.min_words else "template"


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
