"""What the rule filters share: limits, shares, and how options are checked.

Each set of rules is a stage in a file of its own, whose thresholds are its fields; `None` turns a rule off. The first rule that
a document breaks names its drop. Order and strictness are those of datatrove 0.10.
"""

from lmjax.config import need
from lmjax.data.stage import MapStage


def share(part: int | float, whole: int) -> float:
    """part / whole; nothing of nothing is 0."""
    return part / whole if whole else 0.0


def above(value: int | float, limit: int | float | None) -> bool:
    """Whether a rule with an upper limit is broken."""
    return limit is not None and value > limit


def below(value: int | float, limit: int | float | None) -> bool:
    """Whether a rule with a lower limit is broken."""
    return limit is not None and value < limit


def shown(value: int | float) -> float:
    """A figure as a drop's detail."""
    return round(float(value), 4)


def check_shares(stage: MapStage, *names: str) -> None:
    """These fields are shares: from 0 to 1."""
    for name in names:
        value = getattr(stage, name)
        need(value is None or 0 <= value <= 1, f"{stage.name}.{name}={value} must be a share from 0 to 1, or none")


def check_counts(stage: MapStage, *names: str) -> None:
    """These fields count something."""
    for name in names:
        value = getattr(stage, name)
        need(value is None or value >= 0, f"{stage.name}.{name}={value} must be at least 0, or none")


def check_order(stage: MapStage, low: str, high: str) -> None:
    """What passes one limit must be able to pass the other."""
    least, most = getattr(stage, low), getattr(stage, high)
    need(
        least is None or most is None or least <= most,
        f"{stage.name}.{low}={least} is above {stage.name}.{high}={most}: nothing would pass",
    )


def count_duplicates(parts: list[str]) -> tuple[int, int]:
    """(number, characters) of the parts that stood before."""
    if len(set(parts)) == len(parts):
        return 0, 0
    seen, number, size = set(), 0, 0
    for part in parts:
        if part in seen:
            number, size = number + 1, size + len(part)
        seen.add(part)
    return number, size
