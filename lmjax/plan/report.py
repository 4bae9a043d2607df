"""`lmjax plan`: what a run costs before it is started, on one page. No jax: it answers at once."""

import dataclasses
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lmjax.config import need
from lmjax.plan import hardware, memory, params
from lmjax.plan.flops import Flops, flops_per_token
from lmjax.train.config import RunConfig

MFU = 0.4  # assumed where none is stated: what well-tuned dense models reach on accelerators
TIGHT = 0.9  # share of HBM above which the estimates' error decides


@dataclasses.dataclass(frozen=True)
class Plan:
    """Parameters, FLOPs, memory and time of a run."""

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
    memory: memory.Memory  # bytes of one device
    accelerator: hardware.Accelerator | None
    mfu: float
    seconds: float | None  # of the whole run at that MFU; none without an accelerator

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens for each parameter; about 20 is compute-optimal (Chinchilla, arXiv 2203.15556)."""
        return self.tokens / self.params

    @property
    def hbm_share(self) -> float | None:
        """The device's bytes over its HBM."""
        return None if self.accelerator is None else self.memory.total / self.accelerator.hbm_bytes


def plan(config: RunConfig, num_devices: int | None = None, hardware_name: str | None = None, mfu: float = MFU) -> Plan:
    """What the run costs.

    Args:
      config: the run.
      num_devices: none: as many as the mesh states, an axis of -1 being 1.
      hardware_name: a name of `lmjax.plan.hardware`, for the time and the share of HBM.
      mfu: model FLOPs utilization to assume for the time.

    Raises:
      UserError: the run does not divide over the devices, or the hardware is unknown.
    """
    need(0 < mfu <= 1, f"--mfu {mfu} must be in (0, 1]")
    accelerator = None if hardware_name is None else hardware.by_name(hardware_name)
    num_devices = config.mesh.fewest_devices if num_devices is None else num_devices
    flops = flops_per_token(config.model, config.data.longest)
    tokens_per_step = config.train.batch_size * config.data.seq_len
    tokens = tokens_per_step * config.train.steps
    training_flops = sum(
        flops_per_token(config.model, length).training * tokens_per_step * steps
        for length, steps in config.data.stage_steps(config.train.steps)
    )
    peak = None if accelerator is None else num_devices * accelerator.peak_flops(config.train.precision)
    return Plan(
        params_by_group=params.count_by_group(config.model),
        params=params.total(config.model),
        params_active=params.active(config.model),
        params_non_embedding=params.non_embedding(config.model),
        flops_per_token=flops,
        tokens_per_step=tokens_per_step,
        tokens=tokens,
        training_flops=training_flops,
        num_devices=num_devices,
        mesh=memory.layout(config, num_devices).sizes,
        memory=memory.memory(config, num_devices),
        accelerator=accelerator,
        mfu=mfu,
        seconds=None if peak is None else training_flops / (peak * mfu),
    )


def to_dict(result: Plan) -> dict[str, Any]:
    """The plan as JSON values, for `--json`; names carry their units."""
    flops = result.flops_per_token
    values = {
        "params": result.params_by_group
        | {
            "total": result.params,
            "active": result.params_active,
            "non_embedding": result.params_non_embedding,
        },
        "flops_per_token": dataclasses.asdict(flops)
        | {"forward": flops.forward, "training": flops.training, "hardware": flops.hardware},
        "tokens_per_step": result.tokens_per_step,
        "tokens": result.tokens,
        "tokens_per_parameter": result.tokens_per_parameter,
        "training_flops": result.training_flops,
        "num_devices": result.num_devices,
        "mesh": result.mesh,
        "memory_bytes_per_device": dataclasses.asdict(result.memory) | {"total": result.memory.total},
    }
    if result.accelerator is not None:
        values["hardware"] = dataclasses.asdict(result.accelerator)
        values |= {"hbm_share": result.hbm_share, "mfu": result.mfu, "seconds": result.seconds}
    return values


# --------------------------------------------------------------------------------------------------------------- rendering


def show(result: Plan) -> None:
    """Prints the plan."""
    Console(highlight=False, soft_wrap=True).print(render(result))


def render(result: Plan) -> Group:
    """The plan as rich renders it."""
    parts: list[Any] = [params_table(result), flops_table(result), memory_table(result)]
    parts += [Text(line) for line in notes(result)]
    return Group(*parts)


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False, width=72)
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left", ratio=(4, 2, 1)[place])
    return made


def params_table(result: Plan) -> Table:
    """Parameters by group."""
    made = table("Parameters", "group", "count", "share")
    for name, count in result.params_by_group.items():
        made.add_row(name, f"{count:,}", f"{count / result.params:.1%}")
    made.add_section()
    made.add_row("total", f"{result.params:,}", "100.0%")
    if result.params_active < result.params:
        made.add_row(
            "that a token runs through", f"{result.params_active:,}", f"{result.params_active / result.params:.1%}"
        )
    made.add_row("without embedding and head", f"{result.params_non_embedding:,}", "")
    return made


def flops_table(result: Plan) -> Table:
    """FLOPs of a token, and of the run."""
    flops = result.flops_per_token
    made = table("\nFLOPs and tokens", "", "count", "share")
    for name in ("qkv", "attention", "out", "mlp", "head"):
        made.add_row(
            f"{name}, forward, a token", si(getattr(flops, name)), f"{getattr(flops, name) / flops.forward:.1%}"
        )
    made.add_section()
    made.add_row("training, a token (model FLOPs)", si(flops.training), "")
    made.add_row("recomputed, a token (remat)", si(flops.recomputed), f"{flops.recomputed / flops.training:.1%}")
    made.add_row("training, the run", si(result.training_flops), "")
    made.add_row("tokens a step", f"{result.tokens_per_step:,}", "")
    made.add_row("tokens, the run", f"{result.tokens:,}", "")
    made.add_row("tokens a parameter", f"{result.tokens_per_parameter:.3g}", "")
    return made


def memory_table(result: Plan) -> Table:
    """Bytes of one device by part."""
    made = table(f"\nMemory of each of {result.num_devices} device(s)", "part", "bytes", "of HBM")
    hbm = None if result.accelerator is None else result.accelerator.hbm_bytes
    estimates = ("activations", "loss_head", "gathered")
    for name, size in (dataclasses.asdict(result.memory) | {"total": result.memory.total}).items():
        if name == "total":
            made.add_section()
        label = name.replace("_", " ") + (" (estimate)" if name in estimates else "")
        made.add_row(label, gib(size), "" if hbm is None else f"{size / hbm:.1%}")
    return made


def notes(result: Plan) -> list[str]:
    """What the tables do not say: the hardware, the time, whether it fits."""
    lines = ["", "mesh: " + " × ".join(f"{axis} {size}" for axis, size in result.mesh.items())]
    if result.accelerator is None:
        return [*lines, "Name an accelerator with --hardware for the time and the share of its memory."]
    row, share = result.accelerator, result.hbm_share
    chips, hosts = -(-result.num_devices // row.devices_per_chip), -(-result.num_devices // row.devices_per_host)
    lines.append(
        f"{result.num_devices} × {row.name} ({chips} chip(s), {hosts} host(s) of {row.devices_per_host}); {row.source}"
    )
    verdict = "does not fit" if share > 1 else "is tight: compile it before relying on it" if share > TIGHT else "fits"
    lines.append(f"{gib(result.memory.total)} of {gib(row.hbm_bytes)} HBM {verdict}")
    hours = result.seconds / 3600
    lines.append(f"At {result.mfu:.0%} MFU: {hours:,.2f} hours, {hours * result.num_devices:,.2f} device-hours")
    return lines


def si(value: float) -> str:
    """A count with a prefix: 1.23 G."""
    for exponent, prefix in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.3f} {prefix}"
    return f"{value:.0f}"


def gib(size: int) -> str:
    """Bytes as GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
