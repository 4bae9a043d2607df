"""Decontamination: documents that hold items of evaluation sets are dropped, or those passages are cut out of them.

An item and a document meet as sequences of words: lower case, without signs, white space and line breaks. They meet in
`ngram` consecutive words (13: Brown et al. 2020, 2005.14165, appendix C), or, where an item is shorter, in all of its words. What
is too short to be known again, or stands in too many items (a template: "Answer the following question …"), is not sought;
the report names it. What many documents share (a licence that an item quotes) cannot be known in one pass: it is found like
the rest, and shows as an item of many `documents`.
"""

import collections
import dataclasses
import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Int

from lmjax.config import did_you_mean, need
from lmjax.data.benchmarks import read_items
from lmjax.data.document import Document, grouped
from lmjax.data.inputs import find_files
from lmjax.data.overlap import KINDS, Index, build_index, read_index, write_index
from lmjax.data.stage import Apply, Drop, MapStage, Tally, Verdict
from lmjax.files import write_atomic

log = logging.getLogger(__name__)

NAMED = 1000  # items of a benchmark that the report names; all stand in the published file


@dataclasses.dataclass(frozen=True)
class Decontaminate(MapStage):
    """Drops documents that hold benchmark items, or cuts these passages out."""

    name: ClassVar[str] = "decontaminate"
    version: ClassVar[int] = 2

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
        need(self.ngram >= 2, f"decontaminate.ngram={self.ngram} must be at least 2")
        need(
            1 <= self.min_words <= self.ngram,
            f"decontaminate.min_words={self.min_words} must be in 1 … ngram={self.ngram}",
        )
        need(self.max_items >= 1, f"decontaminate.max_items={self.max_items} must be at least 1")
        need(self.window >= 0, f"decontaminate.window={self.window} must not be negative")
        need(self.max_pieces >= 1, f"decontaminate.max_pieces={self.max_pieces} must be at least 1")
        need(self.min_piece >= 0, f"decontaminate.min_piece={self.min_piece} must not be negative")
        for benchmark in self.fields:
            known = benchmark in self.benchmarks
            need(
                known, f"decontaminate.fields.{benchmark}: no such benchmark{did_you_mean(benchmark, self.benchmarks)}"
            )
            need(bool(self.fields[benchmark]), f"decontaminate.fields.{benchmark} must name at least one field")

    def files(self) -> Sequence[str]:
        """The benchmarks' files."""
        if not self.benchmarks:
            log.warning("decontaminate has no benchmarks (name → path of the items): nothing is compared")
        return [str(path) for where in self.benchmarks.values() for _, path in find_files(where)[0]]

    def fit(self, shards: Sequence[Path], folder: Path) -> None:
        """Writes the index of all items."""
        write_index(folder, self.build_index())

    def build_index(self) -> Index:
        """Reads all items."""
        items = list(read_items(self.benchmarks, self.fields))
        return build_index(items, self.ngram, self.min_words, self.max_items)

    def open(self, folder: Path) -> Apply:
        """Loads the index."""
        return functools.partial(self.judge, read_index(folder))

    def judge(self, index: Index, document: Document, tally: Tally) -> Verdict:
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
        cut = {"cut": [detail["benchmark"], detail["item"]]}
        if len(kept) == 1:
            return dataclasses.replace(document, text=kept[0], meta=document.meta | cut)
        meta = grouped(document).meta | cut  # a split divides them as little as the document
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

    def flag(self, index: Index, item: int, counts: dict[str, dict[str, Any]]) -> dict[str, Any]:
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
