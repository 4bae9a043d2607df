"""The simple rules on both sides of their thresholds."""

import pytest
from test_rules import only, reason

from lmjax.data.simple import Simple


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
