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

from lmjax.config import need
from lmjax.optim.config import OptimConfig

Schedule = Callable[[Array | int], Float[Array, ""]]


def decay_of(config: OptimConfig, num_steps: int) -> int:
    """The steps of wsd's decay."""
    return max(num_steps // 5, 1) if config.decay_steps is None else config.decay_steps


def fraction(config: OptimConfig, step: Array, num_steps: int) -> Float[Array, ""]:
    """Learning rate over its peak, after the warmup."""
    last, final = num_steps - 1, config.final_ratio
    if config.schedule == "constant":
        return jnp.ones(())
    if config.schedule == "inverse_sqrt":
        return jnp.sqrt(max(config.warmup_steps, 1) / jnp.maximum(step, 1.0))
    if config.schedule == "wsd":
        begin = last - decay_of(config, num_steps)
    else:
        begin = config.warmup_steps
    done = jnp.clip((step - begin) / max(last - begin, 1), 0.0, 1.0)
    if config.schedule == "cosine":
        done = 0.5 * (1.0 - jnp.cos(jnp.pi * done))
    return 1.0 + (final - 1.0) * done


def check_fits(config: OptimConfig, num_steps: int) -> None:
    """A `UserError` where the warmup is longer than the run, or runs into wsd's decay: the peak would never be reached."""
    warmup = config.warmup_steps
    need(warmup <= num_steps, f"config.optim.warmup_steps={warmup} exceed config.train.steps={num_steps}")
    if config.schedule == "wsd":
        decay = decay_of(config, num_steps)
        shown = f"decay_steps={decay}" + (" (a fifth of the run)" if config.decay_steps is None else "")
        need(
            warmup + decay < num_steps,
            f"config.optim: warmup_steps={warmup} and {shown} must together be less than config.train.steps={num_steps}",
        )


def build_schedule(config: OptimConfig, num_steps: int) -> Schedule:
    """The schedule of a run of `num_steps` steps; a `UserError` where warmup and decay do not fit into it."""
    check_fits(config, num_steps)

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        warmup = jnp.minimum(step / max(config.warmup_steps, 1), 1.0) if config.warmup_steps else 1.0
        after = fraction(config, jnp.maximum(step, config.warmup_steps), num_steps)
        return jnp.asarray(config.learning_rate * warmup * after, jnp.float32)

    return schedule
