"""`lmjax scaling`: finished runs in, a law with intervals out, as a table and a plot. No jax."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from rich.console import Console
from rich.table import Table

from lmjax import config as configs
from lmjax import files
from lmjax.config import need
from lmjax.errors import UserError
from lmjax.monitor.write import read_metrics
from lmjax.plan import params
from lmjax.plan.scaling import Fit, Interval, fit
from lmjax.train.config import RunConfig

RUN = "run.json"
LOSS = "eval/loss"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a law takes of a run."""

    name: str
    parameters: int  # that a token runs through, embeddings included
    tokens: int  # positions trained on, those of the whole schedule
    loss: float  # nats a held-out token, after the last step
    measure: tuple[str, int]  # tokenizer and row length: losses of others do not compare


def read_run(workdir: os.PathLike | str) -> Run:
    """A run that reached its last step.

    Raises:
      UserError: it did not, or was not evaluated there.
    """
    path = epath.Path(workdir) / RUN
    need(path.exists(), f"{workdir} holds no {RUN}: it is not the workdir of a run")
    record = files.read_json(path)
    config = configs.build(RunConfig, record["config"])
    rows = read_metrics(workdir)
    done, steps = rows[-1]["step"] if rows else 0, config.train.steps
    need(done == steps, f"{workdir} stands at step {done} of {steps}: resume it, or move it away")
    last = [row for row in rows if row["step"] == steps and LOSS in row]
    need(bool(last), f"{workdir} was not evaluated at its last step")
    loss = last[-1][LOSS]
    need(math.isfinite(loss), f"{workdir}: its {LOSS} is {loss}")
    measure = str(record["tokenizer"]), config.data.seq_len
    return Run(path.parent.name, params.active(config.model), last[-1]["tokens"], loss, measure)


def read_runs(folder: os.PathLike | str, against: str | None = None) -> list[Run]:
    """All runs of a folder, each in a folder of its own; without that which the law is held against."""
    folder = epath.Path(folder)
    need(folder.is_dir(), f"--runs {folder}: no such folder")
    left_out = against and os.path.realpath(against)
    paths = [path for path in sorted(folder.iterdir()) if os.path.realpath(path) != left_out]
    runs = [read_run(path) for path in paths if (path / RUN).exists()]
    need(bool(runs), f"--runs {folder} holds no workdirs of runs")
    check_measure(runs)
    return runs


def check_measure(runs: Sequence[Run]) -> None:
    """Losses over other pieces or in other rows are other quantities."""
    for run in runs:
        need(
            run.measure == runs[0].measure,
            f"{run.name} has another tokenizer or config.data.seq_len than {runs[0].name}: their losses do not compare",
        )


def fit_runs(runs: Sequence[Run], resamples: int, level: float, seed: int) -> Fit:
    """The law of the runs."""
    columns = ((run.parameters, run.tokens, run.loss) for run in runs)
    return fit(*(np.array(column, float) for column in zip(*columns, strict=True)), resamples, level, seed)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A law, and what was asked of it."""

    runs: list[Run]
    fit: Fit
    size: tuple[float, float] | None = None  # parameters and tokens of a larger run
    against: Run | None = None  # a run of that size, which took no part in the fit
    budget: float | None = None  # FLOPs

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values: dict[str, Any] = {"runs": [dataclasses.asdict(run) for run in self.runs], "level": self.fit.level}
        values["coefficients"] = intervals(self.fit.coefficients())
        if self.size is not None:
            parameters, tokens = self.size
            loss = dataclasses.asdict(self.fit.predict(*self.size))
            values["prediction"] = {"parameters": parameters, "tokens": tokens, "loss": loss}
        if self.against is not None:
            values["prediction"] |= {"reached": self.against.loss, "inside": self.inside}
        if self.budget is not None:
            values["optimal"] = {"training_flops": self.budget, **intervals(self.fit.optimal(self.budget))}
        return values

    @property
    def inside(self) -> bool:
        """Whether the run that is compared ended inside the interval."""
        predicted = self.fit.predict(*self.size)
        return predicted.low <= self.against.loss <= predicted.high


def intervals(values: dict[str, Interval]) -> dict[str, Any]:
    """As plain values."""
    return {name: dataclasses.asdict(value) for name, value in values.items()}


def answer(
    folder: os.PathLike | str,
    size: tuple[float | None, float | None] = (None, None),
    against: str | None = None,
    budget: float | None = None,
    options: tuple[int, float, int] = (500, 0.9, 0),
) -> Answer:
    """Fits the law of a folder's runs.

    Args:
      folder: of the workdirs.
      size: parameters and tokens to predict for, both or none.
      against: the workdir of a finished run to predict and compare with.
      budget: FLOPs to spend best.
      options: resamples, level and seed of the intervals.
    """
    parameters, tokens = size
    need((parameters is None) == (tokens is None), "--parameters and --tokens go together")
    need(against is None or parameters is None, "--against brings its own --parameters and --tokens")
    for name, value in (("parameters", parameters), ("tokens", tokens), ("budget", budget)):
        need(value is None or (value > 0 and math.isfinite(value)), f"--{name} must be positive and finite")
    need(options[-1] >= 0, f"--seed {options[-1]} must not be negative")
    runs = read_runs(folder, against)
    other = None if against is None else read_run(against)
    if other is not None:
        check_measure([runs[0], other])
        parameters, tokens = other.parameters, other.tokens
    wanted = None if parameters is None else (float(parameters), float(tokens))
    return Answer(runs, fit_runs(runs, *options), wanted, other, budget)


# --------------------------------------------------------------------------------------------------------------- rendering


def show(result: Answer) -> None:
    """Prints tables."""
    console = Console(highlight=False, soft_wrap=True)
    percent = f"{result.fit.level:.0%} interval"
    columns = ("run", "parameters", "tokens", "loss (nats)", "law")
    table = Table(*columns, title="runs", title_justify="left", show_edge=False)
    for run in sorted(result.runs, key=lambda run: (run.parameters, run.tokens)):
        law = float(result.fit.law.loss(float(run.parameters), float(run.tokens)))
        table.add_row(run.name, f"{run.parameters:,}", f"{run.tokens:,}", f"{run.loss:.4f}", f"{law:.4f}")
    console.print(table)
    table = Table("L = E + A / N^α + B / D^β", "fit", percent, title="law", title_justify="left", show_edge=False)
    for name, value in result.fit.coefficients().items():
        table.add_row(name, f"{value.value:.4g}", between(value))
    console.print("\n", table)
    if result.size is not None:
        parameters, tokens = result.size
        console.print(
            f"\n{parameters:,.0f} parameters on {tokens:,.0f} tokens: {said(result.fit.predict(*result.size), '.4f')} nats"
        )
    if result.against is not None:
        where = "inside" if result.inside else "outside"
        console.print(f"{result.against.name} reached {result.against.loss:.4f}: {where} the interval")
    if result.budget is not None:
        best = result.fit.optimal(result.budget)
        console.print(f"\n{result.budget:.3g} FLOPs are best spent on")
        for name, value in best.items():
            console.print(f"  {name:<12}{said(value, '.4f' if name == 'loss' else ',.3g')}")


def between(value: Interval, form: str = ".4g") -> str:
    """Low and high."""
    return f"{value.low:{form}} to {value.high:{form}}"


def said(value: Interval, form: str) -> str:
    """A value and its interval."""
    return f"{value.value:{form}} ({between(value, form)})"


def plot(result: Answer, path: str) -> None:
    """Losses over tokens, a colour for each size: runs, the law, and what is predicted; the suffix says the format.

    Raises:
      UserError: matplotlib is missing, does not know the suffix, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'lmjax[notebook]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    suffix = os.path.splitext(path)[1].lstrip(".").lower()
    need(suffix in kinds, f"--plot {path}: the suffix must be one of {', '.join(sorted(kinds))}")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="tokens", ylabel="held-out loss (nats)")
    lengths = [run.tokens for run in result.runs] + ([result.size[1]] if result.size else [])
    line = np.geomspace(min(lengths), max(lengths), 60)
    for number, size in enumerate(sorted({run.parameters for run in result.runs})):
        color = f"C{number}"
        runs = [run for run in result.runs if run.parameters == size]
        axes.plot(
            [run.tokens for run in runs], [run.loss for run in runs], "o", color=color, label=f"{size:,} parameters"
        )
        axes.plot(line, result.fit.law.loss(float(size), line), "-", color=color, linewidth=1)
    if result.size is not None:
        predicted = result.fit.predict(*result.size)
        bars = [[predicted.value - predicted.low], [predicted.high - predicted.value]]
        label = f"predicted, {result.size[0]:,.0f} parameters"
        axes.errorbar(
            [result.size[1]], [predicted.value], yerr=np.maximum(bars, 0), fmt="s", color="k", capsize=4, label=label
        )
    if result.against is not None:
        axes.plot([result.against.tokens], [result.against.loss], "*", color="r", markersize=11, label="reached")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}") from error
