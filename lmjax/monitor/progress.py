"""The progress line: live on a terminal, a plain line every few seconds elsewhere (a log file, a batch job)."""

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows rows as they are written."""

    def __init__(
        self,
        total_steps: int | None = None,
        console: Console | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          total_steps: of the whole run, for the bar and the time left.
          console: where to print; none: stdout.
          every_s: seconds between plain lines; a terminal's line follows every row.
          clock: seconds, rising.
        """
        self.total_steps, self.every_s, self.clock = total_steps, every_s, clock
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.printed_at = -float("inf")
        self.bar = self.task = None
        if self.console.is_terminal:
            self.bar = RichProgress(BarColumn(), TextColumn("{task.description}", markup=False), console=self.console)
            self.task = self.bar.add_task("", total=total_steps)
            self.bar.start()

    def show(self, row: Mapping[str, int | float]) -> None:
        """Shows a row: one with evaluations always, others as the line's pace allows."""
        text = describe(row, self.total_steps)
        if any(name.startswith("eval/") for name in row):
            self.say(text)
        elif self.bar is not None:
            self.bar.update(self.task, completed=row["step"], description=text)
        elif self.clock() - self.printed_at >= self.every_s or row["step"] == self.total_steps:
            self.printed_at = self.clock()
            self.say(text)

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, markup=False, soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Leaves the last state of the line on the terminal."""
        if self.bar is not None:
            self.bar.stop()


SHOWN = {
    "train/loss": "loss {:.4f}",
    "train/grad_norm": "grad {:.3g}",
    "train/learning_rate": "lr {:.3g}",
    "speed/tokens_per_s": "{:,.0f} tokens/s",
    "speed/step_s": "{:.3g} s/step",
    "speed/mfu": "mfu {:.1%}",
    "eval/loss": "eval loss {:.4f}",
    "eval/perplexity": "perplexity {:.4g}",
    "eval/bits_per_byte": "{:.4f} bits/byte",
}


def describe(row: Mapping[str, int | float], total_steps: int | None) -> str:
    """A row as a person reads it: where the run is, the main numbers, and the time left."""
    parts = [f"step {row['step']}" + ("" if total_steps is None else f"/{total_steps}")]
    parts += [text.format(row[name]) for name, text in SHOWN.items() if name in row]
    if total_steps is not None and "speed/step_s" in row and row["step"] < total_steps:
        parts.append(f"{duration((total_steps - row['step']) * row['speed/step_s'])} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as `1d 02h`, `3h 04m`, `5m 06s` or `7s`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}h"
    return f"{h}h {m:02}m" if h else f"{m}m {s:02}s" if m else f"{s}s"
