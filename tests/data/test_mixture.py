"""Shares are exact over blocks, even within them, and a source keeps its place."""

import time

import numpy as np
import pytest

from lmjax.config import build
from lmjax.data.config import DataConfig
from lmjax.data.mixture import MAX_BLOCK, MIN_BLOCK, apportion, budget, budget_lines, build_mixture, shares
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


def test_empty_sources_are_left_out(caplog):
    """By a weight of 0; where shares are implied by themselves, and that is said."""
    tokens = {"code": 5, "docs": 0}
    with pytest.raises(UserError, match="empty corpus: source 'docs'"):
        mixture({"code": 1, "docs": 1}, tokens=tokens)
    assert mixture({"code": 1, "docs": 0}, tokens=tokens).weights == ((1.0, 0.0),) and not caplog.text
    assert mixture({}, tokens=tokens).weights == ((1.0, 0.0),)
    assert "source 'docs' holds no token in this split: it takes no part" in caplog.text
    with pytest.raises(UserError, match="empty corpus: no source holds a token"):
        mixture({}, tokens=dict.fromkeys(tokens, 0))


W = {"code": 1}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"stages": [{"from_step": 0, "weights": W}, {"from_step": 5}]}, "weights to all stages or to none"),
        (
            {"stages": [{"from_step": 0, "seq_len": 64}, {"from_step": 5}]},
            "from step 5 has neither weights nor seq_len",
        ),
        ({"stages": [{"from_step": 1, "seq_len": 64}]}, "must start at step 0 and rise"),
        ({"stages": [{"from_step": 0, "seq_len": 96}, {"from_step": 1, "seq_len": 128}]}, "96 does not divide .* 128"),
        ({"stages": [{"from_step": 0, "weights": W}], "weights": W}, "not both"),
        ({"stages": [{"from_step": 0, "weights": W}], "temperature": 2.0}, "weights say what temperature would"),
        ({"weights": W, "temperature": 2.0}, "weights say what temperature would"),
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"max_epochs": {"code": -1.0}}, "max_epochs must not be negative"),
        ({"max_tokens": {"code": -1}}, "max_tokens must not be negative"),
        ({"packing": "bestfit"}, "did you mean 'best_fit'"),
    ],
)
def test_impossible_configs(config, message):
    with pytest.raises(UserError, match=message):
        build(DataConfig, config)


# ------------------------------------------------------------------------------------------ temperature, caps and budget


def shares_of(tokens, steps=1000, per_step=100, **config):
    made = shares(tokens, build(DataConfig, config), per_step, steps)
    return [dict(zip(sorted(tokens), map(float, stage), strict=True)) for stage in made]


def test_temperature_is_the_power_of_the_tokens():
    tokens = {"de": 10**6, "en": 10**8, "sw": 10**4}
    (as_they_are,), (lifted,), (even,) = (shares_of(tokens, temperature=t) for t in (1.0, 1 / 0.3, 1e9))
    assert as_they_are == shares_of(tokens)[0] == {name: pytest.approx(n / 101_010_000) for name, n in tokens.items()}
    powers = {name: n**0.3 for name, n in tokens.items()}
    assert lifted == {name: pytest.approx(p / sum(powers.values())) for name, p in powers.items()}
    assert even == {name: pytest.approx(1 / 3) for name in tokens}
    assert shares_of(tokens | {"fr": 0}, temperature=2.0) == [shares_of(tokens, temperature=2.0)[0] | {"fr": 0.0}]
    (first,) = shares_of(tokens, temperature=0.01)  # of numbers that no float holds
    assert first == {"de": pytest.approx(0), "en": 1.0, "sw": 0.0}


def test_what_a_cap_cuts_off_goes_to_the_others_in_proportion():
    """100,000 tokens; rare may give 2 × 1000, so code and docs share 98,000 as 3 to 1."""
    weights = {"code": 3, "docs": 1, "rare": 4}
    (made,) = shares_of({"code": 10**6, "docs": 10**6, "rare": 1000}, weights=weights, max_epochs={"rare": 2.0})
    assert made["rare"] == pytest.approx(0.02, rel=0.02) and made["rare"] <= 0.02
    assert made["code"] == pytest.approx(3 * made["docs"]) and sum(made.values()) == pytest.approx(1)


def test_a_share_that_is_raised_above_its_cap_is_cut_too():
    """rare's cut lifts docs above its own cap: code takes what both leave."""
    weights = {"code": 1, "docs": 1, "rare": 2}
    (made,) = shares_of(TOKENS, weights=weights, max_tokens={"docs": 30_000, "rare": 10_000})
    assert list(made.values()) == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    assert made["docs"] <= 0.3 and made["rare"] <= 0.1


@pytest.mark.parametrize("seed", range(30))
def test_caps_hold_over_the_rows_of_the_run(seed):
    """To within a row or two of each stage; sources below their cap keep their proportions."""
    rng = np.random.default_rng(seed)
    names = [f"s{i:02}" for i in range(rng.integers(2, 12))]
    steps, batch, length = int(rng.integers(50, 2000)), 8, 16
    total = steps * batch * length
    tokens = {name: int(n) for name, n in zip(names, 1 + total * rng.dirichlet(np.full(len(names), 0.4)))}
    weights = dict(zip(names, rng.dirichlet(np.full(len(names), 0.6)).tolist()))
    epochs = {"*": 1.5} | {name: float(rng.uniform(0.1, 4)) for name in names[::2]}
    if sum(tokens[name] * epochs.get(name, 1.5) for name in names) < total:
        epochs[names[-1]] = total / tokens[names[-1]]
    most = {name: tokens[name] * epochs.get(name, 1.5) for name in names}
    stages = [{"from_step": s, "weights": weights} for s in ([0] if seed % 2 else [0, steps // 3])]
    config = build(DataConfig, {"stages": stages, "max_epochs": epochs, "seq_len": length})
    mix = build_mixture(tokens, config, batch, steps)
    read = np.bincount(mix.locate(np.arange(steps * batch))[0], minlength=len(names)) * length
    free = []
    for number, name in enumerate(mix.names):
        assert read[number] <= most[name] + 2 * length * len(stages)
        if read[number] + 2 * length < 0.9 * most[name] and len(stages) == 1:
            free.append(mix.weights[0][number] / weights[name])
    assert free == pytest.approx(free[:1] * len(free), rel=1e-6)


def test_stages_use_up_a_cap_in_turn():
    tokens = dict.fromkeys(TOKENS, 10**6)
    stages = [
        {"from_step": 0, "weights": {"code": 1, "docs": 1, "rare": 0}},
        {"from_step": 500, "weights": {"docs": 1, "rare": 1}},
    ]
    early, late = shares_of(tokens, stages=stages, max_tokens={"docs": 40_000})
    assert early["docs"] == 0.5 and late["docs"] == pytest.approx(0.3, abs=0.01) and late["docs"] <= 0.3
    early, late = shares_of(tokens, stages=stages, max_tokens={"docs": 10_000})
    assert early["docs"] == pytest.approx(0.2, abs=0.01)
    assert late["code"] == 0 and late["docs"] < 1e-3
    beyond = [*stages, {"from_step": 1000, "weights": {"docs": 1}}]  # never reached
    assert shares_of(tokens, stages=beyond, max_tokens={"docs": 10_000})[:2] == [early, late]


def test_of_two_caps_the_lower_one_holds():
    for docs, share in ((5_000, 0.05), (50_000, 0.2)):
        (made,) = shares_of(
            {"code": 10**6, "docs": 20_000},
            weights={"code": 1, "docs": 1},
            max_epochs={"docs": 1.0},
            max_tokens={"docs": docs},
        )
        assert made["docs"] == pytest.approx(share, abs=0.01) and made["docs"] <= share


def test_what_is_short_is_named():
    tokens = {"code": 20_000, "docs": 10_000}
    with pytest.raises(UserError) as error:
        shares_of(tokens, max_epochs={"*": 2.0})
    assert "from step 0 the run reads 100,000 tokens" in str(error.value)
    assert "leave 60,000 (code 40,000, docs 20,000)" in str(error.value)
    (just_enough,) = shares_of(tokens, max_epochs={"code": 4.0, "docs": 2.0})
    assert just_enough == {"code": pytest.approx(0.8), "docs": pytest.approx(0.2)}
    (nearly,) = shares_of(tokens, max_tokens={"code": 80_010, "docs": 20_000})  # rounding has no room
    assert nearly["code"] <= 0.8001 and nearly["docs"] <= 0.2
    for name in ("max_epochs", "max_tokens"):
        with pytest.raises(UserError, match="no source 'cdoe' in the shards; did you mean 'code'"):
            shares_of(tokens, **{name: {"cdoe": 5}})


def test_the_budget_is_what_the_run_reads():
    tokens, steps, batch, length = {"code": 10**6, "docs": 10**5, "rare": 1000}, 5000, 8, 16
    config = build(DataConfig, {"temperature": 2.0, "max_epochs": {"*": 4.0}, "seq_len": length})
    rows = budget(tokens, config, steps * batch * length, steps)
    mix = build_mixture(tokens, config, batch, steps)
    read = np.bincount(mix.locate(np.arange(steps * batch))[0], minlength=3) * length
    for row, name, amount in zip(rows, tokens, read, strict=True):
        assert row.source == name and row.tokens == tokens[name]
        assert abs(row.tokens_read - amount) <= 2 * length
        assert row.epochs == row.tokens_read / row.tokens and row.share == pytest.approx(amount / read.sum(), rel=0.01)
    assert rows[2].epochs == pytest.approx(4, rel=0.02) and rows[2].epochs <= 4
    lines = budget_lines(rows)
    assert (
        len(lines) == 3
        and lines[2].startswith("rare ")
        and lines[2].endswith(f"{rows[2].epochs:.2f} epochs of its 1,000")
    )
    assert budget(tokens, config, 640_000) == budget(tokens, config, 640_000, 80)  # the steps matter to stages alone
