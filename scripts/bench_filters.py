"""The rule filters beside datatrove's: the same decision and reason for each document, and how much faster.

    python scripts/bench_filters.py [--only SECTION …] [--documents N] [--quick] [--json FILE]

Both judge by our splitters of words and sentences, on the real texts of `real_documents.py`. Samples are taken in turn in one
process; those during which others used the machine are dropped and counted. `--quick`: installed packages' texts, few samples.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bench_harness import Row, Sampler, environment, ratio, show, write
from real_documents import package_documents, real_documents
from rich.console import Console

from lmjax.data.c4 import C4
from lmjax.data.document import Document
from lmjax.data.fineweb import FineWeb
from lmjax.data.gopher_quality import GopherQuality
from lmjax.data.gopher_repetition import GopherRepetition
from lmjax.data.stage import Drop, MapStage, Tally
from lmjax.data.words import split_sentences, split_words

COMMAND = "python scripts/bench_filters.py --only {}"
DOCUMENTS, QUICK_DOCUMENTS = 25_000, 300
TIMED = 400  # documents in a sample of speed
QUALITY = {
    "gopher_short_doc": "too_few_words",
    "gopher_long_doc": "too_many_words",
    "gopher_below_avg_threshold": "short_words",
    "gopher_above_avg_threshold": "long_words",
    "gopher_too_many_hashes": "too_many_hashes",
    "gopher_too_many_ellipsis": "too_many_ellipses",
    "gopher_too_many_bullets": "bullet_lines",
    "gopher_too_many_end_ellipsis": "ellipsis_lines",
    "gopher_below_alpha_threshold": "few_alphabetic_words",
    "gopher_enough_stop_words": "few_stop_words",
}
REPETITION = {
    "empty": "empty",
    "dup_para_frac": "duplicate_paragraphs",
    "dup_para_char_frac": "duplicate_paragraph_characters",
    "dup_line_frac": "duplicate_lines",
    "dup_line_char_frac": "duplicate_line_characters",
    **{f"top_{n}_gram": f"top_{n}_gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"duplicate_{n}_grams" for n in range(5, 11)},
}
C4_REASONS = {reason: reason for reason in ("lorem_ipsum", "curly_bracket", "too_few_sentences")}
FINEWEB = {
    "empty": "empty",
    "line_punct_ratio": "few_ended_lines",
    "short_line_ratio": "short_lines",
    "char_dup_ratio": "duplicate_characters",
    "list_ratio": "too_many_newlines",
}


class Pair(NamedTuple):
    """A filter of ours and theirs, with the same thresholds."""

    ours: MapStage
    theirs: Any
    reasons: dict[str, str]  # theirs → ours


def pairs() -> dict[str, Pair]:
    """The filters that both have; FineWeb's pipeline uses C4 without the rule of line ends."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    return {
        "gopher_repetition": Pair(GopherRepetition(), GopherRepetitionFilter(), REPETITION),
        "gopher_quality": Pair(GopherQuality(), GopherQualityFilter(), QUALITY),
        "c4": Pair(C4(), C4QualityFilter(), C4_REASONS),
        "c4, any line end": Pair(
            C4(terminal_punctuation=False), C4QualityFilter(filter_no_terminal_punct=False), C4_REASONS
        ),
        "fineweb": Pair(FineWeb(), FineWebQualityFilter(), FINEWEB),
    }


@contextlib.contextmanager
def our_splitters() -> Iterator[None]:
    """Gives datatrove's filters our words and sentences."""
    from datatrove.pipeline.filters import (
        c4_filters,
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    patches = dict.fromkeys(
        (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter), "split_into_words"
    )
    patches[c4_filters] = "split_into_sentences"
    kept = {module: getattr(module, name) for module, name in patches.items()}
    try:
        for module, name in patches.items():
            ours = split_words if name == "split_into_words" else split_sentences
            setattr(module, name, lambda text, language=None, ours=ours: ours(text))
        yield
    finally:
        for module, name in patches.items():
            setattr(module, name, kept[module])


Answer = tuple[str, str | None]  # the reason of a drop, or "keep"; the text that goes on


def our_answer(pair: Pair, document: Document) -> Answer:
    """Our verdict."""
    verdict = pair.ours.apply(document, Tally())
    return (verdict.reason, None) if isinstance(verdict, Drop) else ("keep", verdict.text)


def their_answer(pair: Pair, document: Document) -> Answer:
    """datatrove's, in our words."""
    from datatrove.data import Document as Theirs

    theirs = Theirs(document.text, document.id)
    verdict = pair.theirs.filter(theirs)
    if isinstance(verdict, tuple):
        kept, reason = verdict
        return ("keep", theirs.text) if kept else (pair.reasons[reason], None)
    return ("keep", theirs.text) if verdict else ("dropped", None)


class Difference(NamedTuple):
    """A document that the two judge differently."""

    filter: str
    id: str
    ours: str
    theirs: str


def compare(documents: Iterable[Document]) -> tuple[dict[str, int], dict[str, int], list[Difference]]:
    """(documents, drops) of each filter, and where the two differ: in decision, reason, or the text that goes on."""
    found, drops, differences, judged = pairs(), {}, [], {}
    with our_splitters():
        for document in documents:
            for name, pair in found.items():
                ours, theirs = our_answer(pair, document), their_answer(pair, document)
                judged[name] = judged.get(name, 0) + 1
                drops[name] = drops.get(name, 0) + (theirs[0] != "keep")
                if ours != theirs:
                    texts = ours[0] == theirs[0]
                    differences.append(
                        Difference(
                            name,
                            f"{document.source}/{document.id}",
                            *(a[0] + " (text)" * texts for a in (ours, theirs)),
                        )
                    )
    return judged, drops, differences


# ---------------------------------------------------------------------------------------------------------------- sections


class Bench:
    """What both sections need."""

    def __init__(self, quick: bool, documents: int, console: Console):
        self.quick, self.documents, self.console = quick, documents, console
        self.sampler = Sampler(rounds=3 if quick else 7, patience_s=10 if quick else 60)

    def texts(self) -> list[Document]:
        """The same documents each time: a sample of all sources, or the first texts of installed packages."""
        if self.quick:
            return list(itertools.islice(package_documents(), self.documents))
        documents = list(real_documents())
        return random.Random(0).sample(documents, min(self.documents, len(documents)))


def agreement(bench: Bench) -> list[Row]:
    """The share of documents on which both say the same."""
    judged, drops, differences = compare(bench.texts())
    rows, command = [], COMMAND.format("agreement")
    for name, number in judged.items():
        unlike = sum(difference.filter == name for difference in differences)
        label = f"{name}: same decision, reason and text, of {number:,} documents ({drops[name]:,} drops)"
        rows.append(Row(label, number - unlike, "documents", f">= {number}", command))
    for difference in differences:
        bench.console.print(
            f"unlike: {difference.filter}: {difference.id}: ours {difference.ours}, theirs {difference.theirs}"
        )
    return rows


def speed(bench: Bench) -> list[Row]:
    """Documents a second, ours over theirs: each filter alone, words found anew, and all in the order of FineWeb."""
    documents = bench.texts()[:TIMED]
    found, rows, command = pairs(), [], COMMAND.format("speed")
    together = ["gopher_repetition", "gopher_quality", "c4, any line end", "fineweb"]
    with our_splitters():
        for label, names in [*((name, [name]) for name in found), ("all, one after another", together)]:
            chosen = [found[name] for name in names]
            samples = bench.sampler.run({
                "ours": lambda chosen=chosen: rate(our_run, chosen, documents),
                "theirs": lambda chosen=chosen: rate(their_run, chosen, documents),
            })  # fmt: skip
            ours = samples["ours"]
            rows.append(Row(f"{label}: ours", ours.median if ours.kept else None, "documents/s", None, command))
            rows.append(Row(f"{label}: ours / datatrove", ratio(ours, samples["theirs"]), "×", ">= 3", command))
    return rows


def rate(run: Callable[[list[Pair], list[Document]], None], chosen: list[Pair], documents: list[Document]) -> float:
    """Documents a second of processor time; a document passes through all filters, as if each had kept it."""
    start = time.process_time()
    run(chosen, documents)
    return len(documents) / (time.process_time() - start)


def our_run(chosen: list[Pair], documents: list[Document]) -> None:
    """Ours over all documents."""
    stages, tally = [pair.ours.apply for pair in chosen], Tally()
    for document in documents:
        for apply in stages:
            apply(document, tally)


def their_run(chosen: list[Pair], documents: list[Document]) -> None:
    """datatrove's."""
    from datatrove.data import Document as Theirs

    for document in documents:
        theirs = Theirs(document.text, document.id)
        for pair in chosen:
            theirs.text = document.text  # C4 writes to it
            pair.theirs.filter(theirs)


SECTIONS = {"agreement": agreement, "speed": speed}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections, prints the table; exit code 2 where the peer is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--documents", type=int, help=f"how many to judge; {DOCUMENTS:,}, or quick: {QUICK_DOCUMENTS}")
    parser.add_argument("--quick", action="store_true", help="installed packages' texts, few samples")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("datatrove") is None:
        print("bench_filters: datatrove is missing: pip install 'datatrove==0.10.1' 'xxhash<4'", file=sys.stderr)
        return 2
    console = Console(soft_wrap=True, highlight=False)
    bench = Bench(args.quick, args.documents or (QUICK_DOCUMENTS if args.quick else DOCUMENTS), console)
    rows = environment(["datatrove", "numpy"])
    for name in args.only or SECTIONS:
        console.print(f"bench_filters: {name} …")
        rows += SECTIONS[name](bench)
    rows.append(Row("samples kept, dropped", json.dumps([bench.sampler.kept, bench.sampler.dropped]), ""))
    show("rule filters beside datatrove's", rows, console)
    if args.json:
        write(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
