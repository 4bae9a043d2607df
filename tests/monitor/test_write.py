"""The record survives kills, torn lines and resumes; its views hold the same numbers."""

import json
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from lmjax.errors import UserError
from lmjax.monitor import write
from lmjax.monitor.progress import Progress
from lmjax.monitor.write import Writer, read_metrics


class Said(Progress):
    """A progress line that keeps what it is given."""

    def __init__(self):
        self.texts, self.rows, self.closed = [], [], False

    def show(self, row):
        self.rows.append(dict(row))

    def say(self, text):
        self.texts.append(text)

    def close(self):
        self.closed = True


def run(folder, steps, resume_step=None, tensorboard=False, run_name=0):
    """A run over `steps`; its loss tells the step and the run apart."""
    said = Said()
    with Writer(folder, tensorboard, resume_step, progress=said) as writer:
        for step in steps:
            writer.write(step, {"train/loss": step + run_name / 10})
    return said


def read_events(folder):
    """Event files of a folder in order of their making, parsed from the TFRecord framing."""
    events = []
    for path in sorted((folder / write.TENSORBOARD).iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, place = path.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            events.append(Event.FromString(data[place + 12 : place + 12 + length]))
            place += 12 + length + 4
    return events


def test_rows_hold_the_bits(tmp_path):
    """float32 values of every size come back as the same float32, from Python, NumPy and JAX."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200, dtype=np.uint32).view(np.float32)
    finite = bits[np.isfinite(bits)]
    with Writer(tmp_path, False, progress=Said()) as writer:
        for step, value in enumerate(finite):
            writer.write(step, {"numpy": value, "jax": jnp.asarray(value), "python": float(value)})
    rows = read_metrics(tmp_path)
    for name in ("numpy", "jax", "python"):
        back = np.array([row[name] for row in rows], np.float32)
        np.testing.assert_array_equal(back.view(np.uint32), finite.view(np.uint32))


def test_integers_stay_integers_of_any_size(tmp_path):
    with Writer(tmp_path, False, progress=Said()) as writer:
        writer.write(1, {"tokens": np.int64(2**53 + 1), "also": jnp.int32(7)})
    assert read_metrics(tmp_path) == [{"step": 1, "tokens": 2**53 + 1, "also": 7}]
    assert (tmp_path / write.METRICS).read_text() == '{"step": 1, "tokens": 9007199254740993, "also": 7}\n'


def test_non_finite_values_are_valid_json_and_come_back(tmp_path):
    with Writer(tmp_path, progress=Said()) as writer:
        writer.write(1, {"a": math.nan, "b": np.float32("inf"), "c": -math.inf})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    line = (tmp_path / write.METRICS).read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


@pytest.mark.parametrize("value", ["0.5", None, True, np.ones(2), [1, 2]])
def test_what_is_no_number_is_refused(tmp_path, value):
    with Writer(tmp_path, False, progress=Said()) as writer, pytest.raises((TypeError, ValueError)):
        writer.write(1, {"a": value})


def test_a_resume_supersedes_later_rows(tmp_path):
    """Killed at 5 with a checkpoint of 3, resumed, killed at 4, resumed from 3 again: each step stands once, from its last run."""
    run(tmp_path, range(1, 6), run_name=1)
    said = run(tmp_path, range(4, 5), resume_step=3, run_name=2)
    assert said.texts == ["metrics.jsonl: 2 row(s) after step 3 moved to metrics.superseded.jsonl"]
    run(tmp_path, range(4, 8), resume_step=3, run_name=3)
    assert [(row["step"], row["train/loss"]) for row in read_metrics(tmp_path)] == [
        (1, 1.1), (2, 2.1), (3, 3.1), (4, 4.3), (5, 5.3), (6, 6.3), (7, 7.3),
    ]  # fmt: skip
    aside = [json.loads(line)["train/loss"] for line in (tmp_path / write.SUPERSEDED).read_text().splitlines()]
    assert aside == [4.1, 5.1, 4.2]


def test_a_clean_resume_touches_nothing(tmp_path):
    run(tmp_path, range(1, 4))
    before = (tmp_path / write.METRICS).stat()
    assert run(tmp_path, [], resume_step=3).texts == []
    after = (tmp_path / write.METRICS).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert not (tmp_path / write.SUPERSEDED).exists()


def test_a_run_from_the_start_keeps_no_row_of_a_run_before(tmp_path):
    run(tmp_path, range(3), run_name=1)
    said = run(tmp_path, range(2), run_name=2)
    assert said.texts == ["metrics.jsonl: 3 row(s) of a run before moved to metrics.superseded.jsonl"]
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [0.2, 1.2]


@pytest.mark.parametrize("cut", range(1, 33))
def test_a_line_torn_anywhere_is_repaired(tmp_path, cut):
    """The last line loses its last `cut` bytes: the run goes on, and every line is a row again."""
    run(tmp_path, range(1, 4))
    path = tmp_path / write.METRICS
    whole = path.read_bytes()
    length = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: len(whole) - min(cut, length)])
    survived = 3 if cut == 1 else 2  # without its newline alone, the row is whole
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, survived + 1))
    said = run(tmp_path, range(survived + 1, 5), resume_step=survived)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert path.read_bytes().endswith(b"\n")
    assert said.texts == (
        ["metrics.jsonl: 1 line(s) cut short moved to metrics.superseded.jsonl"] if 1 < cut < length else []
    )


def test_a_broken_line_in_the_middle_is_named_and_then_set_aside(tmp_path):
    run(tmp_path, range(1, 4))
    path = tmp_path / write.METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": 2, "tr\xff\x00\n' + lines[2])
    with pytest.raises(UserError, match=r"metrics.jsonl:2 is not a row"):
        read_metrics(tmp_path)
    run(tmp_path, [4], resume_step=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3, 4]


def test_a_workdir_without_a_record_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"is .* the workdir of a run"):
        read_metrics(tmp_path)


def test_rows_are_on_disk_before_the_run_ends(tmp_path):
    writer = Writer(tmp_path, False, progress=Said())
    writer.write(1, {"train/loss": 0.5})
    assert read_metrics(tmp_path) == [{"step": 1, "train/loss": 0.5}]
    writer.close()


def test_tensorboard_holds_the_same_names_and_values(tmp_path):
    values = {"train/loss": 2.5, "eval/c++ & more/loss": 1 / 3, "tokens": 4096}
    with Writer(tmp_path, progress=Said()) as writer:
        writer.write(1, values)
        writer.write(2, {"train/loss": math.nan})
    scalars = [
        (event.step, value.tag, value.simple_value) for event in read_events(tmp_path) for value in event.summary.value
    ]
    assert scalars[:-1] == [(1, name, float(np.float32(value))) for name, value in values.items()]
    assert scalars[-1][:2] == (2, "train/loss") and math.isnan(scalars[-1][2])


def test_tensorboard_forgets_what_a_resume_supersedes(tmp_path):
    """A session that starts at step s + 1 hides the events of earlier files from there on."""
    run(tmp_path, range(1, 6), tensorboard=True)
    run(tmp_path, range(4, 6), resume_step=3, tensorboard=True)
    starts = [event.step for event in read_events(tmp_path) if event.session_log.status == SessionLog.START]
    assert starts == [0, 4]


def test_other_processes_write_nothing(tmp_path):
    folder = tmp_path / "run"
    with Writer(folder, primary=False) as writer:
        writer.write(1, {"train/loss": 1.0})
        writer.say("hello")
    assert not folder.exists()


def test_tensorboard_refuses_object_storage():
    with pytest.raises(UserError, match=r"set config\.monitor\.tensorboard=false"):
        Writer("gs://bucket/run")


def test_remote_rows_are_written_now_and_then_and_at_the_end(tmp_path):
    now = [0.0]
    path = write.epath.Path(tmp_path / write.METRICS)
    path.write_bytes(b'{"step": 1}\n')
    rows = write.RemoteRows(path, every_s=60.0, clock=lambda: now[0])
    rows.append(b'{"step": 2}\n')
    assert len(read_metrics(tmp_path)) == 1
    now[0] = 61.0
    rows.append(b'{"step": 3}\n')
    assert len(read_metrics(tmp_path)) == 3
    rows.append(b'{"step": 4}\n')
    assert len(read_metrics(tmp_path)) == 3
    rows.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
