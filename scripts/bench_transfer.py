"""Does the learning rate of a narrow model hold at eight times its width? With `config.model.mup`, and without.

    python scripts/bench_transfer.py [--quick] [--json FILE]

Small decoders learn bytes of this Python's source at rates a factor of two apart. A rate's loss is the mean over the last tenth of
its steps, the best rate that of a parabola through the lowest loss and its neighbours. The coordinate check is the root mean square
of what four steps change in the logits. `--quick` is the short form: four times the width and fewer steps.

On two cores, 80 steps, width 32 → 256: with muP the best rate is 1.09 × the base's, and the base's rate loses nothing; without, it is
2.24 × away and the base's rate loses 0.061 nats. Four steps move the logits 1.005 × and 4.4 × as far as at the base. 6 min of a core.
"""

import argparse
import pathlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from bench_harness import Row, environment, show, write
from rich.console import Console

from lmjax.batch import Batch
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MupConfig
from lmjax.model.dense import dtypes
from lmjax.optim.build import build_optimizer
from lmjax.optim.config import OptimConfig
from lmjax.train.loss import next_token_loss

TYPES = dtypes("float32", "cpu")
BASE = 32  # width
ROWS, LENGTH = 16, 64
RATES = 2.0 ** np.arange(-9, -3)
WARMUP = 0.1  # share of the steps; the rate then falls to zero
CHECK_STEPS, CHECK_RATE = 4, 2.0**-7


def make_model(width: int, mup: bool) -> ModelConfig:
    """Two layers, heads of 16."""
    fields = {"vocab_size": 256, "num_layers": 2, "d_model": width, "num_heads": width // 16, "max_length": LENGTH}
    return ModelConfig(**fields, mup=MupConfig(BASE) if mup else None)


def batches(count: int) -> Iterator[Batch]:
    """Windows of bytes, the same for every run."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    random = np.random.default_rng(0)
    places = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH)).astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    for _ in range(count):
        starts = random.integers(0, len(text) - LENGTH - 1, ROWS)
        ids = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
        yield Batch(ids[:, :-1], ids[:, 1:], ones.astype(np.float32), ones, places)


class Trainer:
    """One width, compiled once; the rate is an argument."""

    def __init__(self, model: ModelConfig, name: str):
        self.model = model
        optimizer = build_optimizer(OptimConfig(name=name), 1.0 / model.width_ratio)

        def loss(params, batch):
            sums = next_token_loss(model, params, batch, None, 0.0, ROWS * LENGTH, TYPES)
            return sums.total / sums.weight

        def step(params, state, batch, rate):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return jax.tree.map(lambda p, u: p + rate * u, params, updates), state, value

        self.init = jax.jit(lambda: decoder.init(model, jax.random.key(0)))
        self.init_state, self.step = jax.jit(optimizer.init), jax.jit(step, donate_argnums=(0, 1))

    def train(self, rates: Sequence[float]) -> tuple[dict, np.ndarray]:
        """Parameters after a step at each of these rates, and each step's loss."""
        params, losses = self.init(), []
        state = self.init_state(params)
        for rate, batch in zip(rates, batches(len(rates)), strict=True):
            params, state, value = self.step(params, state, batch, rate)
            losses.append(value)
        return params, np.array(jax.device_get(losses))

    def final_loss(self, peak: float, steps: int) -> float:
        """Of a run at that peak."""
        done = np.arange(steps) / steps
        rates = peak * np.minimum(done / WARMUP, (1 - done) / (1 - WARMUP))
        losses = self.train(rates)[1]
        return float(losses[-max(steps // 10, 1) :].mean())

    def moved(self) -> float:
        """The coordinate check."""
        batch = next(batches(1))

        @jax.jit
        def logits(params):
            hidden, _ = decoder.forward(self.model, params, batch.tokens, batch.positions, Mask(), TYPES)
            return decoder.unembed(self.model, params, hidden, TYPES)

        after, _ = self.train([CHECK_RATE] * CHECK_STEPS)
        return float(jnp.sqrt(jnp.mean((logits(after) - logits(self.init())) ** 2)))


def best_rate(losses: np.ndarray) -> float:
    """log2 of the rate with the least loss, between those that were tried."""
    place = int(np.nanargmin(losses))
    here = float(np.log2(RATES[place]))
    if place in (0, len(losses) - 1):
        return here
    left, low, right = losses[place - 1 : place + 2]
    bend = left - 2 * low + right
    return float(here + 0.5 * (left - right) / bend) if bend > 0 else here


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller width and fewer steps")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    args = parser.parse_args(argv)
    console, command = (
        Console(soft_wrap=True, highlight=False),
        "python scripts/bench_transfer.py" + " --quick" * args.quick,
    )
    steps, widest = (40, 4 * BASE) if args.quick else (80, 8 * BASE)
    cases = {"base": (BASE, False), "muP": (widest, True), "standard": (widest, False)}
    losses, sizes = {}, {}
    for name, (width, mup) in cases.items():
        trainer = Trainer(make_model(width, mup), "adamw")
        losses[name] = np.array([trainer.final_loss(rate, steps) for rate in RATES])
        sizes[name] = trainer.moved()
        told = ", ".join(f"2^{np.log2(rate):.0f} {loss:.3f}" for rate, loss in zip(RATES, losses[name], strict=True))
        console.print(f"{name}, {width} wide: {told}")
    rows, base = environment(["jax", "jaxlib"]), int(np.nanargmin(losses["base"]))
    rows.append(Row(f"best rate at width {BASE}", f"2^{best_rate(losses['base']):.2f}", "", None, command))
    for name, bound in (("muP", True), ("standard", False)):
        at = f"{name}, {widest // BASE} × the width: "
        shift = abs(best_rate(losses[name]) - best_rate(losses["base"]))
        lost = float(losses[name][base] - np.nanmin(losses[name]))
        rows += [
            Row(at + "best rate over the base's, either way", 2**shift, "×", "<= 2" if bound else None, command),
            Row(at + "loss at the base's best rate over its own", lost, "nats", "<= 0.02" if bound else None, command),
            Row(at + "logits moved by four steps, over the base's", sizes[name] / sizes["base"], "×",
                "<= 1.7" if bound else None, command),
        ]  # fmt: skip
    show("hyper-parameters over width", rows, console)
    if args.json:
        write(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
