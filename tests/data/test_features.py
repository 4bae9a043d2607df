"""Features beside text: what is read, what a row holds, and that a model learns to name what it was shown."""

import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax import config as configs
from lmjax import run, trained
from lmjax.data import features as features_of
from lmjax.data.config import ShardsConfig, SplitConfig, TokenizerConfig
from lmjax.data.eval_batches import EvalBatches
from lmjax.data.features import Features
from lmjax.data.shards import write_shards
from lmjax.data.split import split_documents
from lmjax.errors import UserError
from lmjax.generate.decode import generate
from lmjax.generate.sample import Sampling
from lmjax.interchange import export_hf
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig
from lmjax.model.dense import dtypes
from lmjax.parts import build_reader
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.tokenizers.train import train_tokenizer
from lmjax.train.config import RunConfig

BYTES, TYPES = ByteTokenizer(), dtypes("float32", "cpu")
NAMES = ("cat", "dog", "cow", "hen", "fox", "owl", "bee", "ant", "eel", "a long one")
PLACES, WIDTH, LENGTH = 4, 16, 6
MODEL = ModelConfig(vocab_size=264, num_layers=2, d_model=64, num_heads=4, d_ff=128, prefix_dim=WIDTH, max_length=32)


def shown(count, seed):
    """Which of ten patterns, and the patterns with noise."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).normal(size=(10, PLACES, WIDTH))
    kinds = rng.integers(10, size=count)
    return kinds, patterns[kinds] + 0.5 * rng.normal(size=(count, PLACES, WIDTH))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Shards of documents that name what their features are, and a config that reads both."""
    root = tmp_path_factory.mktemp("zoo")
    kinds, arrays = shown(400, 1)
    lines = [json.dumps({"id": f"d{n}", "text": NAMES[kind]}) for n, kind in enumerate(kinds)]
    (root / "zoo.jsonl").write_text("\n".join(lines))
    np.savez(root / "zoo.npz", **{f"d{n}": array for n, array in enumerate(arrays)})
    split_documents([root / "zoo.jsonl"], root / "documents", SplitConfig(validation=0.0, test=0.0), "zoo")
    train_tokenizer(None, root / "tokenizer", TokenizerConfig(kind="byte"))
    write_shards(root / "documents", root / "tokenizer", root / "shards", ShardsConfig(num_workers=0))
    values = {
        "model": configs.to_dict(MODEL),
        "tokenizer": str(root / "tokenizer"),
        "data": {
            "shards": [str(root / "shards")], "seq_len": LENGTH, "packing": "document", "eval_split": "train",
            "features": {"zoo": str(root / "zoo.npz")},
        },
        "optim": {"learning_rate": 3e-3, "warmup_steps": 5},
        "train": {"steps": 80, "batch_size": 32, "precision": "float32"},
        "eval": {"rows": 32},
        "monitor": {"tensorboard": False, "peak_flops": 1e12},
    }  # fmt: skip
    return root, configs.build(RunConfig, values)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"a": np.ones((2, 3)), "b": np.ones((2, 4))}, r"'b' has shape \(2, 4\)"),
        ({"a": np.ones((2, 3)), "b": np.full((2, 3), np.nan)}, "'b' holds numbers that are not finite"),
        ({}, "holds no features"),
        ({"a": np.ones((2, 3)), "b": np.array([["x"]])}, "is no .npz of numbers"),
        ({"a": np.ones((2, 3))}, "holds no features of document 'b'"),
    ],
)
def test_damaged_features_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "zoo.npz", **arrays)
    with pytest.raises(UserError, match=message):
        Features(str(tmp_path / "zoo.npz")).read("b")


def test_an_id_that_ends_like_a_member_is_its_own(tmp_path):
    arrays = {"x": np.zeros((2, 3)), "x.npy": np.ones((2, 3)), "y": np.zeros((2, 3))}
    np.savez(tmp_path / "f.npz", **arrays)
    features = Features(str(tmp_path / "f.npz"))
    for name, array in arrays.items():
        assert np.array_equal(features.read(name), array)
    with pytest.raises(UserError, match=r"no features of document 'y\.npy'"):
        features.read("y.npy")


def test_a_row_is_a_document_behind_its_features(zoo, tmp_path):
    """Every document once in an epoch, in another order in the next; all of its text is learned, and no other's."""
    _, config = zoo
    reader = pickle.loads(pickle.dumps(build_reader(config, tmp_path)))
    reader.prepare()
    seen = []
    for step in (0, 1, 12):  # the thirteenth step passes the end of the epoch of 400
        batch = reader(step)
        assert batch.prefix.shape == (32, PLACES, WIDTH)
        for row, prefix in enumerate(batch.prefix):
            (number,) = (n for n, array in enumerate(shown(400, 1)[1]) if np.allclose(array, prefix, atol=1e-6))
            seen.append(number)
            ids = [BYTES.bos_id, *BYTES.encode(NAMES[shown(400, 1)[0][number]]), BYTES.eos_id]
            inputs, targets = ids[:-1][:LENGTH], ids[1:][:LENGTH]
            cut = len(ids) <= LENGTH  # the end of the text stands in the row, too, and predicts nothing
            expected = [*inputs, *([BYTES.eos_id] if cut else [])]
            assert batch.tokens[row].tolist() == expected + [0] * (LENGTH - len(expected))
            assert batch.targets[row].tolist() == targets + [0] * (LENGTH - len(targets))
            assert batch.loss_weights[row].tolist() == [1] * len(targets) + [0] * (LENGTH - len(targets))
            assert set(batch.segment_ids[row].tolist()) <= {0, 1}
    assert len(set(seen[:64])) == 64 and len(set(seen)) < len(seen)
    source = reader.sources[0]
    batches = EvalBatches(source, LENGTH, 64, None, None, reader.features["zoo"])
    assert len(batches) == 7 and sum(batch.loss_weights.any(axis=1).sum() for batch in batches) == 400
    assert not batches[6].prefix[16:].any()


def test_features_see_one_another_and_text_sees_them_and_no_later_text():
    params = decoder.init(MODEL, jax.random.key(0))
    tokens, prefix = jnp.arange(2 * LENGTH).reshape(2, LENGTH), jnp.asarray(shown(2, 1)[1], jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    segments = jnp.asarray([[1] * LENGTH, [1, 1, 1, 2, 2, 2]], jnp.int32)

    @jax.jit
    def hidden(tokens, prefix):
        mask = Mask(segments=segments)
        return decoder.forward_routed(MODEL, params, tokens, positions, mask, TYPES, prefix=prefix)[0]

    before = hidden(tokens, prefix)
    assert before.shape == (2, LENGTH, MODEL.d_model)
    later = hidden(jnp.where(jnp.arange(LENGTH) == 2, 9, tokens), prefix)
    np.testing.assert_array_equal(before[:, :2], later[:, :2])
    for place in range(PLACES):  # the first text token reads all of them, so each changes it
        moved = hidden(tokens, prefix + jnp.eye(PLACES)[place][:, None])
        assert np.abs(moved[:, 0] - before[:, 0]).max() > 1e-3
        np.testing.assert_array_equal(moved[1, 3:], before[1, 3:])  # a second document in the row reads none
    x, positions, mask = decoder.merge(MODEL, params).enter_prefix(before, prefix, positions, Mask(segments), TYPES)
    assert x.shape[1] == PLACES + LENGTH and mask.prefix == PLACES
    assert mask.segments[0].tolist() == [1] * PLACES + [1] * LENGTH
    assert positions[0].tolist() == list(range(PLACES + LENGTH))


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5}, {"position": "learned"}, {"position": "sinusoidal"}])
def test_generation_behind_features_equals_the_whole_forward_pass(fields):
    config = dataclasses.replace(MODEL, init_std=0.4, **fields)
    params, prefix = decoder.init(config, jax.random.key(0)), shown(2, 3)[1].astype(np.float32)
    prompts = [np.array([5, 6, 7]), np.array([9])]
    made = np.stack(list(generate(config, params, prompts, 4, Sampling(0.0), TYPES, 264, prefix=prefix)), axis=1)

    @jax.jit
    def logits(row, prefix):
        places = jnp.arange(len(row))[None]
        hidden, *_ = decoder.forward_routed(config, params, row[None], places, Mask(), TYPES, prefix=prefix[None])
        return decoder.unembed(config, params, hidden, TYPES)[0]

    for prompt, own, new in zip(prompts, prefix, made, strict=True):
        row = np.zeros(8, np.int32)
        row[: len(prompt)] = prompt
        for place, token in enumerate(new, len(prompt)):
            assert token == logits(row, own)[place - 1].argmax()
            row[place] = token


@pytest.mark.slow
def test_a_model_learns_to_name_what_it_was_shown(zoo, tmp_path):
    """By the loader, the step and the loop of any run; of ten, unseen and with noise. No family of Hugging Face has such a model."""
    _, config = zoo
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, stop_at=40))
    assert run.train(half, tmp_path / "run") == 40
    assert run.train(config, tmp_path / "run") == 80
    kinds, arrays = shown(40, 1000)
    np.savez(tmp_path / "new.npz", **{str(n): array for n, array in enumerate(arrays)})
    gained = trained.generate(tmp_path / "run", [""] * 40, 5, Sampling(0.0), None, [], tmp_path / "new.npz")
    said = ["".join(parts) for parts in zip(*gained, strict=True)]
    assert np.mean([NAMES[kind].startswith(text[:3]) and len(text) >= 3 for kind, text in zip(kinds, said)]) >= 0.95
    with pytest.raises(UserError, match="prefix_dim=16"):
        export_hf(tmp_path / "run", tmp_path / "out", None, "float32")


def test_what_does_not_go_together_is_refused(zoo, tmp_path):
    _, config = zoo
    for section, changes, message in (
        ("model", {"prefix_dim": None}, r"need config\.model\.prefix_dim"),
        ("data", {"packing": "concat"}, "must be 'document'"),
        ("mesh", {"context": 2}, r"config\.mesh\.context splits rows"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
    narrow = dataclasses.replace(config, model=dataclasses.replace(MODEL, prefix_dim=8))
    with pytest.raises(UserError, match="features have width 16"):
        build_reader(narrow, tmp_path)
    np.savez(tmp_path / "few.npz", d0=np.ones((PLACES, WIDTH)))
    few = dataclasses.replace(
        config, data=dataclasses.replace(config.data, features={"zoo": str(tmp_path / "few.npz")})
    )
    with pytest.raises(UserError, match="holds no features of document 'd"):
        build_reader(few, tmp_path).prepare()
    with pytest.raises(UserError, match="names no file for source"):
        features_of.open_features({"other": "x.npz"}, build_reader(config, tmp_path).sources)
