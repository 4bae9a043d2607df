"""The law finds what was planted, and its intervals hold what they promise."""

import numpy as np
import pytest
import scipy.optimize

from lmjax.errors import UserError
from lmjax.plan import scaling
from lmjax.plan.scaling import Law, fit, huber, log_loss

PLANTED = Law(*map(np.float64, (1.8, np.log(90.0), 0.35, np.log(400.0), 0.4)))
SIZES, LENGTHS = (65e3, 104e3, 172e3, 256e3, 430e3), (125e3, 250e3, 500e3, 1e6)
N, D = (grid.ravel() for grid in np.meshgrid(SIZES, LENGTHS))
LARGER = 1.2e6, 2e6


def losses(noise, seed=0):
    return PLANTED.loss(N, D) * np.exp(noise * np.random.default_rng([1, seed]).normal(size=N.size))


def test_without_noise_the_planted_law_is_found():
    law = fit(N, D, losses(0.0), resamples=20).law
    np.testing.assert_allclose(law, PLANTED, rtol=1e-3)
    np.testing.assert_allclose(law.loss(*LARGER), PLANTED.loss(*LARGER), rtol=1e-5)


def test_no_minimum_is_lower_than_what_was_found():
    """L-BFGS, begun at the law that made the runs, and at what was found."""
    z, points = np.log(losses(0.01, seed=3)), np.stack([np.log(N), np.log(D)])

    def cost(theta):
        return float(huber(log_loss(theta[None], points)[0] - z)[0])

    law = fit(N, D, np.exp(z), resamples=20).law
    found = np.array([law.log_A, law.log_B, np.log(law.E), law.alpha, law.beta])
    planted = np.array([PLANTED.log_A, PLANTED.log_B, np.log(PLANTED.E), PLANTED.alpha, PLANTED.beta])
    for start in (planted, found):
        best = scipy.optimize.minimize(cost, start, method="L-BFGS-B", options={"maxiter": 500})
        assert cost(found) <= best.fun * (1 + 1e-4)
    assert cost(found) < cost(planted)


def test_slopes_are_those_of_the_law():
    theta, points = np.array([[0.3, -0.2, 0.1, 0.4, 0.6]]), np.array([[0.5, -1.0], [0.2, 2.0]])
    value, slopes = log_loss(theta, points)
    for place in range(5):
        step = np.zeros(5)
        step[place] = 1e-6
        np.testing.assert_allclose((log_loss(theta + step, points)[0] - value) / 1e-6, slopes[..., place], atol=1e-5)


def test_the_best_size_for_a_budget_has_the_least_loss():
    parameters, tokens = PLANTED.optimal(1e15)
    assert parameters * tokens * 6 == pytest.approx(1e15)
    others = parameters * np.linspace(0.5, 2, 301)
    assert PLANTED.loss(parameters, tokens) <= PLANTED.loss(others, 1e15 / 6 / others).min() + 1e-9


def coverage(trials, noise=0.003, level=0.9):
    """How often each interval holds the truth: of E, A, α, B, β, the best size for a budget, and a new, larger run."""
    held = []
    for seed in range(trials):
        made = fit(N, D, losses(noise, seed), resamples=100, level=level, seed=seed)
        best = made.optimal(1e15)["parameters"]
        planted = PLANTED._replace(log_A=np.exp(PLANTED.log_A), log_B=np.exp(PLANTED.log_B))
        truths = [*zip(made.coefficients().values(), planted, strict=True), (best, PLANTED.optimal(1e15)[0])]
        reached = PLANTED.loss(*LARGER) * np.exp(noise * np.random.default_rng([2, seed]).normal())
        truths.append((made.predict(*LARGER), reached))
        held.append([interval.low <= truth <= interval.high for interval, truth in truths])
    return np.mean(held, axis=0)


def test_intervals_hold_the_planted_coefficients_and_a_larger_run():
    assert coverage(4).mean() > 0.6


@pytest.mark.slow
def test_intervals_hold_as_often_as_they_say():
    """At 90 % and at 50 %, within about three standard errors of so many trials."""
    held = coverage(100)
    assert (held > 0.81).all(), held
    half = coverage(60, level=0.5)
    assert (abs(half - 0.5) < 0.2).all(), half


def test_a_run_gone_wrong_moves_the_law_little():
    wrong = losses(0.002)
    wrong[7] *= 1.3
    whole, spoiled = fit(N, D, losses(0.002), resamples=20), fit(N, D, wrong, resamples=20)
    moved = float(spoiled.law.loss(*LARGER) / whole.law.loss(*LARGER)) - 1
    assert abs(moved) < 0.02


def test_equal_seeds_give_equal_intervals():
    first, again, other = (fit(N, D, losses(0.01), resamples=30, seed=seed).predict(*LARGER) for seed in (0, 0, 1))
    assert first == again and first.low != other.low and first.value == other.value


@pytest.mark.parametrize(
    "keep, message",
    [
        (np.arange(N.size) < 6, "6 runs of 5 sizes and 2 lengths are too few"),
        (N < 110e3, "2 sizes"),
        (D < 300e3, "2 lengths"),
    ],
)
def test_too_few_runs_are_refused(keep, message):
    with pytest.raises(UserError, match=message):
        fit(N[keep], D[keep], losses(0.0)[keep])
    assert len(Law._fields) == scaling.NUM_COEFFICIENTS
