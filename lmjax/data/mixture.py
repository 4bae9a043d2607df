"""Mixtures: which source a row of the run comes from, exact in blocks and known in O(1) for any row.

Rows are dealt in blocks of M. Of a block, source i has c_i rows, the largest-remainder rounding of M w_i and at least one
where w_i > 0, spread evenly: its k-th row stands at (k + 1/2) M / c_i among all others. So any stretch of rows holds each
source's share to within a row or so, and the share over a block is w_i to within 1/M, with M large enough for the smallest.

Weights may change by step (a curriculum): each stage has its own block, and a source goes on where it was.

Where no weights are given, w_i ∝ n_i^(1/τ) for n_i tokens and a temperature τ: 1 takes sources as large as they are, a high one all
alike (Conneau et al., 2020: "Unsupervised cross-lingual representation learning at scale", with α = 1/τ = 0.3). A source that
would be read more often than it may is cut to its cap, and the others take the rest in proportion, until none is above.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, Integer

from lmjax.config import did_you_mean
from lmjax.data.config import DataConfig
from lmjax.data.source import Source
from lmjax.errors import UserError

log = logging.getLogger(__name__)

MIN_BLOCK, MAX_BLOCK = 1 << 8, 1 << 20  # rows
ROWS_OF_SMALLEST = 64  # in a block: its share is right to within one part in twice as many


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The sources' shares over the rows of a run."""

    names: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]  # for each stage the share of each source; each sums to 1
    from_row: tuple[int, ...]  # the first row of the run that a stage deals

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # tables are made again

    @functools.cached_property
    def blocks(self) -> tuple["Block", ...]:
        """The block of each stage."""
        return tuple(Block.of(np.array(weights)) for weights in self.weights)

    @functools.cached_property
    def taken(self) -> tuple[Int64[np.ndarray, " S"], ...]:
        """Rows that each source has given before a stage begins."""
        taken = [np.zeros(len(self.names), np.int64)]
        for block, start, stop in zip(self.blocks, self.from_row, self.from_row[1:]):
            taken.append(taken[-1] + block.count(stop - start))
        return tuple(taken)

    def locate(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """Rows of the run → the number of their source, and how many rows that source gave before."""
        stages = np.searchsorted(self.from_row, rows, side="right") - 1
        sources, counters = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            source, counter = self.blocks[stage].locate(rows[here] - self.from_row[stage])
            sources[here], counters[here] = source, counter + self.taken[stage][source]
        return sources, counters


@dataclasses.dataclass(frozen=True)
class Block:
    """M rows that repeat for ever."""

    source: Int32[np.ndarray, " M"]  # whose each row is
    rank: Int32[np.ndarray, " M"]  # rows of the same source before it in the block
    counts: Int64[np.ndarray, " S"]

    @classmethod
    def of(cls, weights: np.ndarray) -> "Block":
        """The block of shares that sum to 1."""
        counts = apportion(weights, block_size(weights))
        owner = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        order = np.argsort((nth + 0.5) / counts[owner], kind="stable")
        return cls(owner[order].astype(np.int32), nth[order].astype(np.int32), counts)

    def locate(self, rows: Integer[np.ndarray, " B"]) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """Rows of the stage → source, and its earlier rows in the stage."""
        block, slot = np.divmod(rows, len(self.source))
        source = self.source[slot]
        return source.astype(np.int64), block * self.counts[source] + self.rank[slot]

    def count(self, rows: int) -> Int64[np.ndarray, " S"]:
        """Rows of each source among the first `rows`."""
        blocks, rest = divmod(rows, len(self.source))
        return blocks * self.counts + np.bincount(self.source[:rest], minlength=len(self.counts))


def block_size(weights: np.ndarray) -> int:
    """M: the power of two at which the smallest share has its rows."""
    wanted = ROWS_OF_SMALLEST / weights[weights > 0].min()
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << int(np.ceil(np.log2(wanted)))))


def apportion(weights: np.ndarray, rows: int) -> Int64[np.ndarray, " S"]:
    """Whole rows for shares, by largest remainder; at least one for each positive share, taken from the largest."""
    exact = weights * rows
    counts = np.floor(exact).astype(np.int64)
    largest_remainder = np.argsort(counts - exact, kind="stable")
    counts[largest_remainder[: rows - counts.sum()]] += 1
    for source in np.flatnonzero((counts == 0) & (weights > 0)):
        counts[source] += 1
        counts[np.argmax(counts)] -= 1
    return counts


def build_mixture(tokens: Mapping[str, int], config: DataConfig, batch_size: int, steps: int | None = None) -> Mixture:
    """The mixture of a run.

    Args:
      tokens: source → its tokens, as `sizes` counts them; the order of the sources is the order of the names.
      config: weights or temperature, caps, stages.
      batch_size: rows of a step, where they have `config.seq_len` tokens.
      steps: of the run; only caps need it.

    Raises:
      UserError: a name is unknown, a source is given no weight (0 leaves it out), one with a weight is empty, or the caps
        leave too few tokens.
    """
    rows, starts = config.stage_rows(batch_size), config.from_steps
    from_row = np.cumsum([0, *(n * (stop - start) for n, start, stop in zip(rows, starts, starts[1:]))])
    by_stage = shares(tokens, config, batch_size * config.seq_len, steps)
    names = tuple(sorted(tokens))
    return Mixture(names, tuple(tuple(stage.tolist()) for stage in by_stage), tuple(from_row.tolist()))


# ------------------------------------------------------------------------------------------------------------------ shares


def sizes(sources: Iterable[Source], config: DataConfig) -> dict[str, int]:
    """Source → the tokens by which it is weighed and capped: where each row is one document, as many rows as it has documents."""
    rows = config.packing == "document"
    return {source.name: source.num_documents * config.seq_len if rows else source.num_tokens for source in sources}


def amounts(config: DataConfig, tokens_per_step: float | int, steps: int) -> list[float | int]:
    """The tokens of each stage over a run; a row of one document counts `config.seq_len`, whatever its T."""
    rows = config.packing == "document"
    return [
        count * tokens_per_step * (config.seq_len / length if rows else 1)
        for length, count in config.stage_steps(steps)
    ]


def shares(
    tokens: Mapping[str, int], config: DataConfig, tokens_per_step: float | int, steps: int | None
) -> list[Float64[np.ndarray, " S"]]:
    """For each stage the share of each source, in the order of the names; each sums to 1."""
    default = config.weights or by_temperature(tokens, config.temperature)
    by_stage = [stage.weights or default for stage in config.stages] or [default]
    implied = default is not config.weights and not any(stage.weights for stage in config.stages)
    check_names(tokens, config, by_stage, implied)
    names, wanted = sorted(tokens), []
    for stage in by_stage:
        weights = np.array([float(stage.get(name, 0)) for name in names])
        wanted.append(weights / weights.sum())
    if not (config.max_epochs or config.max_tokens):
        return wanted
    if steps is None:
        raise ValueError("caps over a run need the number of its steps")
    left, made = caps(tokens, config), []
    for start, amount, stage in zip(config.from_steps, amounts(config, tokens_per_step, steps), wanted):
        made.append(capped(names, stage, left, amount, start) if amount else stage)
        left = np.maximum(left - made[-1] * amount, 0.0)
    return made


def by_temperature(tokens: Mapping[str, int], temperature: float | None) -> Mapping[str, float | int]:
    """Source → n^(1/τ), of the largest source 1, so that no power overflows; without a temperature the tokens."""
    if temperature is None:
        return tokens
    largest = max(*tokens.values(), 1)
    return {name: (n / largest) ** (1 / temperature) for name, n in tokens.items()}


def check_names(
    tokens: Mapping[str, int], config: DataConfig, by_stage: Sequence[Mapping[str, float | int]], implied: bool
) -> None:
    """Every source has a weight in some stage, every weight and cap a source, every source that is given one a token."""
    named = {name for stage in by_stage for name in stage}
    capped_names = {*config.max_epochs, *config.max_tokens} - {"*"}
    for name in sorted((named | capped_names) - tokens.keys()):
        raise UserError(f"config.data: no source {name!r} in the shards{did_you_mean(name, tokens)}")
    for name in sorted(tokens.keys() - named):
        raise UserError(f"config.data: source {name!r} has no weight; give it one, or 0 to leave it out")
    if not any(tokens.values()):
        raise UserError("empty corpus: no source holds a token in this split")
    for name in sorted(name for name, count in tokens.items() if count == 0):
        if implied:  # of many languages some have a document or two, and all of them in another split
            log.warning("source %r holds no token in this split: it takes no part", name)
        elif any(stage.get(name) for stage in by_stage):
            raise UserError(f"empty corpus: source {name!r} holds no token in this split; give it weight 0")


def caps(tokens: Mapping[str, int], config: DataConfig) -> Float64[np.ndarray, " S"]:
    """The tokens that may be read of each source over the run."""
    epochs, most, free = config.max_epochs, config.max_tokens, float("inf")
    most = [
        min(tokens[name] * epochs.get(name, epochs.get("*", free)), most.get(name, most.get("*", free)))
        for name in sorted(tokens)
    ]
    return np.array(most, np.float64)


def capped(
    names: Sequence[str],
    wanted: Float64[np.ndarray, " S"],
    left: Float64[np.ndarray, " S"],
    amount: float | int,
    from_step: int,
) -> Float64[np.ndarray, " S"]:
    """The shares of a stage of `amount` tokens of which source i may give `left[i]`."""
    most = np.where(wanted > 0, left / amount, 0.0)
    if most.sum() < 1 - 1e-9:
        given = ", ".join(f"{name} {int(n):,}" for name, n, share in zip(names, left, wanted) if share > 0)
        raise UserError(
            f"config.data: from step {from_step} the run reads {amount:,.0f} tokens, but max_epochs and max_tokens leave "
            f"{most.sum() * amount:,.0f} ({given}): raise them, add a source, or train fewer steps"
        )
    filled, full = water_fill(wanted, most)
    rounded = filled
    for _ in range(3):  # blocks round to whole rows: a full source down, so that it stays below its cap
        rounded = round_down(rounded, most, full, block_size(rounded))
    return rounded if (rounded <= most).all() else filled  # or nearly so, where no other source has room


def water_fill(
    wanted: Float64[np.ndarray, " S"], most: Float64[np.ndarray, " S"]
) -> tuple[Float64[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
    """Shares of which none is above its cap, the others in proportion to what was wanted; and which are at their cap."""
    full = np.zeros(len(wanted), bool)
    while True:
        others = wanted[~full].sum()
        if not others > 0:  # the caps are just enough
            return most / most.sum(), full
        raised = wanted * max(0.0, 1 - most[full].sum()) / others
        over = ~full & (raised > most * (1 - 1e-9))
        if not over.any():
            return np.where(full, most, raised), full
        full |= over


def round_down(
    filled: Float64[np.ndarray, " S"], most: Float64[np.ndarray, " S"], full: Bool[np.ndarray, " S"], rows: int
) -> Float64[np.ndarray, " S"]:
    """Full sources at a whole number of a block's rows, never above their cap; the others take the rest."""
    others = filled[~full].sum()
    if not others > 0:
        return filled
    down = np.floor(np.where(full, most, 0.0) * rows + 1e-9) / rows
    return np.where(full, down, filled * (1 - down[full].sum()) / others)


# ------------------------------------------------------------------------------------------------------------------ budget


class Budget(NamedTuple):
    """What a run reads of a source."""

    source: str
    tokens: int  # it has
    share: float  # of the run's tokens
    tokens_read: int  # padding included, where rows are padded
    epochs: float  # how often it is read


def budget(tokens: Mapping[str, int], config: DataConfig, total_tokens: int, steps: int = 1) -> list[Budget]:
    """What a run of `total_tokens` over `steps` steps reads of each source, by name.

    Args:
      tokens: source → its tokens.
      config: weights or temperature, caps, stages.
      total_tokens: of the run, over all sources.
      steps: of the run; stages begin at steps.

    Raises:
      UserError: as `build_mixture`.
    """
    by_stage = shares(tokens, config, total_tokens / steps, steps)
    mean = sum(stage * count / steps for stage, (_, count) in zip(by_stage, config.stage_steps(steps)))
    read = sum(stage * amount for stage, amount in zip(by_stage, amounts(config, total_tokens / steps, steps)))
    return [
        Budget(name, tokens[name], share, round(share * total_tokens), round(amount) / tokens[name] if amount else 0.0)
        for name, share, amount in zip(sorted(tokens), np.asarray(mean).tolist(), np.asarray(read).tolist())
    ]


def budget_lines(rows: Sequence[Budget]) -> list[str]:
    """A budget for people, a line for each source."""
    wide = max(len(row.source) for row in rows)
    return [
        f"{row.source:{wide}}  {row.share:7.2%} of the run: {row.tokens_read:,} tokens, {row.epochs:.2f} epochs of its {row.tokens:,}"
        for row in rows
    ]
