"""What the compiler says of a step for a slice, beside what was planned, as JSON and as a page. No jax.

Times are bounds, of nothing but peaks:

    compute      FLOPs of a device / its peak
    communicate  Σ bytes that a device sends / bandwidth of the links in the torus dims over which it sends
"""

import dataclasses
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lmjax.plan.report import gib, si


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of a kind over the same mesh axes, in one step, of one device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    sent_bytes: float
    overlapped_bytes: float  # of those, sent while other work runs
    seconds: float  # at the links' peak


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step of a slice; bytes, FLOPs and seconds are of one device."""

    topology: str
    num_devices: int
    mesh: dict[str, int]
    hbm_bytes: int
    fits: bool
    needed_bytes: int  # at the peak: what is passed in, what comes out beside it, and temporaries
    argument_bytes: int | None  # state and batch; this and all below: none where it does not fit
    temporary_bytes: int | None
    code_bytes: int | None
    flops: float | None  # hardware FLOPs of a step
    compute_s: float | None
    traffic: tuple[Traffic, ...]
    compile_s: float

    @property
    def communicate_s(self) -> float:
        """All collectives one after another."""
        return sum(row.seconds for row in self.traffic)

    @property
    def overlapped_share(self) -> float:
        """Of the bytes sent, those that other work runs beside."""
        sent = sum(row.sent_bytes for row in self.traffic)
        return sum(row.overlapped_bytes for row in self.traffic) / sent if sent else 1.0


def to_dict(result: Compiled) -> dict[str, Any]:
    """As JSON values."""
    values = dataclasses.asdict(result)
    return values | {"communicate_s": result.communicate_s, "overlapped_share": result.overlapped_share}


def show(result: Compiled, planned_bytes: int, planned_flops: float) -> None:
    """Prints it beside the plan's bytes and hardware FLOPs of a device."""
    Console(highlight=False, soft_wrap=True).print(render(result, planned_bytes, planned_flops))


def render(result: Compiled, planned_bytes: int, planned_flops: float) -> Group:
    """As rich renders it."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in result.mesh.items() if size > 1) or "one device"
    share = f"{result.needed_bytes / result.hbm_bytes:.1%} of {gib(result.hbm_bytes)}"
    title = Text(
        f"\nCompiled for {result.topology}: {result.num_devices} devices, {mesh}, {result.compile_s:.0f} s", "bold"
    )
    off = f"planned {gib(planned_bytes)}, {planned_bytes / result.needed_bytes - 1:+.1%}"
    if not result.fits:
        of = " of temporaries" if result.argument_bytes is None else ""  # a refusal names no more
        needed = f"does not fit: {gib(result.needed_bytes)}{of}, and {gib(result.hbm_bytes)} of HBM are free"
        return Group(title, Text(f"{needed} (planned {gib(planned_bytes)} in all)"))
    lines = [
        f"memory     {gib(result.needed_bytes)} a device, {share} ({off}): "
        f"{gib(result.argument_bytes)} arguments, {gib(result.temporary_bytes)} temporaries; code {gib(result.code_bytes)}",
        f"FLOPs      {si(result.flops)} a device (planned {si(planned_flops)}, {planned_flops / result.flops - 1:+.1%})"
        if result.flops is not None
        else f"FLOPs      planned {si(planned_flops)} a device; the compiler does not see into a GPU's libraries",
        f"a step     {computing(result)}communicating {result.communicate_s:.3g} s at the hardware's peaks; "
        f"{result.overlapped_share:.0%} of the bytes sent beside other work",
    ]
    return Group(title, *map(Text, lines), traffic_table(result))


def computing(result: Compiled) -> str:
    """The time of the products, where they are known."""
    return "" if result.compute_s is None else f"computing {result.compute_s:.3g} s, "


def traffic_table(result: Compiled) -> Table:
    """The collectives."""
    made = Table(
        title="\nCollectives of a step", title_justify="left", title_style="bold", show_edge=False, pad_edge=False
    )
    for place, column in enumerate(("kind", "axes", "count", "sent by a device", "beside work", "seconds")):
        made.add_column(column, justify="left" if place < 2 else "right")
    for row in result.traffic:
        beside = f"{row.overlapped_bytes / row.sent_bytes:.0%}" if row.sent_bytes else ""
        size = gib(round(row.sent_bytes))
        made.add_row(row.kind, ", ".join(row.axes), f"{row.count:,}", size, beside, f"{row.seconds:.3g}")
    return made
