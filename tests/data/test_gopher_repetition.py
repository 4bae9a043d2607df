"""Gopher's repetition rules on both sides of their thresholds; n-grams by hashes are those by strings."""

import random

import pytest
from test_rules import different, only, reason

from lmjax.data import gopher_repetition
from lmjax.data.gopher_repetition import GopherRepetition


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
        monkeypatch.setattr(gopher_repetition, "BLOCK", rng.choice([1, 3, 64, 1 << 15]))
        alphabet = rng.choice([["a", "aa", "aaa"], ["a", "b", "ab", "ba", "\x00", "中", "\ud800"], different(30)])
        words = rng.choices(alphabet, k=rng.randint(0, 40))
        hashes = gopher_repetition.hash_words(words)
        for n in range(1, 11):
            assert gopher_repetition.top_ngram_characters(hashes, n) == top(words, n), (words, n)
            assert gopher_repetition.duplicate_ngram_characters(hashes, n) == duplicates(words, n), (words, n)


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
