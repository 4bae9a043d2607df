"""Words and sentences."""

import random
import time

import pytest

from lmjax.data import words
from lmjax.data.words import split_sentences, split_words

PIECES = [
    "a", "b", "Z", "0", "_", " ", "\n", "'", "’", ".", "-", "é", "\u0301", "\u0e01", "\u0e31", "中", "\u200d", "❤", "\ufe0f",
    "\ud800", "\u3000", "\xa0", "\x1c", "\x00", "１", "\u093f", "\u0939", "\U0001f44d", "\U000e0100", "\U00010a56",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, 3.5!", "Don't|stop|,|3|.|5|!"),
        ("'quoted' rock'n'roll a''b _x_1", "'|quoted|'|rock'n'roll|a|'|'|b|_x_1"),
        ("l’été et l'été", "l’été|et|l'été"),
        ("cafe\u0301 हिन्दी में।", "cafe\u0301|हिन्दी|में|।"),
        ("中文abc字", "中|文|abc|字"),
        ("ที่นี่", "ที่|นี่"),
        ("نمی\u200cخواهم", "نمی\u200cخواهم"),
        ("❤\ufe0f\u0301 \u0301x", "❤\ufe0f\u0301|\u0301|x"),
        ("a\x1cb\u3000c\x00", "a|b|c|\x00"),
        ("\ud800x", "\ud800|x"),
        (" \n\t", ""),
        ("", ""),
    ],
)
def test_words(text, expected):
    assert "|".join(split_words(text)) == expected


def test_arrays_and_patterns_find_the_same_words():
    rng = random.Random(0)
    for _ in range(4000):
        text = "".join(rng.choices(PIECES[: rng.choice([5, 9, 11, len(PIECES)])], k=rng.randint(1, 14)))
        expected = words.unicode_word().findall(text)
        assert words.part_words(text) == expected, text
        if text.isascii():
            assert words.ASCII_WORD.findall(text) == expected, text


def test_nothing_but_white_space_is_left_out():
    rng = random.Random(1)
    for length in (20, 3 * words.SMALL):
        text = "".join(rng.choices(PIECES, k=length))
        assert "".join(split_words(text)) == "".join(text.split())


def test_long_and_short_texts_are_split_alike(monkeypatch):
    text = "The cat's whiskers, the dog’s 2 ears - and 中文 " * 40
    long = split_words(text)
    monkeypatch.setattr(words, "SMALL", 1 << 30)
    assert words.find_words(text) == long and len(text) > 600


def test_the_words_of_a_text_are_found_once():
    text = "one text, several stages"
    assert split_words(text) is split_words(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Mr. Smith went. He said "Hi!" Then he left... Is it 3.5?', 'Mr. Smith went.|He said "Hi!"|Then he left...|Is it 3.5?'),
        ("Use e.g. this one. J. Doe did. see www.example.org for more.", "Use e.g. this one.|J. Doe did. see www.example.org for more."),
        ("A title\n\nA line\nthat goes on. The end", "A title|A line\nthat goes on.|The end"),
        ("你好。再见！好", "你好。|再见！|好"),
        ("यह है। वह था।", "यह है।|वह था।"),
        ("No. 5 is alive.", "No. 5 is alive."),
        ("He met J. R. Doe. A. B. I. See", "He met J. R. Doe.|A. B. I. See"),
        ("Vitamin É. Then x.) Y", "Vitamin É.|Then x.)|Y"),
        ("  ", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_sentences(text, expected):
    assert "|".join(split_sentences(text)) == expected


def test_terminal_signs_are_those_of_the_peer():
    peer = pytest.importorskip("datatrove.utils.text", reason="datatrove is not installed")
    assert words.TERMINAL == peer.TERMINAL_PUNCTUATION


@pytest.mark.parametrize(
    "piece", ["a", ".", "'", "a'", "a.", "\n", " ", ". ", "é", "\u0301", "a\u0301", "中", '."', "\n "]
)
def test_time_is_linear(piece):
    text = piece * (150_000 // len(piece))
    start = time.process_time()
    split_words(text)
    split_sentences(text)
    assert time.process_time() - start < 10  # a quadratic pattern takes an hour
