"""The optimizer of a run: one visible dict of optax transformations.

A transformation here gets clipped gradients and gives the update at learning rate 1. Clipping and the learning rate are the
step's: it knows the global norm already, and its rate is a function of the run's step, not of a counter in here.

Each takes `matrix_rate`, by which the layers' matrices learn slower than the rest (`config.model.mup`); their decay does not.
"""

from collections.abc import Callable

import optax

from lmjax.optim import masks
from lmjax.optim.config import OptimConfig


def adamw(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Loshchilov & Hutter, 2019 (1711.05101)."""
    return descend(config, matrix_rate, optax.scale_by_adam(config.b1, config.b2, config.epsilon))


def lion(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Chen et al., 2023 (2302.06675); wants about a tenth of AdamW's learning rate and ten times its decay."""
    return descend(config, matrix_rate, optax.scale_by_lion(config.b1, config.b2))


def adafactor(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Shazeer & Stern, 2018 (1804.04235), without the parameter scale; its decay rate grows with the step, b1 and b2 unused.

    Not `optax.adafactor`, which adds the weight decay after the learning rate: here the decay is times the learning rate, as everywhere.
    """
    return descend(config, matrix_rate, optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def muon(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Jordan et al., 2024 (Muon), for the layers' matrices, which alone decay; AdamW with b1, b2 for the rest.

    An orthogonal update has the size that a wider layer wants already, so `matrix_rate` is not used (Yang et al., 2023, 2310.17813).
    """
    ratio = (config.adam_learning_rate or config.learning_rate) / config.learning_rate
    return optax.contrib.muon(
        1.0,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_learning_rate=ratio,
        muon_weight_dimension_numbers=masks.muon_dimensions,
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig, float], optax.GradientTransformation]] = {
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}


def descend(config: OptimConfig, matrix_rate: float, *direction: optax.GradientTransformation):
    """Minus the direction, and minus the decay of what decays."""
    slower = [] if matrix_rate == 1.0 else [optax.masked(optax.scale(matrix_rate), masks.layer_matrices)]
    decay = optax.add_decayed_weights(config.weight_decay, mask=lambda p: masks.decay_mask(p, config.decay_embeddings))
    return optax.chain(*direction, *slower, decay, optax.scale(-1.0))


def build_optimizer(config: OptimConfig, matrix_rate: float = 1.0) -> optax.GradientTransformation:
    """The transformation named by `config.name`."""
    return OPTIMIZERS[config.name](config, matrix_rate)
