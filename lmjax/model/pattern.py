"""What each layer is, and how the list of them repeats: what a scan compiles once. No jax.

A list of layers is cut into segments, each a period of layers and how often it comes: "a b a b a b" is one period of two, "a b b b b"
a layer and one of one. Of all cuts the one with the fewest written out, layers and segments together, is taken. So the program of a
regular pattern does not grow with the layers.
"""

import functools
from typing import NamedTuple

from lmjax.model.config import ModelConfig


class Kind(NamedTuple):
    """What a layer is."""

    attention: str  # of `config.pattern`: what its queries see
    experts: bool  # in place of an MLP


class Segment(NamedTuple):
    """Layers that repeat."""

    kinds: tuple[Kind, ...]  # of one period
    repeats: int


@functools.lru_cache(maxsize=64)
def kinds(config: ModelConfig) -> tuple[Kind, ...]:
    """Of each layer."""
    return tuple(map(Kind, config.kinds, config.expert_layers))


@functools.lru_cache(maxsize=64)
def segments(config: ModelConfig, num_layers: int) -> tuple[Segment, ...]:
    """The first so many layers, as a scan runs them."""
    return cut(kinds(config)[:num_layers])


def cut(layers: tuple[Kind, ...]) -> tuple[Segment, ...]:
    """The cheapest segments of a list, from its end to its start."""
    best: list[tuple[tuple[int, int], tuple[Segment, ...]]] = [((0, 0), ())]  # cost and segments of the last n layers
    for start in reversed(range(len(layers))):
        left, found = len(layers) - start, []
        for period in range(1, left + 1):
            for repeats in range(1, repetitions(layers, start, period) + 1):
                (cost, count), rest = best[left - period * repeats]
                first = Segment(layers[start : start + period], repeats)
                found.append(((cost + period + 1, count + 1), (first, *rest)))
        best.append(min(reversed(found), key=lambda item: item[0]))  # of equals the longest period first
    return best[-1][1]


def repetitions(layers: tuple[Kind, ...], start: int, period: int) -> int:
    """How often the `period` layers from `start` on come one after another."""
    count = 1
    while layers[start : start + period] == layers[start + count * period : start + (count + 1) * period]:
        count += 1
    return count
