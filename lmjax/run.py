"""Trains a run: the one place that wires all parts into the loop."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from lmjax import bucket, files
from lmjax import config as configs
from lmjax.checkpoint import restore, save
from lmjax.checkpoint.layout import steps as checkpoint_steps
from lmjax.data import loader
from lmjax.data.mixture import budget, budget_lines, sizes
from lmjax.lock import locked
from lmjax.model import attention
from lmjax.model.config import ModelConfig
from lmjax.model.decoder import Params
from lmjax.model.upcycle import upcycle
from lmjax.monitor.speed import Speed, peak_flops
from lmjax.monitor.watchdog import Watchdog
from lmjax.monitor.write import Writer
from lmjax.parts import Parts, build_evaluate, build_parts, build_reader
from lmjax.plan import memory, params
from lmjax.plan.flops import flops_per_token
from lmjax.sharding import mesh as meshes
from lmjax.sharding import multihost, topology
from lmjax.train import step as steps
from lmjax.train.config import RunConfig
from lmjax.train.loop import Loop
from lmjax.train.state import TrainState, init_state, state_shardings
from lmjax.train.step import Step
from lmjax.workdir import (
    absolute_paths,
    announce,
    check_folder,
    check_init_from,
    check_tokenizer,
    claim_workdir,
    open_run,
    open_tokenizer,
    use_compile_cache,
)

UPCYCLE = 0x0E  # the key of what a dense model lacks
FLOAT16_SKIPS = 100  # overflows in a row while the loss scale is found; more, and the loss is not finite itself


def train(config: RunConfig, workdir: os.PathLike | str, distributed: bool = False) -> int:
    """Trains, or goes on where the workdir's newest checkpoint stands.

    Args:
      config: the run.
      workdir: its folder; the same on all processes.
      distributed: join other processes that the environment does not name (TPU pods, SLURM).

    Returns:
      Optimizer steps done.
    """
    for path in (workdir, config.tokenizer, config.init_from or ""):
        bucket.check(path)
    multihost.initialize(distributed)
    workdir = epath.Path(workdir)
    use_compile_cache(workdir)
    tokenizer = open_tokenizer(config)
    parts = build_parts(config)
    reader = build_reader(config, workdir, functools.partial(multihost.local_rows, parts.batch_sharding))
    check_tokenizer(config, tokenizer, reader.sources[0].tokenizer)
    check_init_from(config, workdir, tokenizer)
    record = {
        "config": configs.to_dict(absolute_paths(config)),
        "tokenizer": tokenizer.fingerprint(),
        "data": reader.identity(),
        "code": files.code_version(),
    }
    check_folder(workdir)
    with locked(workdir) if multihost.is_primary() else contextlib.nullcontext():
        notes = claim_workdir(workdir, record, tokenizer)
        return run_loop(parts, reader, workdir, record, notes)


def run_loop(
    parts: Parts, reader: loader.StepReader, workdir: epath.Path, record: dict[str, Any], notes: list[str]
) -> int:
    """The run in its workdir, which is ours: the state, the files, the loop; the steps done."""
    config = parts.config
    notes = notes + describe_data(config, reader)
    with meshes.use(parts.mesh), multihost.StopRequest() as request:
        state, start, more = initial_state(parts, workdir)
        asked = config.train.steps if config.train.stop_at is None else config.train.stop_at
        stop = min(asked, config.train.steps)
        if start >= stop:
            announce(notes + more + [f"nothing to do: {workdir} stands at step {start} of {config.train.steps}"])
            return start
        writer = Writer(
            workdir,
            config.monitor.tensorboard,
            resume_step=start if start else None,
            total_steps=config.train.steps,
            primary=multihost.is_primary(),
        )
        with writer, save.Saver(workdir, config.checkpoint, record) as saver:
            peers = multihost.Peers() if jax.process_count() > 1 else None
            watchdog = Watchdog(config.monitor.hang_after_s, peers, lambda: saver.last_good)
            loop = build_loop(parts, reader, saver, writer, watchdog, request, start, stop)
            for note in [*notes, *more, *describe(parts, loop.speed)]:
                writer.say(note)
            with watchdog:
                _, done = loop.run(state, start, stop)
    return done


def build_loop(
    parts: Parts,
    reader: loader.StepReader,
    saver: save.Saver,
    writer: Writer,
    watchdog: Watchdog,
    request: multihost.StopRequest,
    start: int,
    stop: int,
) -> Loop:
    """The loop's arguments."""
    config, data = parts.config, parts.config.data
    host_batches = loader.batches(reader, start, stop, data.num_workers, data.prefetch)
    peak = peak_flops(list(parts.mesh.devices.flat), config.train.precision, config.monitor.peak_flops)

    def training_flops(seq_len: int) -> float:
        return flops_per_token(config.model, seq_len, prefix=memory.prefix_shape(config)[0]).training

    return Loop(
        step=build_steps(parts),
        batches=multihost.on_devices(host_batches, parts.batch_sharding, reader.batch_rows),
        evaluate=build_evaluate(parts, moves=watchdog.still),
        saver=saver,
        writer=writer,
        watchdog=watchdog,
        speed=Speed(training_flops(data.seq_len), peak),
        should_stop=request.reached,
        tokens_per_step=config.train.batch_size * data.seq_len,
        flops_per_token=training_flops,
        log_every=config.monitor.log_every,
        eval_every=config.eval.every,
        save_every=config.checkpoint.every,
        max_skipped=FLOAT16_SKIPS if config.train.precision == "float16" else 0,
    )


def build_steps(parts: Parts) -> Callable[[int], Step]:
    """The program of each step: another where the rope changes."""

    @functools.cache
    def program(model: ModelConfig) -> Step:
        own = parts.with_model(model)
        return steps.build_step(own.config, own.loss, own.optimizer, own.schedule, own.mesh, own.shardings)

    return lambda step: program(parts.config.model_at(step))


def initial_state(parts: Parts, workdir: epath.Path) -> tuple[TrainState, int, list[str]]:
    """The newest readable checkpoint, or the state before the first step; with its step and what to tell."""
    if not checkpoint_steps(workdir):
        return first_state(parts)
    restored = restore.restore(workdir, parts.abstract_state())
    if int(restored.state.step) != restored.step:
        raise RuntimeError(f"checkpoint {restored.step} holds the state of step {int(restored.state.step)}")
    if restored.unreadable:
        if multihost.is_primary():
            restore.set_aside(workdir, restored.step)
        multihost.told_by_all("")  # the savers of all look at the steps that are left
    return restored.state, restored.step, [*restored.unreadable, f"going on from checkpoint {restored.step}"]


def first_state(parts: Parts) -> tuple[TrainState, int, list[str]]:
    """The state before the first step: drawn, or with the parameters of another run; its experts from a dense one's MLPs."""
    config, place = parts.config, parts.shardings.state
    if config.init_from is None:
        return jax.jit(lambda: init_state(config, parts.optimizer), out_shardings=place)(), 0, []
    source = source_of(parts)
    restored = restore.restore(config.init_from, source.abstract_weights(), partial=True)

    def begin(params: Params) -> TrainState:
        if source is not parts:
            key = jax.random.fold_in(jax.random.key(config.seed), UPCYCLE)
            params = upcycle(params, source.config.model, config.model, key)
        return init_state(config, parts.optimizer, params)

    state = jax.jit(begin, out_shardings=place, donate_argnums=(0,))(restored.state.params)
    notes = [*restored.unreadable, f"beginning with the parameters of {config.init_from}, step {restored.step}"]
    notes += ["each expert begins as its layer's MLP"] if source is not parts else []
    return state, 0, notes


def source_of(parts: Parts) -> Parts:
    """The parts by which the parameters to begin from are restored: these, or those without experts."""
    config = parts.config
    if config.model.moe is None or open_run(config.init_from)[0].model.moe is not None:
        return parts
    dense = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=None))
    return dataclasses.replace(parts, config=dense, shardings=state_shardings(dense, parts.mesh, parts.optimizer))


def describe(parts: Parts, speed: Speed) -> list[str]:
    """The run in a few lines."""
    config, devices = parts.config, parts.mesh.devices
    pipeline = memory.layout(config, devices.size).pipeline
    shape = " × ".join(f"{name} {size}" for name, size in meshes.sizes(parts.mesh).items())
    lengths = " → ".join(map(str, config.data.seq_lens))
    rows = "" if set(config.data.seq_lens) == {config.data.seq_len} else f", in rows of {lengths}"
    ropes = [
        f"from step {stage.from_step} on: {describe_rope(config.model_at(stage.from_step))}"
        for stage in config.rope_stages
    ]
    return [
        f"{params.total(config.model):,} parameters; {config.train.steps:,} steps of {config.train.batch_size} × "
        f"{config.data.seq_len} tokens{rows}; {config.optim.name}, {config.train.precision}",
        f"{devices.size} {devices.flat[0].device_kind} device(s), mesh {shape}; peak for MFU {speed.peak.source}",
        attention.describe(
            config.model, config.data.longest, parts.types, devices.flat[0].platform, parts.mesh.shape["context"]
        ),
        *([] if pipeline.stages == 1 else [pipeline.describe()]),
        *topology.slow_links(devices),
        *ropes,
    ]


def describe_rope(model: ModelConfig) -> str:
    """Its theta and scaling."""
    scaling = model.rope_scaling
    return f"rope theta {model.rope_theta:g}" + (f", {scaling.kind} × {scaling.factor:g}" if scaling else "")


def describe_data(config: RunConfig, reader: loader.StepReader) -> list[str]:
    """What the run reads of each source, where it has several or a cap; makes or verifies the rows of best-fit packing."""
    data, total = config.data, config.train.steps * config.train.batch_size * config.data.seq_len
    notes = reader.prepare(full=data.verify == "full")
    if len(reader.sources) > 1 or data.max_epochs or data.max_tokens:
        notes += budget_lines(budget(sizes(reader.sources, data), data, total, config.train.steps))
    return notes
