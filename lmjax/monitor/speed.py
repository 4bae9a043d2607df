"""How fast a run goes, and what share of the hardware's peak that is.

    MFU = model FLOPs a token · tokens a second / peak FLOP/s of all devices

Model FLOPs are those of `lmjax.plan.flops`: three times the forward pass, causal attention counted once, nothing for
recomputation. The peak comes from the table of `lmjax.plan.hardware`; a device that it lacks, such as a CPU, is measured.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from lmjax.plan import hardware

MATMUL_SIZE = {"cpu": 1024}  # rows and columns of the product that is timed: large enough to reach the peak
MATMUL_SIZE_ACCELERATOR = 8192


@dataclasses.dataclass(frozen=True)
class Peak:
    """FLOP/s that MFU divides by."""

    flops: float  # of all devices of the run together
    source: str  # where the figure comes from, for people


def peak_flops(devices: Sequence[Any], precision: hardware.Precision, stated: float | None = None) -> Peak:
    """The peak of a run's devices: as stated, else from the table, else measured here.

    Args:
      devices: all devices of the run, of one kind.
      precision: of the matrix products.
      stated: FLOP/s of one device (`config.monitor.peak_flops`).
    """
    kind, count = devices[0].device_kind, len(devices)
    if stated is not None:
        return Peak(stated * count, f"config.monitor.peak_flops: {count} × {stated:.3g} FLOP/s")
    row = hardware.find(kind)
    if row is not None:
        each = row.peak_flops(precision)
        return Peak(each * count, f"table: {count} × {kind}, {precision} {each:.4g} FLOP/s")
    each = measure_matmul_flops("bfloat16" if precision.startswith("fp8") else precision)
    if devices[0].platform == "cpu":  # the devices of a process share its cores
        count = len({device.process_index for device in devices})
    return Peak(each * count, f"measured: {count} × {kind}, {precision} product at {each:.3g} FLOP/s")


def measure_matmul_flops(dtype: str, seconds: float = 0.2) -> float:
    """FLOP/s of a square matrix product on the first local device: the fastest of those run within `seconds`.

    Nothing else should run on the machine meanwhile.
    """
    device = jax.local_devices()[0]
    size = MATMUL_SIZE.get(device.platform, MATMUL_SIZE_ACCELERATOR)
    alone = jax.make_mesh((1,), ("alone",), axis_types=(AxisType.Auto,), devices=[device])
    with jax.set_mesh(alone):  # a run's ambient mesh would want the product on all its devices
        operand = jax.device_put(jnp.ones((size, size), dtype), device)
        product = jax.jit(jnp.matmul)
        product(operand, operand).block_until_ready()
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            product(operand, operand).block_until_ready()
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


class Speed:
    """A stopwatch over the steps since the last reading.

    Steps run asynchronously, so a single one cannot be timed from the host; over a window the host keeps pace with the
    devices, because the loop fetches each step's values one step late.
    """

    def __init__(self, flops_per_token: float, peak: Peak, clock: Callable[[], float] = time.perf_counter):
        """
        Args:
          flops_per_token: model FLOPs of a token in training.
          peak: what MFU divides by.
          clock: seconds, rising.
        """
        self.flops_per_token, self.peak, self.clock = flops_per_token, peak, clock
        self.restart()

    def restart(self) -> None:
        """Forgets the window and starts another: after the first step, whose time is the compiler's."""
        self.start = self.clock()
        self.steps = self.tokens = 0
        self.waited_s = self.paused_s = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a batch."""
        start = self.clock()
        try:
            yield
        finally:
            self.waited_s += self.clock() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no part of a step: an evaluation, a blocking save."""
        start = self.clock()
        try:
            yield
        finally:
            self.paused_s += self.clock() - start

    def step(self, num_tokens: int) -> None:
        """A step on `num_tokens` positions, over all devices and processes, has ended."""
        self.steps += 1
        self.tokens += num_tokens

    def read(self) -> dict[str, float]:
        """The window's metrics, by name; empty where no step has ended. Starts the next window."""
        elapsed_s = self.clock() - self.start - self.paused_s
        steps, tokens, waited_s = self.steps, self.tokens, self.waited_s
        self.restart()
        if steps == 0 or elapsed_s <= 0:
            return {}
        rate = tokens / elapsed_s
        return {
            "speed/tokens_per_s": rate,
            "speed/step_s": elapsed_s / steps,
            "speed/data_wait_s": waited_s / steps,
            "speed/mfu": self.flops_per_token * rate / self.peak.flops,
        }
