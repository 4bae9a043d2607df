"""The training step on a CPU beside the same model in PyTorch, and what the step is made of.

    python scripts/bench_train.py [--only SECTION …] [--quick] [--json FILE]

Peers run in processes of their own, asked in turn for a few steps; samples during which others used the machine are dropped
and counted. `--quick` is the short form: fewer samples, and no peer. The full form needs the extra `peers`.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench_harness import Row, Sampler, Worker, environment, ratio, show, write
from rich.console import Console

from lmjax.cli import HUGE_PAGES

HERE = pathlib.Path(__file__).parent
COMMAND = "python scripts/bench_train.py --only {}"
# Fields that change speed and no result (attention's form and block, the loss's chunk) stand at their best for a CPU.
LLAMA = {
    "model": {
        "vocab_size": 16384, "num_layers": 6, "d_model": 384, "num_heads": 6, "d_ff": 1024, "attention_block": 64,
    },
    "data": {"seq_len": 256},
    "optim": {"schedule": "constant", "warmup_steps": 0},
    "train": {"batch_size": 8, "precision": "float32", "loss_chunk": 256},
}  # fmt: skip
NANOGPT = {  # nanoGPT's command for a laptop: data/shakespeare_char on --device=cpu
    "model": {
        "vocab_size": 65, "num_layers": 4, "d_model": 128, "num_heads": 4, "activation": "gelu", "norm": "layernorm",
        "norm_epsilon": 1e-5, "position": "learned", "max_length": 64, "attention": "blockwise",
    },
    "data": {"seq_len": 64},
    "optim": {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-3, "b2": 0.99},
    "train": {"batch_size": 12, "precision": "float32"},
}  # fmt: skip
SMALL = {
    **LLAMA,
    "model": {**LLAMA["model"], "vocab_size": 512, "num_layers": 4, "d_model": 128, "num_heads": 8, "d_ff": 512},
}
HEAD = {"vocab_size": 128_256, "num_tokens": 2048, "width": 512}


class Bench:
    """What every section needs."""

    def __init__(self, quick: bool):
        self.quick = quick
        self.sampler = Sampler(rounds=3 if quick else 9, patience_s=20 if quick else 120)
        self.left_out: list[str] = []

    def ours(self, devices: int = 1) -> Worker:
        """A process of lmjax with so many virtual devices."""
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"} if devices > 1 else {}
        as_train_does = {"GLIBC_TUNABLES": HUGE_PAGES}
        return Worker(str(HERE / "bench_lmjax.py"), {"JAX_PLATFORMS": "cpu", **as_train_does, **flags})

    def peer(self) -> Worker:
        """A process of PyTorch; its compiler finds no cache, as ours does not: first steps are compared."""
        return Worker(str(HERE / "bench_torch.py"), {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})


def half(config: dict[str, Any]) -> dict[str, Any]:
    """The same in bfloat16."""
    return {**config, "train": {**config["train"], "precision": "bfloat16"}}


def versus(bench: Bench, config: dict[str, Any], compiled: bool, count: int) -> dict[str, Any]:
    """Interleaved samples of `count` steps of one config, ours and the peers', from the same weights.

    Returns:
      Samples by candidate, and what `build` told of each.
    """
    kinds = [] if bench.quick else ["eager", "compiled"] if compiled else ["eager"]
    workers = {"ours": bench.ours(), **{kind: bench.peer() for kind in kinds}}
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        start = {"config": config, "weights": f"{folder}/weights.npz"}
        told["ours"] = workers["ours"].call("build", name="ours", **start)
        for kind in kinds:
            told[kind] = workers[kind].call("build", name=kind, compiled=kind == "compiled", **start)
            check_same_model(told["ours"], told[kind], 1e-3 if config["train"]["precision"] == "float32" else 2e-2)
    candidates = {k: lambda k=k: workers[k].call("steps", name=k, count=count)["step_s"] for k in workers}
    for warm_up in candidates.values():
        warm_up()
    precision = config["train"]["precision"]
    candidates["matmul"] = lambda: 1 / workers["ours"].call("matmul", dtype=precision)
    samples = bench.sampler.run(candidates)
    for worker in workers.values():
        worker.close()
    return {"samples": samples, "told": told}


def check_same_model(ours: dict[str, Any], peer: dict[str, Any], tolerance: float) -> None:
    """A comparison of two models that differ would mean nothing."""
    if peer["num_parameters"] != ours["num_parameters"] or abs(peer["loss"] - ours["loss"]) > tolerance:
        raise RuntimeError(f"not the same model: ours {ours}, the peer's {peer}")


def against_peers(bench: Bench, label: str, result: dict[str, Any], targets: dict[str, str], section: str) -> list[Row]:
    """Our time a step, and the peers' over it."""
    samples, command = result["samples"], COMMAND.format(section)
    ours = samples["ours"]
    rows = [Row(f"{label}: step", 1000 * ours.median if ours.kept else None, "ms", None, command)]
    for kind, target in targets.items():
        if kind in samples:
            rows.append(Row(f"{label}: torch {kind} time / ours", ratio(samples[kind], ours), "×", target, command))
        else:
            bench.left_out.append(f"{label} against torch {kind}")
    return rows


def llama(bench: Bench) -> list[Row]:
    """A Llama of 10M parameters, float32 and bfloat16."""
    command = COMMAND.format("llama")
    exact = versus(bench, LLAMA, compiled=True, count=2)
    rows = against_peers(bench, "Llama 10M fp32", exact, {"eager": ">= 1.05", "compiled": ">= 1.0"}, "llama")
    samples, flops = exact["samples"], exact["told"]["ours"]["flops_per_step"]
    share = None
    if samples["ours"].kept and samples["matmul"].kept:
        share = 100 * flops / samples["ours"].median * samples["matmul"].median
        rows.append(Row("matrix product fp32", 1e-9 / samples["matmul"].median, "GFLOP/s", None, command))
    rows.append(Row("Llama 10M fp32: share of the matrix product", share, "%", ">= 68", command))
    rough = versus(bench, half(LLAMA), compiled=True, count=2)
    rows += against_peers(bench, "Llama 10M bf16", rough, {"compiled": ">= 0.8"}, "llama")
    rows.append(
        Row(
            "Llama 10M: own fp32 time / bf16", ratio(samples["ours"], rough["samples"]["ours"]), "×", ">= 1.25", command
        )
    )
    if not bench.quick:
        first = exact["told"]["ours"]["first_step_s"] / exact["told"]["compiled"]["first_step_s"]
        rows.append(Row("Llama 10M: first step / torch.compile's", first, "×", "<= 0.2", command))
    return rows


def nanogpt(bench: Bench) -> list[Row]:
    """nanoGPT's configuration for a CPU."""
    result = versus(bench, NANOGPT, compiled=False, count=10)
    return against_peers(bench, "nanoGPT CPU config fp32", result, {"eager": ">= 0.85"}, "nanogpt")


def compiling(bench: Bench) -> list[Row]:
    """Compile time under the scan over layers."""
    worker, command = bench.ours(), COMMAND.format("compile")

    def seconds(layers: int) -> Callable[[], float]:
        model = {**SMALL["model"], "num_layers": layers, "scan": "on"}
        return lambda: worker.call("compile", config={**SMALL, "model": model})

    few, many = seconds(4), seconds(64)
    few()  # the first compilation of a process loads what the others find
    samples = bench.sampler.run({"few": few, "many": many}, rounds=2 if bench.quick else 5)
    worker.close()
    return [
        Row("compile, 4 layers", samples["few"].median if samples["few"].kept else None, "s", None, command),
        Row("compile, 64 layers / 4 layers", ratio(samples["many"], samples["few"]), "×", "<= 1.1", command),
    ]


def head(bench: Bench) -> list[Row]:
    """The loss head over a large vocabulary, forward and backward."""
    worker, command = bench.ours(), COMMAND.format("head")
    memory = {
        kind: worker.call("build_head", name=kind, chunk=chunk, **HEAD)
        for kind, chunk in (("naive", None), ("ours", 256))
    }
    samples = bench.sampler.run(
        {kind: lambda k=kind: worker.call("run_head", name=k) for kind in memory}, rounds=2 if bench.quick else 5
    )
    worker.close()
    return [
        Row("loss head, V 128k: time / naive", ratio(samples["ours"], samples["naive"]), "×", "<= 1.0", command),
        Row("loss head, V 128k: temporaries / naive", memory["ours"] / memory["naive"], "×", "<= 0.25", command),
    ]


def devices(bench: Bench) -> list[Row]:
    """Eight virtual devices against one: no speed-up is possible, what is measured is the overhead."""
    worker, command = bench.ours(devices=8), COMMAND.format("devices")
    meshes = {"one": None, "data": ("<= 1.05", 1), "fsdp": ("<= 1.15", 1), "tensor": ("<= 1.4", 1)}
    for name in meshes:
        mesh = {"data": 1, "fsdp": 1, "tensor": 1, **({name: 8} if name != "one" else {})}
        worker.call("build", name=name, config={**SMALL, "mesh": mesh}, num_devices=1 if name == "one" else 8)
        worker.call("steps", name=name, count=2)
    samples = bench.sampler.run({n: lambda n=n: worker.call("steps", name=n, count=3)["step_s"] for n in meshes})
    worker.close()
    return [
        Row(
            f"8 virtual devices, {name} / one device",
            ratio(samples[name], samples["one"]),
            "×",
            meshes[name][0],
            command,
        )
        for name in ("data", "fsdp", "tensor")
    ]


def command_line(bench: Bench) -> list[Row]:
    """Commands that must not wait for jax."""

    def seconds(*words: str) -> Callable[[], float]:
        def sample() -> float:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "lmjax.cli", *words], check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - start

        return sample

    plan = (
        "plan",
        "--config",
        str(HERE.parent / "configs/pretrain/llama3_8b.py"),
        "--devices",
        "64",
        "--hardware",
        "v5p",
    )
    samples = bench.sampler.run({"lmjax --help": seconds("--help"), "lmjax plan": seconds(*plan)}, rounds=3)
    return [
        Row(name, s.median if s.kept else None, "s", "<= 1.0", COMMAND.format("cli")) for name, s in samples.items()
    ]


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "llama": llama,
    "nanogpt": nanogpt,
    "compile": compiling,
    "head": head,
    "devices": devices,
    "cli": command_line,
}
QUICK = ("nanogpt", "compile", "cli")  # what a minute holds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections, prints the table; exit code 2 where the peers are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer samples, no peers")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    args = parser.parse_args(argv)
    if not args.quick and importlib.util.find_spec("torch") is None:
        print(
            "bench_train: PyTorch is missing: pip install -c constraints/py311.txt 'lmjax[peers]', or use --quick",
            file=sys.stderr,
        )
        return 2
    console, bench = Console(soft_wrap=True, highlight=False), Bench(args.quick)
    rows = environment(["jax", "jaxlib", "torch"])
    for name in args.only or (QUICK if args.quick else SECTIONS):
        console.print(f"bench_train: {name} …")
        rows += SECTIONS[name](bench)
    rows.append(Row("samples kept, dropped", json.dumps([bench.sampler.kept, bench.sampler.dropped]), ""))
    show("the training step on a CPU", rows, console)
    if bench.left_out or args.quick:
        console.print(
            "left out: " + ", ".join([*bench.left_out, *(s for s in SECTIONS if args.quick and s not in QUICK)])
        )
    if args.json:
        write(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
