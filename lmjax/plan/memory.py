"""Bytes on each device while a step runs, by part.

Exact, from the shapes and the sharding rules: parameters (float32), optimizer state, gradients (float32; a second copy where
micro-batches are accumulated), the batch. What compression has not sent counts as optimizer state.

The temporaries are an estimate: the buffers that a step holds, each from one phase to another, placed as the compiler places them
(`lmjax/plan/heap.py`). With a bytes for a number in products, w numbers in a layer's products, h = D V / tensor in the head, n shards over
fsdp (zero = 3; else 1), and C tokens in a chunk of the loss:

    look-up            table, gathered                                    a h, n > 1
    forward            what the layers keep (`activations.py`)            until the backward pass is through
                       a layer's weights, and the next one's, whole       2 a w, n > 1, else a w; what is there in its MLP
    loss head          output weights; logits, their gradient, cast       a h; (4 + a) C V / tensor
                       gradient of the output weights, whole, float32     4 h, n > 1; its sum is split, and stays until the update;
                                                                          of a single chunk a h in the place of its logits
    backward           a layer's weights whole, and their gradients       3 a w, n > 1, else 2 a w; what is there in its MLP
                       gradients of all layers                            until the update
    table's gradient   added up in float32, whole; in products' dtype     4 h + a h, n > 1
    update             in place; optimizer state that is kept on the host (mesh.offload), whole

In a pipeline the layers are those of a stage, the tokens those of a tick; every tick keeps as much, also in the bubble, and rows wait
before and after it. Where it goes round several times, a stage's weights and gradients are dealt to it whole. Features before text
(data.features) are tokens of the layers, but not of the head.
"""

import dataclasses
import functools
import math

from lmjax.axes import MESH_AXES
from lmjax.config import need
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig
from lmjax.model.pattern import kinds
from lmjax.plan import activations, heap, optimizer, params
from lmjax.plan.heap import Buffer
from lmjax.sharding import rules
from lmjax.sharding.config import check_tokens_divide
from lmjax.sharding.stages import Schedule, check_layers, schedule
from lmjax.train.config import RunConfig

FLOAT32_BYTES = 4
BATCH_BYTES = 5 * 4  # of a position: tokens, targets, loss_weights, segment_ids, positions


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    params: int
    optimizer: int
    batch: int
    temporaries: int  # estimate, see the module: the heap at its tallest
    gradients: int  # among the temporaries, or on the way to them
    activations: int  # among the temporaries, estimate: what the layers keep for the backward pass
    phase: str  # in which most is held at once
    held: dict[str, int]  # in that phase, the temporaries by part; with the gaps between them they make the heap
    host: int = 0  # of optimizer state that its host keeps between steps (mesh.offload); not of the device

    @property
    def total(self) -> int:
        """At the peak."""
        return self.params + self.optimizer + self.batch + self.temporaries

    @property
    def state(self) -> int:
        """What lives between steps: parameters and optimizer state."""
        return self.params + self.optimizer + self.host


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run lies over its devices, and the sizes that follow."""

    sizes: dict[str, int]  # mesh axis → size
    zero: int
    rows: int  # of a micro-batch, on one device, around the layers
    pipeline: Schedule  # of a micro-batch; without stages one tick

    @property
    def tensor(self) -> int:
        """Shards of heads, hidden and vocabulary."""
        return self.sizes["tensor"]

    def tokens(self, length: int) -> int:
        """Tokens of a micro-batch on one device, from rows of `length`."""
        return self.rows * length // self.sizes["context"]

    def shards(self, axes: tuple[str | None, ...], fsdp: bool) -> int:
        """Into how many pieces an array with these logical axes is cut."""
        return math.prod(rules.num_shards(axis, self.sizes) for axis in rules.spec(axes, fsdp))


def layout(config: RunConfig, num_devices: int) -> Layout:
    """The layout, checked: a `UserError` where rows or a parameter do not divide over the mesh."""
    sizes = dict(zip(MESH_AXES, config.mesh.sizes(num_devices), strict=True))
    replicas = rules.num_shards(rules.RULES["batch"], sizes)
    batch_axes = " × ".join(axis for axis in rules.RULES["batch"] if sizes[axis] > 1)
    micros = [rows // config.train.accumulation for rows in config.data.stage_rows(config.train.batch_size)]
    for micro in micros:
        need(
            micro % replicas == 0,
            f"config.train: {micro} rows of a micro-batch do not divide over {batch_axes} = {replicas} devices",
        )
    for length in (config.data.seq_len, *config.data.seq_lens):
        check_tokens_divide(length, sizes["context"])
        need(
            not config.model.split_tokens or length // sizes["context"] % sizes["tensor"] == 0,
            f"config.model.split_tokens: {length} tokens do not divide by config.mesh.context × tensor = "
            f"{sizes['context'] * sizes['tensor']}",
        )
    check_experts(config.model, sizes)
    check_divides(config.model, sizes)
    plans = [pipeline(config.model, sizes, micro) for micro in micros]
    shortest = micros.index(min(micros))  # of the longest rows: they take most memory
    return Layout(sizes, config.mesh.zero, micros[shortest] // replicas, plans[shortest])


def pipeline(model: ModelConfig, sizes: dict[str, int], rows: int) -> Schedule:
    """The schedule over the layers of so many rows; a `UserError` where rows or layers do not divide."""
    stages = sizes["stage"]
    check_layers(kinds(model), stages, model.stage_repeats)
    if stages == 1:
        return Schedule(1, 1, 1)
    replicas = rules.num_shards(rules.RULES["rows"], sizes)
    return schedule(stages, model.stage_repeats, rows // replicas, model.micro_batches)


# Where the size of a sharded logical axis is set, for messages.
FIELDS = {
    "layers": "config.model.num_layers",
    "embed": "config.model.d_model",
    "kv_heads": "config.model.num_kv_heads (or num_heads)",
    "mlp": "config.model.d_ff (or moe.shared_d_ff)",
    "experts": "config.model.moe.num_experts",
    "vocab": "config.model.vocab_size",
}


def check_experts(model: ModelConfig, sizes: dict[str, int]) -> None:
    """A mesh that splits experts has some."""
    need(
        sizes["expert"] == 1 or model.moe is not None,
        f"config.mesh.expert={sizes['expert']} splits experts: config.model.moe has none",
    )


def check_divides(model: ModelConfig, sizes: dict[str, int]) -> None:
    """Every sharded dim of a parameter divides by its mesh axis."""
    shapes = params.parameter_shapes(model)
    for path, axes in params.logical_axes(model).items():
        for name, axis, size in zip(axes, rules.spec(axes), shapes[path], strict=True):
            shards = rules.num_shards(axis, sizes)
            if size % shards:
                raise UserError(
                    f"{FIELDS.get(name, name)}={size} does not divide by config.mesh.{axis}={shards} (parameter {path})"
                )


# ------------------------------------------------------------------------------------------------------------------- exact


def tree_bytes(model: ModelConfig, where: Layout, fsdp: bool, copies: dict[str, int] | None = None) -> int:
    """Bytes on a device of a float32 tree like the parameters, or of `copies[path]` such arrays for each."""
    axes, total = params.logical_axes(model), 0
    for path, shape in params.parameter_shapes(model).items():
        count = 1 if copies is None else copies[path]
        total += count * FLOAT32_BYTES * math.prod(shape) // where.shards(axes[path], fsdp)
    return total


# --------------------------------------------------------------------------------------------------------------- estimates


PHASES = ("look-up", "forward", "loss head", "backward", "table's gradient", "update")
LOOK_UP, FORWARD, HEAD, BACKWARD, TABLE_GRADIENT, UPDATE = range(len(PHASES))
KEPT, LAYER, WEIGHTS, GRADIENTS, LOGITS = "kept by layers", "in a layer", "whole weights", "gradients", "logits"
STATE = "optimizer state"


def buffers(config: RunConfig, where: Layout, fused: bool = True) -> list[Buffer]:
    """What a step holds beside its arguments, see the module; `fused`: on an accelerator, whose compiler fuses what it can."""
    model, length, a = config.model, config.data.longest + prefix_shape(config)[0], product_bytes(config)
    tensor, expert, n = where.tensor, where.sizes["expert"], fsdp_shards(where)
    tokens, is_split, passes = where.tokens(length), n > 1, where.pipeline
    # Tokens of a tick, and how often a layer's are kept.
    tick, share = tokens * passes.stages / passes.micro_batches, passes.ticks / passes.chunks
    head = model.d_model * model.vocab_size // tensor
    layer = max(layer_weights(alike, where) for alike in model.alike) // (model.num_layers // passes.stages)
    gradients = tree_bytes(model, where, fsdp=where.zero >= 2)
    outer = FLOAT32_BYTES * head // (where.sizes["fsdp"] if where.zero >= 2 else 1)  # what stays of table or head
    kept = sum(
        share * count * activations.kept_for_backward(alike, length, a, tensor, model.remat, expert)
        for alike, count in model.alike.items()
    )
    forward = max(activations.forward_needs(alike, a, tensor, expert) for alike in model.alike)
    backward = max(
        activations.backward_needs(alike, a, tensor, expert)
        if fused
        else activations.backward_needs_unfused(alike, length, a, tensor, expert)
        for alike in model.alike
    )
    chunk = chunk_tokens(config, where) * (model.vocab_size // tensor)
    # Of several chunks the gradient is a sum beside all of them; of one it is a product, cast, in the place of logits that are done with.
    alone = chunk_tokens(config, where) == tokens
    head_gradient = max(a * head - FLOAT32_BYTES * chunk, 0) if alone else FLOAT32_BYTES * head
    stream = tokens * a * model.d_model
    found = [
        Buffer(KEPT, round(tick * kept), FORWARD, BACKWARD),
        Buffer(LAYER, round(tick * forward), FORWARD, FORWARD),
        Buffer(WEIGHTS, (2 if is_split else 1) * a * layer, FORWARD, FORWARD),
        Buffer(LAYER, stream * 2, HEAD, HEAD),  # the final norm's output, and its gradient
        Buffer(WEIGHTS, a * head, HEAD, HEAD),
        Buffer(LOGITS, FLOAT32_BYTES * chunk, HEAD, HEAD),
        Buffer(LOGITS, a * chunk, HEAD, HEAD),
        Buffer(LAYER, stream, BACKWARD, BACKWARD),
        Buffer(LAYER, round(tick * backward), BACKWARD, BACKWARD),
        Buffer(WEIGHTS, (2 if is_split else 1) * a * layer, BACKWARD, BACKWARD),
        Buffer(GRADIENTS, a * layer, BACKWARD, BACKWARD),
        Buffer(GRADIENTS, gradients - outer * (1 if model.tie_embeddings else 2), BACKWARD, UPDATE),
    ]
    if is_split:
        found += [
            Buffer(WEIGHTS, a * head, LOOK_UP, LOOK_UP),
            Buffer(GRADIENTS, head_gradient, HEAD, HEAD),
            Buffer(GRADIENTS, outer, HEAD, UPDATE),
            Buffer(GRADIENTS, FLOAT32_BYTES * head, TABLE_GRADIENT, TABLE_GRADIENT),
            Buffer(GRADIENTS, a * head, TABLE_GRADIENT, TABLE_GRADIENT),
        ]
    else:
        found.append(Buffer(GRADIENTS, FLOAT32_BYTES * head, HEAD, UPDATE))
    if not (is_split or model.tie_embeddings):
        found.append(Buffer(GRADIENTS, FLOAT32_BYTES * head, TABLE_GRADIENT, UPDATE))
    if passes.stages > 1:
        found.append(Buffer(LAYER, 2 * stream, FORWARD, BACKWARD))
    if passes.repeats > 1:
        found.append(Buffer(WEIGHTS, 2 * FLOAT32_BYTES * layer_weights(model, where) // n, FORWARD, BACKWARD))
    if config.mesh.offload:
        found.append(Buffer(STATE, optimizer.state_bytes(model, where.sizes, config.optim), UPDATE, UPDATE))
    if config.train.accumulation > 1:
        found.append(Buffer(GRADIENTS, gradients, LOOK_UP, UPDATE))
    return found


def prefix_shape(config: RunConfig) -> tuple[int, int]:
    """(P, I) of the features that stand before each row's text; none: (0, 0). Reads the first file that the config names."""
    paths = list(config.data.features.values())
    return file_shape(paths[0]) if paths else (0, 0)


@functools.cache
def file_shape(path: str) -> tuple[int, int]:
    """(P, I) of a file of features."""
    from lmjax.data.features import Features  # with its readers of shards, which few plans need

    return Features(path).shape


def chunk_tokens(config: RunConfig, where: Layout) -> int:
    """Tokens of a device whose logits exist at one time."""
    length = config.data.longest // where.sizes["context"]
    chunks = min(length, -(-where.rows * length // config.train.loss_chunk))
    return where.rows * -(-length // chunks)


def layer_weights(model: ModelConfig, where: Layout) -> int:
    """Numbers in the layers' products on a device while they are used: whole over fsdp; all layers."""
    shapes, axes = params.parameter_shapes(model), params.logical_axes(model)
    matrices = filter(params.is_layer_matrix, shapes)
    return sum(math.prod(shapes[path]) // where.shards(axes[path], fsdp=False) for path in matrices)


def fsdp_shards(where: Layout) -> int:
    """Shards of the parameters over fsdp."""
    return where.sizes["fsdp"] if where.zero == 3 else 1


def product_bytes(config: RunConfig) -> int:
    """Bytes of a number in products and activations on a TPU or GPU."""
    return 4 if config.train.precision == "float32" else 2


def memory(config: RunConfig, num_devices: int, fused: bool = True) -> Memory:
    """Bytes on each of `num_devices` devices, which are accelerators or CPUs; a `UserError` where the run does not divide over them."""
    where, model = layout(config, num_devices), config.model
    found = buffers(config, where, fused)
    phase = heap.fullest(found)
    held: dict[str, int] = {}
    for one in found:
        if one.first <= phase <= one.last:
            held[one.part] = held.get(one.part, 0) + one.size
    copies = 2 if config.train.accumulation > 1 else 1
    state, features = optimizer.state_bytes(model, where.sizes, config.optim), math.prod(prefix_shape(config))
    unsent = tree_bytes(model, where, fsdp=where.zero >= 2) if config.compress.kind in ("int8", "topk") else 0
    return Memory(
        params=tree_bytes(model, where, fsdp=where.zero == 3),
        optimizer=unsent + (0 if config.mesh.offload else state),
        batch=config.train.accumulation * where.rows * (config.data.longest * BATCH_BYTES + FLOAT32_BYTES * features),
        temporaries=heap.height(found),
        gradients=copies * tree_bytes(model, where, fsdp=where.zero >= 2),
        activations=sum(one.size for one in found if one.part == KEPT),
        phase=PHASES[phase],
        held=held,
        host=state if config.mesh.offload else 0,
    )
