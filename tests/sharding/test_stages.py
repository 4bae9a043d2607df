"""The schedule of a pipeline: every micro-batch meets every chunk of layers, in order, one at a time."""

import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.sharding.stages import Schedule, check_layers, schedule

SCHEDULES = [Schedule(4, 1, 8), Schedule(4, 2, 8), Schedule(2, 3, 2), Schedule(3, 4, 6), Schedule(1, 1, 1)]


@pytest.mark.parametrize("plan", SCHEDULES, ids=str)
def test_every_micro_batch_goes_through_all_chunks_in_order(plan):
    assert plan.ticks == plan.micro_batches * plan.repeats + plan.stages - 1
    rounds, numbers = plan.visits()
    times = plan.times()
    assert rounds.shape == numbers.shape == (plan.ticks, plan.stages)
    # A stage does one thing at a tick, and no two ticks do the same.
    seen = np.unique(times.transpose(1, 0, 2, 3).reshape(plan.stages, -1), axis=1)
    assert seen.shape[1] == plan.repeats * plan.micro_batches
    for place in range(plan.stages):
        for group in range(plan.groups):
            path = times[:, :, place, group].reshape(-1)  # by chunk: round after round, in each the stages in order
            np.testing.assert_array_equal(np.diff(path), 1)
            at = path.reshape(plan.repeats, plan.stages)
            stage = np.arange(plan.stages)
            np.testing.assert_array_equal(numbers[at, stage], place * plan.groups + group)
            np.testing.assert_array_equal(rounds[at, stage], np.arange(plan.repeats)[:, None] + 0 * stage)


def test_without_a_number_as_many_micro_batches_as_the_rows_allow():
    assert schedule(4, 1, 64, None).micro_batches == 16
    assert schedule(4, 1, 8, None).micro_batches == 8
    assert schedule(4, 1, 12, None).micro_batches == 12
    assert schedule(2, 1, 14, None).micro_batches == 2
    assert schedule(4, 2, 8, 4) == Schedule(4, 2, 4)
    assert "8 micro-batches × 1 round(s) in 11 ticks, of which the bubble is 27%" in Schedule(4, 1, 8).describe()


@pytest.mark.parametrize(
    "rows, micro_batches, message",
    [
        (6, None, r"config\.mesh\.stage=4 does not divide the 6 rows of a replica"),
        (8, 6, r"config\.model\.micro_batches=6 does not divide by config\.mesh\.stage=4"),
        (12, 8, r"config\.model\.micro_batches=8 does not divide the 12 rows"),
    ],
)
def test_rows_that_do_not_divide(rows, micro_batches, message):
    with pytest.raises(UserError, match=message):
        schedule(4, 1, rows, micro_batches)


def test_layers_that_do_not_divide():
    check_layers("abababab", 2, 2)
    check_layers("abababa", 1, 3)
    with pytest.raises(UserError, match=r"num_layers=6 does not divide by config\.mesh\.stage=4"):
        check_layers("aaaaaa", 4, 1)
    with pytest.raises(
        UserError, match=r"num_layers=4 does not divide by config\.mesh\.stage=4 × config\.model\.stage_repeats=2"
    ):
        check_layers("aaaa", 4, 2)
    with pytest.raises(UserError, match="chunks of 3 that are not alike"):
        check_layers("ababab", 2, 1)
