"""Where the tasks of preparation run: processes of this machine, or a Ray cluster. What they write does not depend on it.

A task is a plain function of a module and its arguments. It writes its files whole or not at all (`files.write_atomic`, or a
temporary name that is renamed) and returns JSON, which the engine writes as the task's receipt when it is done: a task with a
receipt is never run again. So a kill costs at most the tasks that were in work.
"""

import collections
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lmjax.errors import UserError
from lmjax.files import read_json, write_json

Progress = Callable[[str, int, int], None]  # (label, tasks done, tasks in all)


class Task(NamedTuple):
    """Work that is done once."""

    key: str  # names the receipt within the folder of the call: "sketch/web/00012"
    function: Callable[..., Any]  # of a module, so that it can be sent; returns JSON
    arguments: tuple = ()


class Results(Sequence):
    """What tasks returned, on disk."""

    def __init__(self, receipts: Sequence[Path]):
        self.receipts = receipts

    def __len__(self) -> int:
        return len(self.receipts)

    def __getitem__(self, index: int) -> Any:
        return read_json(self.receipts[index])


class Engine(contextlib.AbstractContextManager):
    """Runs tasks; how is for its kinds to say."""

    def __init__(self, progress: Progress | None = None):
        self.progress = progress or (lambda *_: None)

    def run(self, tasks: Sequence[Task], folder: Path, label: str = "") -> "Results":
        """The results of tasks, in their order; each is read when it is asked for, since all may be more than memory holds.

        Args:
          tasks: independent of one another; keys are unique in the folder.
          folder: holds the receipts, `FOLDER/receipts/<key>.json`. A task that has one is not run again.
          label: says on a terminal what is being done.

        Raises:
          Exception: what a task raised; others that were done keep their receipts.
        """
        waiting = [task for task in tasks if not receipt(folder, task).exists()]
        done = len(tasks) - len(waiting)
        self.progress(label, done, len(tasks))
        for _ in self.perform(waiting, folder):
            done += 1
            self.progress(label, done, len(tasks))
        return Results([receipt(folder, task) for task in tasks])

    def perform(self, tasks: Sequence[Task], folder: Path) -> Iterator[None]:
        """Performs tasks, in any order; yields as each is done."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        """Ends what it started."""


def receipt(folder: Path, task: Task) -> Path:
    """Where a task's result is kept."""
    return folder / "receipts" / f"{task.key}.json"


def perform(task: Task, folder: Path) -> None:
    """Runs a task and writes its receipt."""
    write_json(receipt(folder, task), task.function(*task.arguments))


class LocalEngine(Engine):
    """Processes of this machine; with 0 or 1 workers, this very process."""

    def __init__(self, num_workers: int = 0, progress: Progress | None = None):
        super().__init__(progress)
        self.num_workers = num_workers
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "LocalEngine":
        if self.num_workers > 1:
            # a fork of a process with threads may hang; workers that live for the whole run load their libraries once
            self.pool = ProcessPoolExecutor(self.num_workers, multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def perform(self, tasks: Sequence[Task], folder: Path) -> Iterator[None]:
        """See `Engine`; a few tasks more than workers are handed over ahead."""
        if self.pool is None:
            yield from (perform(task, folder) for task in tasks)
            return
        pending: collections.deque = collections.deque()
        for task in tasks:
            pending.append(self.pool.submit(perform, task, folder))
            if len(pending) > 2 * self.num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class RayEngine(Engine):
    """Tasks of a Ray cluster over a file system that all its nodes share."""

    def __init__(self, address: str | None = None, progress: Progress | None = None):
        super().__init__(progress)
        try:
            import ray
        except ImportError as error:
            raise UserError("config.engine='ray' needs Ray: pip install 'lmjax[ray]'") from error
        self.ray, self.address, self.started = ray, address, False

    def __enter__(self) -> "RayEngine":
        if not self.ray.is_initialized():
            self.ray.init(address=self.address, include_dashboard=False)
            self.started = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.started:
            self.ray.shutdown()

    def perform(self, tasks: Sequence[Task], folder: Path) -> Iterator[None]:
        """See `Engine`; a million tasks are not handed over at once."""
        remote = self.ray.remote(max_retries=3)(perform)
        slots = 2 * max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        waiting, pending = collections.deque(tasks), []
        while waiting or pending:
            while waiting and len(pending) < slots:
                pending.append(remote.remote(waiting.popleft(), folder.absolute()))
            ready, pending = self.ray.wait(pending)
            self.ray.get(ready)
            yield from (None for _ in ready)


@contextlib.contextmanager
def open_engine(name: str, num_workers: int, address: str | None, progress: Progress | None = None) -> Iterator[Engine]:
    """The engine that the config names."""
    with LocalEngine(num_workers, progress) if name == "local" else RayEngine(address, progress) as engine:
        yield engine
