"""What the benchmarks share: rows and their table, long-lived workers, and the gate that drops samples of a busy machine.

A candidate runs in a process of its own that is asked for one sample after another, in turn with its peers: whatever slows the
machine slows them alike. Under load the order of two libraries can turn round, so the share of the machine that went to
processes outside the benchmark is read around each sample, and above `MAX_FOREIGN` the sample is dropped and counted.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from lmjax import files

MAX_FOREIGN = 0.08  # share of all cores that others may use during a sample
GLANCE_S = 0.3  # how long to look before a sample

T = TypeVar("T")


# -------------------------------------------------------------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    value: float | str | None  # none: too few samples of a quiet machine
    unit: str
    target: str | None = None  # as "<= 1.1"
    command: str = ""  # that measures it again

    @property
    def met(self) -> bool | None:
        """Whether the figure reaches its target; none where there is no target or no figure."""
        if self.target is None or self.value is None:
            return None
        sign, bound = self.target.split()
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


def show(title: str, rows: Sequence[Row], console: Console) -> None:
    """The table for people."""
    table = Table("what", "figure", "target", "met", title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for row in rows:
        figure = f"{row.value:,.4g}" if isinstance(row.value, float | int) else row.value or "machine too busy"
        met = {True: "yes", False: "NO", None: ""}[row.met]
        table.add_row(row.name, f"{figure} {row.unit}".rstrip(), row.target or "", met)
    console.print(table)


def write(path: str, rows: Sequence[Row]) -> None:
    """The same rows as JSON objects."""
    files.write_json(path, [dataclasses.asdict(row) | {"met": row.met} for row in rows])


def peak_bytes(process: int | str = "self") -> int:
    """Bytes that a process held at most. `getrusage` counts what its parent held when it started this one, too."""
    with open(f"/proc/{process}/status", encoding="utf-8") as status:
        return next((1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:")), 0)  # 0: it has ended


def environment(packages: Sequence[str]) -> list[Row]:
    """Machine, versions and commit."""
    versions = [f"python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} (none)")
    machine = f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    values = {"machine": machine, "versions": ", ".join(versions), "commit": files.code_version()}
    return [Row(name, value, "") for name, value in values.items()]


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown processor"


# -------------------------------------------------------------------------------------------------------------------- gate


class Gate:
    """Reads how much of the machine goes to others; on a system without /proc/stat, nothing."""

    def around(self, sample: Callable[[], T]) -> tuple[T, float]:
        """The sample's value, and the share of all cores' time spent meanwhile outside this process and its descendants."""
        clock, busy, own = time.perf_counter(), busy_s(), tree_s(os.getpid())
        value = sample()
        foreign = (busy_s() - busy) - (tree_s(os.getpid()) - own)
        return value, max(foreign, 0.0) / ((time.perf_counter() - clock) * os.cpu_count())


def busy_s() -> float:
    """Seconds that all cores together were not idle, since boot; 0 where the system does not say."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def tree_s(root: int) -> float:
    """CPU seconds of a process and of all its descendants, living or waited for; 0 where the system does not say."""
    parents, seconds = {}, {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()  # the command's name may hold blanks
            except OSError:
                continue  # it ended meanwhile
            parents[int(name)] = int(fields[1])
            seconds[int(name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def inside(process: int) -> bool:
        while process not in (root, 0):
            process = parents.get(process, 0)
        return process == root

    return sum(spent for process, spent in seconds.items() if inside(process))


@dataclasses.dataclass
class Samples:
    """What a candidate's samples came to."""

    kept: list[float] = dataclasses.field(default_factory=list)
    dropped: int = 0

    @property
    def median(self) -> float:
        """Of the kept ones."""
        return statistics.median(self.kept)


class Sampler:
    """Takes samples of candidates in turn; counts over the whole benchmark."""

    def __init__(self, rounds: int, patience_s: float):
        """
        Args:
          rounds: samples wanted of each candidate.
          patience_s: how long one comparison may take to find them.
        """
        self.rounds, self.patience_s = rounds, patience_s
        self.kept = self.dropped = 0

    def run(self, candidates: Mapping[str, Callable[[], float]], rounds: int | None = None) -> dict[str, Samples]:
        """Samples of every candidate; fewer than `rounds`, or none, where the machine was too busy for too long."""
        rounds = self.rounds if rounds is None else rounds
        samples = {name: Samples() for name in candidates}
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end and min(len(s.kept) for s in samples.values()) < rounds:
            for name, sample in candidates.items():
                self.take(sample, samples[name], end)
        return samples

    def take(self, sample: Callable[[], float], samples: Samples, end: float) -> None:
        """One sample, kept or dropped, once others leave the machine alone."""
        gate = Gate()
        while time.monotonic() < end and gate.around(lambda: time.sleep(GLANCE_S))[1] > MAX_FOREIGN:
            pass
        value, foreign = gate.around(sample)
        if foreign > MAX_FOREIGN:
            samples.dropped += 1
            self.dropped += 1
        else:
            samples.kept.append(value)
            self.kept += 1


def ratio(above: Samples, below: Samples) -> float | None:
    """Median over median; none where either has no sample."""
    return above.median / below.median if above.kept and below.kept else None


# ----------------------------------------------------------------------------------------------------------------- workers


class Worker:
    """A process that answers one JSON line with another, see `serve`."""

    def __init__(self, script: str, environment: Mapping[str, str] | None = None):
        self.script = script
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the worker)
        self.process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    def call(self, verb: str, **arguments: Any) -> Any:
        """Runs a verb in the worker; its failure is raised here, with what it wrote."""
        try:
            self.process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.script} ended in {verb!r}:\n{self.errors.read()[-4000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """The worker's side: answers until the parent closes the pipe. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(verbs[request["verb"]](**request["arguments"])) + "\n")
        answers.flush()
