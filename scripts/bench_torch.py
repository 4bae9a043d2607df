"""The peer of `bench_train.py` in PyTorch: the same decoder, written as its users write it, with the same weights.

Fused products for query, key and value and for gate and up, `scaled_dot_product_attention`, fused AdamW: its best forms.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench_harness import serve
from torch import nn

from lmjax import config as configs
from lmjax.model.config import ModelConfig
from lmjax.train.config import RunConfig


class Rope(nn.Module):
    """Rotates dim i with dim i + H/2."""

    def __init__(self, model: ModelConfig, length: int):
        super().__init__()
        frequency = model.rope_theta ** (-torch.arange(0, model.dim_head, 2) / model.dim_head)
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1).to(
            x.dtype
        )


class Norm(nn.Module):
    """RMS or layer norm without bias."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.rms, self.epsilon, self.weight = (
            model.norm == "rmsnorm",
            model.norm_epsilon,
            nn.Parameter(torch.ones(model.d_model)),
        )

    def forward(self, x):
        shape = self.weight.shape
        if self.rms:
            return F.rms_norm(x, shape, self.weight, self.epsilon)
        return F.layer_norm(x, shape, self.weight, None, self.epsilon)


class Block(nn.Module):
    """One layer."""

    def __init__(self, model: ModelConfig, rope: Rope | None):
        super().__init__()
        self.heads, self.gated, self.rope = model.num_heads, model.gated, rope
        self.attention_norm, self.mlp_norm = Norm(model), Norm(model)
        self.qkv = nn.Linear(model.d_model, 3 * model.d_model, bias=False)
        self.out = nn.Linear(model.d_model, model.d_model, bias=False)
        self.up = nn.Linear(model.d_model, (2 if model.gated else 1) * model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.d_model, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = self.up(self.mlp_norm(x))
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return x + self.down(hidden)


class Decoder(nn.Module):
    """The loss of a batch."""

    def __init__(self, model: ModelConfig, length: int):
        super().__init__()
        rope = Rope(model, length) if model.position == "rope" else None
        self.token = nn.Embedding(model.vocab_size, model.d_model)
        self.position = nn.Embedding(model.max_length, model.d_model) if model.position == "learned" else None
        self.layers = nn.ModuleList(Block(model, rope) for _ in range(model.num_layers))
        self.final_norm = Norm(model)

    def forward(self, tokens, targets):
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.final_norm(x), self.token.weight)  # tied
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def load(decoder: Decoder, weights: Any) -> None:
    """Copies lmjax's parameters, see the classes in `lmjax.model` for their layouts."""
    layers = {name.removeprefix("layers/"): weights[name] for name in weights if name.startswith("layers/")}
    state = {"token.weight": weights["embed/token"], "final_norm.weight": weights["final_norm/scale"]}
    if decoder.position is not None:
        state["position.weight"] = weights["embed/position"]
    for i in range(len(decoder.layers)):
        layer = {name: value[i] for name, value in layers.items()}
        width = layer["mlp/down"].shape[1]
        state |= {
            f"layers.{i}.attention_norm.weight": layer["attention_norm/scale"],
            f"layers.{i}.mlp_norm.weight": layer["mlp_norm/scale"],
            f"layers.{i}.qkv.weight": layer["attention/qkv"].transpose(2, 1, 3, 0).reshape(-1, width),
            f"layers.{i}.out.weight": layer["attention/out"].reshape(-1, width).T,
            f"layers.{i}.up.weight": layer["mlp/up"].reshape(width, -1).T,
            f"layers.{i}.down.weight": layer["mlp/down"].T,
        }
    decoder.load_state_dict({name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()})


class Training:
    """A model, its optimizer and one batch."""

    def __init__(self, config: RunConfig, weights: str, compiled: bool):
        rows, length = config.train.batch_size, config.data.seq_len
        tokens = np.random.default_rng(config.seed).integers(config.model.vocab_size, size=(rows, length + 1))
        tokens = torch.tensor(tokens)
        self.tokens, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.decoder = Decoder(config.model, length)
        with np.load(weights) as arrays:
            load(self.decoder, arrays)
        optim = config.optim
        decayed = [
            p
            for name, p in self.decoder.named_parameters()
            if p.ndim == 2 and not name.startswith(("token", "position"))
        ]
        others = [p for p in self.decoder.parameters() if all(p is not q for q in decayed)]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, optim.learning_rate, (optim.b1, optim.b2), optim.epsilon, fused=True)
        self.clip_norm = optim.clip_norm
        self.half = config.train.precision == "bfloat16"
        self.loss = torch.compile(self.decoder) if compiled else self.decoder

    def steps(self, count: int) -> list[float]:
        """The losses of `count` steps."""
        losses = []
        for _ in range(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
                loss = self.loss(self.tokens, self.targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.decoder.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return [float(loss) for loss in losses]


TRAININGS: dict[str, Training] = {}


def build(name: str, config: dict[str, Any], weights: str, compiled: bool) -> dict[str, Any]:
    """Makes a training from lmjax's config and weights, and runs its first step."""
    training = TRAININGS[name] = Training(configs.build(RunConfig, config), weights, compiled)
    start = time.perf_counter()
    (loss,) = training.steps(1)
    return {
        "first_step_s": time.perf_counter() - start,
        "loss": loss,
        "num_parameters": sum(p.numel() for p in training.decoder.parameters()),
    }


def steps(name: str, count: int) -> dict[str, Any]:
    """Seconds a step, and the last loss."""
    TRAININGS[name].steps(1)  # the first step after a pause pays for the pause
    start = time.perf_counter()
    losses = TRAININGS[name].steps(count)
    return {"step_s": (time.perf_counter() - start) / count, "loss": losses[-1]}


def matmul(dtype: str, size: int = 1024, seconds: float = 0.2) -> float:
    """FLOP/s of a square product: the fastest of those run within `seconds`."""
    operand = torch.ones((size, size), dtype=getattr(torch, dtype))
    operand @ operand
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        operand @ operand
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


if __name__ == "__main__":
    serve({"build": build, "steps": steps, "matmul": matmul})
