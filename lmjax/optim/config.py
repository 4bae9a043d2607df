"""How parameters are updated."""

import dataclasses
from typing import Literal

from lmjax.config import need


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon", "soap", "adamw_8bit"] = "adamw"
    learning_rate: float = 3e-4  # at the peak; muon, soap: of the matrices, see adam_learning_rate
    adam_learning_rate: float | None = None  # muon, soap: of all but the layers' matrices; none: learning_rate
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    warmup_steps: int = 100  # linear from 0; step `warmup_steps` is the first at the peak
    decay_steps: int | None = None  # wsd: the final linear decay, begun after the warmup; none: a fifth of the run
    final_ratio: float = 0.1  # learning rate at the last step over its peak (linear, cosine, wsd)
    b1: float = 0.9  # decay of the first moment (momentum)
    b2: float = 0.95  # decay of the second moment
    momentum: float = 0.95  # muon: decay of the matrices' momentum
    soap_block: int = 512  # soap: largest side of a matrix's blocks; their statistics cost up to 4 times the matrix
    soap_every: int = 10  # soap: steps between refreshes of the eigenbases
    quantize_block: int = 256  # adamw_8bit: numbers that share a scale
    epsilon: float = 1e-8  # added to the denominator (adamw and its kin)
    weight_decay: float = 0.1  # decoupled, times the learning rate; on matrices only, see decay_embeddings
    decay_embeddings: bool = False  # whether token and position embeddings decay too
    clip_norm: float | None = 1.0  # largest global norm of the gradient; none: no clipping

    def __post_init__(self):
        for field in ("learning_rate", "epsilon"):
            need(getattr(self, field) > 0, f"config.optim.{field}={getattr(self, field)} must be positive")
        for field in ("warmup_steps", "weight_decay"):
            need(getattr(self, field) >= 0, f"config.optim.{field}={getattr(self, field)} must not be negative")
        for field in ("adam_learning_rate", "decay_steps"):
            value = getattr(self, field)
            need(value is None or value >= 0, f"config.optim.{field}={value} must not be negative, or none")
        for field in ("b1", "b2", "momentum"):  # at 1 an average never moves
            need(0 <= getattr(self, field) < 1, f"config.optim.{field}={getattr(self, field)} must be in [0, 1)")
        need(
            self.clip_norm is None or self.clip_norm > 0,
            f"config.optim.clip_norm={self.clip_norm} must be positive or none",
        )
        for field in ("soap_block", "soap_every", "quantize_block"):
            need(getattr(self, field) >= 1, f"config.optim.{field}={getattr(self, field)} must be at least 1")
        need(0 <= self.final_ratio <= 1, f"config.optim.final_ratio={self.final_ratio} must be in [0, 1]")


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """How gradients cross `mesh.data`, where that axis is slow: slices joined over a data-centre network."""

    kind: Literal["none", "bfloat16", "int8", "topk"] = (
        "none"  # int8, topk: with error feedback; `mesh.data` is then fixed
    )
    block: int = 256  # int8: numbers that share a scale
    share: float = 0.01  # topk: of a device's gradient, sent in a step

    def __post_init__(self):
        need(self.block >= 1, f"config.compress.block={self.block} must be at least 1")
        need(0 < self.share <= 1, f"config.compress.share={self.share} must be in (0, 1]")
