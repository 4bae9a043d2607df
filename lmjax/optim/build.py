"""The optimizer of a run: one visible dict of optax transformations.

A transformation here gets clipped gradients and gives the update at learning rate 1. Clipping and the learning rate are the
step's: it knows the global norm already, and its rate is a function of the run's step, not of a counter in here.
"""

from collections.abc import Callable

import optax

from lmjax.optim import masks
from lmjax.optim.config import OptimConfig


def adamw(config: OptimConfig) -> optax.GradientTransformation:
    """Loshchilov & Hutter, 2019 (1711.05101)."""
    return optax.adamw(1.0, config.b1, config.b2, config.epsilon, weight_decay=config.weight_decay, mask=decay(config))


def lion(config: OptimConfig) -> optax.GradientTransformation:
    """Chen et al., 2023 (2302.06675); wants about a tenth of AdamW's learning rate and ten times its decay."""
    return optax.lion(1.0, config.b1, config.b2, weight_decay=config.weight_decay, mask=decay(config))


def adafactor(config: OptimConfig) -> optax.GradientTransformation:
    """Shazeer & Stern, 2018 (1804.04235), without the parameter scale; its decay rate grows with the step, b1 and b2 unused.

    Not `optax.adafactor`, which adds the weight decay after the learning rate: here the decay is times the learning rate, as everywhere.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, mask=decay(config)),
        optax.scale(-1.0),
    )


def muon(config: OptimConfig) -> optax.GradientTransformation:
    """Jordan et al., 2024 (Muon), for the layers' matrices, which alone decay; AdamW with b1, b2 for the rest."""
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


OPTIMIZERS: dict[str, Callable[[OptimConfig], optax.GradientTransformation]] = {
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}


def decay(config: OptimConfig) -> Callable:
    """The weight-decay mask as optax wants it: a function of the parameters."""
    return lambda params: masks.decay_mask(params, config.decay_embeddings)


def build_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """The transformation named by `config.name`."""
    return OPTIMIZERS[config.name](config)
