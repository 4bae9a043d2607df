"""Writes what is measured: `metrics.jsonl` is the record; TensorBoard and the progress line are views of it.

A row is one JSON object on one line: `step` first, then names from `lmjax.monitor.metrics`. Floats carry every digit, so that
equal text means equal bits. JSON has no NaN or infinities: they are the strings "NaN", "Infinity" and "-Infinity".

The record survives a kill at any moment. Each row is one write; on a resume at step s, rows after s and a last line that was cut
short leave `metrics.jsonl` for `metrics.superseded.jsonl`, by an atomic rename, and that is said.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from lmjax import files
from lmjax.errors import UserError
from lmjax.monitor.progress import Progress

METRICS = "metrics.jsonl"
SUPERSEDED = "metrics.superseded.jsonl"
TENSORBOARD = "tensorboard"
FLUSH_S = 5.0  # seconds that TensorBoard may lag behind the record
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Writer:
    """Writes rows to the record and its views; on a process that is not the primary one, nothing."""

    def __init__(
        self,
        workdir: os.PathLike | str,
        tensorboard: bool = True,
        resume_step: int | None = None,
        total_steps: int | None = None,
        primary: bool = True,
        progress: Progress | None = None,
    ):
        """
        Args:
          workdir: the run's folder; TensorBoard's events need a local one.
          tensorboard: write event files too, under `tensorboard/`.
          resume_step: the step whose checkpoint the run goes on from: rows up to it stay. None: a run from the start.
          total_steps: for the progress line.
          primary: whether this process writes.
          progress: the line; none: on the terminal, or plain on stdout.
        """
        self.progress = self.rows = self.events = None
        if not primary:
            return
        folder = epath.Path(workdir)
        if tensorboard and files.is_remote(folder):
            raise UserError(
                f"TensorBoard events need a local workdir, not {folder}: set config.monitor.tensorboard=false"
            )
        self.progress = Progress(total_steps) if progress is None else progress
        for note in recover(folder, resume_step):
            self.progress.say(note)
        self.rows = RemoteRows(folder / METRICS) if files.is_remote(folder) else LocalRows(folder / METRICS)
        if tensorboard:
            self.events = Events(folder / TENSORBOARD, 0 if resume_step is None else resume_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a row after `step` optimizer steps.

        Args:
          step: optimizer steps done.
          values: name → number: of Python, NumPy or JAX, one element. A JAX array that is not ready is waited for.
        """
        if self.rows is None:
            return
        row = {"step": int(step)} | {name: number(value) for name, value in values.items() if name != "step"}
        self.rows.append(encode(row))
        if self.events is not None:
            self.events.append(row)
        self.progress.show(row)

    def flush(self) -> None:
        """Every row so far is where it stays: called before a checkpoint, whose resume would miss them."""
        if isinstance(self.rows, RemoteRows):
            self.rows.close()

    def say(self, text: str) -> None:
        """Prints a line beside the live one."""
        if self.progress is not None:
            self.progress.say(text)

    def close(self) -> None:
        """Ends the files and the line."""
        for part in (self.rows, self.events, self.progress):
            if part is not None:
                part.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# -------------------------------------------------------------------------------------------------------------------- rows


def number(value: Any) -> int | float:
    """A scalar of Python, NumPy or JAX as a Python number, exact; `TypeError` or `ValueError` for anything else."""
    item = np.asarray(value).item()
    if isinstance(item, str | bytes | bool) or item is None:
        raise TypeError(f"a metric is a number, not {value!r}")
    return item if isinstance(item, int) else float(item)


def encode(row: Mapping[str, int | float]) -> bytes:
    """A row as one line of valid JSON."""
    safe = {name: value if math.isfinite(value) else name_of(value) for name, value in row.items()}
    return json.dumps(safe, allow_nan=False).encode() + b"\n"


def name_of(value: float) -> str:
    """The string that stands for a float that JSON lacks."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode(line: bytes) -> dict[str, Any] | None:
    """A line as a row, or none if it is not a whole one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


def read_metrics(workdir: os.PathLike | str) -> list[dict[str, Any]]:
    """The rows of a run, in order; a last line that is still being written is left out.

    Raises:
      UserError: there is no record, or a line in its middle is broken.
    """
    path = epath.Path(workdir) / METRICS
    if not path.exists():
        raise UserError(f"{path} does not exist: is {workdir} the workdir of a run?")
    *lines, last = path.read_bytes().split(b"\n")
    rows = [decode(line) for line in lines]
    if None in rows:
        raise UserError(f"{path}:{rows.index(None) + 1} is not a row; resume the run, which sets broken lines aside")
    ending = decode(last)
    return rows + ([ending] if ending is not None else [])


def recover(folder: epath.Path, resume_step: int | None) -> list[str]:
    """Sets aside what a resume at `resume_step` will write again, and lines that were cut short; returns what to say."""
    path = folder / METRICS
    if not path.exists():
        return []
    data = path.read_bytes()
    kept, later, broken = [], [], []
    for line in filter(None, data.split(b"\n")):
        row = decode(line)
        stays = row is not None and resume_step is not None and row["step"] <= resume_step
        (broken if row is None else kept if stays else later).append(line + b"\n")
    if b"".join(kept) == data:
        return []
    aside = folder / SUPERSEDED
    before = aside.read_bytes() if aside.exists() else b""
    files.write_atomic(aside, before + b"".join(later + broken))
    files.write_atomic(path, b"".join(kept))
    place = "of a run before" if resume_step is None else f"after step {resume_step}"
    notes = [f"{METRICS}: {len(later)} row(s) {place} moved to {SUPERSEDED}"] if later else []
    return notes + ([f"{METRICS}: {len(broken)} line(s) cut short moved to {SUPERSEDED}"] if broken else [])


class LocalRows:
    """A file that is appended to; each row is one write, straight to the operating system."""

    def __init__(self, path: epath.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(os.fspath(path), "ab")  # noqa: SIM115

    def append(self, line: bytes) -> None:
        """Writes a row."""
        self.file.write(line)
        self.file.flush()

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class RemoteRows:
    """An object, which cannot be appended to: written anew, at most every `every_s` seconds and at the end."""

    def __init__(self, path: epath.Path, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic):
        self.path, self.every_s, self.clock = path, every_s, clock
        self.data = bytearray(path.read_bytes() if path.exists() else b"")
        self.written_at = clock()

    def append(self, line: bytes) -> None:
        """Takes a row, and writes the object if it is time."""
        self.data += line
        if self.clock() - self.written_at >= self.every_s:
            self.close()
            self.written_at = self.clock()

    def close(self) -> None:
        """Writes the object."""
        files.write_atomic(self.path, bytes(self.data))


# ------------------------------------------------------------------------------------------------------------- TensorBoard


class Events:
    """TensorBoard's event file: the names, steps and values of the rows, values as float32."""

    def __init__(self, folder: epath.Path, purge_step: int):
        """`purge_step`: what earlier event files of the folder hold from this step on is no longer shown."""
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self.event, self.summary, self.session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        folder.mkdir(parents=True, exist_ok=True)
        self.file = event_file_writer.EventsWriter(os.fspath(folder / "events"), f".{uuid.uuid4().hex[:8]}")
        self.flushed_at = -math.inf
        started = self.session(status=self.session.START)
        self.file.write_event(self.event(wall_time=time.time(), step=purge_step, session_log=started))

    def append(self, row: Mapping[str, int | float]) -> None:
        """Writes a row's values as scalars."""
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
        event = self.event(wall_time=time.time(), step=row["step"], summary=self.summary(value=values))
        self.file.write_event(event)
        if time.monotonic() - self.flushed_at >= FLUSH_S:  # a flush waits for the disk: milliseconds
            self.file.flush()
            self.flushed_at = time.monotonic()

    def close(self) -> None:
        """Ends the file."""
        self.file.close()
