"""Two runs never write into one folder; what a kill leaves blocks nobody."""

import os
import signal
import subprocess
import sys

import pytest

from lmjax.errors import UserError
from lmjax.lock import LOCK, locked

HOLD = "import sys, time; from lmjax.lock import locked\nwith locked(sys.argv[1]):\n print('held', flush=True); time.sleep(60)"


def hold(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_and_a_kill_leaves_nothing_behind(tmp_path):
    process = hold(tmp_path / "run")
    try:
        refused = pytest.raises(UserError, match=rf"run is in use by process {process.pid} on .*: one run at a time")
        with refused, locked(tmp_path / "run"):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with locked(tmp_path / "run"), pytest.raises(UserError, match=f"process {os.getpid()}"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    from lmjax import lock

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    said = []
    with locked(tmp_path, said.append):
        assert "cannot be locked (Function not implemented)" in said[0]
