"""One accelerator, or several: attention kernels against the reference, the speed and MFU of training, float32 beside bfloat16.

    python scripts/bench_gpu.py [--only SECTION …] [--quick] [--json FILE]

`--quick` takes small shapes, which a CPU can run too: it shows that the script works, not how fast anything is.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from bench_harness import Row, environment, show, write
from bench_lmjax import Training
from rich.console import Console

from lmjax import config as configs
from lmjax.errors import UserError
from lmjax.model import attention
from lmjax.model.attention import IMPLEMENTATIONS, Mask
from lmjax.monitor.speed import measure_matmul_flops, peak_flops
from lmjax.plan import hardware, params
from lmjax.plan.flops import flops_per_token
from lmjax.train.config import RunConfig

COMMAND = "python scripts/bench_gpu.py --only"
MASKS = {"causal": Mask(), "window": Mask(window=512), "packed": Mask()}
WORST_ERROR = 0.02  # of bfloat16 results of unit size, forward; gradients are compared relative to their largest
CONFIGS = {  # batches that an accelerator of 80 GB holds
    "configs/pretrain/gpt2_124m.py": {"train.batch_size": 64, "model.remat": "none"},
    "configs/pretrain/llama_1b.py": {"train.batch_size": 8},
}
STEPS = {"optim.schedule": "constant", "optim.warmup_steps": 5}  # a few steps on one batch
TINY = {
    "model.vocab_size": 512, "model.num_layers": 2, "model.d_model": 64, "model.num_heads": 4, "model.num_kv_heads": 2,
    "model.head_dim": 16, "model.d_ff": 128, "data.seq_len": 64, "train.batch_size": 8,
}  # fmt: skip


def platform() -> str:
    """Of the devices here."""
    return jax.devices()[0].platform


def inputs(length: int, dim: int, dtype: str) -> tuple[jax.Array, ...]:
    """q [1 T K G H], k and v [1 T K H] with 8 heads in 4 groups, of unit size."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, length, 4, 2, dim), *[(1, length, 4, dim)] * 2]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def masked(kind: str, length: int) -> Mask:
    """The mask of that name; packed rows hold four documents."""
    if kind != "packed":
        return MASKS[kind]
    return Mask(segments=jnp.arange(length)[None] * 4 // length + 1)


def gradients(name: str, mask: Mask) -> Callable:
    """Forward and backward of an implementation: (out, gradients by q, k and v)."""
    attend = functools.partial(IMPLEMENTATIONS[name], mask=mask)

    def run(q, k, v):
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(jnp.ones_like(out))

    return jax.jit(run)


def error(name: str, kind: str, length: int, dim: int) -> float:
    """Largest difference to the reference in float32, of the output and of each gradient, relative to its largest element."""
    arrays, mask = inputs(length, dim, "bfloat16"), masked(kind, length)
    found = gradients(name, mask)(*arrays)
    wanted = gradients("reference", mask)(*(x.astype(jnp.float32) for x in arrays))
    pairs = zip(found, wanted, strict=True)
    return max(float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def best_s(run: Callable, arrays: Sequence[Any], rounds: int = 10) -> float:
    """Seconds of the fastest of some calls, compiled before."""
    jax.block_until_ready(run(*arrays))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        best = min(best, time.perf_counter() - start)
    return best


def kernels(quick: bool) -> list[Row]:
    """Each implementation that runs here, by mask: its error, and its time at a longer row."""
    length, timed_length, dim = (128, 256, 16) if quick else (1024, 4096, 128)
    names = [n for n in IMPLEMENTATIONS if n != "reference" and attention.PLATFORMS.get(n, platform()) == platform()]
    rows = []
    for name in names:
        for kind in MASKS:
            try:
                worst = error(name, kind, length, dim)
            except UserError as refused:
                rows.append(Row(f"{name}, {kind}", f"refused: {refused}", ""))
                continue
            command = f"{COMMAND} kernels"
            rows.append(Row(f"{name}, {kind}: error, T {length}", worst, "", f"<= {WORST_ERROR}", command))
            seconds = best_s(gradients(name, masked(kind, timed_length)), inputs(timed_length, dim, "bfloat16"))
            rows.append(
                Row(f"{name}, {kind}: forward + backward, T {timed_length}", 1e3 * seconds, "ms", None, command)
            )
    return rows


def run_config(path: str, overrides: dict[str, Any]) -> RunConfig:
    """A config of the repository for random tokens on all devices here."""
    values = {**overrides, "data.shards": "none", "tokenizer": "none"}
    return configs.load(RunConfig, path, [f"{name}={value}" for name, value in values.items()])


def training(quick: bool) -> list[Row]:
    """Step time, tokens a second and MFU of real steps; the peak is the table's, and a bfloat16 product is beside it."""
    devices = jax.devices()
    product = measure_matmul_flops("bfloat16")
    rows = [Row("bfloat16 product of one device", product / 1e12, "TFLOP/s", None, f"{COMMAND} training")]
    for path, overrides in CONFIGS.items():
        fitting = {k: v for k, v in TINY.items() if not (k == "model.num_kv_heads" and "gpt2" in path)} if quick else {}
        config = run_config(path, {**overrides, **STEPS, **fitting})
        run = Training(config, len(devices))
        run.start()
        first = run.steps(1)[0]
        count = 2 if quick else 10
        start = time.perf_counter()
        losses = run.steps(count)
        step_s = (time.perf_counter() - start) / count
        tokens_per_s = config.train.batch_size * config.data.seq_len / step_s
        peak = peak_flops(devices, config.train.precision)
        mfu = flops_per_token(config.model, config.data.seq_len).training * tokens_per_s / peak.flops
        target = ">= 45" if "llama_1b" in path and not quick else None
        command, name = f"{COMMAND} training", path.rpartition("/")[2]
        rows += [
            Row(f"{name}, {params.total(config.model) / 1e6:,.0f}M: step", 1e3 * step_s, "ms", None, command),
            Row(f"{name}: tokens/s", tokens_per_s, "tokens/s", None, command),
            Row(f"{name}: MFU ({peak.source})", 100 * mfu, "%", target, command),
            Row(
                f"{name}: loss of {count} steps on one batch, against the first",
                losses[-1] / first,
                "×",
                "<= 1.0",
                command,
            ),
        ]
        del run
    return rows


def precision(quick: bool) -> list[Row]:
    """Losses of the same steps in bfloat16 and float32."""
    config = {**STEPS, **TINY}
    losses = {}
    for kind in ("float32", "bfloat16"):
        run = Training(
            run_config("configs/pretrain/llama_1b.py", {**config, "train.precision": kind}), len(jax.devices())
        )
        run.start()
        losses[kind] = run.steps(5 if quick else 20)
    worst = max(abs(a - b) / b for a, b in zip(losses["bfloat16"], losses["float32"], strict=True))
    return [
        Row(
            "bfloat16 against float32: largest relative difference of a loss",
            worst,
            "",
            "<= 0.02",
            f"{COMMAND} precision",
        )
    ]


SECTIONS: dict[str, Callable[[bool], list[Row]]] = {"kernels": kernels, "training": training, "precision": precision}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections, prints the table; 1 where a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small shapes, also on a CPU")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    args = parser.parse_args(argv)
    if platform() == "cpu" and not args.quick:
        print("bench_gpu: JAX finds no accelerator here; --quick runs on a CPU", file=sys.stderr)
        return 2
    kind = jax.devices()[0].device_kind
    known = hardware.find(kind)
    rows = environment(["jax", "jaxlib"])
    rows.append(Row("devices", f"{len(jax.devices())} × {kind}{'' if known else ' (not in the table)'}", ""))
    for name in args.only or SECTIONS:
        print(f"bench_gpu: {name} …", flush=True)
        rows += SECTIONS[name](args.quick)
    show("an accelerator", rows, Console(soft_wrap=True, highlight=False))
    if args.json:
        write(args.json, rows)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
