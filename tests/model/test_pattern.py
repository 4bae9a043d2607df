"""Layers are cut into what repeats, so that the fewest are written out."""

import pytest

from lmjax.config import UserError
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.pattern import Kind, cut, kinds, segments


def shown(parts):
    return [("".join(kind.attention for kind in part.kinds), part.repeats) for part in parts]


@pytest.mark.parametrize(
    "layers, expected",
    [
        ("aaaa", [("a", 4)]),
        ("ababab", [("ab", 3)]),
        ("ababa", [("ab", 2), ("a", 1)]),
        ("daaa", [("d", 1), ("a", 3)]),
        ("dddababab", [("d", 3), ("ab", 3)]),
        ("aaaaabaaaaabaaaa", [("aaaaab", 2), ("a", 4)]),
        ("a", [("a", 1)]),
    ],
)
def test_cut(layers, expected):
    parts = cut(tuple(Kind(letter, False) for letter in layers))
    assert shown(parts) == expected
    assert "".join(name * count for name, count in shown(parts)) == layers


def test_both_patterns_together():
    """Windows every other layer, experts every third: a period of six."""
    moe = MoeConfig(every=3)
    config = ModelConfig(num_layers=13, moe=moe, sliding_window=4, layer_pattern=("local", "global"))
    assert [(len(part.kinds), part.repeats) for part in segments(config, config.num_layers)] == [(6, 2), (1, 1)]
    assert [kind.experts for kind in kinds(config)] == [False, False, True] * 4 + [False]


@pytest.mark.parametrize(
    "moe", [MoeConfig(every=5), MoeConfig(dense_layers=(0, 1, 2, 3)), MoeConfig(dense_layers=(4,))]
)
def test_a_model_has_experts_and_the_layers_that_it_names(moe):
    with pytest.raises(UserError, match="moe"):
        ModelConfig(num_layers=4, moe=moe)
