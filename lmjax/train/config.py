"""RunConfig: everything that a training run is."""

import dataclasses
from typing import Literal

from lmjax.config import free, need
from lmjax.data.config import DataConfig
from lmjax.model.config import ModelConfig, RopeScaling
from lmjax.optim.config import CompressConfig, OptimConfig
from lmjax.sharding.config import MeshConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop and the step."""

    steps: int = 1000  # optimizer steps of the whole run; schedules end here
    stop_at: int | None = free(None)  # end this process after that step, with a checkpoint; the run goes on from it
    batch_size: int = 8  # rows of a global batch
    accumulation: int = 1  # micro-batches whose summed gradients make one step; divides batch_size
    precision: Literal["float32", "bfloat16", "float16", "fp8", "fp8_emulated"] = "bfloat16"
    # of the matrix products; parameters, softmax and losses stay float32. float16 scales the loss dynamically; fp8: the layers'
    # products in e4m3 and e5m2, all else bfloat16, on chips that have them; emulated: the same numbers anywhere, slower
    z_loss: float = 0.0  # weight of log² Z, keeps the logits' normalizer near 1 (PaLM: 1e-4)
    loss_chunk: int = free(1024)  # tokens of one device whose logits exist at one time

    def __post_init__(self):
        need(self.steps >= 1, f"config.train.steps={self.steps} must be at least 1")
        need(
            self.batch_size >= 1 and self.accumulation >= 1,
            "config.train: batch_size and accumulation must be at least 1",
        )
        need(self.loss_chunk >= 1, f"config.train.loss_chunk={self.loss_chunk} must be at least 1")
        need(self.z_loss >= 0, f"config.train.z_loss={self.z_loss} must not be negative")
        need(
            self.batch_size % self.accumulation == 0,
            f"config.train.batch_size={self.batch_size} does not divide by accumulation={self.accumulation}",
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation on the held-out split, inside the loop."""

    every: int | None = free(250)  # steps between evaluations; none: at the end only
    rows: int | None = free(256)  # rows of each source; none: all
    batch_size: int | None = free(None)  # rows of an evaluation batch; none: train.batch_size

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            need(value is None or value >= 1, f"config.eval.{name}={value} must be at least 1, or none")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = free(500)  # steps between checkpoints; one is always written at the end
    keep: int = free(2)  # newest checkpoints kept
    keep_every: int | None = free(None)  # checkpoints at multiples of this are kept for good

    def __post_init__(self):
        need(self.every >= 1, f"config.checkpoint.every={self.every} must be at least 1")
        need(self.keep >= 1, f"config.checkpoint.keep={self.keep} must be at least 1")
        need(
            self.keep_every is None or self.keep_every >= 1,
            f"config.checkpoint.keep_every={self.keep_every} must be at least 1, or none",
        )


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """What is written, and how often."""

    log_every: int = free(10)  # steps between rows of metrics.jsonl
    tensorboard: bool = free(True)
    peak_flops: float | None = free(None)  # FLOP/s of one device, for MFU; none: from the table, or measured on a CPU
    hang_after_s: float | None = free(300.0)  # a step that takes longer ends the run, and the stuck process is named
    # (compiling, evaluating, saving: six times as long). Steps take up to a minute, and an idle pod costs as much as a busy
    # one; left alone, the processes wait for each other ten minutes on a CPU and for ever on a TPU. None: for ever

    def __post_init__(self):
        need(self.log_every >= 1, f"config.monitor.log_every={self.log_every} must be at least 1")
        need(
            self.peak_flops is None or self.peak_flops > 0,
            f"config.monitor.peak_flops={self.peak_flops} must be positive, or none",
        )
        need(
            self.hang_after_s is None or self.hang_after_s > 0,
            f"config.monitor.hang_after_s={self.hang_after_s} must be positive, or none",
        )


@dataclasses.dataclass(frozen=True)
class RopeStage:
    """Another rope from one step on, for rows that get longer (`data.stages`)."""

    from_step: int  # the first step that uses it; before the first stage it is the model's own
    theta: float | None = None  # none: model.rope_theta
    scaling: RopeScaling | None = None  # none: model.rope_scaling


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run. Fields marked `free` may change between a run and its resumption; no other may."""

    seed: int = 0  # of the initial parameters, the order of the data and dropout
    objective: Literal["next_token"] = "next_token"
    init_from: str | None = None  # workdir of a run or an import: begin with its newest parameters, all else fresh
    tokenizer: str = free("")  # folder made by `lmjax tokenizer`; a run keeps a copy, compared by fingerprint
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    mesh: MeshConfig = dataclasses.field(
        default_factory=MeshConfig, metadata={"free": True}
    )  # checkpoints fit any mesh
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    compress: CompressConfig = dataclasses.field(default_factory=CompressConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
    rope_stages: tuple[
        RopeStage, ...
    ] = ()  # a checkpoint evaluates, generates and exports with the rope of its last step

    def __post_init__(self):
        model, data = self.model, self.data
        need(
            model.moe is None or not self.train.precision.startswith("fp8"),
            f"config.train.precision={self.train.precision!r}: the products of config.model.moe have no form in eight bits",
        )
        need(
            model.prefix_dim is None or self.mesh.context == 1,
            "config.mesh.context splits rows, before whose text config.model.prefix_dim puts features",
        )
        need(
            not data.features or model.prefix_dim is not None,
            "config.data.features need config.model.prefix_dim, the width of the features",
        )
        need(
            model.position != "learned" or data.seq_len <= model.max_length,
            f"config.data.seq_len={data.seq_len} exceeds config.model.max_length={model.max_length} of learned positions",
        )
        need(
            not data.stages or data.longest <= max(data.seq_len, model.max_length),
            f"config.data.stages: seq_len={data.longest} exceeds config.model.max_length={model.max_length}",
        )
        for rows in data.stage_rows(self.train.batch_size):
            need(
                rows % self.train.accumulation == 0,
                f"config.data.stages: {rows} rows of a step do not divide by train.accumulation={self.train.accumulation}",
            )
        self.check_ropes()

    def check_ropes(self) -> None:
        """Stages rise, and no row is longer than a scaling is made for."""
        steps = [stage.from_step for stage in self.rope_stages]
        need(steps == sorted(set(steps)) and min(steps, default=0) >= 0, f"config.rope_stages must rise: {steps}")
        need(not steps or self.model.position == "rope", "config.rope_stages need config.model.position='rope'")
        lengths = dict(zip(self.data.from_steps, self.data.seq_lens, strict=True))
        for step in sorted({*lengths, *steps}) if steps else ():
            length, scaling = (
                lengths[max(start for start in lengths if start <= step)],
                self.model_at(step).rope_scaling,
            )
            need(
                scaling is None or scaling.kind != "yarn" or length <= scaling.factor * scaling.original_length,
                f"config.rope_stages: rows of {length} tokens at step {step} are longer than yarn's factor × original_length",
            )

    def model_at(self, step: int) -> ModelConfig:
        """The model with the rope of a step."""
        begun = [stage for stage in self.rope_stages if stage.from_step <= step]
        if not begun:
            return self.model
        theta, scaling = begun[-1].theta or self.model.rope_theta, begun[-1].scaling or self.model.rope_scaling
        return dataclasses.replace(self.model, rope_theta=theta, rope_scaling=scaling)

    def model_after(self, steps: int) -> ModelConfig:
        """The model that so many steps have trained: with the rope of the last of them."""
        return self.model_at(max(steps - 1, 0))
