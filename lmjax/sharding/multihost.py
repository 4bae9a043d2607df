"""Several processes as one run: start, the rows of each, stopping together, leaving.

On a TPU pod or under SLURM `jax.distributed` finds its peers by itself. Elsewhere each process is told by the environment:
JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES, JAX_PROCESS_ID.
"""

import collections
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import jax
import numpy as np
from jax._src import distributed  # the client has no public name; Orbax takes it from here, too
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from lmjax.batch import Batch
from lmjax.errors import UserError

PLACES, TOLD = "lmjax/places", "lmjax/told"
TOLD_WITHIN_S = 3600  # one process may read a checkpoint that much longer than another; a dead one is noticed before
HEARTBEAT_TIMEOUT_S = 30  # a dead peer is noticed after this; the default of jax lets the others wait 100


def initialize(distributed: bool) -> None:
    """Joins the other processes, where there are any; call before the first use of a device.

    Args:
      distributed: look for peers although the environment names no coordinator (TPU pods, SLURM).
    """
    variables = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in variables if name in os.environ]
    if not given:
        if distributed:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
        return
    if len(given) < len(variables):
        missing = ", ".join(name for name in variables if name not in os.environ)
        raise UserError(f"{given[0]} is set, but not {missing}: a process of a cluster needs all three")
    address, count, index = (os.environ[name] for name in variables)
    jax.distributed.initialize(address, int(count), int(index), heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)


def is_primary() -> bool:
    """Whether this process writes metrics and prints."""
    return jax.process_index() == 0


def local_rows(sharding: NamedSharding, batch_rows: int) -> tuple[int, ...]:
    """The rows of a global batch that this process's devices hold, ascending."""
    slices = sharding.addressable_devices_indices_map((batch_rows,)).values()
    rows = {row for (piece,) in slices for row in range(*piece.indices(batch_rows))}
    return tuple(sorted(rows))


def global_array(sharding: NamedSharding, local: np.ndarray, batch_rows: int) -> jax.Array:
    """A global [batch_rows, …] array from each process's `local_rows` of it; the copy to the devices is asynchronous."""
    return jax.make_array_from_process_local_data(sharding, local, (batch_rows, *local.shape[1:]))


def on_devices(
    batches: Iterable[tuple[int, Batch]], sharding: NamedSharding, batch_rows: Callable[[int], int], ahead: int = 2
) -> Iterator[tuple[int, Batch]]:
    """Global batches on the devices from this process's rows, `ahead` of them before they are asked for.

    Args:
      batches: (step, this process's rows).
      sharding: of a [B, T] array.
      batch_rows: step → B of the global batch.
      ahead: batches.
    """
    queue: collections.deque[tuple[int, Batch]] = collections.deque()
    for step, batch in batches:
        arrays = (None if x is None else global_array(sharding, x, batch_rows(step)) for x in batch)
        queue.append((step, Batch(*arrays)))
        if len(queue) > ahead:
            yield queue.popleft()
    yield from queue


class Peers:
    """What the processes tell each other beside the devices, through the coordinator's store of keys and values."""

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()

    def publish(self, value: str) -> None:
        """Tells the others where this process stands."""
        distributed.global_state.client.key_value_set(f"{PLACES}/{self.index}", value, allow_overwrite=True)

    def published(self) -> dict[int, str]:
        """What each process told last; `RuntimeError` where the coordinator does not answer."""
        found = distributed.global_state.client.key_value_dir_get(PLACES)
        return {int(key.rpartition("/")[2]): value for key, value in found}


_calls = itertools.count()  # of `told_by_all`: all processes make the same ones


def told_by_all(word: str) -> list[str]:
    """What each process says here, by index; every process must come here. No device takes part."""
    if jax.process_count() == 1:
        return [word]
    client, call = distributed.global_state.client, f"{TOLD}/{next(_calls)}"
    client.key_value_set(f"{call}/{jax.process_index()}", word)
    return [
        client.blocking_key_value_get(f"{call}/{index}", TOLD_WITHIN_S * 1000) for index in range(jax.process_count())
    ]


class StopRequest:
    """SIGTERM and SIGINT ask the run to save and end; all processes end after the same step.

    With several processes jax's preemption service carries a SIGTERM of any of them to all, and names the step; SIGINT becomes one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGTERM, signal.SIGINT]
            self.previous = {number: signal.signal(number, self.receive) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Notes the signal; a second one ends the process at once, as the user then wants."""
        if self.signal is not None:
            sys.exit(1)
        self.signal = number
        if number == signal.SIGINT and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self, step: int) -> bool:
        """Whether to end after `step` steps; every process must ask at every step."""
        if jax.process_count() == 1:
            return self.signal is not None
        return multihost_utils.reached_preemption_sync_point(step)
