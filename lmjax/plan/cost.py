"""What a run costs: money, energy and emissions; and what a budget buys.

usd         device-hours · price
energy      device-hours · power · PUE
emissions   energy · intensity of the grid (location-based: what the grid emits, whatever was bought; Patterson et al., 2021, 2104.10350)
optimum     N parameters on 20 N tokens cost 6 N · 20 N FLOPs (Hoffmann et al., 2022, 2203.15556)
"""

import dataclasses
import math

from lmjax.config import did_you_mean, need
from lmjax.errors import UserError
from lmjax.plan.hardware import GRIDS, PUE, Accelerator, Figure

TOKENS_PER_PARAMETER = 20  # Chinchilla's optimum
STATED = "stated"


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the bill is made from; each with its source, or unknown."""

    usd_per_hour: Figure  # of a device
    watts: Figure  # of a device
    pue: Figure
    kg_per_kwh: Figure  # CO2e


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a whole run; none: a rate is unknown."""

    device_hours: float
    usd: float | None
    energy_kwh: float | None
    kg_co2e: float | None


def rates(
    accelerator: Accelerator,
    usd_per_hour: float | None = None,
    watts: float | None = None,
    pue: float | None = None,
    grid: str = "us",
) -> Rates:
    """The table's rates, or those that are stated.

    Args:
      accelerator: the device.
      usd_per_hour, watts, pue: none: the table's.
      grid: a name of `hardware.GRIDS`, or kg of CO2e for a kWh.
    """
    for name, value in (("--usd-per-hour", usd_per_hour), ("--watts", watts)):
        need(value is None or value > 0, f"{name} {value} must be positive")
    need(pue is None or pue >= 1, f"--pue {pue} must be at least 1")
    return Rates(
        accelerator.usd_per_hour if usd_per_hour is None else Figure(usd_per_hour, STATED),
        accelerator.watts if watts is None else Figure(watts, STATED),
        PUE[accelerator.platform] if pue is None else Figure(pue, STATED),
        grid_intensity(grid),
    )


def grid_intensity(grid: str) -> Figure:
    """kg of CO2e for a kWh, by the name of a grid or as a number."""
    if grid in GRIDS:
        return GRIDS[grid]
    try:
        value = float(grid)
    except ValueError:
        raise UserError(
            f"--grid {grid!r} is no number of kg/kWh, and not in the table{did_you_mean(grid, GRIDS)}"
        ) from None
    need(value >= 0 and math.isfinite(value), f"--grid {grid} kg/kWh must not be negative")
    return Figure(value, STATED)


def cost(device_hours: float, at: Rates) -> Cost:
    """The bill of so many hours of one device."""
    energy = times(device_hours / 1000, at.watts.value, at.pue.value)
    return Cost(
        device_hours, times(device_hours, at.usd_per_hour.value), energy, times(1.0, energy, at.kg_per_kwh.value)
    )


def times(*factors: float | None) -> float | None:
    """The product; none where a factor is unknown."""
    return None if None in factors else math.prod(factors)


def budget_flops(usd: float, usd_per_hour: float, peak_flops: float, mfu: float) -> float:
    """Model FLOPs that a budget buys, on however many devices."""
    need(usd > 0, f"--budget-usd {usd} must be positive")
    return usd / usd_per_hour * 3600 * peak_flops * mfu


def optimal_parameters(flops: float) -> float:
    """Parameters of the compute-optimal dense model for so many FLOPs, by Chinchilla's rule."""
    return math.sqrt(flops / (6 * TOKENS_PER_PARAMETER))
