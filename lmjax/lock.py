"""One run at a time in a folder: two that write checkpoints into one workdir would destroy each other's.

On a disk the lock is the kernel's (flock), so it goes with its process, whatever ends that. In a bucket it is an object that its
holder renews; one that is no longer renewed is taken over, so a run that was killed delays the next one and never blocks it.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from lmjax.errors import UserError
from lmjax.files import is_remote

LOCK = "lock"
RENEW_S = 10.0  # between renewals in a bucket
STALE_S = 40.0  # a lock in a bucket that was not renewed for that long is nobody's: four renewals missed
SETTLE_S = 3.0  # after taking over: of two that did, the later writer has it


@contextlib.contextmanager
def locked(folder: os.PathLike | str, say: Callable[[str], None] = print) -> Iterator[None]:
    """Holds a folder's lock.

    Raises:
      UserError: another run holds it.
    """
    if is_remote(folder):
        with Lease(os.fspath(folder), say):
            yield
        return
    path = pathlib.Path(folder) / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        take(folder, file, say)
        yield


def take(folder: os.PathLike | str, file, say: Callable[[str], None]) -> None:
    """Locks an open file, and writes into it who did."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise in_use(folder, file.read().strip()) from error
    except OSError as error:
        say(f"{folder} cannot be locked ({error.strerror}): see that no other run uses it")
        return
    file.truncate(0)
    file.write(owner())
    file.flush()


def owner() -> str:
    """Who holds a lock, for a person."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def in_use(folder: os.PathLike | str, holder: str) -> UserError:
    """The folder is another's."""
    who = holder or "another process"
    return UserError(f"{os.fspath(folder)} is in use by {who}: one run at a time; end it, or choose another --workdir")


class Lease:
    """The lock of a folder in a bucket."""

    def __init__(self, folder: str, say: Callable[[str], None]):
        import fsspec

        self.folder, self.say = folder, say
        self.system, path = fsspec.core.url_to_fs(folder)
        self.path = f"{path.rstrip('/')}/{LOCK}"
        self.token = uuid.uuid4().hex
        self.renewals = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.renew, daemon=True, name="lock")

    def __enter__(self) -> "Lease":
        try:
            self.write(mode="create")
        except FileExistsError:
            self.take_over()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        if self.read().get("token") == self.token:
            self.system.rm_file(self.path)

    def write(self, mode: str = "overwrite") -> None:
        """Writes the object, always another content."""
        self.renewals += 1
        value = {"token": self.token, "owner": owner(), "renewals": self.renewals}
        self.system.pipe_file(self.path, json.dumps(value).encode(), mode=mode)

    def read(self) -> dict:
        """What the object says; nothing where there is none."""
        try:
            return json.loads(self.system.cat_file(self.path))
        except FileNotFoundError:
            return {}

    def take_over(self) -> None:
        """Waits until the holder has missed its renewals; a `UserError` when it has not."""
        found = self.read()
        if found:
            self.say(f"{self.folder} is locked by {found['owner']}: waiting {STALE_S:.0f} s for a sign of it")
        deadline = time.monotonic() + STALE_S
        while found and time.monotonic() < deadline:
            time.sleep(min(RENEW_S, STALE_S) / 4)
            before, found = found, self.read()
            if found and found != before:
                raise in_use(self.folder, found["owner"])
        self.write()
        time.sleep(SETTLE_S)
        now = self.read()
        if now.get("token") != self.token:
            raise in_use(self.folder, now.get("owner", ""))

    def renew(self) -> None:
        """Renews until the end; a lock that another has taken ends this process: two must not write."""
        while not self.ended.wait(RENEW_S):
            try:
                if self.read().get("token") != self.token:
                    print(f"{self.folder}: another run has taken the lock of this one; it ends here", file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(1)
                self.write()
            except Exception:  # the bucket does not answer now, by whichever library; it is asked again
                continue
