"""The bill is arithmetic on rates that have a source; what has none stays unknown."""

import pytest

from lmjax.errors import UserError
from lmjax.plan import cost, hardware

H100 = hardware.by_name("h100")


def test_the_bill():
    bill = cost.cost(1000.0, cost.rates(H100, usd_per_hour=2.0, watts=500.0, pue=1.2, grid="0.1"))
    assert (bill.usd, bill.energy_kwh, bill.kg_co2e) == pytest.approx((2000.0, 600.0, 60.0))


def test_the_tables_rates_hold_unless_others_are_stated():
    rates = cost.rates(H100)
    assert rates.usd_per_hour is H100.usd_per_hour and rates.pue is hardware.PUE["gpu"]
    assert cost.rates(H100, grid="europe-west4").kg_per_kwh.value == 0.19435


def test_unknown_stays_unknown():
    """No power is published for v5p: no energy, no emissions, but a price."""
    bill = cost.cost(10.0, cost.rates(hardware.by_name("v5p")))
    assert bill.usd == pytest.approx(42.0) and bill.energy_kwh is None and bill.kg_co2e is None


def test_every_figure_has_a_source():
    figures = [figure for row in hardware.ACCELERATORS for figure in (row.watts, row.usd_per_hour)]
    for figure in (*figures, *hardware.PUE.values(), *hardware.GRIDS.values()):
        assert figure.source and (figure.value is None or figure.value > 0)
    assert all(row.source for row in hardware.ACCELERATORS)


def test_chinchillas_optimum():
    """70 billion parameters on 1.4 trillion tokens is what its 5.9e23 FLOPs are best spent on."""
    assert cost.optimal_parameters(6 * 70e9 * 1.4e12) == pytest.approx(70e9)


@pytest.mark.parametrize("grid", ["mars", "-1", "nan"])
def test_a_grid_that_is_none(grid):
    with pytest.raises(UserError, match="--grid"):
        cost.grid_intensity(grid)
