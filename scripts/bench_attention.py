"""Sections of `bench_model.py`: attention over long rows, and what scanning layers saves in compilation."""

import dataclasses
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from bench_harness import Row, Sampler, peak_bytes, ratio
from bench_lmjax import Training

from lmjax.data.config import DataConfig
from lmjax.model import decoder
from lmjax.model.attention import IMPLEMENTATIONS, Mask
from lmjax.model.config import ModelConfig
from lmjax.model.dense import dtypes
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig
from lmjax.train.loss import next_token_loss

HEADS = (2, 2, 64)  # K, G, H
WINDOW = 512
LONG = 32_768
COMMAND = "scripts/bench_model.py --only"


def gradient(name: str, length: int, window: int | None = None) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Forward and backward of one row by an implementation, and the shapes of its arguments."""
    kv_heads, group, dim = HEADS
    shapes = [(1, length, kv_heads, group, dim), *[(1, length, kv_heads, dim)] * 2]
    attend = functools.partial(IMPLEMENTATIONS[name], mask=Mask(window=window))
    loss = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.square(attend(*x))), argnums=(0, 1, 2)))
    return loss, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def timed(name: str, length: int, window: int | None = None) -> Callable[[], float]:
    """Seconds of one forward and backward, compiled before."""
    function, shapes = gradient(name, length, window)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(key, shape.shape) for key, shape in zip(keys, shapes, strict=True)]
    jax.block_until_ready(function(*arrays))

    def sample() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        return time.perf_counter() - start

    return sample


def temporaries(length: int) -> float:
    """MiB that blockwise attention needs beside its arguments and gradients."""
    function, shapes = gradient("blockwise", length)
    return function.lower(*shapes).compile().memory_analysis().temp_size_in_bytes / 2**20


def attention(sampler: Sampler, quick: bool) -> list[Row]:
    """Time against the reference, memory by length, what a window saves, and one step over a very long row."""
    length = 1024 if quick else 8192
    command = f"{COMMAND} attention" + " --quick" * quick
    samples = sampler.run({name: timed(name, length) for name in ("blockwise", "reference")})
    windowed = sampler.run({"window": timed("blockwise", length, length // 16), "whole": timed("blockwise", length)})
    lengths = [length // 4, length // 2, length, 2 * length]
    sizes = [temporaries(each) for each in lengths]
    growth = max(after / before for before, after in itertools.pairwise(sizes))
    rows = [
        Row(f"blockwise / reference, T {length}, forward + backward", ratio(samples["blockwise"], samples["reference"]),
            "×", "<= 1.0", command),
        Row(f"a window of {length // 16} / none, blockwise, T {length}", ratio(windowed["window"], windowed["whole"]), "×",
            "<= 0.25", command),
        *(Row(f"blockwise temporaries, T {each}", size, "MiB", None, command) for each, size in zip(lengths, sizes, strict=True)),
        Row("their growth from one length to its double", growth, "×", "<= 2.2", command),
    ]  # fmt: skip
    if not quick:
        peak = float(subprocess.check_output([sys.executable, __file__, "long"], text=True).split()[-1])
        rows.append(Row(f"peak memory of a process that trains, T {LONG}", peak, "GiB", "<= 4", command))
    return rows


def train_long() -> float:
    """GiB at the peak of this process, after one step of a small model over one long row."""
    model = ModelConfig(vocab_size=512, num_layers=2, d_model=128, num_heads=2, max_length=LONG, attention_block=256)
    train = TrainConfig(batch_size=1, precision="float32")
    config = RunConfig(model=model, data=DataConfig(seq_len=LONG), mesh=MeshConfig(data=1), train=train)
    training = Training(config, 1)
    training.start()
    losses = training.steps(1)
    assert jnp.isfinite(losses[0])
    return peak_bytes() / 2**30


def compile_s(num_layers: int) -> float:
    """Seconds to compile the gradient of a scanned decoder."""
    model = ModelConfig(vocab_size=512, num_layers=num_layers, d_model=128, num_heads=4, scan="on")
    shapes = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    training = Training(RunConfig(model=dataclasses.replace(model, num_layers=1), mesh=MeshConfig(data=1)), 1)

    def loss(params, batch):
        return next_token_loss(model, params, batch, None, 0.0, 1024, dtypes("float32", "cpu")).total

    lowered = jax.jit(jax.grad(loss)).lower(shapes, training.batch)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def scan(sampler: Sampler, quick: bool) -> list[Row]:
    """Compilation of a deep decoder against a shallow one."""
    samples = sampler.run({"deep": lambda: compile_s(64), "shallow": lambda: compile_s(4)}, rounds=1 if quick else 3)
    command = f"{COMMAND} scan" + " --quick" * quick
    return [Row("compile, 64 layers / 4, scanned", ratio(samples["deep"], samples["shallow"]), "×", "<= 1.5", command)]


if __name__ == "__main__":
    print(train_long())
