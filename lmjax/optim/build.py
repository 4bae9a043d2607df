"""The optimizer of a run: one visible dict of optax transformations.

A transformation here gets clipped gradients and gives the update at learning rate 1. Clipping and the learning rate are the
step's: it knows the global norm already, and its rate is a function of the run's step, not of a counter in here.

Each takes `matrix_rate`, by which the layers' matrices learn slower than the rest (`config.model.mup`); their decay does not.
"""

from collections.abc import Callable

import jax
import optax

from lmjax.optim import masks
from lmjax.optim.config import OptimConfig
from lmjax.optim.muon import scale_by_muon
from lmjax.optim.quantized import scale_by_quantized_adam
from lmjax.optim.soap import Soap, scale_by_soap


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


def adamw_8bit(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Dettmers et al., 2021 (2110.02861)."""
    return descend(
        config, matrix_rate, scale_by_quantized_adam(config.b1, config.b2, config.epsilon, config.quantize_block)
    )


def muon(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Jordan et al., 2024 (Muon), for the layers' matrices; AdamW, with Nesterov's momentum as theirs, for the rest.

    An orthogonal update has the size that a wider layer wants already, so `matrix_rate` is not used (Yang et al., 2023, 2310.17813).
    """
    rest = optax.scale_by_adam(config.b1, config.b2, config.epsilon, nesterov=True)
    return for_matrices(config, 1.0, scale_by_muon(config.momentum, config.epsilon), rest)


def soap(config: OptimConfig, matrix_rate: float) -> optax.GradientTransformation:
    """Vyas et al., 2024 (2409.11321), for the layers' matrices; AdamW for the rest."""
    chosen = Soap(config.b1, config.b2, config.epsilon, config.soap_block, config.soap_every)
    return for_matrices(
        config, matrix_rate, scale_by_soap(chosen), optax.scale_by_adam(config.b1, config.b2, config.epsilon)
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig, float], optax.GradientTransformation]] = {
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "adamw_8bit": adamw_8bit,
    "muon": muon,
    "soap": soap,
}


def descend(config: OptimConfig, matrix_rate: float, *direction: optax.GradientTransformation):
    """Minus the direction, and minus the decay of what decays."""
    slower = [] if matrix_rate == 1.0 else [optax.masked(optax.scale(matrix_rate), masks.layer_matrices)]
    decay = optax.add_decayed_weights(config.weight_decay, mask=lambda p: masks.decay_mask(p, config.decay_embeddings))
    return optax.chain(*direction, *slower, decay, optax.scale(-1.0))


def for_matrices(
    config: OptimConfig, matrix_rate: float, matrices: optax.GradientTransformation, rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`matrices` for the layers' matrices, `rest` at `adam_learning_rate` for the rest; both decay by the one mask."""
    rate = config.learning_rate if config.adam_learning_rate is None else config.adam_learning_rate
    return optax.partition(
        {
            "matrix": descend(config, matrix_rate, matrices),
            "rest": optax.chain(descend(config, 1.0, rest), optax.scale(rate / config.learning_rate)),
        },
        lambda params: jax.tree.map(lambda is_one: "matrix" if is_one else "rest", masks.layer_matrices(params)),
    )


def build_optimizer(config: OptimConfig, matrix_rate: float = 1.0) -> optax.GradientTransformation:
    """The transformation named by `config.name`."""
    return OPTIMIZERS[config.name](config, matrix_rate)
