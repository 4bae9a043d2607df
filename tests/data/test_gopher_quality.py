"""Gopher's quality rules on both sides of their thresholds, and their order."""

import pytest
from test_rules import PROSE, different, only, reason, verdict

from lmjax.config import build, to_dict
from lmjax.data.gopher_quality import GopherQuality
from lmjax.data.stage import Drop

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
