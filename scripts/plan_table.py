"""The estimate of `lmjax plan` beside what the compiler says, for slices of TPUs that are not here: a table, and rows for machines.

    python scripts/plan_table.py [--only NAME …] [--quick] [--results DIR] [--json FILE] [--readme]

Each pair of a config and a slice is one `lmjax plan --topology … --json`: a minute or two of two cores, and about a GiB of memory. What
the compiler said is kept in --results, so that the table goes on where it was stopped; delete the folder after a change of the step. The
plan is made anew each time. Memory is held to 10 %, FLOPs to 3 %; parameters are equal (tests/plan/test_params.py). --quick compiles one
small pair; --readme writes the table of the slices into README.md.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import bench_harness as harness
from bench_harness import Row
from rich.console import Console

from lmjax import config as configs
from lmjax import files
from lmjax.plan import estimate
from lmjax.train.config import RunConfig

ROOT = pathlib.Path(__file__).parents[1]
MARK = "<!-- scripts/plan_table.py -->"
SMALL = ("model.num_layers=2", "data.seq_len=1024", "train.batch_size=8")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A config, with overrides, on a slice."""

    name: str
    config: str
    topology: str
    overrides: tuple[str, ...] = ()
    shown: bool = False  # in the README

    @property
    def command(self) -> str:
        """What a person types."""
        changes = "".join(f" --config.{change}" for change in self.overrides)
        return f"lmjax plan --config configs/pretrain/{self.config}.py --topology {self.topology}{changes}"


PAIRS = (
    Pair("Llama 3 8B, v5p-64", "llama3_8b", "v5p:2x4x4", ("train.batch_size=64",), shown=True),
    Pair("Llama 3 8B, v5p-128", "llama3_8b", "v5p:4x4x4", ("train.batch_size=128",), shown=True),
    Pair("Llama 3 8B, v5e-256", "llama3_8b", "v5e:16x16", ("train.batch_size=256",), shown=True),
    Pair("Llama 3 70B, v5p-256", "llama3_70b", "v5p:4x4x8", (), shown=True),
    Pair("Mixtral 8x7B, v5p-128", "mixtral_8x7b", "v5p:4x4x4", (), shown=True),
    Pair("1.2B, fsdp 16, branch outputs kept", "llama_1b", "v5e:4x4", ("train.batch_size=16",)),
    Pair("1.2B, fsdp 16, products kept", "llama_1b", "v6e:4x4", ("train.batch_size=16", "model.remat=dots")),
    Pair("1.2B, fsdp 8, all kept", "llama_1b", "v5p:2x2x2", ("train.batch_size=16", "model.remat=none")),
    Pair("1.2B, data 4, fsdp 4", "llama_1b", "v5p:2x2x4", ("train.batch_size=32", "mesh.data=4", "mesh.fsdp=4")),
    Pair("1.2B, fsdp 4, tensor 4", "llama_1b", "v5e:4x4", ("train.batch_size=16", "mesh.fsdp=4", "mesh.tensor=4")),
    Pair("1.2B, accumulation 4", "llama_1b", "v5e:4x4", ("train.batch_size=64", "train.accumulation=4")),
    Pair("124M, data 8", "gpt2_124m", "v5e:2x4", ("train.batch_size=64", "mesh.data=8")),
    Pair("124M, data 4, all kept", "gpt2_124m", "v4:2x2x1", ("train.batch_size=32", "mesh.data=4", "model.remat=none")),
    Pair("small", "llama_1b", "v5e:2x2", SMALL),
)


def compiled(pair: Pair, folder: pathlib.Path) -> dict[str, Any]:
    """What the compiler says of a pair, from the folder or made anew."""
    path = folder / f"{pair.name.replace(' ', '_').replace(',', '')}.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["command"] == pair.command:
            return kept["compiled"]
    words = [sys.executable, "-m", "lmjax.cli", *pair.command.split()[1:], "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{pair.command}\n{done.stderr}")
    kept = {"command": pair.command, "compiled": json.loads(done.stdout)["compiled"]}
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(path, kept)
    return kept["compiled"]


def planned(pair: Pair, num_devices: int) -> estimate.Plan:
    """The plan of a pair."""
    config = configs.load(RunConfig, str(ROOT / "configs" / "pretrain" / f"{pair.config}.py"), pair.overrides)
    return estimate.plan(config, num_devices, pair.topology.partition(":")[0])


def rows_of(pair: Pair, plan: estimate.Plan, there: dict[str, Any]) -> list[Row]:
    """How far the plan is off, in percent."""
    pairs = {
        "memory": (plan.memory.total, there["needed_bytes"], 10),
        "FLOPs": (plan.device_flops, there["flops"], 3),
    }
    return [
        Row(f"{pair.name}: {what} off", abs(estimate / exact - 1) * 100, "%", f"<= {bound}", pair.command)
        for what, (estimate, exact, bound) in pairs.items()
        if exact is not None
    ]


def markdown(entries: list[tuple[Pair, estimate.Plan, dict[str, Any]]]) -> str:
    """The table of the README."""
    head = "| run | GiB a device, planned | compiled | of HBM | TFLOPs a device, planned | compiled | command |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for pair, plan, there in entries:
        lines.append(
            f"| {pair.name} | {plan.memory.total / 2**30:.2f} | {there['needed_bytes'] / 2**30:.2f} | "
            f"{there['needed_bytes'] / there['hbm_bytes']:.0%} | {plan.device_flops / 1e12:.1f} | "
            f"{there['flops'] / 1e12:.1f} | `{pair.command}` |"
        )
    return "\n".join(lines)


def main() -> int:
    """Compiles, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="pairs whose name holds one of these")
    parser.add_argument("--quick", action="store_true", help="one small pair")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("plan_table"), metavar="DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--readme", action="store_true", help="write the table of those that are shown into README.md")
    args = parser.parse_args()
    wanted = ["small"] if args.quick else args.only
    entries = []
    for pair in PAIRS:
        if wanted is None or any(name in pair.name for name in wanted):
            there = compiled(pair, args.results)
            entries.append((pair, planned(pair, there["num_devices"]), there))
    rows = [row for entry in entries for row in rows_of(*entry)]
    harness.show("The plan beside the compiler", rows, Console())
    if args.json:
        harness.write(str(args.json), rows)
    shown = [entry for entry in entries if entry[0].shown]
    if args.readme and shown:
        path = ROOT / "README.md"
        before, _, after = path.read_text(encoding="utf-8").split(MARK)
        path.write_text(f"{before}{MARK}\n{markdown(shown)}\n{MARK}{after}", encoding="utf-8")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
