"""Builds the parts of a run from its config and wires them: the one place that knows them all.

A workdir holds:

    run.json                the resolved config, and fingerprints of tokenizer and data: what a resume must agree with
    tokenizer/              a copy of the tokenizer, so that the folder generates by itself
    checkpoints/<step>/     see lmjax/checkpoint/save.py
    packing/                rows of best-fit packing, see lmjax/data/bestfit.py
    metrics.jsonl, tensorboard/
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh, NamedSharding

from lmjax import config as configs
from lmjax import files
from lmjax.checkpoint import restore, save
from lmjax.checkpoint.layout import steps as checkpoint_steps
from lmjax.data import loader
from lmjax.data.document import Document
from lmjax.data.mixture import budget, budget_lines
from lmjax.data.trace import trace as trace_step
from lmjax.errors import UserError
from lmjax.eval import needle, perplexity
from lmjax.eval.needle import Cell, NeedleConfig
from lmjax.generate import decode
from lmjax.generate.sample import Sampling
from lmjax.hf import export, load
from lmjax.model import attention
from lmjax.model.decoder import Params
from lmjax.model.dense import Dtypes, dtypes
from lmjax.model.upcycle import upcycle
from lmjax.monitor.speed import Speed, peak_flops
from lmjax.monitor.write import Writer
from lmjax.optim.build import build_optimizer
from lmjax.optim.schedule import Schedule, build_schedule
from lmjax.plan import memory, params
from lmjax.plan.flops import flops_per_token
from lmjax.sharding import mesh as meshes
from lmjax.sharding import multihost, rules
from lmjax.tokenizers import build as tokenizers
from lmjax.tokenizers.base import Tokenizer
from lmjax.train import step as steps
from lmjax.train.config import RunConfig
from lmjax.train.loop import Loop
from lmjax.train.objective import Loss, build_objective
from lmjax.train.state import StateShardings, TrainState, Weights, init_state, state_shardings

RUN = "run.json"
TOKENIZER = "tokenizer"
COMPILE_CACHE = "compile_cache"
PACKING = "packing"
IMPORT_SEQ_LEN = 2048  # tokens of a row when an import is evaluated, at most
UPCYCLE = 0x0E  # the key of what a dense model lacks
FLOAT16_SKIPS = 100  # overflows in a row while the loss scale is found; more, and the loss is not finite itself


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the config builds, before any data is read."""

    config: RunConfig
    mesh: Mesh
    types: Dtypes
    optimizer: optax.GradientTransformation
    schedule: Schedule
    shardings: StateShardings
    loss: Loss

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of a [B, T] array."""
        return meshes.sharding(self.mesh, ("batch", None))

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        shapes = jax.eval_shape(lambda: init_state(self.config, self.optimizer))
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            self.shardings.state,
        )

    def abstract_weights(self) -> Weights:
        """The same of the parameters and the step alone."""
        abstract = self.abstract_state()
        return Weights(abstract.step, abstract.params)


def build_parts(config: RunConfig, devices: list | None = None) -> Parts:
    """Everything that needs no data; every impossible combination is a `UserError` here, before compilation."""
    devices = jax.devices() if devices is None else devices
    memory.layout(config, len(devices))  # dims that do not divide over the mesh
    attention.check_platform(config.model, devices[0].platform)
    mesh = meshes.make_mesh(config.mesh, devices)
    types = dtypes(config.train.precision, devices[0].platform)
    optimizer = build_optimizer(config.optim)
    return Parts(
        config=config,
        mesh=mesh,
        types=types,
        optimizer=optimizer,
        schedule=build_schedule(config.optim, config.train.steps),
        shardings=state_shardings(config, mesh, optimizer),
        loss=build_objective(config, types),
    )


# ------------------------------------------------------------------------------------------------------------------- train


def train(config: RunConfig, workdir: os.PathLike | str, distributed: bool = False) -> int:
    """Trains, or goes on where the workdir's newest checkpoint stands.

    Args:
      config: the run.
      workdir: its folder; the same on all processes.
      distributed: join other processes that the environment does not name (TPU pods, SLURM).

    Returns:
      Optimizer steps done.
    """
    multihost.initialize(distributed)
    workdir = epath.Path(workdir)
    use_compile_cache(workdir)
    tokenizer = open_tokenizer(config)
    parts = build_parts(config)
    reader = build_reader(config, workdir, functools.partial(multihost.local_rows, parts.batch_sharding))
    check_tokenizer(config, tokenizer, reader.sources[0].tokenizer)
    check_init_from(config, tokenizer)
    record = {
        "config": configs.to_dict(absolute_paths(config)),
        "tokenizer": tokenizer.fingerprint(),
        "data": reader.identity(),
        "code": files.code_version(),
    }
    notes = claim_workdir(workdir, record, tokenizer)
    notes += describe_data(config, reader)
    with meshes.use(parts.mesh), multihost.StopRequest() as request:
        state, start, more = initial_state(parts, workdir)
        stop = min(config.train.stop_at or config.train.steps, config.train.steps)
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
            loop = build_loop(parts, reader, saver, writer, request, start, stop)
            for note in [*notes, *more, *describe(parts, loop.speed)]:
                writer.say(note)
            _, done = loop.run(state, start, stop)
    return done


def build_loop(
    parts: Parts,
    reader: loader.StepReader,
    saver: save.Saver,
    writer: Writer,
    request: multihost.StopRequest,
    start: int,
    stop: int,
) -> Loop:
    """The loop's arguments."""
    config, data = parts.config, parts.config.data
    host_batches = loader.batches(reader, start, stop, data.num_workers, data.prefetch)
    peak = peak_flops(list(parts.mesh.devices.flat), config.train.precision, config.monitor.peak_flops)

    def training_flops(seq_len: int) -> float:
        return flops_per_token(config.model, seq_len).training

    return Loop(
        step=steps.build_step(config, parts.loss, parts.optimizer, parts.schedule, parts.mesh, parts.shardings),
        batches=multihost.on_devices(host_batches, parts.batch_sharding, reader.batch_rows),
        evaluate=build_evaluate(parts),
        saver=saver,
        writer=writer,
        speed=Speed(training_flops(data.seq_len), peak),
        should_stop=request.reached,
        tokens_per_step=config.train.batch_size * data.seq_len,
        flops_per_token=training_flops,
        log_every=config.monitor.log_every,
        eval_every=config.eval.every,
        save_every=config.checkpoint.every,
        max_skipped=FLOAT16_SKIPS if config.train.precision == "float16" else 0,
    )


def build_evaluate(parts: Parts, split: str | None = None, max_rows: int | str | None = "config"):
    """`evaluate(state) → metrics` on a held-out split.

    Args:
      parts: of the run.
      split: none: `config.data.eval_split`.
      max_rows: of each source; none: all; "config": `config.eval.rows`.
    """
    config = parts.config
    rows_of_batch = config.eval.batch_size or config.train.batch_size
    replicas = rules.num_shards(rules.RULES["batch"], dict(parts.mesh.shape))
    configs.need(
        rows_of_batch % replicas == 0, f"config.eval.batch_size={rows_of_batch} does not divide over {replicas} devices"
    )
    local = multihost.local_rows(parts.batch_sharding, rows_of_batch)
    limit = config.eval.rows if max_rows == "config" else max_rows
    step = steps.build_eval_step(parts.loss, parts.mesh, parts.shardings)
    sources = loader.eval_sources(config.data, split)

    def on_mesh(source):
        batches = loader.EvalBatches(source, config.data.seq_len, rows_of_batch, limit, local)
        placed = multihost.on_devices(enumerate(batches), parts.batch_sharding, lambda _: rows_of_batch)
        return (batch for _, batch in placed)

    def evaluate(state: TrainState | Weights) -> dict[str, float]:
        return perplexity.evaluate(step, state.params, {name: (s, on_mesh(s)) for name, s in sources.items()})

    return evaluate


def initial_state(parts: Parts, workdir: epath.Path) -> tuple[TrainState, int, list[str]]:
    """The newest readable checkpoint, or the state before the first step; with its step and what to tell."""
    if not checkpoint_steps(workdir):
        return first_state(parts)
    restored = restore.restore(workdir, parts.abstract_state())
    if int(restored.state.step) != restored.step:
        raise RuntimeError(f"checkpoint {restored.step} holds the state of step {int(restored.state.step)}")
    if restored.unreadable and multihost.is_primary():
        restore.set_aside(workdir, restored.step)
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
    shape = " × ".join(f"{name} {size}" for name, size in parts.mesh.shape.items())
    lengths = " → ".join(map(str, config.data.seq_lens))
    rows = "" if set(config.data.seq_lens) == {config.data.seq_len} else f", in rows of {lengths}"
    return [
        f"{params.total(config.model):,} parameters; {config.train.steps:,} steps of {config.train.batch_size} × "
        f"{config.data.seq_len} tokens{rows}; {config.optim.name}, {config.train.precision}",
        f"{devices.size} {devices.flat[0].device_kind} device(s), mesh {shape}; peak for MFU {speed.peak.source}",
        attention.describe(
            config.model, config.data.longest, parts.types, devices.flat[0].platform, parts.mesh.shape["context"]
        ),
    ]


def build_reader(
    config: RunConfig, workdir: os.PathLike | str, rows: Callable[[int], tuple[int, ...]] | None = None
) -> loader.StepReader:
    """The reader of a run's batches; `rows` gives this process's of a global batch of that many."""
    steps, packing_dir = config.train.steps, epath.Path(workdir) / PACKING
    return loader.build_train_reader(config.data, config.train.batch_size, config.seed, rows, steps, packing_dir)


def describe_data(config: RunConfig, reader: loader.StepReader) -> list[str]:
    """What the run reads of each source, where it has several or a cap; makes or verifies the rows of best-fit packing."""
    data, total = config.data, config.train.steps * config.train.batch_size * config.data.seq_len
    notes = reader.prepare(full=data.verify == "full")
    if len(reader.sources) > 1 or data.max_epochs or data.max_tokens:
        tokens = {source.name: source.num_tokens for source in reader.sources}
        notes += budget_lines(budget(tokens, data, total, config.train.steps))
    return notes


def announce(notes: list[str]) -> None:
    """Prints notes once, from the primary process."""
    if multihost.is_primary():
        for note in notes:
            print(note, flush=True)


# ----------------------------------------------------------------------------------------------------------------- workdir


def use_compile_cache(workdir: epath.Path) -> None:
    """Compiled programs are kept with a local run, so that a resume starts sooner; JAX_COMPILATION_CACHE_DIR wins."""
    if "://" not in os.fspath(workdir) and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(workdir / COMPILE_CACHE))


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """The run's tokenizer."""
    if not config.tokenizer:
        raise UserError("config.tokenizer names no folder made by `lmjax tokenizer`")
    return tokenizers.load(config.tokenizer)


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer, shards: str) -> None:
    """The model has a row for every id, and the shards hold this tokenizer's ids."""
    if config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"config.model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        )
    if shards != tokenizer.fingerprint():
        raise UserError(
            f"the shards {list(config.data.shards)} were made with another tokenizer than {config.tokenizer}; "
            "run `lmjax tokenize` with this one"
        )


def check_init_from(config: RunConfig, tokenizer: Tokenizer) -> None:
    """The run to begin from has the same model (but for experts, which a dense one may become) and the same tokenizer; each
    difference is named."""
    if config.init_from is None:
        return
    other, its_tokenizer = open_run(config.init_from)
    wanted = config.model if other.model.moe else dataclasses.replace(config.model, moe=None)
    differences = wanted.differences(other.model)
    if its_tokenizer.fingerprint() != tokenizer.fingerprint():
        differences.append("another tokenizer")
    if differences:
        raise UserError(f"config.init_from={config.init_from} is of another model: {'; '.join(differences)}")


def absolute_paths(config: RunConfig) -> RunConfig:
    """The config with local paths made absolute, so that a workdir can be used from anywhere."""

    def absolute(path: str) -> str:
        return path if "://" in path else os.path.abspath(path)

    shards, rows = config.data.shards, config.data.packing_dir
    data = dataclasses.replace(
        config.data, shards=tuple(map(absolute, shards)), packing_dir=None if rows is None else absolute(rows)
    )
    start = None if config.init_from is None else absolute(config.init_from)
    return dataclasses.replace(config, data=data, tokenizer=absolute(config.tokenizer), init_from=start)


def claim_workdir(workdir: epath.Path, record: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Makes the workdir this run's, or checks that it is; returns what to tell.

    Raises:
      UserError: it holds another run: a field that is not free, the tokenizer or the data differ. Each difference is named.
    """
    path = workdir / RUN
    if not path.exists():
        early = (COMPILE_CACHE, PACKING)  # another process of the run may be ahead
        if workdir.exists() and any(p.name not in early for p in workdir.iterdir()):
            raise UserError(f"{workdir} is not empty and is not the workdir of a run; choose another --workdir")
        if multihost.is_primary():
            tokenizer.save(workdir / TOKENIZER)
            files.write_json(path, record)
        return []
    before = files.read_json(path)
    changes = configs.diff(RunConfig, before["config"], record["config"])
    refused = [str(change) for change in changes if not change.free]
    refused += [f"{name}: another fingerprint" for name in ("tokenizer", "data") if before[name] != record[name]]
    if refused:
        raise UserError(
            f"{workdir} holds another run: {'; '.join(refused)}. Go on with its config, or choose another --workdir"
        )
    if changes and multihost.is_primary():
        files.write_json(path, record)
    return [f"changed since the run began: {change}" for change in changes]


def open_run(workdir: os.PathLike | str, overrides: list[str] | None = None) -> tuple[RunConfig, Tokenizer]:
    """The config of a run, with overrides of free fields, and its tokenizer."""
    path = epath.Path(workdir) / RUN
    if not path.exists():
        raise UserError(f"{workdir} holds no {RUN}: it is not the workdir of a run")
    values = files.read_json(path)["config"]
    for override in overrides or []:
        key = override.partition("=")[0]
        if not configs.is_free(RunConfig, key):
            raise UserError(f"config.{key} belongs to the run and cannot be changed after training")
        configs.set_override(values, override)
    return configs.build(RunConfig, values), tokenizers.load(epath.Path(workdir) / TOKENIZER)


# ------------------------------------------------------------------------------------------------ evaluate, generate, trace


def evaluate(workdir: os.PathLike | str, split: str, step: int | None, overrides: list[str]) -> dict[str, Any]:
    """Likelihood of the whole of a split, by source and together; with the checkpoint's step."""
    config, _ = open_run(workdir, overrides)
    parts = build_parts(config)
    with meshes.use(parts.mesh):
        restored = restore.restore(workdir, parts.abstract_weights(), step, partial=True)
        metrics = build_evaluate(parts, split, max_rows=None)(restored.state)
    announce(list(restored.unreadable))
    return {"step": restored.step, **metrics}


def find_needles(
    workdir: os.PathLike | str,
    documents: Iterable[Document],
    config: NeedleConfig,
    step: int | None,
    overrides: list[str],
) -> tuple[int, list[Cell]]:
    """A needle in a haystack of documents, by length and depth; with the checkpoint's step."""
    parts, tokenizer, weights, step = load_model(workdir, step, overrides)
    longest = max(config.lengths)
    if longest > parts.config.model.max_length:
        raise UserError(
            f"needle: {longest} tokens are more than config.model.max_length={parts.config.model.max_length}"
        )
    trials = needle.make_trials(config, documents, tokenizer)
    with meshes.use(parts.mesh):
        model = (parts.config.model, weights, parts.types)
        return step, needle.evaluate(trials, tokenizer, needle.greedy(*model, tokenizer), needle.likelihood(*model))


class Model(NamedTuple):
    """A run's model, to generate with."""

    parts: Parts
    tokenizer: Tokenizer
    params: Params
    step: int = 0


def load_model(workdir: os.PathLike | str, step: int | None, overrides: list[str]) -> Model:
    """Restores the parameters of a checkpoint."""
    config, tokenizer = open_run(workdir, overrides)
    parts = build_parts(config)
    with meshes.use(parts.mesh):
        restored = restore.restore(workdir, parts.abstract_weights(), step, partial=True)
    announce(list(restored.unreadable))
    return Model(parts, tokenizer, restored.state.params, restored.step)


def stream(
    model: Model, prompts: Sequence[str], max_tokens: int, sampling: Sampling, seeds: Sequence[int] | None = None
) -> Iterator[list[str]]:
    """See `generate`; with `seeds`, each prompt's draw is its own."""
    parts, tokenizer, weights, _ = model
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [np.array([*bos, *tokenizer.encode(prompt)], np.int32) for prompt in prompts]
    numbers = tokenizer.vocab_size, tokenizer.eos_id, seeds
    with meshes.use(parts.mesh):
        tokens = decode.generate(parts.config.model, weights, ids, max_tokens, sampling, parts.types, *numbers)
        yield from decode.stream_text(tokens, tokenizer, len(prompts))


def generate(
    workdir: os.PathLike | str,
    prompts: list[str],
    max_tokens: int,
    sampling: Sampling,
    step: int | None,
    overrides: list[str],
) -> Iterator[list[str]]:
    """Yields, as it is decoded, the text that each prompt gained: ["def", ""], [" f", "import"] …"""
    yield from stream(load_model(workdir, step, overrides), prompts, max_tokens, sampling)


def complete(
    model: Model, requests: Iterable[tuple[str, int]], max_tokens: int, sampling: Sampling, batch_size: int
) -> Iterator[str]:
    """What follows each (prompt, seed), decoded `batch_size` at a time."""
    requests = iter(requests)
    while batch := list(itertools.islice(requests, batch_size)):
        prompts, seeds = zip(*batch, strict=True)
        gained = stream(model, prompts, max_tokens, sampling, seeds)
        yield from map("".join, zip(*gained, strict=True))


# ------------------------------------------------------------------------------------------------------------ interchange


def import_hf(
    folder: os.PathLike | str, workdir: os.PathLike | str, tokenizer: str | None, overrides: list[str]
) -> tuple[str, RunConfig]:
    """Makes a folder of Hugging Face a workdir that evaluates, generates and is begun from; the family and the config.

    Args:
      folder: holds config.json, safetensors and the tokenizer.
      workdir: a new folder.
      tokenizer: a folder made by `lmjax tokenizer`, where the other holds none.
      overrides: of all but what the model is.
    """
    kind, model = load.read_config(folder)
    own = load.read_tokenizer(folder) if tokenizer is None else tokenizers.load(tokenizer)
    path = epath.Path(workdir)
    rows = math.lcm(RunConfig().train.batch_size, jax.device_count())
    values: dict[str, Any] = {
        "model": configs.to_dict(model),
        "tokenizer": os.fspath(path / TOKENIZER),
        "data": {"seq_len": min(model.max_length, IMPORT_SEQ_LEN)},
        "train": {"batch_size": rows},
    }
    for override in overrides:
        configs.set_override(values, override)
    config = configs.build(RunConfig, values)
    changed = config.model.differences(model)
    configs.need(not changed, f"an import keeps the model that config.json describes: {'; '.join(changed)}")
    check_tokenizer(config, own, own.fingerprint())
    parts = build_parts(config)
    record = {
        "config": configs.to_dict(absolute_paths(config)),
        "tokenizer": own.fingerprint(),
        "data": None,
        "code": files.code_version(),
        "imported": {"family": kind, "from": os.fspath(folder)},
    }
    files.claim(path, "hf-import")
    files.empty(path)
    with meshes.use(parts.mesh):
        params = load.load_params(folder, kind, model, parts.shardings.state.params)
        step = jax.device_put(np.zeros((), np.int32), meshes.replicated(parts.mesh))
        own.save(path / TOKENIZER)
        with save.Saver(path, config.checkpoint, record) as saver:
            saver.save(0, Weights(step, params))
    files.write_json(path / RUN, record)
    (path / files.UNFINISHED).unlink()
    return kind, config


def export_hf(workdir: os.PathLike | str, out: os.PathLike | str, step: int | None, dtype: str) -> tuple[str, int, int]:
    """Writes a checkpoint as a folder of Hugging Face; its family, step and vocabulary."""
    path = epath.Path(out)
    model = load_model(workdir, step, [])
    config = model.parts.config.model
    files.claim(path, "hf-export")
    files.empty(path)
    kind = export.write_folder(path, config, model.params, model.tokenizer, dtype)
    (path / files.UNFINISHED).unlink()
    return kind, model.step, model.tokenizer.vocab_size


def trace(workdir: os.PathLike | str, step: int) -> list[dict[str, Any]]:
    """The documents in each row of the global batch of a step."""
    config, _ = open_run(workdir)
    reader = build_reader(config, workdir)
    reader.prepare(full=config.data.verify == "full")
    return trace_step(reader, step)
