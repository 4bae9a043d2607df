"""A scaling law: the loss of a run from its parameters N and tokens D, with intervals; NumPy alone.

    L(N, D) = E + A / N^α + B / D^β                       Hoffmann et al., 2022 (2203.15556), approach 3

fitted by the Huber loss of log L - LSE(a - α log N, b - β log D, e), with A, B, E the exponentials of a, b, e, from a grid of
starts. The minimizer is Levenberg-Marquardt with Huber's weights, which lowers the same loss as L-BFGS would and runs all starts,
and all resamples, at one time. Intervals are those of a residual bootstrap (Efron, 1979): a ladder's N and D are designed,
not drawn, and it has too few runs to leave any out.

For C = 6 N D FLOPs the least loss is at N = G (C/6)^(β/(α+β)), D = (C/6) / N, with G = (αA / βB)^(1/(α+β)).
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lmjax.config import need

# of log-loss: residuals above count by their size and not by their square. Hoffmann et al. took 1e-3 for hundreds of runs; with
# a dozen that passes through five of them exactly, and their scatter is then unknown
DELTA = 1e-2
NUM_COEFFICIENTS = 5
STEPS = 400  # of the minimizer, at most
FIRST_STEPS = 40  # of every start; the best go on
NUM_BEST = 12
SMALLEST_EXPONENT = 1e-3  # more parameters or tokens never hurt
TOLERANCE = 1e-9  # of the loss, relative, from one step to the next

Array = np.ndarray
Values = float | np.ndarray  # one, or one for each resample


class Law(NamedTuple):
    """The coefficients: numbers, or arrays with one entry for each resample. A and B by their logs: a law of runs that tell
    little may have any."""

    E: Values  # nats, of endless parameters and tokens
    log_A: Values
    alpha: Values
    log_B: Values
    beta: Values

    def loss(self, parameters: Values, tokens: Values) -> Values:
        """Nats a token."""
        size = np.exp(self.log_A - self.alpha * np.log(parameters))
        return self.E + size + np.exp(self.log_B - self.beta * np.log(tokens))

    def optimal(self, flops: float) -> tuple[Values, Values]:
        """Parameters and tokens of the least loss for that many training FLOPs, counted as 6 N D."""
        log_ratio = np.log(self.alpha / self.beta) + self.log_A - self.log_B
        log_parameters = (log_ratio + self.beta * np.log(flops / 6)) / (self.alpha + self.beta)
        return np.exp(log_parameters), np.exp(np.log(flops / 6) - log_parameters)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A value and the bounds between which it lies with the stated probability."""

    value: float
    low: float
    high: float

    def exp(self) -> "Interval":
        """Of the exponential, infinite where it is too large for a float."""
        with np.errstate(over="ignore"):
            return Interval(*(float(np.exp(bound)) for bound in (self.value, self.low, self.high)))


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law, the laws of resamples, and the scatter of runs around it."""

    law: Law
    resampled: Law
    draws: Float[Array, " resamples"]  # of log-loss: how far a new run may lie from each
    level: float  # probability of an interval

    def coefficients(self) -> dict[str, Interval]:
        """Each coefficient, by its name in the equation."""
        found = {}
        for name, value, others in zip(Law._fields, self.law, self.resampled, strict=True):
            interval = self.interval(value, others)
            found[name.removeprefix("log_")] = interval.exp() if name.startswith("log_") else interval
        return found

    def predict(self, parameters: float, tokens: float) -> Interval:
        """The loss that a run of that size will reach: the law's own uncertainty, and a run's scatter around it."""
        resampled = self.resampled.loss(parameters, tokens) * np.exp(self.draws)
        return self.interval(self.law.loss(parameters, tokens), resampled)

    def optimal(self, flops: float) -> dict[str, Interval]:
        """Parameters, tokens and loss for that many training FLOPs."""
        best, others = self.law.optimal(flops), self.resampled.optimal(flops)
        values = {"parameters": (best[0], others[0]), "tokens": (best[1], others[1])}
        values["loss"] = self.law.loss(*best), self.resampled.loss(*others)
        return {name: self.interval(*pair) for name, pair in values.items()}

    def interval(self, value: Values, resampled: Array) -> Interval:
        """Between quantiles of the resamples."""
        tail = (1 - self.level) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        return Interval(float(value), float(low), float(high))


def fit(
    parameters: Float[Array, " n"],
    tokens: Float[Array, " n"],
    losses: Float[Array, " n"],
    resamples: int = 500,
    level: float = 0.9,
    seed: int = 0,
) -> Fit:
    """The law of runs.

    Args:
      parameters, tokens, losses: of each run; losses in nats.
      resamples: of the bootstrap.
      level: probability of an interval.
      seed: of the bootstrap.

    Raises:
      UserError: too few runs to tell the coefficients apart.
    """
    check(parameters, tokens, losses, resamples, level)
    # Centred, so that a change of an exponent does not move the whole surface.
    x, y = np.log(parameters), np.log(tokens)
    center = x.mean(), y.mean()
    points = np.stack([x - center[0], y - center[1]])
    z = np.log(losses)
    found = starts(z, np.ptp(points, axis=1))
    found, costs = minimize(found, points, z, FIRST_STEPS)
    best = np.argsort(costs)[:NUM_BEST]
    found, costs = minimize(found[best], points, z, STEPS)
    theta = found[np.argmin(costs)]
    predicted = log_loss(theta[None], points)[0][0]
    residuals = z - predicted
    # A fit bends towards its runs: residuals are smaller than the scatter of new ones. And of how large that is, few runs tell
    # little: each resample draws it as Student's t would.
    count, free = len(z), len(z) - NUM_COEFFICIENTS
    scatter = (residuals - residuals.mean()) * np.sqrt(count / free)
    random = np.random.default_rng(seed)
    sizes = np.sqrt(free / random.chisquare(free, resamples))
    resampled = predicted + random.choice(scatter, (resamples, count)) * sizes[:, None]
    thetas, _ = minimize(np.repeat(theta[None], resamples, 0), points, resampled, STEPS)
    draws = random.choice(scatter, resamples) * sizes
    return Fit(to_law(theta, center), to_law(thetas, center), draws, level)


def check(parameters: Array, tokens: Array, losses: Array, resamples: int, level: float) -> None:
    """Refuses what has no answer."""
    count, sizes, lengths = len(losses), len(set(parameters.tolist())), len(set(tokens.tolist()))
    need(
        count > NUM_COEFFICIENTS + 1 and sizes >= 3 and lengths >= 3,
        f"{count} runs of {sizes} sizes and {lengths} lengths are too few for a law of {NUM_COEFFICIENTS} coefficients: it takes "
        f"{NUM_COEFFICIENTS + 2} runs, 3 sizes and 3 lengths at least",
    )
    need(resamples >= 20, f"{resamples} resamples are too few for an interval; take 20 at least")
    need(0 < level < 1, f"an interval's level of {level} must be between 0 and 1")


def to_law(theta: Float[Array, "... 5"], center: tuple[float, float]) -> Law:
    """Coefficients from (a, b, e, α, β) around the centre of log N and log D."""
    a, b, e, alpha, beta = np.moveaxis(theta, -1, 0)
    return Law(np.exp(e), a + alpha * center[0], alpha, b + beta * center[1], beta)


def starts(z: Float[Array, " n"], spread: Float[Array, "2"]) -> Float[Array, "starts 5"]:
    """A grid: shares of the loss at the centre for the three terms, and exponents."""
    level = z.mean()
    shares = [(p, d) for p in (0.05, 0.2, 0.45) for d in (0.05, 0.2, 0.45)]
    exponents = (0.1, 0.3, 0.6, 1.0)
    grid = [
        (level + np.log(p), level + np.log(d), level + np.log(1 - p - d), alpha, beta)
        for (p, d), alpha, beta in itertools.product(shares, exponents, exponents)
    ]
    return np.array(grid)


def log_loss(
    theta: Float[Array, "S 5"], points: Float[Array, "2 n"]
) -> tuple[Float[Array, "S n"], Float[Array, "S n 5"]]:
    """The log of the law at each point, and its derivatives."""
    a, b, e, alpha, beta = theta.T[:, :, None]
    x, y = points
    terms = np.stack([a - alpha * x, b - beta * y, np.broadcast_to(e, (len(theta), len(x)))])
    top = terms.max(axis=0)
    weights = np.exp(terms - top)
    total = weights.sum(axis=0)
    size, length, rest = weights / total
    return top + np.log(total), np.stack([size, length, rest, -size * x, -length * y], axis=-1)


def huber(residuals: Float[Array, "S n"]) -> Float[Array, " S"]:
    """Its sum over the points."""
    large = np.abs(residuals)
    return np.where(large <= DELTA, 0.5 * large**2, DELTA * (large - 0.5 * DELTA)).sum(axis=-1)


def minimize(
    theta: Float[Array, "S 5"], points: Float[Array, "2 n"], z: Float[Array, "*S n"], steps: int
) -> tuple[Float[Array, "S 5"], Float[Array, " S"]]:
    """Lowers the Huber loss from each start, against targets `z`; what was found, and its loss."""
    damping = np.full(len(theta), 1e-2)
    predicted, slopes = log_loss(theta, points)
    residuals = predicted - z
    costs = huber(residuals)
    for _ in range(steps):
        weights = 1 / np.maximum(np.abs(residuals) / DELTA, 1.0)
        downhill = np.einsum("snp,sn->sp", slopes, weights * residuals)
        curvature = np.einsum("snp,sn,snq->spq", slopes, weights, slopes)
        diagonal = np.einsum("spp->sp", curvature)  # a view
        diagonal += damping[:, None] * diagonal + 1e-12
        trial = theta - np.linalg.solve(curvature, downhill[..., None])[..., 0]
        trial[:, 3:] = np.maximum(trial[:, 3:], SMALLEST_EXPONENT)
        new_predicted, new_slopes = log_loss(trial, points)
        new_costs = huber(new_predicted - z)
        better = new_costs < costs
        gain = np.where(better, costs - new_costs, 0.0)
        theta = np.where(better[:, None], trial, theta)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        residuals = np.where(better[:, None], new_predicted - z, residuals)
        settled = (gain <= TOLERANCE * costs) & (better | (damping > 1e6))
        costs = np.where(better, new_costs, costs)
        damping = np.clip(damping * np.where(better, 0.3, 5.0), 1e-9, 1e8)
        if settled.all():
            break
    return theta, costs
