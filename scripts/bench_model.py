"""Parts of the decoder on a CPU: a mixture of experts beside a dense model, attention over long rows, compilation by depth, and the
import of a large checkpoint.

    python scripts/bench_model.py [--only SECTION …] [--quick] [--json FILE]

Candidates run in a process of their own, asked in turn for a few steps; samples during which others used the machine are dropped
and counted. `--quick` is the short form: fewer samples.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence

from bench_attention import attention, scan
from bench_harness import Row, Sampler, Worker, environment, ratio, show, write
from bench_import import hf_import
from rich.console import Console

from lmjax.cli import HUGE_PAGES

HERE = pathlib.Path(__file__).parent
DENSE = {
    "model": {"vocab_size": 4096, "num_layers": 4, "d_model": 384, "num_heads": 6, "d_ff": 1024, "attention_block": 64},
    "data": {"seq_len": 256},
    "optim": {"schedule": "constant", "warmup_steps": 0},
    "train": {"batch_size": 8, "precision": "float32", "loss_chunk": 256},
    "mesh": {"data": 1},
}
GROUPED = {"rows": 4096, "groups": 8, "width": 384, "out": 1024}


def with_model(**fields) -> dict:
    """The dense run with other fields of its model."""
    return {**DENSE, "model": {**DENSE["model"], **fields}}


def moe(sampler: Sampler, quick: bool) -> list[Row]:
    """Eight experts of half the width, two for a token: as many active parameters as the dense model."""
    command = "python scripts/bench_model.py --only moe" + " --quick" * quick
    worker = Worker(str(HERE / "bench_lmjax.py"), {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": HUGE_PAGES})
    experts = {"num_experts": 8, "top_k": 2}
    configs = {
        "dense": DENSE,
        "dropless": with_model(d_ff=512, moe=experts),
        "capacity 1.25": with_model(d_ff=512, moe={**experts, "capacity_factor": 1.25}),
    }
    told = {name: worker.call("build", name=name, config=config) for name, config in configs.items()}
    samples = sampler.run({n: lambda n=n: worker.call("steps", name=n, count=2)["step_s"] for n in configs})
    kinds = ("blocks", "ragged_dot")
    for kind in kinds:
        worker.call("build_grouped", kind=kind, **GROUPED)
    grouped = sampler.run({k: lambda k=k: worker.call("run_grouped", kind=k) for k in kinds}, rounds=3)
    worker.close()
    millions = {name: facts["num_parameters"] / 1e6 for name, facts in told.items()}
    dense = 1000 * samples["dense"].median if samples["dense"].kept else None
    return [
        Row(f"dense, {millions['dense']:.1f}M parameters: step", dense, "ms", None, command),
        Row(
            f"8 experts top-2, {millions['dropless']:.1f}M, dropless: step / dense",
            ratio(samples["dropless"], samples["dense"]), "×", "<= 1.5", command,
        ),
        Row(
            "8 experts top-2, capacity 1.25: step / dense",
            ratio(samples["capacity 1.25"], samples["dense"]), "×", "<= 1.5", command,
        ),
        Row("grouped product, ragged_dot / blocks", ratio(grouped["ragged_dot"], grouped["blocks"]), "×", ">= 1.0", command),
    ]  # fmt: skip


SECTIONS: dict[str, Callable[[Sampler, bool], list[Row]]] = {
    "moe": moe, "attention": attention, "scan": scan, "import": hf_import,
}  # fmt: skip
QUICK = ("moe",)  # what a minute holds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    args = parser.parse_args(argv)
    console, sampler = (
        Console(soft_wrap=True, highlight=False),
        Sampler(3 if args.quick else 9, 30 if args.quick else 180),
    )
    rows = environment(["jax", "jaxlib"])
    for name in args.only or (QUICK if args.quick else SECTIONS):
        console.print(f"bench_model: {name} …")
        rows += SECTIONS[name](sampler, args.quick)
    rows.append(Row("samples kept, dropped", json.dumps([sampler.kept, sampler.dropped]), ""))
    show("the decoder's parts on a CPU", rows, console)
    if args.json:
        write(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
