"""A run that hangs is ended, and the process that holds the others up is named.

A process that waits in a collective cannot see why. So each one counts the places it passes (a step's batch, the step itself, an
evaluation, a checkpoint; the same places in the same order on every process), and a thread tells the coordinator the count.
When nothing moves for too long, the process with the lowest count is the one that the others wait for; one that no longer tells
its count is frozen.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

PATIENCE = 6  # compiling, an evaluation's first batch and a checkpoint may take that many times as long as a step
SLOW = ("compiling", "evaluating", "saving")
TICK_S = 1.0  # of the thread, at most
LATE = 5  # ticks that a busy machine may be late; what is more, the process was stopped for
GRACE = 5  # ticks from a process's last words to its end: once it is gone the collectives of the others fail, and they say less


@runtime_checkable
class Peers(Protocol):
    """How processes tell each other where they stand."""

    index: int
    count: int

    def publish(self, value: str) -> None:
        """Tells the others."""

    def published(self) -> Mapping[int, str]:
        """What each process told last."""


class Alone:
    """A single process has nobody to tell."""

    index, count = 0, 1

    def publish(self, value: str) -> None:
        """Nothing."""

    def published(self) -> Mapping[int, str]:
        """Nothing."""
        return {}


class Seen(NamedTuple):
    """What a peer told last, and when that was new."""

    value: str
    at_s: float  # of this process's clock


class Watchdog:
    """Ends the process when no place is passed for `hang_after_s`; a context manager."""

    def __init__(
        self,
        hang_after_s: float | None,
        peers: Peers | None = None,
        last_good: Callable[[], int | None] = lambda: None,
        end: Callable[[str], None] | None = None,
    ):
        """
        Args:
          hang_after_s: none: it watches nothing.
          peers: the other processes.
          last_good: the step of the last checkpoint, for the message.
          end: what is done in the end; none: the message to stderr, and exit code 1 once the others could say theirs.
        """
        self.hang_after_s, self.peers, self.last_good = hang_after_s, peers or Alone(), last_good
        self.tick_s = TICK_S if hang_after_s is None else min(TICK_S, hang_after_s / 10)
        self.end = end or functools.partial(leave, after_s=GRACE * self.tick_s if self.peers.count > 1 else 0)
        self.passed, self.step, self.place = 0, 0, "starting"
        self.idle_s = 0.0  # since the last place, as far as this process itself was running
        self.seen: dict[int, Seen] = {}
        self.answered_s = time.monotonic()  # when the coordinator answered last
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self.watch, self.tell)]

    def at(self, step: int, place: str) -> None:
        """The process has come to a place: `batch`, `step`, or one of `SLOW`."""
        self.passed, self.step, self.place = self.passed + 1, step, place
        self.idle_s = 0.0

    def still(self) -> None:
        """It moves, at the same place."""
        self.at(self.step, self.place)

    def limit_s(self) -> float:
        """How long the present place may take."""
        assert self.hang_after_s is not None
        return self.hang_after_s * (PATIENCE if self.place in SLOW else 1)

    def watch(self) -> None:
        """Looks whether the process moves. Makes no call that could hang."""
        before = time.monotonic()
        while not self.ended.wait(self.tick_s):
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, was not waiting for anything.
            self.idle_s += min(now - before, LATE * self.tick_s)
            before = now
            if self.idle_s > self.limit_s():
                self.end(self.message())
                return

    def tell(self) -> None:
        """Tells the others where this process stands; once it waits for long, looks where they stand."""
        beat = 0
        while not self.ended.wait(self.tick_s):
            beat += 1
            place = {"passed": self.passed, "step": self.step, "place": self.place, "host": socket.gethostname()}
            with contextlib.suppress(RuntimeError):  # the coordinator is gone, or does not answer in time
                self.peers.publish(json.dumps(place | {"beat": beat}))
                if self.idle_s > self.limit_s() / 4:
                    self.look()
                self.answered_s = time.monotonic()

    def look(self) -> None:
        """Reads what the others told."""
        now = time.monotonic()
        for index, value in self.peers.published().items():
            if index not in self.seen or self.seen[index].value != value:
                self.seen[index] = Seen(value, now)

    def message(self) -> str:
        """What happened, whom to blame, what is left."""
        good = self.last_good()
        kept = "no checkpoint was saved" if good is None else f"the last checkpoint is that of step {good}"
        what = f"{self.place} of step {self.step}" if self.place in ("batch", *SLOW) else f"step {self.step}"
        what = f"waiting for the {what}" if self.place == "batch" else what
        return (
            f"step {self.step} hangs: {what} has not ended for {self.idle_s:.0f} s (config.monitor.hang_after_s); "
            f"{self.blame()}; {kept}"
        )

    def blame(self) -> str:
        """The process that the others wait for."""
        if self.peers.count == 1:
            return "the process itself is stuck"
        silent_s, now = max(3 * self.tick_s, self.limit_s() / 4), time.monotonic()
        if now - self.answered_s > silent_s:
            return "process 0, the coordinator, does not answer"
        missing = [index for index in range(self.peers.count) if index not in self.seen]
        frozen = missing + [index for index, seen in self.seen.items() if now - seen.at_s > silent_s]
        if frozen:
            return "; ".join(f"{self.name(index)} does not answer" for index in sorted(frozen))
        places = {index: json.loads(seen.value) for index, seen in self.seen.items()}
        last = min(place["passed"] for place in places.values())
        if last == max(place["passed"] for place in places.values()):
            return "all processes stand at the same place: a device or the network between them"
        behind = [index for index, place in places.items() if place["passed"] == last]
        where = places[behind[0]]
        return f"{', '.join(map(self.name, behind))} came only to the {where['place']} of step {where['step']}"

    def name(self, index: int) -> str:
        """A process and its host."""
        seen = self.seen.get(index)
        return f"process {index}" + (f" on {json.loads(seen.value)['host']}" if seen else "")

    def __enter__(self) -> "Watchdog":
        if self.hang_after_s is not None:
            for thread in self.threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()


def leave(message: str, after_s: float) -> None:
    """The message, and some seconds later the end: whatever hangs would hang an orderly one too."""
    try:
        print(f"lmjax train: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(after_s)
    finally:  # whoever would have read it may be gone
        os._exit(1)
