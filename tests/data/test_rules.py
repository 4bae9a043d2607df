"""What holds of all sets of rules: no text is too strange, time is linear, each can be turned off; and datatrove's verdicts."""

import dataclasses
import importlib.util
import itertools
import pathlib
import random
import time

import pytest

from lmjax.config import build
from lmjax.data.c4 import C4
from lmjax.data.document import Document
from lmjax.data.fineweb import FineWeb
from lmjax.data.gopher_quality import GopherQuality
from lmjax.data.gopher_repetition import GopherRepetition
from lmjax.data.simple import Simple
from lmjax.data.stage import Counts, Drop, Tally, run
from lmjax.errors import UserError

SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"
STAGES = [GopherQuality, GopherRepetition, C4, FineWeb, Simple]
PROSE = "The little cat sat with a hat, and that was all. "


def verdict(stage, text, **meta):
    return stage.apply(Document("id", text, "s", meta), Tally())


def reason(stage, text, **meta):
    answer = verdict(stage, text, **meta)
    return answer.reason if isinstance(answer, Drop) else "keep"


def different(number, start=0):
    """Words of four letters, no two alike."""
    letters = itertools.product("abcdefghij", repeat=4)
    return list(map("".join, itertools.islice(letters, start, start + number)))


def only(stage, **fields):
    """A stage with all rules off but these."""
    off = {f.name: None for f in dataclasses.fields(stage) if f.name.startswith(("min_", "max_"))}
    off |= {f.name: {} for f in dataclasses.fields(stage) if f.name.endswith("_ngrams")}
    off |= {f.name: False for f in dataclasses.fields(stage) if f.type in (bool, "bool")}
    off |= {"policy": ()} if stage is C4 else {}
    return stage(**off | fields)


# ------------------------------------------------------------------------------------------------------------- for each of all


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("text", ["", "x", " ", "\n", "\ud800", "\x00" * 60, "中" * 200, "....\n" * 100])
def test_no_text_is_too_strange(stage, text):
    counts = Counts(stage.name)
    list(run(stage(), [Document("id", text, "s")], counts))
    list(run(only(stage), [Document("id", text, "s")], counts))
    assert counts.failed == 0 and counts.close()["read"] == 2


@pytest.mark.parametrize("stage", STAGES)
def test_every_rule_can_be_turned_off(stage):
    assert reason(only(stage), "# # ... { lorem ipsum\n" * 3) == "keep"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("piece", ["x", "x ", "- \n", "\n", "...", "#[", "é", "word one. "])
def test_time_is_linear(stage, piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    verdict(stage(), text)
    verdict(
        only(
            stage, **({"duplicate_ngrams": {"5": 1.0}, "top_ngrams": {"2": 1.0}} if stage is GopherRepetition else {})
        ),
        text,
    )
    assert time.process_time() - start < 10  # quadratic: hours


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        (GopherQuality, {"min_words": 10, "max_words": 9}),
        (GopherQuality, {"min_alphabetic": 80.0}),
        (GopherQuality, {"min_stop_words": 3, "stop_words": ("the", "a", "a")}),
        (GopherRepetition, {"top_ngrams": {"two": 0.2}}),
        (GopherRepetition, {"duplicate_ngrams": {"5": 15.0}}),
        (C4, {"policy": ("Terms of Use",)}),
        (FineWeb, {"max_short_lines": -0.1}),
        (Simple, {"repetition_words": 0}),
    ],
)
def test_impossible_options_are_named(stage, fields):
    with pytest.raises(UserError, match=stage.name):
        build(stage, fields)


# --------------------------------------------------------------------------------------------------------------- datatrove


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("datatrove", reason="datatrove, the oracle, is not installed")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("bench_filters", SCRIPTS / "bench_filters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def odd_text(rng):
    """A text near the rules' edges: repeated lines, bullets, ellipses, signs of all kinds, ambiguous n-grams."""
    words = rng.choice(
        [["a", "aa", "ab", "ba", "b"], ["the", "of", "and", "be", "with", "cat", "Cat's"], different(400)]
    )
    signs = [
        ".",
        "...",
        "…",
        "!",
        '"',
        "#",
        "•",
        "-",
        "１",
        "１１",
        "[1]",
        "[edit]",
        "{",
        "javascript",
        "Terms of use",
        "।",
        "\u0301",
    ]
    ends = ["\n", "\n", "\n\n", "\n\n\n", " ", "\x0b", "\u2028", "\r\n", "\x1c"]
    weight, lines = rng.choice([0, 0.1, 0.5]), []
    for _ in range(rng.randint(0, 12)):
        line = [rng.choice(signs) if rng.random() < weight else rng.choice(words) for _ in range(rng.randint(0, 25))]
        lines.append(rng.choice(["", "", "- ", " • "]) + " ".join(line) + rng.choice([".", "", "...", "…", '"']))
        lines += [lines[0]] * (rng.random() < 0.1)
    return rng.choice(["", "\n", " "]) + "".join(line + rng.choice(ends) for line in lines)


def test_datatrove_says_the_same_of_real_texts(bench):
    documents = list(itertools.islice(bench.package_documents(), 150))
    judged, drops, differences = bench.compare(documents)
    assert set(judged.values()) == {len(documents)} and differences == []
    assert all(0 < number < len(documents) for number in drops.values())


def test_datatrove_says_the_same_of_odd_texts(bench):
    rng = random.Random(0)
    documents = [Document(str(i), odd_text(rng), "odd") for i in range(400)]
    assert bench.compare(documents)[2] == []


def test_datatrove_says_the_same_whatever_the_thresholds(bench, monkeypatch):
    """Each rule alone, with limits that part the texts: at the defaults a first rule hides the rest."""
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    rng = random.Random(1)
    documents = [Document(str(i), odd_text(rng), "odd") for i in range(150)]
    pairs = {}
    off = dict.fromkeys(["dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"])
    for n in range(2, 11):
        ours, theirs = ("top_ngrams", "top_n_grams") if n < 5 else ("duplicate_ngrams", "dup_n_grams")
        theirs = GopherRepetitionFilter(**off | {"top_n_grams": (), "dup_n_grams": ()} | {theirs: ((n, 0.1),)})
        pairs[str(n)] = bench.Pair(only(GopherRepetition, **{ours: {str(n): 0.1}}), theirs, bench.REPETITION)
    for ours, theirs, limit in QUALITY_LIMITS:
        least = {"min_doc_words": 1} | dict.fromkeys([theirs for _, theirs, _ in QUALITY_LIMITS][1:])
        theirs = GopherQualityFilter(**least | {"max_symbol_word_ratio": None} | {theirs: limit})
        pairs[ours] = bench.Pair(only(GopherQuality, **{"min_words": 1} | {ours: limit}), theirs, bench.QUALITY)
    for ours, theirs, limit in FINEWEB_LIMITS:
        loose = {"line_punct_thr": 0, "short_line_thr": 1, "char_duplicates_ratio": 1, "new_line_ratio": 100}
        theirs = FineWebQualityFilter(**loose | {theirs: limit})
        pairs[ours] = bench.Pair(only(FineWeb, **{ours: limit}), theirs, bench.FINEWEB)
    monkeypatch.setattr(bench, "pairs", lambda: pairs)
    _, drops, differences = bench.compare(documents)
    assert differences == []
    assert all(0 < number < len(documents) for number in drops.values()), drops


QUALITY_LIMITS = [
    ("min_words", "min_doc_words", 30),
    ("max_words", "max_doc_words", 80),
    ("min_word_length", "min_avg_word_length", 2.5),
    ("max_word_length", "max_avg_word_length", 3.5),
    ("max_bullet_lines", "max_bullet_lines_ratio", 0.3),
    ("max_ellipsis_lines", "max_ellipsis_lines_ratio", 0.3),
    ("min_alphabetic", "max_non_alpha_words_ratio", 0.7),
    ("min_stop_words", "min_stop_words", 4),
]
FINEWEB_LIMITS = [
    ("min_ended_lines", "line_punct_thr", 0.3),
    ("max_short_lines", "short_line_thr", 0.5),
    ("max_duplicate_characters", "char_duplicates_ratio", 0.1),
    ("max_newlines", "new_line_ratio", 0.1),
]
