"""The progress line, on a terminal and off it."""

import io

import pytest
from rich.console import Console

from lmjax.monitor.progress import Progress, describe, duration

ROW = {"step": 10, "train/loss": 3.14159, "train/learning_rate": 3e-4, "speed/tokens_per_s": 12345.6, "speed/step_s": 2.0,
       "speed/mfu": 0.4123}  # fmt: skip


def test_a_row_in_words():
    assert (
        describe(ROW, 100) == "step 10/100  loss 3.1416  lr 0.0003  12,346 tokens/s  2 s/step  mfu 41.2%  3m 00s left"
    )
    assert (
        describe({"step": 10, "eval/loss": 2.0, "eval/perplexity": 7.389}, None)
        == "step 10  eval loss 2.0000  perplexity 7.389"
    )


@pytest.mark.parametrize(
    "seconds, text", [(7.2, "7s"), (306.0, "5m 06s"), (11040.0, "3h 04m"), (93600.0, "1d 02h"), (59.7, "1m 00s")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_off_a_terminal_lines_are_few_and_plain():
    """A row a second for 25 s: a line at 0, 10, 20 and the run's end; evaluations always."""
    out, now = io.StringIO(), [0.0]
    progress = Progress(25, Console(file=out), every_s=10.0, clock=lambda: now[0])
    for step in range(26):
        now[0] = float(step)
        progress.show({"step": step})
    progress.show({"step": 25, "eval/loss": 1.0})
    progress.close()
    assert out.getvalue() == "step 0/25\nstep 10/25\nstep 20/25\nstep 25/25\nstep 25/25  eval loss 1.0000\n"


def test_on_a_terminal_the_line_is_live():
    out = io.StringIO()
    progress = Progress(100, Console(file=out, force_terminal=True, width=150))
    progress.show(ROW)
    progress.say("a note")
    progress.close()
    assert "step 10/100" in out.getvalue() and "a note" in out.getvalue() and "\x1b[" in out.getvalue()
