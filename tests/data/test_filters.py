"""The rule filters: each rule on both sides of its threshold, their order, and datatrove's verdicts."""

import dataclasses
import importlib.util
import itertools
import pathlib
import random
import time

import pytest

from lmjax.config import build, to_dict
from lmjax.data import filters
from lmjax.data.document import Document
from lmjax.data.filters import C4, FineWeb, GopherQuality, GopherRepetition, Simple
from lmjax.data.stage import Counts, Drop, Tally, run
from lmjax.data.words import split_words
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


# ----------------------------------------------------------------------------------------------------------- gopher, quality


def only(stage, **fields):
    """A stage with all rules off but these."""
    off = {f.name: None for f in dataclasses.fields(stage) if f.name.startswith(("min_", "max_"))}
    off |= {f.name: {} for f in dataclasses.fields(stage) if f.name.endswith("_ngrams")}
    off |= {f.name: False for f in dataclasses.fields(stage) if f.type in (bool, "bool")}
    off |= {"policy": ()} if stage is C4 else {}
    return stage(**off | fields)


QUALITY = {
    "too_few_words": ("min_words", "two , １words ; 12 １１ .", [3, 4]),
    "too_many_words": ("max_words", "two , words ; 12 .", [3, 2]),
    "short_words": ("min_word_length", "ab abcd , !", [3.0, 3.01]),
    "long_words": ("max_word_length", "ab abcd , !", [3.0, 2.99]),
    "too_many_hashes": ("max_hashes", "# one two three", [0.25, 0.24]),
    "too_many_ellipses": ("max_ellipses", "one two three …", [0.25, 0.24]),
    "bullet_lines": ("max_bullet_lines", "- a\n  • b\n\nc - -", [0.5, 0.49]),
    "ellipsis_lines": ("max_ellipsis_lines", "a...\nb…  \n\n... c", [0.5, 0.49]),
    "few_alphabetic_words": ("min_alphabetic", "a1 12 , b", [0.5, 0.51]),
    "few_stop_words": ("min_stop_words", "The the of of", [2, 3]),
}


@pytest.mark.parametrize("code", QUALITY)
def test_quality_rules_are_strict(code):
    field, text, (passes, breaks) = QUALITY[code]
    assert reason(only(GopherQuality, **{field: passes}), text) == "keep"
    assert reason(only(GopherQuality, **{field: breaks}), text) == code


def test_quality_of_prose_and_the_order_of_rules():
    stage = GopherQuality()
    assert reason(stage, PROSE * 5) == "keep"
    assert reason(stage, "#...\n" * 60) == "too_few_words"
    assert reason(stage, "# " * 30 + "it is so " * 60) == "short_words"
    assert verdict(stage, "one two") == Drop("too_few_words", 2)


def test_stop_words_of_a_language():
    text = " ".join(different(60)) + " der die das"
    stage = GopherQuality(language_stop_words={"de": ("der", "die"), "th": ()})
    assert reason(stage, text) == "few_stop_words"
    assert reason(stage, text, language="de") == "keep"
    assert reason(GopherQuality(language_stop_words={"de": ("der", "der")}), text, language="de") == "few_stop_words"
    assert reason(stage, " ".join(different(60)), language="th") == "keep"
    assert build(GopherQuality, to_dict(stage)) == stage


# -------------------------------------------------------------------------------------------------------- gopher, repetition


@pytest.mark.parametrize(
    ("field", "text", "share", "code"),
    [
        ("max_duplicate_paragraphs", "aa\n\nb\n\n\naa\n\nb", 2 / 4, "duplicate_paragraphs"),
        ("max_duplicate_paragraph_characters", "aa\n\nb\n\naa", 2 / 9, "duplicate_paragraph_characters"),
        ("max_duplicate_lines", "\naa\n\nb\naa\n", 2 / 5, "duplicate_lines"),  # the empty ends are lines, and alike
        ("max_duplicate_line_characters", "aa\nb\n\naa", 2 / 8, "duplicate_line_characters"),
    ],
)
def test_repeated_parts(field, text, share, code):
    assert reason(only(GopherRepetition, **{field: share}), text) == "keep"
    assert reason(only(GopherRepetition, **{field: share - 1e-6}), text) == code


def top(words, n):
    """The most frequent n-gram's characters, by its strings."""
    grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    best = max(grams, key=grams.count, default="")
    return len(best) * grams.count(best)


def duplicates(words, n):
    """Characters of n-grams that stood before, by their strings."""
    seen, total, i = set(), 0, 0
    while i + n <= len(words):
        gram = "".join(words[i : i + n])
        total, i = (total + len(gram), i + n) if gram in seen else (total, i + 1)
        seen.add(gram)
    return total


def test_ngrams_by_hashes_are_those_by_strings(monkeypatch):
    rng = random.Random(0)
    for _ in range(300):
        monkeypatch.setattr(filters, "BLOCK", rng.choice([1, 3, 64, 1 << 15]))
        alphabet = rng.choice([["a", "aa", "aaa"], ["a", "b", "ab", "ba", "\x00", "中", "\ud800"], different(30)])
        words = rng.choices(alphabet, k=rng.randint(0, 40))
        hashes = filters.hash_words(words)
        for n in range(1, 11):
            assert filters.top_ngram_characters(hashes, n) == top(words, n), (words, n)
            assert filters.duplicate_ngram_characters(hashes, n) == duplicates(words, n), (words, n)


def test_repeated_ngrams_are_dropped_by_n():
    unlike = " ".join(different(100))
    assert reason(GopherRepetition(), unlike) == "keep"
    assert reason(GopherRepetition(), "to be " * 40 + unlike) == "top_2_gram"
    half = " ".join(different(40))
    again = " and ".join([half, " ".join(different(100, 200)), half])
    assert reason(GopherRepetition(), again) == "duplicate_5_grams"
    stage = GopherRepetition(duplicate_ngrams={"10": 0.1, "7": 0.13})
    assert reason(stage, again) == "duplicate_7_grams"  # small n first
    assert reason(GopherRepetition(), "") == "empty"


# ------------------------------------------------------------------------------------------------------------------------ C4

LINES = [f"This is sentence number {i} of some." for i in range(6)]


def c4(*lines, **fields):
    tally = Tally()
    answer = C4(**fields).apply(Document("id", "\n".join([*LINES, *lines]), "s"), tally)
    removed = {key: number for key, number in tally.counts["c4_lines"].items() if key != "kept"}
    return answer.reason if isinstance(answer, Drop) else answer.text.split("\n")[len(LINES) :], removed


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (f"This is {'x' * 1001} long.", "long_word"),
        ("This does not end", "no_terminal_punctuation"),
        ("This does not end...", "no_terminal_punctuation"),
        ("Two words.", "too_few_words"),
        ("Please enable JavaScript in your browser.", "javascript"),
        ("Read our Privacy Policy and more.", "policy"),
        ("   ", "blank"),
    ],
)
def test_c4_removes_lines(line, rule):
    assert c4(line) == ([], {rule: 1})


def test_c4_keeps_and_edits_lines():
    assert c4('  He said [12] "so", [edit] and left.\t') == (['He said  "so",  and left.'], {"citation": 2})
    assert c4(f"This is {'x' * 999}.") == ([f"This is {'x' * 999}."], {})
    assert c4("No end here is", terminal_punctuation=False) == (["No end here is"], {})
    assert c4("See [1] here [2]", "[3].", citations=False, terminal_punctuation=False, min_line_words=None) == (
        ["See [1] here [2]", "[3]."], {},
    )  # fmt: skip
    assert verdict(C4(), "\n".join(LINES)).text == "\n".join(LINES)
    assert verdict(C4(), "\n".join(["[1] A first line.", *LINES])).text.startswith("A first line.\n")


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["And then Lorem Ipsum came."], "lorem_ipsum"),
        (["It reads java{script} for us."], "curly_bracket"),
        (["It reads { for JavaScript users."], []),  # the line goes before its bracket is seen
        (["It reads { without an end"], []),
        (["A { b c.", "Lorem ipsum dolor."], "curly_bracket"),
        (["Lorem ipsum dolor.", "A { b c."], "lorem_ipsum"),
        (["My Java[1]Script is off."], []),  # a citation hides nothing
    ],
)
def test_c4_drops_documents(lines, code):
    assert c4(*lines)[0] == code


def test_c4_counts_sentences_and_long_lines():
    assert verdict(C4(), "\n".join(LINES[:4])) == Drop("too_few_sentences", 4)
    assert reason(C4(), "One is here. Two is here. Three is here. Four is here. Five is here.") == "keep"
    assert reason(C4(min_sentences=None), "no sentence") == "no_lines_left"
    long = ["word " * 40 + "end."] * 3
    assert c4(*long, min_long_lines=3)[0] == long
    assert c4(*long[:2], min_long_lines=3)[0] == "too_few_long_lines"


# ---------------------------------------------------------------------------------------------------------- FineWeb, simple


@pytest.mark.parametrize(
    ("field", "text", "share", "code"),
    [
        ("min_ended_lines", "One.\nTwo\n  \nThree।\nFour", 1 / 2, "few_ended_lines"),
        ("max_short_lines", f"{'x' * 30}\n\n{'x' * 31}", 1 / 2, "short_lines"),
        ("max_duplicate_characters", "abc\nabc\n\nde", 3 / 8, "duplicate_characters"),
        ("max_newlines", "one\n\ntwo , three", 2 / 4, "too_many_newlines"),
    ],
)
def test_fineweb_rules_are_strict(field, text, share, code):
    nudge = 1e-6 if field.startswith("min") else -1e-6
    assert reason(only(FineWeb, **{field: share}), text) == "keep"
    assert reason(only(FineWeb, **{field: share + nudge}), text) == code


def test_fineweb_of_nothing():
    assert reason(FineWeb(), "") == reason(FineWeb(), " \n\t\n") == "empty"


def test_a_quick_count_of_words_is_never_too_high():
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("ab \n\t\xa0\u3000.'é\x00\x1c\ud800", k=rng.randint(0, 12)))
        assert filters.least_words(text) <= max(len(split_words(text)), 1), text


@pytest.mark.parametrize(
    ("field", "text", "limits", "code"),
    [
        ("min_characters", "x" * 5, [5, 6], "too_short"),
        ("max_characters", "x" * 5, [5, 4], "too_long"),
        ("max_repetition", "a b c a b c", [0.25, 0.24], "repetitive"),
        ("max_symbols", "ab, d 3.5 हि", [2 / 12, 0.16], "too_many_symbols"),
    ],
)
def test_simple_rules(field, text, limits, code):
    assert reason(only(Simple, **{field: limits[0]}), text) == "keep"
    assert reason(only(Simple, **{field: limits[1]}), text) == code


def test_simple_keeps_prose():
    text = (
        "Many a reader has asked, over the years, whether the old library by the river still lends its books. It does."
    )
    assert reason(Simple(), text) == "keep"
    assert reason(Simple(), "So it goes on and on. " * 20) == "repetitive"


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
