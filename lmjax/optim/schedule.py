"""Learning rate as a function of the step.

Step s uses `schedule(s)`, s counting from 0. With W warmup steps and S steps in all: schedule(W) is the peak, schedule(S - 1)
is peak · final_ratio for the shapes that decay to it.

    linear        peak → final over W … S-1
    cosine        the same along half a cosine                               Loshchilov & Hutter, 2017 (1608.03983)
    wsd           peak, then linear to final over the last decay_steps       Hu et al., 2024 (2404.06395)
    inverse_sqrt  peak · √(W / s), final_ratio unused                        Vaswani et al., 2017 (1706.03762)
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmjax.errors import UserError
from lmjax.optim.config import OptimConfig

Schedule = Callable[[Array | int], Float[Array, ""]]


def fraction(config: OptimConfig, step: Array, num_steps: int) -> Float[Array, ""]:
    """Learning rate over its peak, after the warmup."""
    last, final = num_steps - 1, config.final_ratio
    if config.schedule == "constant":
        return jnp.ones(())
    if config.schedule == "inverse_sqrt":
        return jnp.sqrt(max(config.warmup_steps, 1) / jnp.maximum(step, 1.0))
    if config.schedule == "wsd":
        begin = last - (config.decay_steps if config.decay_steps is not None else max(num_steps // 5, 1))
    else:
        begin = config.warmup_steps
    done = jnp.clip((step - begin) / max(last - begin, 1), 0.0, 1.0)
    if config.schedule == "cosine":
        done = 0.5 * (1.0 - jnp.cos(jnp.pi * done))
    return 1.0 + (final - 1.0) * done


def build_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """The schedule of a run of `num_steps` steps; a `UserError` where warmup and decay do not fit into it."""
    decay = (config.decay_steps or 0) if config.schedule == "wsd" else 0
    if config.warmup_steps + decay > num_steps:
        raise UserError(
            f"config.optim: warmup_steps={config.warmup_steps} and decay_steps={decay} exceed config.train.steps={num_steps}"
        )

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(step / max(config.warmup_steps, 1), 1.0) if config.warmup_steps else 1.0
        after = fraction(config, jnp.maximum(step, config.warmup_steps), num_steps)
        return jnp.asarray(config.learning_rate * warmup * after, jnp.float32)

    return schedule
