"""What a run minimizes: a loss over a batch. One visible dict; a method of training adds its row.

`train` knows an objective only as `(params, batch, key) → Sums`, so every method runs in the one loop.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from lmjax.model import decoder
from lmjax.model.dense import Dtypes
from lmjax.sharding.local import on_each_device
from lmjax.train.config import RunConfig
from lmjax.train.loss import Sums, next_token_loss

Loss = Callable[..., Sums]


def next_token(config: RunConfig, types: Dtypes) -> Loss:
    """Pre-training and continued pre-training: the likelihood of the next token."""
    return functools.partial(
        next_token_loss, config.model, z_loss=config.train.z_loss, chunk=config.train.loss_chunk, types=types
    )


OBJECTIVES: dict[str, Callable[[RunConfig, Dtypes], Loss]] = {"next_token": next_token}


def build_objective(config: RunConfig, types: Dtypes) -> Loss:
    """The loss `(params, batch, key=…) → Sums` of the run; over `config.mesh.context`, and over fsdp, a device computes its own part."""
    types = types._replace(summed=jnp.dtype("float32") if config.mesh.sum_gradients == "float32" else None)
    loss = OBJECTIVES[config.objective](config, types)
    return on_each_device(loss, decoder.logical_axes(config.model), config.mesh.zero)
