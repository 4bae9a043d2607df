"""Mixtures: which source a row of the run comes from, exact in blocks and known in O(1) for any row.

Rows are dealt in blocks of M. Of a block, source i has c_i rows, the largest-remainder rounding of M w_i and at least one
where w_i > 0, spread evenly: its k-th row stands at (k + 1/2) M / c_i among all others. So any stretch of rows holds each
source's share to within a row or so, and the share over a block is w_i to within 1/M, with M large enough for the smallest.

Weights may change by step (a curriculum): each stage has its own block, and a source goes on where it was.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32, Int64, Integer

from lmjax.config import did_you_mean
from lmjax.data.config import StageConfig
from lmjax.errors import UserError

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


def build_mixture(
    tokens: Mapping[str, int], weights: Mapping[str, float | int], stages: Sequence[StageConfig], batch_rows: int
) -> Mixture:
    """The mixture of a run.

    Args:
      tokens: source → its tokens; the order of the sources is the order of the names.
      weights: source → share; empty: in proportion to tokens.
      stages: weights by step, instead of `weights`.
      batch_rows: rows of a step.

    Raises:
      UserError: a name is unknown, a source is given no weight (0 leaves it out), or one with a weight is empty.
    """
    by_step = {stage.from_step: stage.weights for stage in stages} or {0: weights or tokens}
    check_names(tokens, by_step)
    names = tuple(sorted(tokens))
    shares = []
    for step, stage in by_step.items():
        total = sum(stage.values())
        if not total > 0:
            raise UserError(f"config.data: the weights from step {step} sum to 0")
        shares.append(tuple(float(stage.get(name, 0)) / total for name in names))
    return Mixture(names, tuple(shares), tuple(step * batch_rows for step in by_step))


def check_names(tokens: Mapping[str, int], by_step: Mapping[int, Mapping[str, float | int]]) -> None:
    """Every source has a weight in some stage, every weight a source, every source that is read a token."""
    named = {name for stage in by_step.values() for name in stage}
    for name in sorted(named - tokens.keys()):
        raise UserError(f"config.data: no source {name!r} in the shards{did_you_mean(name, tokens)}")
    for name in sorted(tokens.keys() - named):
        raise UserError(f"config.data: source {name!r} has no weight; give it one, or 0 to leave it out")
    for name in sorted(tokens):
        left_out = tokens not in by_step.values() and not any(stage.get(name) for stage in by_step.values())
        if tokens[name] == 0 and not left_out:
            raise UserError(f"empty corpus: source {name!r} holds no token in this split; give it weight 0")
