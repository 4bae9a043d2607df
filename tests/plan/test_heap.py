"""Placing buffers: none that live together overlap, and the heap is as tall as they need."""

import itertools

import numpy as np
import pytest

from lmjax.plan.heap import Buffer, fullest, height, placed


def test_those_that_never_meet_share_a_place():
    assert height([Buffer("a", 10, 0, 1), Buffer("b", 7, 2, 3), Buffer("c", 10, 4, 4)]) == 10


def test_those_that_meet_stand_on_one_another():
    assert height([Buffer("a", 10, 0, 2), Buffer("b", 7, 2, 3)]) == 17


def test_a_hole_that_is_too_small_makes_the_heap_taller_than_what_lives_at_once():
    """b and then c beside a: c is larger, is placed first, and a small one that lives on cuts the room of d."""
    buffers = [Buffer("a", 4, 0, 1), Buffer("b", 3, 1, 3), Buffer("c", 6, 2, 3)]
    most = max(sum(one.size for one in buffers if one.first <= phase <= one.last) for phase in range(4))
    assert height(buffers) >= most == 9


def test_an_empty_heap():
    assert height([]) == 0


@pytest.mark.parametrize("seed", range(5))
def test_nothing_overlaps(seed):
    rng = np.random.default_rng(seed)
    spans = [sorted(map(int, rng.integers(0, 8, 2))) for _ in range(20)]
    buffers = [Buffer(str(i), int(rng.integers(1, 100)), *span) for i, span in enumerate(spans)]
    where = placed(buffers)
    for (at, one), (other_at, other) in itertools.combinations(where, 2):
        assert not one.meets(other) or at + one.size <= other_at or other_at + other.size <= at
    at_once = [sum(one.size for one in buffers if one.first <= phase <= one.last) for phase in range(8)]
    assert max(at_once) <= height(buffers) <= sum(one.size for one in buffers)
    assert at_once[fullest(buffers)] == max(at_once)
