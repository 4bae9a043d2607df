"""Shares are exact over blocks, even within them, and a source keeps its place."""

import time

import numpy as np
import pytest

from lmjax.config import build
from lmjax.data.config import DataConfig
from lmjax.data.mixture import MAX_BLOCK, MIN_BLOCK, apportion, build_mixture
from lmjax.errors import UserError

TOKENS = {"code": 900, "docs": 99, "rare": 1}


def mixture(weights, stages=(), batch_rows=8, tokens=TOKENS):
    stages = [{"from_step": step, "weights": shares} for step, shares in stages]
    return build_mixture(tokens, build(DataConfig, {"weights": weights, "stages": stages}), batch_rows)


def block_of(mix, stage=0):
    return len(mix.blocks[stage].source)


def assert_counters_run(sources, counters, num_sources):
    """Each source's counter is 0, 1, 2, … in the order of the rows."""
    for source in range(num_sources):
        here = counters[sources == source]
        assert np.array_equal(here, np.arange(len(here)))


@pytest.mark.parametrize(
    "weights", [{"code": 1, "docs": 1, "rare": 2}, {"code": 0.7, "docs": 0.299, "rare": 0.001}, {"code": 3, "docs": 0, "rare": 0}]
)  # fmt: skip
def test_shares_are_exact_in_each_block(weights):
    mix = mixture(weights)
    size = block_of(mix)
    sources, counters = mix.locate(np.arange(3 * size))
    shares = np.array([weights[name] for name in mix.names]) / sum(weights.values())
    for block in range(3):
        counts = np.bincount(sources[block * size : (block + 1) * size], minlength=3)
        assert np.array_equal(counts, np.bincount(sources[:size], minlength=3))
        assert (np.abs(counts - shares * size) < 1).all()
        assert ((counts == 0) == (shares == 0)).all()
        assert (np.abs(counts / size - shares) <= 0.01 * shares).all()
    assert_counters_run(sources, counters, 3)


def test_a_small_weight_gets_its_share_and_never_waits_long():
    mix = mixture({"code": 0.899, "docs": 0.1, "rare": 0.001})
    sources, _ = mix.locate(np.arange(1_000_000))
    rare = np.flatnonzero(sources == mix.names.index("rare"))
    assert abs(len(rare) - 1000) <= 8
    assert np.diff(rare).max() < 1100


@pytest.mark.parametrize("smallest", [1e-7, 1e-12])
def test_a_weight_below_one_in_a_block_still_gets_a_row(smallest):
    mix = mixture({"code": 1.0, "docs": 0.5, "rare": smallest})
    assert block_of(mix) == MAX_BLOCK
    assert mix.blocks[0].counts[mix.names.index("rare")] == 1


def test_rows_are_spread_evenly():
    """Any stretch of rows holds each source's share to within two rows."""
    weights = {"code": 5, "docs": 3, "rare": 0.1}
    mix = mixture(weights)
    sources, _ = mix.locate(np.arange(5 * block_of(mix)))
    for number, name in enumerate(mix.names):
        seen = np.concatenate([[0], np.cumsum(sources == number)])
        share = mix.blocks[0].counts[number] / block_of(mix)
        assert share == pytest.approx(weights[name] / 8.1, rel=0.01)
        for length in (10, 100, 1000):
            assert np.abs(seen[length:] - seen[:-length] - share * length).max() <= 2


def test_stages_change_at_their_step_and_keep_places():
    stages = [
        (0, {"code": 1, "docs": 0, "rare": 0}),
        (37, {"code": 0.5, "docs": 0.5}),
        (100, {"docs": 0.98, "rare": 0.02}),
        (101, {"code": 1}),
    ]
    mix = mixture({}, stages, batch_rows=8)
    rows = 8 * 5000
    sources, counters = mix.locate(np.arange(rows))
    assert_counters_run(sources, counters, 3)
    shares = [
        np.bincount(sources[8 * a : 8 * b], minlength=3) for a, b in [(0, 37), (37, 100), (100, 101), (101, 5000)]
    ]
    code, docs, _ = (mix.names.index(name) for name in ("code", "docs", "rare"))
    assert shares[0][code] == 8 * 37 and shares[3][code] == 8 * 4899
    assert shares[1][code] == shares[1][docs] == 4 * 63
    assert shares[2][docs] >= 7


def test_rows_may_be_asked_in_any_order():
    mix = mixture({}, [(0, {"code": 1, "docs": 2, "rare": 0}), (1000, {"code": 3, "docs": 2, "rare": 0.1})])
    rows = np.random.default_rng(0).integers(0, 50_000, 300)
    sources, counters = mix.locate(rows)
    all_sources, all_counters = mix.locate(np.arange(50_000))
    assert np.array_equal(sources, all_sources[rows]) and np.array_equal(counters, all_counters[rows])


def test_late_rows_cost_no_more_than_early_ones():
    mix = mixture({}, [(0, {"code": 1, "docs": 2, "rare": 0.001}), (10**12, {"code": 3, "docs": 2, "rare": 0.1})])
    mix.locate(np.arange(8))
    start = time.perf_counter()
    sources, counters = mix.locate(10**15 + np.arange(8))
    assert time.perf_counter() - start < 1
    assert counters.max() > 10**14 and set(sources.tolist()) <= {0, 1, 2}


def test_default_is_in_proportion_to_tokens():
    mix = mixture({})
    assert mix.weights == ((0.9, 0.099, 0.001),)
    assert mixture({}, tokens={"a": 1}).weights == ((1.0,),)
    assert block_of(mixture({}, tokens={"a": 1, "b": 1})) == MIN_BLOCK


def test_the_order_of_names_does_not_matter():
    a, b = mixture({"code": 1, "docs": 2, "rare": 3}), mixture({"rare": 3, "docs": 2, "code": 1})
    assert a == b == mixture({"code": 10, "docs": 20, "rare": 30}, tokens=dict(reversed(TOKENS.items())))


@pytest.mark.parametrize("seed", range(20))
def test_apportion_rounds_to_neighbours(seed):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(rng.integers(1, 50), 0.3))
    rows = 1 << 20
    counts = apportion(weights, rows)
    assert counts.sum() == rows
    lifted = (weights * rows < 1) & (counts == 1)
    assert (np.abs(counts - weights * rows)[~lifted] <= 1 + lifted.sum()).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"code": 1, "dosc": 1, "rare": 1}, "no source 'dosc' in the shards; did you mean 'docs'"),
        ({"code": 1, "docs": 1}, "source 'rare' has no weight; give it one, or 0"),
    ],
)
def test_names_must_fit(weights, message):
    with pytest.raises(UserError, match=message):
        mixture(weights)


def test_empty_sources_must_be_left_out():
    tokens = {"code": 5, "docs": 0}
    for weights in ({}, {"code": 1, "docs": 1}):
        with pytest.raises(UserError, match="empty corpus: source 'docs'"):
            mixture(weights, tokens=tokens)
    assert mixture({"code": 1, "docs": 0}, tokens=tokens).weights == ((1.0, 0.0),)


def test_a_stage_without_weights_is_refused():
    with pytest.raises(UserError, match="from step 5 has neither weights nor seq_len"):
        mixture({}, [(0, {"code": 1, "docs": 1, "rare": 1}), (5, {})])
