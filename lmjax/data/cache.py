"""Shards in a bucket: a bounded cache of whole files on a local disk, filled ahead of the step.

    CACHE/<sha256>               a shard; appears by a rename when all of it has arrived and has the hash of the manifest
    CACHE/<sha256>.keep          offsets and documents of a source: memory-mapped, so never removed
    CACHE/<sha256>.<bytes>.part  one that is arriving; the process that fetches it holds CACHE/<sha256>.lock

Files are named by their content, so corpora share them, and processes of one machine share the folder. The least recently
read shards make room for new ones.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from lmjax.errors import RunError, UserError
from lmjax.files import sha256_file

ATTEMPTS = 3  # at a file that does not arrive, or arrives wrong
FETCHES = 4  # files fetched at a time: one stream from a bucket is a fraction of a host's link
MAX_STEPS_AHEAD = 64
WAIT_S = 0.05  # until it is looked again for room that files on their way take
KEEP, PART, LOCK = ".keep", ".part", ".lock"


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file in a bucket, as its manifest describes it."""

    path: str
    file_bytes: int
    sha256: str
    keep: bool = False  # never removed from the cache


@dataclasses.dataclass(frozen=True)
class ShardCache:
    """A folder of fetched files, at most `max_bytes` of them; pickles."""

    folder: str
    max_bytes: int

    def fetch(self, file: RemoteFile) -> str:
        """The local copy of a file, fetched now if it is not there.

        Raises:
          UserError: it is missing, its content is not that of the manifest, or it is larger than the cache.
        """
        path = self.path(file.sha256 + (KEEP if file.keep else ""))
        while not touch(path):
            os.makedirs(self.folder, exist_ok=True)
            with locked(self.path(file.sha256 + LOCK)) as ours:
                if ours and not os.path.exists(path):
                    self.bring(file, path)
                    return path  # though others may need its room already: it is the reader who sees that
        return path

    def path(self, name: str) -> str:
        """A file of the cache."""
        return os.path.join(self.folder, name)

    def bring(self, file: RemoteFile, path: str) -> None:
        """Fetches a file that is locked."""
        part = self.path(f"{file.sha256}.{file.file_bytes}{PART}")
        remove(part)  # of a process that was killed
        while not self.reserve(file, part):
            time.sleep(WAIT_S)
        try:
            download(file, part)
            os.rename(part, path)
        finally:
            remove(part)

    def reserve(self, file: RemoteFile, part: str) -> bool:
        """Makes room for a file and takes it by an empty part; false where others that are arriving have it for now.

        The least recently read shards go; a reader that has one open keeps it until it closes it.
        """
        with open(self.path(LOCK), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.files()
            arriving = [name for name, _ in found if name.endswith(PART) and not self.left_behind(name)]
            kept = sum(stat.st_size for name, stat in found if name.endswith(KEEP))
            shards = sorted((stat.st_mtime_ns, stat.st_size, name) for name, stat in found if "." not in name)
            need = kept + file.file_bytes + sum(int(name.split(".")[1]) for name in arriving)
            held = sum(size for _, size, _ in shards)
            while shards and need + held > self.max_bytes:
                _, size, name = shards.pop(0)
                os.unlink(self.path(name))
                held -= size
            if need + held <= self.max_bytes:
                open(part, "w").close()
                return True
        if not arriving:
            raise UserError(
                f"config.data.cache_bytes={self.max_bytes} has no room for {file.path} ({file.file_bytes} bytes, beside "
                f"{kept} that must stay): raise it"
            )
        return False

    def files(self) -> list[tuple[str, os.stat_result]]:
        """Names and stats of what lies there, but for locks."""
        while True:
            try:
                with os.scandir(self.folder) as entries:
                    return [(entry.name, entry.stat()) for entry in entries if not entry.name.endswith(LOCK)]
            except FileNotFoundError:
                continue  # a part arrived meanwhile, and has another name now

    def left_behind(self, part: str) -> bool:
        """Whether nobody is fetching a part, whose process was killed; then it is removed."""
        with locked(self.path(part.split(".")[0] + LOCK), wait=False) as ours:
            if ours:
                remove(self.path(part))
        return ours


@contextlib.contextmanager
def locked(path: str, wait: bool = True) -> Iterator[bool]:
    """Holds the lock that a file stands for, and removes it; false: someone else has, or had, it. The kernel frees a lock,
    whatever becomes of the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        ours = lock(descriptor, wait) and same_file(path, descriptor)
        yield ours
        if ours:
            os.unlink(path)
    finally:
        os.close(descriptor)


def lock(descriptor: int, wait: bool) -> bool:
    """Locks an open file; false: another has it, and is not waited for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def same_file(path: str, descriptor: int) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def touch(path: str) -> bool:
    """Marks a file as read just now; whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def download(file: RemoteFile, part: str) -> None:
    """Fetches a file and compares its hash."""
    import fsspec

    system = fsspec.core.url_to_fs(file.path)[0]
    for attempt in range(ATTEMPTS):
        try:
            system.get_file(file.path, part)
        except FileNotFoundError as error:
            raise UserError(f"{file.path} is missing: copy the shards to the bucket again") from error
        except Exception as error:  # of HTTP or the network, by whichever library
            if attempt + 1 < ATTEMPTS:
                continue
            raise RunError(f"{file.path} cannot be fetched ({type(error).__name__}: {error})") from error
        if os.path.getsize(part) == file.file_bytes and sha256_file(part) == file.sha256:
            return
    raise UserError(f"{file.path}: content differs from the manifest; copy the shards to the bucket again")


class ReadAhead:
    """Fetches what coming steps read, in a thread, while the steps before run.

    It goes ahead as far as half the cache holds, so that what it fetches does not push out what the step itself reads.
    """

    def __init__(self, cache: ShardCache, needed: Callable[[int], Iterable[RemoteFile]], total: int):
        """
        Args:
          cache: where to.
          needed: step → the files that it reads.
          total: files of the run; once all are there and fit, there is nothing more to do.
        """
        self.cache, self.needed, self.total = cache, needed, total
        self.step, self.ended = -1, False
        self.moved = threading.Condition()
        self.thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, start: int, stop: int) -> Iterator["ReadAhead"]:
        """Runs while the steps start … stop - 1 are read; tell `at` of each."""
        self.step = start
        self.thread = threading.Thread(target=self.run, args=(start, stop), daemon=True, name="read-ahead")
        self.thread.start()
        try:
            yield self
        finally:
            with self.moved:
                self.ended = True
                self.moved.notify_all()
            self.thread.join()

    def at(self, step: int) -> None:
        """The consumer has come to a step."""
        with self.moved:
            self.step = step
            self.moved.notify_all()

    def run(self, start: int, stop: int) -> None:
        """Fetches, step by step."""
        ahead: collections.deque[tuple[int, dict[str, RemoteFile]]] = collections.deque()
        seen: dict[str, int] = {}
        with concurrent.futures.ThreadPoolExecutor(FETCHES) as pool:
            for step in range(start, stop):
                ahead.append((step, {file.sha256: file for file in self.needed(step)}))
                if not self.wait(step, ahead):
                    return
                try:
                    list(pool.map(self.cache.fetch, ahead[-1][1].values()))
                except (UserError, RunError):
                    return  # the reader meets the same when it comes to the step, and tells
                seen |= {name: file.file_bytes for name, file in ahead[-1][1].items()}
                if len(seen) == self.total and sum(seen.values()) <= self.cache.max_bytes:
                    return

    def wait(self, step: int, ahead: collections.deque[tuple[int, dict[str, RemoteFile]]]) -> bool:
        """Waits until the step is near enough; whether to go on."""
        with self.moved:
            while not self.ended:
                while ahead[0][0] < min(self.step, step):
                    ahead.popleft()
                union = {name: file.file_bytes for _, files in ahead for name, file in files.items()}
                if step <= self.step or (
                    step - self.step <= MAX_STEPS_AHEAD and 2 * sum(union.values()) <= self.cache.max_bytes
                ):
                    return True
                self.moved.wait()
        return False
