"""Bytes on each device while a step runs, by part.

Exact, from the shapes and the sharding rules: parameters (float32), optimizer state, gradients (float32; a second copy where
micro-batches are accumulated), the batch.

Estimates, of what the compiler keeps for the backward pass. For one layer and one token, with a bytes for an activation (2 in half
precision, as on TPU and GPU, else 4), w arrays of the MLP's width by its activation (`MLP_ARRAYS`), and t = config.mesh.tensor:

    none            16 D + 2 a D + w F/t + attention   two norms in float32, inputs of qkv and up
      blockwise     a (3 N + 2 K) H/t + 4 N/t          q, output twice, k, v, log Z
      reference     a (2 N + 2 K) H/t + (4 + a) N T/t  scores before and after the softmax (8 N T/t more with a softcap)
    dots            2 a D + a (N + 2 K) H/t + M a F/t  layer input, and the outputs of the products
    block_outputs   2 a D                              layer input, attention branch
    full            a D                                layer input

Experts keep rows · (3 a D + w F/t) in place of w F/t under "none", and nothing under "dots": rows gathered, run through, and brought
back. There are k rows for a token; factor · k with a capacity; with dropless experts on x = config.mesh.expert devices, the worst
case x · min(k, E/x). A shared MLP comes on top. All this is

times the tokens of a device in one micro-batch, summed over layers (in a pipeline times ticks / (M · R): the bubble keeps as much); none
keeps a copy of the layers' weights in the product's dtype as well. While the backward pass is in a layer, what "none" keeps of that one
layer exists too. Around the layers: the final norm and the gradient of its output, and rows that wait for a pipeline. Loss head: one
chunk's logits and their gradient in float32, and the gradient of the output weights. Sharded weights (zero = 3): one layer's and the head's
gathered in the product's dtype, and that layer's gradient before it is scattered.

The compiler's own temporaries and fragmentation come on top; a compiled step's `memory_analysis` is the test.
"""

import dataclasses
import math

from lmjax.axes import MESH_AXES
from lmjax.config import need
from lmjax.model.config import ModelConfig
from lmjax.model.pattern import kinds
from lmjax.plan import params
from lmjax.sharding import rules
from lmjax.sharding.config import check_tokens_divide
from lmjax.sharding.stages import Schedule, check_layers, schedule
from lmjax.train.config import RunConfig

FLOAT32_BYTES = 4
BATCH_BYTES = 5 * 4  # of a position: tokens, targets, loss_weights, segment_ids, positions
FACTOR_ABOVE = 128  # adafactor factors arrays whose two largest dims reach this (optax's default)

# Arrays of the MLP's width that "none" keeps, in bytes for a hidden unit, given the bytes of an activation.
MLP_ARRAYS = {
    "swiglu": lambda a: 6 * a,  # gate, up, sigmoid, silu, product, and the product as the input of down
    "geglu": lambda a: 8 * a,
    "gelu": lambda a: 6 * a,
    "relu": lambda a: a + 1,  # the input of down, and a boolean mask
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    params: int
    optimizer: int
    gradients: int
    batch: int
    activations: int  # estimate, see the module
    loss_head: int  # estimate
    gathered: int  # estimate

    @property
    def total(self) -> int:
        """All parts together, as if all peaked at once."""
        return sum(dataclasses.asdict(self).values())

    @property
    def state(self) -> int:
        """What lives between steps: parameters and optimizer state."""
        return self.params + self.optimizer


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
    """What experts cannot do with a mesh, and a mesh without them."""
    need(
        sizes["expert"] == 1 or model.moe is not None,
        f"config.mesh.expert={sizes['expert']} splits experts: config.model.moe has none",
    )
    need(
        sizes["context"] == 1 or model.moe is None,
        f"config.mesh.context={sizes['context']} splits rows, over whose tokens config.model.moe balances its experts",
    )


def check_divides(model: ModelConfig, sizes: dict[str, int]) -> None:
    """Every sharded dim of a parameter divides by its mesh axis."""
    shapes = params.parameter_shapes(model)
    for path, axes in params.logical_axes(model).items():
        for name, axis, size in zip(axes, rules.spec(axes), shapes[path], strict=True):
            shards = rules.num_shards(axis, sizes)
            need(
                size % shards == 0,
                f"{FIELDS.get(name, name)}={size} does not divide by config.mesh.{axis}={shards} (parameter {path})",
            )


# ------------------------------------------------------------------------------------------------------------------- exact


def tree_bytes(model: ModelConfig, where: Layout, fsdp: bool, copies: dict[str, int] | None = None) -> int:
    """Bytes on a device of a float32 tree like the parameters, or of `copies[path]` such arrays for each."""
    axes, total = params.logical_axes(model), 0
    for path, shape in params.parameter_shapes(model).items():
        count = 1 if copies is None else copies[path]
        total += count * FLOAT32_BYTES * math.prod(shape) // where.shards(axes[path], fsdp)
    return total


def optimizer_bytes(model: ModelConfig, where: Layout, name: str) -> int:
    """Bytes on a device of the optimizer's state: shaped like parameters and sharded over fsdp whatever `zero` is, but for
    adafactor's factored statistics, which are whole on every device."""
    shapes = params.parameter_shapes(model)
    factors = {path: factored_size(shape) if name == "adafactor" else None for path, shape in shapes.items()}
    copies = {
        "adamw": lambda path: 2,
        "lion": lambda path: 1,
        "adafactor": lambda path: 1 if factors[path] is None else 0,
        "muon": lambda path: 1 if params.is_layer_matrix(path) else 2,
    }[name]
    whole = sum(size for size in factors.values() if size is not None)
    return tree_bytes(model, where, True, {path: copies(path) for path in shapes}) + FLOAT32_BYTES * whole


def factored_size(shape: tuple[int, ...]) -> int | None:
    """Numbers that adafactor keeps of an array: its means over each of the two largest dims; none where it keeps all."""
    largest = sorted(shape)[-2:]
    if len(shape) < 2 or largest[0] < FACTOR_ABOVE:
        return None
    return sum(math.prod(shape) // size for size in largest)


# --------------------------------------------------------------------------------------------------------------- estimates


def kept_for_backward(model: ModelConfig, seq_len: int, a: int, tensor: int, remat: str, expert: int = 1) -> float:
    """Bytes that one layer, of a model whose layers are alike, keeps of one token under a remat policy, `a` bytes an activation."""
    width, queries = model.d_model, model.num_heads * model.dim_head / tensor
    keys = model.kv_heads * model.dim_head / tensor
    hidden = (model.hidden if model.moe is None else model.moe.shared_d_ff) / tensor
    if remat == "full":
        return float(a * width)
    if remat == "block_outputs":
        return float((2 if model.block == "pre" else 3) * a * width)  # a norm after the MLP needs its output
    if remat == "dots":
        return 2 * a * width + a * (queries + 2 * keys) + (2 if model.gated else 1) * a * hidden
    norms = (
        (32 if model.block == "sandwich" else 16) * width
        + 2 * a * width
        + (8 * (queries + keys) if model.qk_norm else 0)
    )
    dropout = 2 * width if model.dropout else 0  # a boolean mask on each branch
    mlp = MLP_ARRAYS[model.activation](a) * hidden + experts_keep(model, a, tensor, expert)
    return norms + dropout + mlp + attention_keeps(model, seq_len, a, tensor)


def experts_keep(model: ModelConfig, a: int, tensor: int, expert: int) -> float:
    """Bytes that one layer's experts keep of one token where nothing is rematerialized."""
    if model.moe is None:
        return 0.0
    return expert_rows(model, expert) * (
        3 * a * model.d_model + MLP_ARRAYS[model.activation](a) * model.hidden / tensor
    )


def expert_rows(model: ModelConfig, expert: int) -> float:
    """Rows that run through experts for one token; with dropless experts on several devices, the buckets' worst case."""
    if model.moe.capacity_factor is None and expert > 1:
        return float(expert * min(model.moe.top_k, model.moe.num_experts // expert))
    return model.moe.top_k * (model.moe.capacity_factor or 1.0)


def attention_keeps(model: ModelConfig, seq_len: int, a: int, tensor: int) -> float:
    """Bytes that one layer's attention keeps of one token where nothing is rematerialized."""
    heads, keys = model.num_heads / tensor, 2 * model.kv_heads * model.dim_head / tensor
    if is_blockwise(model, seq_len):
        return a * (3 * heads * model.dim_head + keys) + 4 * heads
    scores = 4 + a + (8 if model.attention_softcap is not None else 0)
    return a * (2 * heads * model.dim_head + keys) + scores * heads * seq_len


def is_blockwise(model: ModelConfig, seq_len: int) -> bool:
    """Whether attention never holds T × T scores; `lmjax.model.attention.choose` decides."""
    return seq_len > model.attention_block if model.attention == "auto" else model.attention != "reference"


def activation_bytes(config: RunConfig, where: Layout) -> int:
    """Bytes on a device of what the layers keep for the backward pass of one micro-batch."""
    model, length, a = config.model, config.data.longest, product_bytes(config)
    expert = where.sizes["expert"]
    passes = where.pipeline
    # Rows of a tick, and layers of a chunk: every tick of a pipeline keeps as much, also in the bubble.
    tokens, share = where.tokens(length) * passes.stages / passes.micro_batches, passes.ticks / passes.chunks
    kept, one_layer = 0.0, 0.0
    for alike, count in model.alike.items():
        kept += share * count * kept_for_backward(alike, length, a, where.tensor, model.remat, expert)
        one_layer = max(one_layer, kept_for_backward(alike, length, a, where.tensor, "none", expert))
    around = (8 + (2 if passes.stages == 1 else 4) * a) * model.d_model
    weights = layer_weights(model, where) * a if model.remat == "none" else 0
    return round(tokens * (kept + one_layer) + where.tokens(length) * around) + weights // fsdp_shards(where)


def loss_head_bytes(config: RunConfig, where: Layout) -> int:
    """Bytes on a device of one chunk's logits and their gradient, and of the output weights' gradient."""
    length = config.data.longest // where.sizes["context"]
    chunks = min(length, -(-where.rows * length // config.train.loss_chunk))
    chunk = where.rows * -(-length // chunks)
    vocab = config.model.vocab_size // where.tensor
    return FLOAT32_BYTES * vocab * (2 * chunk + config.model.d_model)


def gathered_bytes(config: RunConfig, where: Layout) -> int:
    """Bytes on a device of sharded weights that are whole while they are used: one layer's with its gradient, and the head's; and of
    a stage's layers with their gradients, where a pipeline of several rounds deals them."""
    a, model = product_bytes(config), config.model
    dealt = 2 * FLOAT32_BYTES * layer_weights(model, where) // fsdp_shards(where) if where.pipeline.repeats > 1 else 0
    if fsdp_shards(where) == 1:
        return dealt
    own_layers = model.num_layers // where.pipeline.stages
    layer = max(layer_weights(alike, where) for alike in model.alike) // own_layers
    return dealt + layer * (a + FLOAT32_BYTES) + model.d_model * model.vocab_size * a // where.tensor


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


def memory(config: RunConfig, num_devices: int) -> Memory:
    """Bytes on each of `num_devices` devices; a `UserError` where the run does not divide over them."""
    where, model = layout(config, num_devices), config.model
    copies = 2 if config.train.accumulation > 1 else 1
    return Memory(
        params=tree_bytes(model, where, fsdp=where.zero == 3),
        optimizer=optimizer_bytes(model, where, config.optim.name),
        gradients=copies * tree_bytes(model, where, fsdp=where.zero >= 2),
        batch=config.train.accumulation * where.rows * config.data.longest * BATCH_BYTES,
        activations=activation_bytes(config, where),
        loss_head=loss_head_bytes(config, where),
        gathered=gathered_bytes(config, where),
    )
