"""FineWeb's rules on both sides of their thresholds."""

import random

import pytest
from test_rules import only, reason

from lmjax.data.fineweb import FineWeb, least_words
from lmjax.data.words import split_words


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
        assert least_words(text) <= max(len(split_words(text)), 1), text
