"""Several processes that are killed, stopped or stuck: the run ends in time, says who it was, and goes on."""

import json
import os
import signal
import time

import pytest
from test_cli import cluster, config, losses, start, train_words  # noqa: F401

from lmjax.checkpoint import layout

LONG = ["--config.train.steps=100000", "--config.eval.every=100000", "--config.checkpoint.every=10"]
HANG = [*LONG, "--config.monitor.hang_after_s=20"]  # six times as long to compile, on a busy machine
# Left alone, jax ends a run whose peer is frozen after 30 s, without a word on where it stood.
PATIENT = """
from lmjax.sharding import multihost
multihost.HEARTBEAT_TIMEOUT_S = 1000
"""
STUCK = f"""{PATIENT}
import os, time
from lmjax.data.loader import StepReader
read = StepReader.__call__
def stuck(self, step):
    if os.environ["JAX_PROCESS_ID"] == "1" and step == 30:
        time.sleep(1000)
    return read(self, step)
StepReader.__call__ = stuck
from lmjax.monitor.watchdog import Watchdog
limit_s = Watchdog.limit_s
Watchdog.limit_s = lambda self: limit_s(self) - 2 * (self.peers.index == 1)  # its patience ends before that of the other
"""


def reached(workdir, step, processes):
    """Waits until a run has done so many steps."""
    deadline = time.monotonic() + 200
    while not (workdir / "metrics.jsonl").exists() or len(losses(workdir)) < step:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stopped,message",
    [(1, "process 1 on "), (0, "process 0, the coordinator, does not answer"), (None, "process 1 on ")],
)
def test_a_stuck_process_is_named_and_the_run_ends(line, config, tmp_path, stopped, message):  # noqa: F811
    """SIGSTOP to one of two, or a batch that never comes: it is alive for the operating system, and hangs the other."""
    workdir = tmp_path / "run"
    processes = cluster(
        train_words(line, config, workdir, *HANG), 2, devices=1, code=STUCK if stopped is None else PATIENT
    )
    try:
        reached(workdir, 25, processes)
        if stopped is not None:
            processes[stopped].send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        errors = []
        for survivor in [processes[index] for index in (0, 1) if index != stopped]:
            errors.append(survivor.communicate(timeout=120)[1])
            assert survivor.returncode == 1 and time.monotonic() - start_s < 100, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for err in errors:  # each says it, whoever's patience ends first
        (said,) = (text for text in err.splitlines() if text.startswith("lmjax train: "))
        assert message in said and ("came only to the batch of step " if stopped is None else "does not answer") in said
    named, newest = int(said.rpartition("step ")[2]), layout.steps(workdir)[-1]
    assert named in layout.steps(workdir) and newest >= 10  # one that was on its way is not believed
    again = start(train_words(line, config, workdir, *LONG, f"--config.train.stop_at={newest + 1}"), devices=2)
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0 and f"going on from checkpoint {newest}" in out, out + err


@pytest.mark.slow
def test_a_checkpoint_that_one_process_cannot_read_is_set_aside_by_all(line, config, tmp_path):  # noqa: F811
    """What the other owns of it is whole: it would wait for the first in a barrier."""
    workdir = tmp_path / "run"
    words = train_words(
        line, config, workdir, "--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.checkpoint.every=10"
    )
    for stop in (20, 21):
        processes = cluster([*words, f"--config.train.stop_at={stop}"], 2, devices=1)
        ends = [(*process.communicate(timeout=120), process.returncode) for process in processes]
        assert [code for *_, code in ends] == [0, 0], ends
        for path in (workdir / "checkpoints" / "20" / "state" / "ocdbt.process_1" / "d").glob("*"):
            os.truncate(path, path.stat().st_size // 2)
    assert "checkpoint 20 cannot be read" in ends[0][0] and "going on from checkpoint 10" in ends[0][0]
    assert layout.steps(workdir)[-2:] == [20, 21] and (workdir / "checkpoints" / "20.unreadable").exists()


@pytest.mark.slow
def test_two_runs_in_one_workdir_are_kept_apart(line, config, tmp_path):  # noqa: F811
    words = train_words(line, config, tmp_path / "run", *LONG)
    first = start(words)
    reached(tmp_path / "run", 12, [first])
    second = start(words)
    _, err = second.communicate(timeout=200)
    assert second.returncode == 2 and f"run is in use by process {first.pid} on " in err and err.count("\n") == 1, err
    assert first.poll() is None
    first.kill()
    first.communicate()
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))  # of one run alone
    newest = layout.steps(tmp_path / "run")[-1]
    third = start([*words, f"--config.train.stop_at={newest + 1}"])
    out, err = third.communicate(timeout=200)
    assert third.returncode == 0 and f"going on from checkpoint {newest}" in out, out + err


@pytest.mark.slow
def test_nobody_who_reads_ends_all_processes(line, config, tmp_path):  # noqa: F811
    """The terminal goes away: the process that prints ends at once, and the other with it."""
    processes = cluster(train_words(line, config, tmp_path / "run", *LONG), 2, devices=1)
    try:
        reached(tmp_path / "run", 12, processes)
        for stream in (processes[0].stdout, processes[0].stderr):
            stream.close()
        assert all(process.wait(timeout=100) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
