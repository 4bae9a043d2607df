"""What a config builds, without a step being taken: mesh, optimizer, loss, shardings, readers, evaluation."""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import optax
from etils import epath
from jax.sharding import Mesh, NamedSharding

from lmjax import config as configs
from lmjax.data import eval_batches, loader
from lmjax.data.features import open_features
from lmjax.eval import perplexity
from lmjax.model import attention, fp8
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dtypes
from lmjax.model.pattern import kinds
from lmjax.optim import compress
from lmjax.optim.build import build_optimizer
from lmjax.optim.config import CompressConfig, OptimConfig
from lmjax.optim.schedule import Schedule, build_schedule
from lmjax.plan import memory
from lmjax.sharding import mesh as meshes
from lmjax.sharding import multihost, rules
from lmjax.sharding.stages import check_layers
from lmjax.train import step as steps
from lmjax.train.config import RunConfig
from lmjax.train.objective import Loss, build_objective
from lmjax.train.state import StateShardings, TrainState, Weights, init_state, state_shardings
from lmjax.workdir import PACKING


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

    def with_model(self, model: ModelConfig) -> "Parts":
        """The same for the model with another rope; see `RunConfig.model_at`."""
        if model == self.config.model:
            return self
        config = dataclasses.replace(self.config, model=model, rope_stages=())
        return dataclasses.replace(self, config=config, loss=build_objective(config, self.types))

    def abstract_state(self) -> TrainState:
        """The state as shapes, dtypes and shardings."""
        with meshes.use(self.mesh):
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
    memory.layout(config, len(devices))  # rows, and dims of parameters, that do not divide over the mesh
    fp8.check_platform(config.train.precision, devices[0])
    mesh = meshes.make_mesh(config.mesh, devices)
    compress.check(config.compress, dict(mesh.shape))
    if config.mesh.offload:
        meshes.check_offload(devices[0])
    return assemble(config, mesh)


def build_reading_parts(config: RunConfig) -> Parts:
    """The same to evaluate, generate or export: the parameters must divide over the mesh; what rows must, their verb knows."""
    devices = jax.devices()
    config = for_reading(config, devices[0])
    mesh = meshes.make_mesh(config.mesh, devices)
    sizes = meshes.sizes(mesh)
    memory.check_experts(config.model, sizes)
    memory.check_divides(config.model, sizes)
    check_layers(kinds(config.model), sizes["stage"], config.model.stage_repeats)
    return assemble(config, mesh)


def for_reading(config: RunConfig, device: jax.Device) -> RunConfig:
    """The config without what training alone asks of a machine. These fields belong to the run: whoever reads it elsewhere could
    not change them."""
    emulated = config.train.precision == "fp8" and not fp8.has_units(device)  # the same numbers, slower
    precision = "fp8_emulated" if emulated else config.train.precision
    return dataclasses.replace(
        config,
        optim=OptimConfig(schedule="constant", warmup_steps=0),  # none is used: the simplest state and schedule
        compress=CompressConfig(),
        train=dataclasses.replace(config.train, accumulation=1, precision=precision),
        mesh=dataclasses.replace(config.mesh, offload=False),
    )


def assemble(config: RunConfig, mesh: Mesh) -> Parts:
    """The parts of a config that fits its mesh."""
    platform = mesh.devices.flat[0].platform
    attention.check_platform(config.model, platform)
    types = dtypes(config.train.precision, platform)
    optimizer = build_optimizer(config.optim, 1.0 / config.model.width_ratio)
    return Parts(
        config=config,
        mesh=mesh,
        types=types,
        optimizer=optimizer,
        schedule=build_schedule(config.optim, config.train.steps),
        shardings=state_shardings(config, mesh, optimizer),
        loss=build_objective(config, types),
    )


def build_reader(
    config: RunConfig, workdir: os.PathLike | str, rows: Callable[[int], tuple[int, ...]] | None = None
) -> loader.StepReader:
    """The reader of a run's batches; `rows` gives this process's of a global batch of that many."""
    steps, packing_dir = config.train.steps, epath.Path(workdir) / PACKING
    reader = loader.build_train_reader(config.data, config.train.batch_size, config.seed, rows, steps, packing_dir)
    for features in reader.features.values():
        configs.need(
            features.shape[1] == config.model.prefix_dim,
            f"{features.path}: features have width {features.shape[1]}; config.model.prefix_dim={config.model.prefix_dim}",
        )
    return reader


def as_training(config: RunConfig, rows_of_batch: int) -> RunConfig:
    """An evaluation as the training whose rows divide over a mesh where its own do."""
    data = dataclasses.replace(config.data, stages=())  # every row has `seq_len` tokens
    train = dataclasses.replace(config.train, batch_size=rows_of_batch, accumulation=1)
    return dataclasses.replace(config, data=data, train=train, rope_stages=())


def build_evaluate(
    parts: Parts,
    split: str | None = None,
    max_rows: int | str | None = "config",
    moves: Callable[[], None] = lambda: None,
):
    """`evaluate(state) → metrics` on a held-out split.

    Args:
      parts: of the run.
      split: none: `config.data.eval_split`.
      max_rows: of each source; none: all; "config": `config.eval.rows`.
      moves: called with each batch.
    """
    config = parts.config
    rows_of_batch = config.eval.batch_size or config.train.batch_size
    replicas = rules.num_shards(rules.RULES["batch"], meshes.sizes(parts.mesh))
    configs.need(
        rows_of_batch % replicas == 0, f"config.eval.batch_size={rows_of_batch} does not divide over {replicas} devices"
    )
    memory.layout(as_training(config, rows_of_batch), parts.mesh.devices.size)
    local = multihost.local_rows(parts.batch_sharding, rows_of_batch)
    limit = config.eval.rows if max_rows == "config" else max_rows
    sources = eval_batches.eval_sources(config.data, split)
    features = open_features(config.data.features, list(sources.values()))

    def on_mesh(source):
        before = features.get(source.name)
        batches = eval_batches.EvalBatches(source, config.data.seq_len, rows_of_batch, limit, local, before)
        placed = multihost.on_devices(enumerate(batches), parts.batch_sharding, lambda _: rows_of_batch)
        for _, batch in placed:
            moves()
            yield batch

    @functools.cache
    def step_of(model: ModelConfig) -> Callable:
        return steps.build_eval_step(parts.with_model(model).loss, parts.mesh, parts.shardings)

    def evaluate(state: TrainState | Weights) -> dict[str, float]:
        step = step_of(config.model_after(int(state.step)))
        return perplexity.evaluate(step, state.params, {name: (s, on_mesh(s)) for name, s in sources.items()})

    return evaluate
