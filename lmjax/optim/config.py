"""How parameters are updated."""

import dataclasses
from typing import Literal

from lmjax.config import need


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    learning_rate: float = 3e-4  # at the peak; muon: of the matrices, see adam_learning_rate
    adam_learning_rate: float | None = None  # muon: of embeddings, head, norms and biases; none: learning_rate
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    warmup_steps: int = 100  # linear from 0; step `warmup_steps` is the first at the peak
    decay_steps: int | None = None  # wsd: length of the final linear decay; none: a fifth of the run
    final_ratio: float = 0.1  # learning rate at the last step over its peak (linear, cosine, wsd)
    b1: float = 0.9  # decay of the first moment (momentum)
    b2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-8  # added to the denominator (adamw, muon's adam part)
    weight_decay: float = 0.1  # decoupled, times the learning rate; on matrices only, see decay_embeddings
    decay_embeddings: bool = False  # whether token and position embeddings decay too
    clip_norm: float | None = 1.0  # largest global norm of the gradient; none: no clipping

    def __post_init__(self):
        need(self.learning_rate > 0, f"config.optim.learning_rate={self.learning_rate} must be positive")
        need(self.warmup_steps >= 0, f"config.optim.warmup_steps={self.warmup_steps} must not be negative")
        need(
            self.clip_norm is None or self.clip_norm > 0,
            f"config.optim.clip_norm={self.clip_norm} must be positive or none",
        )
        need(
            self.name != "muon" or not self.decay_embeddings,
            "config.optim.decay_embeddings: muon decays the layers' matrices only",
        )
        need(0 <= self.final_ratio <= 1, f"config.optim.final_ratio={self.final_ratio} must be in [0, 1]")
