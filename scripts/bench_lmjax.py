"""The worker of lmjax for `bench_train.py`, `bench_model.py` and `bench_scale.py`: training steps on random tokens, and parts of them."""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench_harness import serve

from lmjax import config as configs
from lmjax.batch import Batch
from lmjax.model import grouped
from lmjax.model.dense import dtypes
from lmjax.monitor.speed import measure_matmul_flops
from lmjax.parts import build_parts
from lmjax.plan import params
from lmjax.plan.flops import flops_per_token
from lmjax.plan.hlo import collectives
from lmjax.sharding import mesh as meshes
from lmjax.train.config import RunConfig
from lmjax.train.loss import HeadConfig, head_loss
from lmjax.train.state import init_state
from lmjax.train.step import build_step


def random_batch(config: RunConfig) -> Batch:
    """Uniform tokens from the config's seed, one document a row; the peer draws the same."""
    shape = (config.train.batch_size, config.data.seq_len)
    tokens = np.random.default_rng(config.seed).integers(config.model.vocab_size, size=(shape[0], shape[1] + 1))
    tokens, ones = tokens.astype(np.int32), np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones(shape, np.float32), ones, positions)


class Training:
    """A run's step, its state and one batch."""

    def __init__(self, config: RunConfig, num_devices: int):
        self.parts = build_parts(config, jax.devices()[:num_devices])
        self.step = build_step(
            config, self.parts.loss, self.parts.optimizer, self.parts.schedule, self.parts.mesh, self.parts.shardings
        )
        self.batch = jax.device_put(random_batch(config), self.parts.batch_sharding)

    def start(self) -> None:
        """The state before the first step."""
        init = functools.partial(init_state, self.parts.config, self.parts.optimizer)
        with meshes.use(self.parts.mesh):
            self.state = jax.jit(init, out_shardings=self.parts.shardings.state)()
            jax.block_until_ready(self.state)

    def steps(self, count: int) -> list[float]:
        """The losses of `count` steps."""
        losses = []
        with meshes.use(self.parts.mesh):
            for _ in range(count):
                self.state, metrics = self.step(self.state, self.batch)
                losses.append(metrics["train/loss"])
        return [float(loss) for loss in losses]


TRAININGS: dict[str, Training] = {}


def build(name: str, config: dict[str, Any], num_devices: int = 1, weights: str | None = None) -> dict[str, Any]:
    """Makes a training and runs its first step.

    Args:
      name: by which the other verbs know it.
      config: of a `RunConfig`.
      num_devices: of the mesh.
      weights: where to write the initial parameters, for a peer to start from.
    """
    config = configs.build(RunConfig, config)
    training = TRAININGS[name] = Training(config, num_devices)
    training.start()
    if weights is not None:
        leaves = jax.tree_util.tree_leaves_with_path(training.state.params)
        np.savez(weights, **{"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves})
    start = time.perf_counter()
    (loss,) = training.steps(1)
    return {
        "first_step_s": time.perf_counter() - start,
        "loss": loss,
        "num_parameters": params.total(config.model),
        "flops_per_step": flops_per_token(config.model, config.data.seq_len).training
        * config.train.batch_size * config.data.seq_len,
    }  # fmt: skip


def steps(name: str, count: int) -> dict[str, Any]:
    """Seconds a step, and the last loss."""
    TRAININGS[name].steps(1)  # the first step after a pause pays for the pause
    start = time.perf_counter()
    losses = TRAININGS[name].steps(count)
    return {"step_s": (time.perf_counter() - start) / count, "loss": losses[-1]}


def compile_step(config: dict[str, Any]) -> float:
    """Seconds from a config to a compiled step, nothing kept from before."""
    jax.clear_caches()
    start = time.perf_counter()
    training = Training(configs.build(RunConfig, config), 1)
    with meshes.use(training.parts.mesh):
        training.step.lower(training.parts.abstract_state(), training.batch).compile()
    return time.perf_counter() - start


def permutes(name: str) -> list[int]:
    """How often each collective-permute of the compiled step runs in it; of the step whose loops are not written out."""
    built = TRAININGS[name].parts
    looped = dataclasses.replace(built.config, model=dataclasses.replace(built.config.model, scan="on"))
    training = Training(looped, built.mesh.size)
    with meshes.use(training.parts.mesh):
        text = training.step.lower(training.parts.abstract_state(), training.batch).compile().as_text()
    return [one.times for one in collectives(text) if one.kind == "collective-permute"]


# -------------------------------------------------------------------------------------------------------------- loss head


HEADS: dict[str, Any] = {}


def naive_loss(x, w, targets, weights):
    """The whole batch's logits at once, by optax."""
    logits = (x.reshape(-1, x.shape[-1]) @ w).reshape(*targets.shape, -1)
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def build_head(name: str, vocab_size: int, num_tokens: int, width: int, chunk: int | None) -> int:
    """Compiles a loss head with its gradients; returns the bytes of its temporaries. Without `chunk`, the naive one."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (1, num_tokens, width))
    w = jax.random.normal(keys[1], (width, vocab_size)) / math.sqrt(width)
    targets = jax.random.randint(keys[2], (1, num_tokens), 0, vocab_size)
    loss = naive_loss
    if chunk is not None:
        head = HeadConfig(0.0, None, chunk, dtypes("float32", "cpu"))
        loss = lambda x, w, targets, weights: head_loss(x, w, targets, weights, head)[0]  # noqa: E731
    arguments = (x, w, targets, jnp.ones(targets.shape))
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    HEADS[name] = functools.partial(compiled, *arguments)
    return compiled.memory_analysis().temp_size_in_bytes


def run_head(name: str) -> float:
    """Seconds of the head, forward and backward."""
    start = time.perf_counter()
    jax.block_until_ready(HEADS[name]())
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------- grouped products


GROUPED: dict[str, Any] = {}


def build_grouped(kind: str, rows: int, groups: int, width: int, out: int) -> None:
    """Compiles a product of rows with their groups' matrices, and its gradients; groups of unequal size."""
    x = jax.random.normal(jax.random.key(0), (rows, width))
    w = jax.random.normal(jax.random.key(1), (groups, width, out)) / math.sqrt(width)
    sizes = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)

    def product(x, w):
        if kind == "blocks":
            return grouped.blocks(x, w, sizes, x.dtype, grouped.block_rows(rows, groups))
        return jax.lax.ragged_dot(x, w, sizes)

    compiled = jax.jit(lambda x, w: jax.vjp(product, x, w)[1](jnp.ones((rows, out)))).lower(x, w).compile()
    GROUPED[kind] = functools.partial(compiled, x, w)


def run_grouped(kind: str) -> float:
    """Seconds of the product, forward and backward."""
    start = time.perf_counter()
    jax.block_until_ready(GROUPED[kind]())
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(
        {
            "build": build,
            "steps": steps,
            "matmul": measure_matmul_flops,
            "compile": compile_step,
            "permutes": permutes,
            "build_head": build_head,
            "run_head": run_head,
            "build_grouped": build_grouped,
            "run_grouped": run_grouped,
        }
    )
