"""How long a run takes, what limits its step, and how often to save.

time      model FLOPs of the run / (devices · peak FLOP/s · MFU)
roofline  computing: hardware FLOPs of a device / peak; communicating: bytes that it sends / bandwidth of its links, and of its share of
          the network between slices
cadence   τ = √(2 δ M) (1 + √(δ / 2M) / 3 + δ / 18M) - δ     δ seconds that a save costs, M seconds between preemptions
          (Young, 1974; Daly, 2006); of the time, δ/τ is spent on saving, and (τ/2 + r)/M is done again or spent on the restart r
"""

import dataclasses
import math

from lmjax.axes import MESH_AXES
from lmjax.config import need
from lmjax.optim.config import CompressConfig
from lmjax.plan import activations, memory
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

    compute_s: float  # with a pipeline's bubble
    hidden_s: float  # communication that other work can run beside: weights gathered, gradients reduced
    exposed_s: float  # communication that the next product waits for: tensor, expert, context, stage
    network_s: float = 0.0  # gradients between slices, over other links: beside both

    @property
    def step_s(self) -> float:
        """With all that can overlap overlapping."""
        return max(self.compute_s, self.hidden_s, self.network_s) + self.exposed_s

    @property
    def limit(self) -> str:
        """What the step waits for most."""
        found = {
            "compute": self.compute_s,
            "gathering weights and reducing gradients": self.hidden_s,
            "the network between slices": self.network_s,
            "communication between products (tensor, expert, context, stage)": self.exposed_s,
        }
        return max(found, key=found.__getitem__)


def count_slices(accelerator: Accelerator, num_devices: int, stated: int | None) -> int:
    """How many slices of TPUs, or nodes of GPUs, the devices are of; a TPU's are of one, if nothing is stated."""
    if stated is None:
        nodes = -(-num_devices // accelerator.devices_per_host)
        return nodes if accelerator.platform == "gpu" else 1
    need(
        stated >= 1 and num_devices % stated == 0,
        f"--slices {stated} does not divide the {num_devices} devices equally",
    )
    return stated


def roofline(config: RunConfig, num_devices: int, accelerator: Accelerator, slices: int = 1) -> Roofline:
    """Of one step of the longest rows, all links of a device used at once; a `UserError` where the mesh does not fit the slices."""
    where = memory.layout(config, num_devices)
    micros = config.train.accumulation
    tokens = where.tokens(config.data.longest)  # of a device and a micro-batch
    shared = where.sizes["tensor"]  # devices that share a token's products
    shared /= where.pipeline.slowdown
    flops = flops_per_token(
        config.model, config.data.longest, accelerator.platform, prefix=memory.prefix_shape(config)[0]
    ).hardware
    flops *= tokens * micros / shared
    between = dict(zip(MESH_AXES, slice_sizes(config, num_devices, slices), strict=True))
    sent = sent_bytes(config, where, between["data"])
    rate, network = accelerator.interconnect_bytes_per_s, accelerator.network_bytes_per_s.value
    need(
        slices == 1 or network is not None,
        f"the network between slices of {accelerator.name} is not in the table: plan for one slice",
    )
    hidden = sum(sent[name] for name in ("fsdp", "data")) / rate
    exposed = sum(sent[name] for name in ("tensor", "expert", "context")) / rate
    exposed += sent["stage"] / (network if between["stage"] > 1 else rate)
    peak = accelerator.peak_flops(config.train.precision)
    return Roofline(flops / peak, hidden, exposed, sent["network"] / network if between["data"] > 1 else 0.0)


def slice_sizes(config: RunConfig, num_devices: int, slices: int) -> tuple[int, ...]:
    """In the order of `MESH_AXES`, into how many slices each axis is cut, as `lmjax.sharding.topology` lays it."""
    return (1,) * len(MESH_AXES) if slices == 1 else config.mesh.slice_sizes(config.mesh.sizes(num_devices), slices)


def sent_bytes(config: RunConfig, where: memory.Layout, slices: int = 1) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axis: the least that the layout needs.

    fsdp      each weight gathered forward and backward in the products' dtype, its gradient reduced and scattered, for each micro-batch
              of `accumulation`; the layers' at each tick of a pipeline. Below zero 3: gradients scattered in float32, and what the
              optimizer has made of the weights gathered, float32, once
    data      an all-reduce of the gradients, float32, once; compressed, each replica's codes
    network   the part of it that goes between slices, into which data is cut: exact, each replica of a slice sends its share of the sum
    tensor    two all-reduces forward and two backward a layer, of B · T · D, and again what rematerialization repeats
    expert    rows to the experts and back, forward and backward
    context   keys and values around the ring, forward and backward
    stage     at each tick rows that are done and rows that wait, forward and backward; with several rounds weights dealt, gradients back
    """
    model, a, micros = config.model, memory.product_bytes(config), config.train.accumulation
    n, passes = where.sizes, where.pipeline
    ring = {axis: (size - 1) / size for axis, size in n.items()}
    tokens = where.tokens(config.data.longest) * micros
    worked = tokens * passes.slowdown  # the bubble's too
    layers = memory.layer_weights(model, where)
    head = model.d_model * model.vocab_size // n["tensor"]
    heads = head * (1 if model.tie_embeddings else 2)
    weights = layers * passes.ticks / passes.repeats + heads
    if where.zero == 3:
        shared = micros * 3 * a * weights
    else:
        shared = memory.FLOAT32_BYTES * (micros * weights + layers + heads)
    reduced = memory.tree_bytes(model, where, fsdp=True)
    again = 0.5 if model.remat in ("full", "dots") else 0.0  # the forward pair, of which the second is not needed
    sent = {
        "fsdp": ring["fsdp"] * shared,
        "tensor": 2 * ring["tensor"] * (4 + 2 * again) * model.num_layers * a * worked * model.d_model,
        "expert": 0.0,
        "context": 0.0,
        "stage": 0.0,
    }
    sent["data"], sent["network"] = gradient_bytes(config.compress, reduced, n["data"], slices)
    if model.moe is not None:
        rows = activations.expert_rows(model, n["expert"])
        sent["expert"] = 4 * ring["expert"] * sum(model.expert_layers) * a * worked * rows * model.d_model
    if n["context"] > 1:
        keys = 2 * model.kv_heads * model.dim_head / n["tensor"]
        sent["context"] = 3 * (n["context"] - 1) * model.num_layers * a * worked * keys
    if n["stage"] > 1:
        sent["stage"] = 4 * passes.ticks * a * tokens * passes.stages / passes.micro_batches * model.d_model
        if passes.repeats > 1:
            sent["stage"] += 2 * ring["stage"] * micros * memory.FLOAT32_BYTES * layers / memory.fsdp_shards(where)
    return sent


def gradient_bytes(config: CompressConfig, reduced: int, replicas: int, slices: int) -> tuple[float, float]:
    """Bytes that a device sends so that `reduced` bytes of gradients are summed over replicas: inside its slice, and to others.

    An exact sum is made in each slice first, so that its replicas share what goes between slices. Codes go to each replica alike.
    """
    inside = replicas // slices
    if config.kind == "none":
        return 2 * reduced * (inside - 1) / inside, 2 * reduced / inside * (slices - 1) / slices
    numbers = reduced / memory.FLOAT32_BYTES
    codes = {
        "bfloat16": 2 * 2 * numbers / replicas,
        "int8": 2 * (1 + memory.FLOAT32_BYTES / config.block) * numbers / replicas,
        "topk": 2 * memory.FLOAT32_BYTES * config.share * numbers,
    }[config.kind]
    return codes * (inside - 1), codes * (replicas - inside)
