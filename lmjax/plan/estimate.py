"""What a run costs before it is started: all figures of a plan, worked out. No jax: it answers at once."""

import dataclasses
import math

from lmjax.config import need
from lmjax.plan import cost, hardware, memory, params, time
from lmjax.plan import search as searching
from lmjax.plan.flops import Flops, flops_per_token
from lmjax.sharding.stages import Schedule
from lmjax.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What a plan needs and a config does not tell; each is an argument of `lmjax plan`."""

    mfu: float = 0.4  # what well-tuned dense models reach on accelerators
    tokens: int | None = None  # of the run; none: as many as config.train.steps
    budget_usd: float | None = None
    usd_per_hour: float | None = None  # of a device; none: the table's
    watts: float | None = None  # of a device; none: the table's
    pue: float | None = None  # none: the table's
    grid: str = "us"  # a name of the table, or kg of CO2e for a kWh
    preemptions_per_day: float = 1.0  # of the whole run
    save_s: float = 30.0  # that a checkpoint holds the run up
    restart_s: float = 300.0  # from a preemption until steps go on
    slices: int | None = None  # of TPUs, or nodes of GPUs; none: one slice, or as many nodes as the GPUs fill

    def __post_init__(self):
        need(0 < self.mfu <= 1, f"--mfu {self.mfu} must be in (0, 1]")
        need(self.tokens is None or self.tokens >= 1, f"--tokens {self.tokens} must be positive")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            finite = not isinstance(value, float) or math.isfinite(value)
            need(finite, f"--{field.name.replace('_', '-')} {value} must be a finite number")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a sum of money buys at the stated MFU, on however many devices."""

    usd: float
    flops: float  # model FLOPs
    tokens: float  # of this model
    optimal_params: float  # of the dense model that is compute-optimal for it


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a plan says once an accelerator is named."""

    accelerator: hardware.Accelerator
    slices: int  # that the devices are of
    seconds: float  # of the run at the stated MFU
    step_s: float
    rates: cost.Rates
    bill: cost.Cost
    budget: Budget | None
    roofline: time.Roofline
    cadence: time.Cadence
    better: list[searching.Candidate]  # of the same run on as many devices, fastest first
    fewest_devices: int | None  # where nothing fits on these: on how many something does


@dataclasses.dataclass(frozen=True)
class Plan:
    """Parameters, FLOPs, memory, time and cost of a run."""

    config: RunConfig
    assumed: Assumptions
    params_by_group: dict[str, int]
    params: int
    params_active: int  # that a token runs through
    params_non_embedding: int
    flops_per_token: Flops
    tokens_per_step: int
    tokens: int
    training_flops: float  # model FLOPs of the whole run
    num_devices: int
    mesh: dict[str, int]
    pipeline: Schedule  # one tick without stages
    memory: memory.Memory  # bytes of one device
    costs: Costs | None  # none without an accelerator

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens for each parameter that a token runs through."""
        return self.tokens / self.params_active

    @property
    def optimal_tokens(self) -> int:
        """Chinchilla's: 20 for each parameter that a token runs through (arXiv 2203.15556)."""
        return cost.TOKENS_PER_PARAMETER * self.params_active

    @property
    def device_flops(self) -> float:
        """Hardware FLOPs of a device in a step of the longest rows."""
        return self.flops_per_token.hardware * self.tokens_per_step / self.num_devices

    @property
    def hbm_share(self) -> float | None:
        """The device's bytes over its HBM."""
        return None if self.costs is None else self.memory.total / self.costs.accelerator.hbm_bytes


def plan(
    config: RunConfig,
    num_devices: int | None = None,
    hardware_name: str | None = None,
    assumed: Assumptions = Assumptions(),
) -> Plan:
    """What the run costs.

    Args:
      config: the run.
      num_devices: none: as many as the mesh states, an axis of -1 being 1.
      hardware_name: a name of `lmjax.plan.hardware`, for the time, the cost and the share of HBM.
      assumed: what else it rests on.

    Raises:
      UserError: the run does not divide over the devices, or the hardware is unknown.
    """
    accelerator = None if hardware_name is None else hardware.by_name(hardware_name)
    need(num_devices is None or num_devices >= 1, f"--devices {num_devices} must be at least 1")
    num_devices = config.mesh.fewest_devices if num_devices is None else num_devices
    tokens_per_step = config.train.batch_size * config.data.seq_len
    if assumed.tokens is not None:
        steps = -(-assumed.tokens // tokens_per_step)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    prefix = memory.prefix_shape(config)[0]
    training_flops = sum(
        flops_per_token(config.model, length, prefix=prefix).training * tokens_per_step * steps
        for length, steps in config.data.stage_steps(config.train.steps)
    )
    where = memory.layout(config, num_devices)
    return Plan(
        config=config,
        assumed=assumed,
        params_by_group=params.count_by_group(config.model),
        params=params.total(config.model),
        params_active=params.active(config.model),
        params_non_embedding=params.non_embedding(config.model),
        flops_per_token=flops_per_token(
            config.model, config.data.longest, accelerator and accelerator.platform, prefix=prefix
        ),
        tokens_per_step=tokens_per_step,
        tokens=tokens_per_step * config.train.steps,
        training_flops=training_flops,
        num_devices=num_devices,
        mesh=where.sizes,
        pipeline=where.pipeline,
        memory=memory.memory(config, num_devices),
        costs=None if accelerator is None else costs(config, num_devices, accelerator, training_flops, assumed),
    )


def costs(
    config: RunConfig, num_devices: int, accelerator: hardware.Accelerator, training_flops: float, assumed: Assumptions
) -> Costs:
    """Time, money, energy, and what would be better."""
    peak = accelerator.peak_flops(config.train.precision)
    seconds = time.run_seconds(training_flops, num_devices, peak, assumed.mfu)
    rates = cost.rates(accelerator, assumed.usd_per_hour, assumed.watts, assumed.pue, assumed.grid)
    budget = None
    if assumed.budget_usd is not None:
        price = rates.usd_per_hour.value
        need(price is not None, f"--budget-usd: no price of {accelerator.name} is known; state one with --usd-per-hour")
        flops = cost.budget_flops(assumed.budget_usd, price, peak, assumed.mfu)
        each = flops_per_token(config.model, config.data.longest, prefix=memory.prefix_shape(config)[0]).training
        budget = Budget(assumed.budget_usd, flops, flops / each, cost.optimal_parameters(flops))
    step_s = seconds / config.train.steps
    slices = time.count_slices(accelerator, num_devices, assumed.slices)
    better = searching.search(config, num_devices, accelerator, slices)
    return Costs(
        accelerator=accelerator,
        slices=slices,
        seconds=seconds,
        step_s=step_s,
        rates=rates,
        bill=cost.cost(seconds / 3600 * num_devices, rates),
        budget=budget,
        roofline=time.roofline(config, num_devices, accelerator, slices),
        cadence=time.cadence(assumed.save_s, assumed.restart_s, assumed.preemptions_per_day, step_s),
        better=better,
        fewest_devices=None if better else searching.fewest_devices(config, accelerator),
    )
