"""The schedule of a pipeline: which stage works on which micro-batch, with which layers, at each tick. No jax.

S stages hold L layers in R · S chunks, chunk r · S + s on stage s: a micro-batch goes round all stages R times (Narayanan et al., 2021,
arXiv 2104.04473). Micro-batches go in groups of S, each group round after round, so that what leaves the last stage is what the
first needs at the next tick. M micro-batches take

    ticks = M · R + S - 1,   of which S - 1 are the bubble

At tick t stage s is at its visit i = t - s, if that is one of its M · R: group i // (S R), round i % (S R) // S, place -i % S in the group.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmjax.config import need

LONGEST = 4  # micro-batches for each stage, where the config names no number: past it the bubble hardly shrinks


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Of one pass over the layers."""

    stages: int  # S
    repeats: int  # R
    micro_batches: int  # M, a multiple of S

    @property
    def ticks(self) -> int:
        """From the first micro-batch's entry to the last one's exit."""
        return self.micro_batches * self.repeats + self.stages - 1

    @property
    def chunks(self) -> int:
        """Into which the layers are cut."""
        return self.stages * self.repeats

    @property
    def groups(self) -> int:
        """Of S micro-batches."""
        return self.micro_batches // self.stages

    @property
    def slowdown(self) -> float:
        """The time of all ticks over that of the useful ones."""
        return self.ticks / (self.micro_batches * self.repeats)

    def describe(self) -> str:
        """One line for a run's log."""
        bubble = (self.stages - 1) / self.ticks
        return (
            f"pipeline of {self.stages} stages: {self.micro_batches} micro-batches × {self.repeats} round(s) in {self.ticks} ticks, "
            f"of which the bubble is {bubble:.0%}"
        )

    def visits(self) -> tuple[np.ndarray, np.ndarray]:
        """[ticks, S] each: the round, and the number place · groups + group of the micro-batch; in the bubble some that are in range."""
        visit = np.arange(self.ticks)[:, None] - np.arange(self.stages)
        visit = visit % (self.micro_batches * self.repeats)
        rounds = visit % self.chunks // self.stages
        return rounds, -visit % self.stages * self.groups + visit // self.chunks

    def times(self) -> np.ndarray:
        """[R, S, place, group]: the tick at which a stage is at that round of that micro-batch."""
        r, s, place, group = np.ogrid[: self.repeats, : self.stages, : self.stages, : self.groups]
        return group * self.chunks + r * self.stages + -place % self.stages + s


def schedule(stages: int, repeats: int, rows: int, micro_batches: int | None) -> Schedule:
    """The schedule for `rows` rows of each replica; a `UserError` where they do not divide.

    Without `micro_batches` it is as many as the rows allow, up to `LONGEST` for each stage.
    """
    need(
        rows % stages == 0,
        f"config.mesh.stage={stages} does not divide the {rows} rows of a replica (batch_size over accumulation, data, fsdp "
        "and expert)",
    )
    if micro_batches is None:
        micro_batches = next(stages * n for n in range(LONGEST, 0, -1) if rows % (stages * n) == 0)
    need(
        micro_batches % stages == 0,
        f"config.model.micro_batches={micro_batches} does not divide by config.mesh.stage={stages}",
    )
    need(
        rows % micro_batches == 0,
        f"config.model.micro_batches={micro_batches} does not divide the {rows} rows of a replica (batch_size over accumulation, "
        "data, fsdp and expert)",
    )
    return Schedule(stages, repeats, micro_batches)


def check_layers(kinds: Sequence[Any], stages: int, repeats: int) -> None:
    """A `UserError` where the layers cannot be dealt: a stage holds as many in each round, and the same kinds as the others."""
    chunks, num_layers = stages * repeats, len(kinds)
    asked = f"config.mesh.stage={stages}" + (f" × config.model.stage_repeats={repeats}" if repeats > 1 else "")
    need(
        stages == 1 or num_layers % chunks == 0,
        f"config.model.num_layers={num_layers} does not divide by {asked}",
    )
    size = num_layers // chunks
    need(
        stages == 1 or tuple(kinds) == tuple(kinds[:size]) * chunks,
        f"{asked} cuts the layers into chunks of {size} that are not alike (config.model.layer_pattern, and where experts are)",
    )
