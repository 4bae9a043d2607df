"""`lmjax plan`: a plan on one page, or as JSON."""

import dataclasses
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lmjax.plan import hardware, time
from lmjax.plan.estimate import Costs, Plan
from lmjax.plan.search import HEADROOM

TIGHT = 1 - HEADROOM  # share of HBM above which the estimates' error decides


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
        "optimal_tokens": result.optimal_tokens,
        "training_flops": result.training_flops,
        "num_devices": result.num_devices,
        "mesh": result.mesh,
        "pipeline": dataclasses.asdict(result.pipeline) | {"ticks": result.pipeline.ticks},
        "memory_bytes_per_device": dataclasses.asdict(result.memory) | {"total": result.memory.total},
        "assumed": dataclasses.asdict(result.assumed),
    }
    costs = result.costs
    if costs is not None:
        values["hardware"] = dataclasses.asdict(costs.accelerator)
        values |= {"hbm_share": result.hbm_share, "mfu": result.assumed.mfu, "seconds": costs.seconds}
        values |= {"slices": costs.slices, "step_s": costs.step_s, "rates": dataclasses.asdict(costs.rates)}
        values["cost"] = dataclasses.asdict(costs.bill)
        values["budget"] = None if costs.budget is None else dataclasses.asdict(costs.budget)
        values["roofline"] = roofline_dict(costs.roofline)
        values["checkpoints"] = dataclasses.asdict(costs.cadence)
        values["better"] = [
            {
                "overrides": list(one.overrides),
                "memory_bytes": one.memory_bytes,
                "roofline": roofline_dict(one.roofline),
            }
            for one in costs.better
        ]
        values["fewest_devices"] = costs.fewest_devices
    return values


def roofline_dict(roofline: time.Roofline) -> dict[str, Any]:
    """As JSON values."""
    return dataclasses.asdict(roofline) | {"step_s": roofline.step_s, "limit": roofline.limit}


# --------------------------------------------------------------------------------------------------------------- rendering


def show(result: Plan) -> None:
    """Prints the plan."""
    Console(highlight=False, soft_wrap=True).print(render(result))


def render(result: Plan) -> Group:
    """The plan as rich renders it."""
    parts: list[Any] = [params_table(result), flops_table(result), memory_table(result)]
    if result.costs is None:
        lines = ["", *layout_lines(result), "Name an accelerator with --hardware for time, cost and fit."]
        return Group(*parts, *map(Text, lines))
    parts.append(time_table(result, result.costs))
    parts += [Text(line) for line in notes(result, result.costs)]
    return Group(*parts)


def layout_lines(result: Plan) -> list[str]:
    """How the run lies over its devices."""
    mesh = "mesh: " + " × ".join(f"{axis} {size}" for axis, size in result.mesh.items())
    return [mesh] if result.pipeline.stages == 1 else [mesh, result.pipeline.describe()]


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
    made.add_row("tokens a parameter (active)", f"{result.tokens_per_parameter:.3g}", "")
    made.add_row(
        "compute-optimal tokens (Chinchilla)",
        si(float(result.optimal_tokens)),
        f"{result.optimal_tokens / result.tokens:.0%}",
    )
    return made


def memory_table(result: Plan) -> Table:
    """Bytes of one device by part, and what the temporaries are when they are most."""
    used = result.memory
    made = table(f"\nMemory of each of {result.num_devices} device(s)", "part", "bytes", "of HBM")
    hbm = None if result.costs is None else result.costs.accelerator.hbm_bytes

    def row(label: str, size: int) -> None:
        made.add_row(label, gib(size), "" if hbm is None else f"{size / hbm:.1%}")

    for name in ("params", "optimizer", "batch"):
        row(name, getattr(used, name))
    row("temporaries (estimate)", used.temporaries)
    for part, size in sorted(used.held.items(), key=lambda item: -item[1]):
        row(f"  in the {used.phase}: {part}", size)
    made.add_section()
    row("total", used.total)
    if used.host:
        made.add_row("in its host's memory: optimizer", gib(used.host), "")
    return made


def time_table(result: Plan, costs: Costs) -> Table:
    """Time, money, energy, emissions, each with what it rests on."""
    made = Table(title="\nTime and cost", title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for column, side in (("", "left"), ("", "right"), ("at", "left")):
        made.add_column(column, justify=side)
    bill, rates, line = costs.bill, costs.rates, costs.roofline
    made.add_row("time", duration(costs.seconds), f"{result.assumed.mfu:.0%} MFU (--mfu); a step {costs.step_s:.3g} s")
    least = f"the hardware's peaks; limited by {line.limit}"
    made.add_row("a step at the least", f"{line.step_s:.3g} s", least)
    if costs.slices > 1:
        rate = figure(costs.accelerator.network_bytes_per_s, "", " B/s a device", "")
        made.add_row("between slices", f"{line.network_s:.3g} s", f"{costs.slices} (--slices), of gradients; {rate}")
    made.add_row("device-hours", f"{bill.device_hours:,.0f}", f"{result.num_devices} × {costs.accelerator.name}")
    made.add_row("cost", shown(bill.usd, "${:,.0f}"), figure(rates.usd_per_hour, "$", " an hour", "--usd-per-hour"))
    power = figure(rates.watts, "", " W", "--watts")
    made.add_row("energy", shown(bill.energy_kwh, "{:,.0f} kWh"), f"{power}; PUE {figure(rates.pue, '', '', '--pue')}")
    made.add_row("emissions", shown(bill.kg_co2e, "{:,.0f} kg CO2e"), figure(rates.kg_per_kwh, "", " kg/kWh", "--grid"))
    cadence, assumed = costs.cadence, result.assumed
    rests = f"{assumed.preemptions_per_day:g} preemptions a day, {assumed.save_s:g} s a save, {assumed.restart_s:g} s a restart"
    lost = f"{cadence.lost_share:.1%} of the time is lost (the config saves every {result.config.checkpoint.every:,})"
    made.add_row("a checkpoint every", f"{cadence.steps:,} steps", f"{duration(cadence.interval_s)}; {rests}: {lost}")
    if costs.budget is not None:
        budget = costs.budget
        model = f"compute-optimal: {si(budget.optimal_params)} parameters on {si(20 * budget.optimal_params)} tokens"
        made.add_row(f"${budget.usd:,.0f} buys", f"{si(budget.tokens)} tokens", f"of this model; {model}")
    return made


def notes(result: Plan, costs: Costs) -> list[str]:
    """Whether it fits, and what would be better."""
    row, share = costs.accelerator, result.hbm_share
    chips, hosts = -(-result.num_devices // row.devices_per_chip), -(-result.num_devices // row.devices_per_host)
    verdict = "does not fit" if share > 1 else "is tight: compile it before relying on it" if share > TIGHT else "fits"
    lines = [
        "",
        *layout_lines(result),
        f"{result.num_devices} × {row.name} ({chips} chip(s), {hosts} host(s) of {row.devices_per_host}); {row.source}",
        f"{gib(result.memory.total)} of {gib(row.hbm_bytes)} HBM {verdict}",
    ]
    if not costs.better:
        where = f"; {costs.fewest_devices} are enough" if costs.fewest_devices else ""
        return [*lines, f"No mesh, remat and micro-batch of this run fits on {result.num_devices} devices{where}."]
    best = costs.better[0]
    gain = costs.roofline.step_s / best.roofline.step_s
    if share <= TIGHT and gain < 1.01:
        return [*lines, "By the roofline no other mesh, remat or micro-batch that fits is faster."]
    what = "Fits" if share > TIGHT else f"Faster by the roofline ({gain:.2f} ×)"
    return [
        *lines,
        f"{what}, at {gib(best.memory_bytes)} and {best.roofline.step_s:.3g} s a step:",
        "  " + " ".join(best.overrides),
    ]


def shown(value: float | None, form: str) -> str:
    """A value, or that it is unknown."""
    return "unknown" if value is None else form.format(value)


def figure(rate: hardware.Figure, before: str, unit: str, argument: str) -> str:
    """A rate with its source, or the argument that states it."""
    if rate.value is None:
        return f"unknown ({rate.source}): state it with {argument}"
    return f"{before}{rate.value:g}{unit} ({rate.source})"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    for size, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:.3g} s"


def si(value: float) -> str:
    """A count with a prefix: 1.23 G."""
    for exponent, prefix in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.3f} {prefix}"
    return f"{value:.0f}"


def gib(size: int) -> str:
    """Bytes as GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
