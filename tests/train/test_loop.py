"""The loop alone, with a step that does nothing: what is evaluated and saved, and in which order, when it is asked to end."""

from unittest.mock import create_autospec

import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.checkpoint.save import Saver
from lmjax.monitor.speed import Speed
from lmjax.monitor.watchdog import Watchdog
from lmjax.monitor.write import Writer
from lmjax.train.loop import Loop
from lmjax.train.state import LossScale, TrainState

BATCH = Batch(*(np.zeros((1, 2), kind) for kind in (np.int32, np.int32, np.float32, np.int32, np.int32)))
STATE = TrainState(np.zeros((), np.int32), {}, None, LossScale(np.ones((), np.float32), np.zeros((), np.int32)), None)
LAST = 6


def happened(asked: int | None, start: int = 0) -> list[tuple[str, int]]:
    """What a run does that evaluates every 2 and saves every 3 steps, and is asked to end after step `asked`."""
    seen: list[tuple[str, int]] = []
    saver, writer, watchdog, speed = (create_autospec(kind, instance=True) for kind in (Saver, Writer, Watchdog, Speed))
    saver.save.side_effect = lambda done, _: seen.append(("save", done))
    saver.wait.side_effect = lambda: seen.append(("wait", 0))
    writer.write.side_effect = lambda done, values: seen.append(("evaluate", done)) if "eval/loss" in values else None
    loop = Loop(
        step=lambda _: lambda state, _: (state, {"train/skipped": jnp.zeros(())}),
        batches=((step, BATCH) for step in range(start, LAST)),
        evaluate=lambda _: {"eval/loss": 1.0},
        saver=saver,
        writer=writer,
        watchdog=watchdog,
        speed=speed,
        should_stop=lambda done: done == asked,
        tokens_per_step=2,
        flops_per_token=lambda _: 1.0,
        log_every=100,
        eval_every=2,
        save_every=3,
        max_skipped=0,
    )
    loop.run(STATE, start, LAST)
    return seen


WHOLE = [("evaluate", 2), ("save", 3), ("evaluate", 4), ("evaluate", 6), ("save", 6), ("wait", 0)]


def test_each_is_done_where_it_is_due():
    assert happened(asked=None) == WHOLE


def test_asked_to_end_at_the_last_step_it_evaluates_before_it_saves():
    """A checkpoint of the last step says that nothing is left to do."""
    assert happened(asked=LAST) == WHOLE


def test_asked_to_end_where_an_evaluation_is_due_it_evaluates_when_the_checkpoint_is_on_disk():
    assert happened(asked=4)[2:] == [("save", 4), ("wait", 0), ("evaluate", 4), ("wait", 0)]


@pytest.mark.parametrize("asked", range(1, LAST))
def test_a_run_that_was_asked_to_end_evaluates_what_a_straight_one_does(asked):
    found = happened(asked) + happened(None, start=asked)
    assert [what for what in found if what[0] == "evaluate"] == [what for what in WHOLE if what[0] == "evaluate"]
