"""What a decoder is: chosen by fields, never by a model's name."""

import dataclasses
import functools
import itertools
from typing import Any, Literal

from lmjax.config import free, need


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Experts in place of layers' MLPs, each as wide as `d_ff` says."""

    num_experts: int = 8  # E
    top_k: int = 2  # experts that a token runs through
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router, over all experts
    renormalize: bool = True  # divide the chosen experts' scores by their sum
    shared_d_ff: int = 0  # hidden width of an MLP that every token runs through as well; 0: none
    shared_gate: bool = False  # multiply its output by sigmoid(x w)
    balance_loss: float = 0.01  # weight of the load-balance loss (Switch); 0 where bias_rate does the work
    z_loss: float = 0.001  # weight of log² Z of the router's logits (ST-MoE)
    bias_rate: float = 0.0  # move of the selection bias at each step (DeepSeek-V3: 0.001); 0: no bias
    capacity_factor: float | None = None
    # an expert takes this many times its even share of a row's tokens, and drops the rest; none: all of them (dropless)
    every: int = 1  # the last of this many layers has experts, the others keep an MLP; 1: all have them
    dense_layers: tuple[int, ...] = ()  # layers, counted from 0, that keep an MLP whatever `every` says
    dense_d_ff: int | None = None  # hidden width of the MLPs that are kept; none: as d_ff

    def __post_init__(self):
        need(
            1 <= self.top_k <= self.num_experts,
            f"config.model.moe.top_k={self.top_k} must be 1 to num_experts={self.num_experts}",
        )
        losses = {"balance_loss": self.balance_loss, "z_loss": self.z_loss, "bias_rate": self.bias_rate}
        for name, value in {**losses, "shared_d_ff": self.shared_d_ff}.items():
            need(value >= 0, f"config.model.moe.{name}={value} must not be negative")
        need(
            self.capacity_factor is None or self.capacity_factor > 0,
            f"config.model.moe.capacity_factor={self.capacity_factor} must be positive; none: dropless",
        )
        need(self.shared_d_ff > 0 or not self.shared_gate, "config.model.moe.shared_gate needs shared_d_ff")
        need(self.every >= 1, f"config.model.moe.every={self.every} must be at least 1")
        need(self.dense_d_ff is None or self.dense_d_ff >= 1, "config.model.moe.dense_d_ff must be positive")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return (layer + 1) % self.every == 0 and layer not in self.dense_layers


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Slower rotary angles, so that rows longer than those of pre-training turn no further than they did."""

    kind: Literal["linear", "llama3", "yarn"] = "yarn"
    # linear: all by factor. llama3, yarn: short wavelengths stay, long ones by factor, a ramp between
    factor: float = 1.0  # of the length, at least 1
    original_length: int = 8192  # tokens of pre-training; not for linear
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_length / this are slowed by the whole factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_length / this stay
    beta_fast: float = 32.0  # yarn: dims that turn more often than this over original_length stay
    beta_slow: float = 1.0  # yarn: dims that turn less often than this are slowed by the whole factor
    attention_factor: float | None = None  # yarn: multiplies queries and keys; none: 0.1 ln(factor) + 1

    def __post_init__(self):
        need(self.factor >= 1, f"config.model.rope_scaling.factor={self.factor} must be at least 1")
        need(
            self.low_freq_factor < self.high_freq_factor and self.beta_slow < self.beta_fast,
            "config.model.rope_scaling: low_freq_factor < high_freq_factor and beta_slow < beta_fast must hold",
        )


@dataclasses.dataclass(frozen=True)
class MupConfig:
    """The base model, whose hyper-parameters hold at this one: see `lmjax/model/transfer.py`."""

    base_width: int  # d_model of the base
    base_layers: int | None = None  # num_layers of the base; none: as many as here, depth changes nothing
    base_head_dim: int | None = None  # none: as here, width comes with more heads

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            need(value is None or value >= 1, f"config.model.mup.{name}={value} must be at least 1")


SIZES = (
    "vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_length", "prefix_dim", "score_dim",
    "sliding_window", "attention_block", "micro_batches", "stage_repeats",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int = 4096  # ids; at least the tokenizer's, larger to divide well over devices
    num_layers: int = 4
    d_model: int = 192  # width of the residual stream
    num_heads: int = 6  # query heads
    num_kv_heads: int | None = None  # key-value heads, divides num_heads; none: as many as query heads
    head_dim: int | None = None  # none: d_model / num_heads
    d_ff: int | None = None  # hidden width of the MLP, or of each expert
    # none: 4 d_model, or 8/3 d_model rounded up to 64 where gated
    activation: Literal["swiglu", "geglu", "gelu", "relu"] = (
        "swiglu"  # the first two are gated: act(x W_gate) * (x W_up)
    )
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = 1e-6
    position: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    rope_theta: float = 10_000.0  # base wavelength of the rotary angles
    rope_local_theta: float | None = None  # of local layers, which are then not scaled; none: as the others
    rope_scaling: RopeScaling | None = None
    max_length: int = (
        2048  # tokens; rows of learned positions, and the longest sequence that they can continue; others go on
    )
    block: Literal["pre", "post", "sandwich"] = "pre"
    # norms: of each branch's input; of its output, before the sum (OLMo 2); of both (Gemma 2)
    attention_bias: bool = False  # biases of the query, key, value and output products
    qkv_bias: bool = False  # of the query, key and value products alone (Qwen 2)
    mlp_bias: bool = False
    moe: MoeConfig | None = None  # none: an MLP in each layer
    norm_bias: bool = False  # layernorm only
    tie_embeddings: bool = True  # the output product reuses the token embedding
    scale_embeddings: bool = False  # multiply embeddings by sqrt(d_model)
    prefix_dim: int | None = None  # width of features (image, sound) that stand before text; none: no such door
    dropout: float = 0.0  # probability, on embeddings and on each residual branch
    qk_norm: bool = False  # RMS norm of queries and keys over the head dim, before positions
    qk_norm_heads: bool = False  # over all heads together instead (OLMo 2)
    score_dim: int | None = None  # d: scores are q · k / sqrt(d); none: head_dim
    sliding_window: int | None = None  # tokens that a query of a local layer sees, itself included
    layer_pattern: tuple[Literal["global", "local"], ...] = ()
    # repeated over the layers; empty: all of one kind, local where there is a window
    attention_softcap: float | None = None  # c: scores become c tanh(scores / c)
    logit_softcap: float | None = None  # the same for the output logits
    init: Literal["normal", "scaled", "fan_in"] = "scaled"
    # normal: N(0, init_std²) everywhere. scaled: residual outputs divided by sqrt(2 L) (GPT-2). fan_in: N(0, 1/fan_in), outputs scaled
    init_std: float = 0.02
    mup: MupConfig | None = (
        None  # scale weights and rates so that what was tuned at a narrower model holds; none: as they are
    )
    attention: Literal["auto", "reference", "blockwise", "splash", "cudnn"] = free("auto")
    # auto: above one block of tokens splash on a TPU, cudnn on a GPU, where they can do it; else blockwise
    attention_block: int = free(128)  # tokens in one block of the blockwise form
    scan: Literal["auto", "on", "off"] = free("auto")  # one compiled layer; auto: off on CPU, where unrolled is faster
    micro_batches: int | None = free(None)
    # of a step's rows (of one accumulation) in the pipeline of config.mesh.stage; none: as many as divide, up to 4 a stage
    stage_repeats: int = free(1)  # rounds of the pipeline, each over fewer layers: a smaller bubble, more traffic
    split_tokens: bool = free(False)
    # between the products tokens are split over config.mesh.tensor, and so are norms, residual sums and what layers keep of them (sequence
    # parallelism: Korthikanti et al., 2022, arXiv 2205.05198): a gather and a reduce-scatter in place of each all-reduce
    remat: Literal["none", "dots", "full", "block_outputs"] = free("none")
    # recompute in the backward pass: nothing; all but matmul outputs; all but each layer's input; all but the named branch outputs

    def __post_init__(self):
        for name in SIZES:
            size = getattr(self, name)
            need(size is None or size >= 1, f"config.model.{name}={size} must be at least 1")
        for name in ("rope_theta", "rope_local_theta", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            need(value is None or value > 0, f"config.model.{name}={value} must be positive")
        for name in ("norm_epsilon", "init_std"):
            need(getattr(self, name) >= 0, f"config.model.{name}={getattr(self, name)} must not be negative")
        need(
            self.head_dim is not None or self.d_model % self.num_heads == 0,
            f"config.model.d_model={self.d_model} does not divide by num_heads={self.num_heads}; set head_dim",
        )
        need(
            self.num_heads % self.kv_heads == 0,
            f"config.model.num_heads={self.num_heads} does not divide by num_kv_heads={self.num_kv_heads}",
        )
        windows = self.sliding_window is not None
        need(
            windows == ("local" in self.pattern),
            f"config.model: sliding_window={self.sliding_window} does not go with layer_pattern={self.layer_pattern}",
        )
        need(
            not self.split_tokens or self.prefix_dim is None,
            "config.model.split_tokens splits rows, before whose text config.model.prefix_dim puts features",
        )
        need(self.moe is None or not self.mlp_bias, "config.model.mlp_bias: experts have no biases")
        need(
            self.moe is None or any(self.expert_layers),
            "config.model.moe: every and dense_layers leave no layer its experts",
        )
        for layer in () if self.moe is None else self.moe.dense_layers:
            need(0 <= layer < self.num_layers, f"config.model.moe.dense_layers: there is no layer {layer}")
        need(0.0 <= self.dropout < 1.0, f"config.model.dropout={self.dropout} must be in [0, 1)")
        need(self.position != "rope" or self.dim_head % 2 == 0, f"rope needs an even head_dim, not {self.dim_head}")
        need(
            self.position == "rope" or not (self.rope_scaling or self.rope_local_theta), "rope_… needs position='rope'"
        )
        need(self.qk_norm or not self.qk_norm_heads, "config.model.qk_norm_heads needs qk_norm")
        need(not (self.attention_bias and self.qkv_bias), "config.model: attention_bias holds what qkv_bias would add")
        need(self.norm == "layernorm" or not self.norm_bias, "config.model.norm_bias needs norm='layernorm'")
        if self.mup is not None:
            need(self.prefix_dim is None, "config.model.mup has no rule for config.model.prefix_dim")
            need(
                not self.scale_embeddings,
                "config.model: scale_embeddings grows with the width, which mup must not; set init_std",
            )

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_kv_heads or self.num_heads

    @property
    def dim_head(self) -> int:
        """H."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def width_ratio(self) -> float:
        """Width over that of the base; 1 without `mup`."""
        return self.d_model / self.mup.base_width if self.mup else 1.0

    @property
    def base_layers(self) -> int:
        """Layers of the base, or of this model without one."""
        return (self.mup.base_layers if self.mup else None) or self.num_layers

    @property
    def branch_scale(self) -> float:
        """What the output of each branch is multiplied by before it is added to the residual stream."""
        return self.base_layers / self.num_layers

    @property
    def scores_over(self) -> int | float:
        """d: attention's scores are q · k / sqrt(d)."""
        own = self.score_dim or self.dim_head
        base = (self.mup.base_head_dim if self.mup else None) or self.dim_head
        return own if base == self.dim_head else own * self.dim_head / base

    def resolved(self) -> dict[str, Any]:
        """The fields that decide the logits, with every none that stands for a value replaced by it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if not field.metadata}
        for name in ("init", "init_std", "dropout", "layer_pattern", "mup"):
            del fields[name]
        if self.moe is not None:
            moe = dataclasses.asdict(self.moe)
            moe["router_bias"] = moe["bias_rate"] > 0
            decided = ("balance_loss", "z_loss", "bias_rate", "every", "dense_layers", "dense_d_ff")
            fields["moe"] = {name: moe[name] for name in moe if name not in decided}
            fields["moe"] |= {"layers": self.expert_layers, "dense_d_ff": self.dense_hidden}
        local_theta = self.rope_local_theta
        if local_theta is None and self.rope_scaling is None:
            local_theta = self.rope_theta
        fields |= {
            "num_kv_heads": self.kv_heads, "head_dim": self.dim_head, "d_ff": self.hidden, "kinds": self.kinds,
            "score_dim": self.scores_over, "width_ratio": self.width_ratio, "branch_scale": self.branch_scale,
            "rope_theta": self.rope_theta if self.position == "rope" else None,
            "rope_local_theta": local_theta if self.position == "rope" and "local" in self.kinds else None,
        }  # fmt: skip
        return fields

    def differences(self, other: "ModelConfig") -> list[str]:
        """Where the logits of two models must differ: "d_model=64, not 128"."""
        ours, theirs = self.resolved(), other.resolved()
        return [f"{name}={ours[name]!r}, not {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kinds of one period of layers."""
        return self.layer_pattern or (("global",) if self.sliding_window is None else ("local",))

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return tuple(itertools.islice(itertools.cycle(self.pattern), self.num_layers))

    @functools.cached_property
    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(self.moe is not None and self.moe.has_experts(layer) for layer in range(self.num_layers))

    def with_all(self, experts: bool) -> "ModelConfig":
        """The model if all its layers had experts, or none; itself where that is so."""
        if set(self.expert_layers) == {experts}:
            return self
        if not experts:
            return dataclasses.replace(self, moe=None, d_ff=self.dense_hidden)
        return dataclasses.replace(self, moe=dataclasses.replace(self.moe, every=1, dense_layers=()))

    @functools.cached_property
    def alike(self) -> dict["ModelConfig", int]:
        """Models all of whose layers are alike → how many of this one's layers are such."""
        return {
            self.with_all(experts): self.expert_layers.count(experts) for experts in sorted(set(self.expert_layers))
        }

    def window(self, kind: str) -> int | None:
        """Tokens that a query of such a layer sees; none: all before it."""
        return self.sliding_window if kind == "local" else None

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up product."""
        return self.activation in ("swiglu", "geglu")

    @property
    def hidden(self) -> int:
        """F."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-8 * self.d_model // 3 // 64) * 64 if self.gated else 4 * self.d_model

    @property
    def dense_hidden(self) -> int | None:
        """The hidden width of the MLPs that stand in layers; none where all have experts."""
        if all(self.expert_layers):
            return None
        return (self.moe.dense_d_ff if self.moe else None) or self.hidden
