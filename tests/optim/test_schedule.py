"""Golden values of every schedule at its boundaries: an error of one step shows."""

import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.optim.config import OptimConfig
from lmjax.optim.schedule import build_schedule


def values(steps, *at, **fields):
    schedule = build_schedule(OptimConfig(learning_rate=2.0, **fields), steps)
    return [float(schedule(step)) for step in at]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_warmup_is_linear_from_zero_and_peaks_at_its_end(name):
    at = values(100, 0, 1, 5, 9, 10, schedule=name, warmup_steps=10)
    np.testing.assert_allclose(at, [0.0, 0.2, 1.0, 1.8, 2.0], rtol=1e-6)


def test_without_warmup_the_first_step_is_at_the_peak():
    assert values(100, 0, schedule="cosine", warmup_steps=0) == [2.0]


def test_linear_and_cosine_end_at_the_last_step():
    np.testing.assert_allclose(
        values(101, 0, 25, 50, 99, 100, schedule="linear", warmup_steps=0, final_ratio=0.0),
        [2.0, 1.5, 1.0, 0.02, 0.0], atol=1e-6,
    )  # fmt: skip
    np.testing.assert_allclose(
        values(101, 0, 25, 50, 100, schedule="cosine", warmup_steps=0, final_ratio=0.5),
        [2.0, 1.0 + 0.5 + 0.5 * np.sqrt(0.5), 1.5, 1.0], rtol=1e-6,
    )  # fmt: skip


def test_wsd_is_flat_until_its_decay():
    at = values(101, 10, 79, 80, 90, 100, schedule="wsd", warmup_steps=10, decay_steps=20, final_ratio=0.1)
    np.testing.assert_allclose(at, [2.0, 2.0, 2.0, 1.1, 0.2], rtol=1e-6)


def test_inverse_square_root():
    np.testing.assert_allclose(
        values(1000, 16, 64, 400, schedule="inverse_sqrt", warmup_steps=16), [2.0, 1.0, 0.4], rtol=1e-6
    )


def test_wsd_decays_in_the_last_fifth_and_may_begin_right_at_the_peak():
    at = values(10, 0, 7, 8, 9, schedule="wsd", warmup_steps=7, final_ratio=0.0)
    np.testing.assert_allclose(at, [0.0, 2.0, 1.0, 0.0], atol=1e-6)
    assert values(10, 8, 9, schedule="wsd", warmup_steps=9, decay_steps=0)[1] == 2.0


@pytest.mark.parametrize(
    "steps,fields,message",
    [
        (100, {"schedule": "wsd", "warmup_steps": 60, "decay_steps": 50}, "decay_steps=50 must together be less than"),
        (100, {"schedule": "wsd", "warmup_steps": 50, "decay_steps": 50}, "decay_steps=50 must together be less than"),
        (100, {"schedule": "wsd"}, r"warmup_steps=100 and decay_steps=20 \(a fifth of the run\) must .*steps=100"),
        (10, {"schedule": "wsd", "warmup_steps": 8}, r"decay_steps=2 \(a fifth"),
        (100, {"schedule": "cosine", "warmup_steps": 101}, r"warmup_steps=101 exceed config\.train\.steps=100"),
    ],
)
def test_warmup_and_decay_must_fit_into_the_run(steps, fields, message):
    with pytest.raises(UserError, match=message):
        values(steps, 0, **fields)
