"""How long a run takes, what limits its step, and how often to save.

time      model FLOPs of the run / (devices · peak FLOP/s · MFU)
roofline  computing: hardware FLOPs of a device / peak; communicating: bytes that it sends / bandwidth of its links
cadence   τ = √(2 δ M) (1 + √(δ / 2M) / 3 + δ / 18M) - δ     δ seconds that a save costs, M seconds between preemptions
          (Young, 1974; Daly, 2006); of the time, δ/τ is spent on saving, and (τ/2 + r)/M is done again or spent on the restart r
"""

import dataclasses
import math

from lmjax.config import need
from lmjax.plan import activations, memory, params
from lmjax.plan.flops import flops_per_token
from lmjax.plan.hardware import Accelerator
from lmjax.train.config import RunConfig

DAY_S = 86_400


def run_seconds(training_flops: float, num_devices: int, peak_flops: float, mfu: float) -> float:
    """Seconds of a run of so many model FLOPs at a stated MFU."""
    return training_flops / (num_devices * peak_flops * mfu)


# ----------------------------------------------------------------------------------------------------------------- cadence


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often to save, and what is lost."""

    interval_s: float  # between saves, of useful work
    steps: int | None  # the same in steps, at least one; none: the time of a step is not known
    lost_share: float  # of the time: saving, work done again, restarts


def save_interval_s(save_s: float, between_s: float) -> float:
    """Daly's interval between the ends of saves, in seconds; with saves dearer than the time between preemptions, that time."""
    if save_s >= 2 * between_s:
        return between_s
    ratio = save_s / (2 * between_s)
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def cadence(save_s: float, restart_s: float, preemptions_per_day: float, step_s: float | None) -> Cadence:
    """The cadence that loses least.

    Args:
      save_s: seconds for which a save holds the run up.
      restart_s: seconds from a preemption until steps go on.
      preemptions_per_day: of the whole run.
      step_s: of one step; none: not known.
    """
    need(save_s > 0 and preemptions_per_day > 0, "--save-s and --preemptions-per-day must be positive")
    need(restart_s >= 0, "--restart-s must not be negative")
    between = DAY_S / preemptions_per_day
    interval = save_interval_s(save_s, between)
    lost = save_s / (interval + save_s) + (interval / 2 + restart_s) / between
    return Cadence(interval, None if step_s is None else max(1, round(interval / step_s)), min(lost, 1.0))


# ---------------------------------------------------------------------------------------------------------------- roofline


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step at the hardware's peaks; a real step takes longer."""

    compute_s: float
    hidden_s: float  # communication that other work can run beside: weights gathered, gradients reduced
    exposed_s: float  # communication that the next product waits for: tensor, expert

    @property
    def step_s(self) -> float:
        """With all that can overlap overlapping."""
        return max(self.compute_s, self.hidden_s) + self.exposed_s

    @property
    def limit(self) -> str:
        """What the step waits for most."""
        if self.exposed_s > max(self.compute_s, self.hidden_s):
            return "tensor and expert communication"
        return "compute" if self.compute_s >= self.hidden_s else "gathering weights and reducing gradients"


def roofline(config: RunConfig, num_devices: int, accelerator: Accelerator) -> Roofline:
    """Of one step of the longest rows, all links of a device used at once."""
    where = memory.layout(config, num_devices)
    micros = config.train.accumulation
    tokens = where.tokens(config.data.longest)  # of a device and a micro-batch
    passes = where.pipeline
    shared = where.sizes["tensor"]  # devices that share a token's products
    shared *= passes.micro_batches * passes.repeats / passes.ticks  # what the bubble leaves of the time
    flops = flops_per_token(config.model, config.data.longest, accelerator.platform).hardware * tokens * micros / shared
    sent = sent_bytes(config, where)
    rate = accelerator.interconnect_bytes_per_s
    hidden = sum(sent[name] for name in ("fsdp", "data")) / rate
    exposed = sum(sent[name] for name in ("tensor", "expert", "context")) / rate
    return Roofline(flops / accelerator.peak_flops(config.train.precision), hidden, exposed)


def sent_bytes(config: RunConfig, where: memory.Layout) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axis: the least that the layout needs.

    fsdp      each weight gathered forward and backward in the products' dtype, its gradient reduced and scattered, for each micro-batch
    data      an all-reduce of the gradients, float32, once
    tensor    two all-reduces forward and two backward a layer, of B · T · D, and again what rematerialization repeats
    expert    rows to the experts and back, forward and backward
    context   keys and values around the ring, forward and backward
    """
    model, a, micros = config.model, memory.product_bytes(config), config.train.accumulation
    n = {axis: where.sizes[axis] for axis in ("data", "fsdp", "tensor", "expert", "context")}
    ring = {axis: (size - 1) / size for axis, size in n.items()}
    tokens = where.tokens(config.data.longest) * micros
    layers = memory.layer_weights(model, where)
    head = model.d_model * model.vocab_size // n["tensor"]
    weights = layers + head * (1 if model.tie_embeddings else 2)
    gathers = 2 if where.zero == 3 else 0
    reduced = memory.FLOAT32_BYTES * params.total(model) / (n["tensor"] * n["fsdp"])
    again = 0.5 if model.remat in ("full", "dots") else 0.0  # the forward pair, of which the second is not needed
    sent = {
        "fsdp": ring["fsdp"] * micros * (gathers * a + a) * weights,
        "data": 2 * ring["data"] * reduced,
        "tensor": 2 * ring["tensor"] * (4 + 2 * again) * model.num_layers * a * tokens * model.d_model,
        "expert": 0.0,
        "context": 0.0,
    }
    if model.moe is not None:
        rows = activations.expert_rows(model, n["expert"])
        sent["expert"] = 4 * ring["expert"] * sum(model.expert_layers) * a * tokens * rows * model.d_model
    if n["context"] > 1:
        keys = 2 * model.kv_heads * model.dim_head / n["tensor"]
        sent["context"] = 3 * (n["context"] - 1) * model.num_layers * a * tokens * keys
    return sent
