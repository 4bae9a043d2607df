"""Training and importing: deterministic, from the training split alone, and every mistake has a mend."""

import random

import numpy as np
import pytest
from etils import epath

from lmjax.data.config import SplitConfig, TokenizerConfig
from lmjax.data.document import Document, draw
from lmjax.data.split import split_documents
from lmjax.data.written import read_written, write_documents
from lmjax.errors import UserError
from lmjax.files import Manifest, read_json, read_manifest, sha256_file, write_manifest
from lmjax.tokenizers.build import load
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer
from lmjax.tokenizers.train import (
    SENTENCE_CHARACTERS,
    draw_sample,
    sentences,
    train_model,
    train_tokenizer,
    written_files,
)

SMALL = TokenizerConfig(vocab_size=400)


def words(seed, n, letters="abcdefghij"):
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(letters, k=rng.randrange(2, 9))) for _ in range(60)]
    return [" ".join(rng.choices(vocabulary, k=60)) + f"\n    {i}\n" for i in range(n)]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Two sources, split."""
    folder = tmp_path_factory.mktemp("corpus")
    for source, texts in {"a": words(0, 300), "b": words(1, 100, "klmnopqrst")}.items():
        write_documents(folder / f"{source}.jsonl.zst", [Document(f"{i}", t, source) for i, t in enumerate(texts)])
    files = {f"{source}.jsonl.zst": sha256_file(folder / f"{source}.jsonl.zst") for source in "ab"}
    write_manifest(folder, Manifest("corpus", {}, {}, {}, {"files": files}, "", 0.0))
    out = tmp_path_factory.mktemp("split") / "out"
    split_documents(folder, out, SplitConfig(validation=0.1, test=0.1))
    return out


def test_trained_tokenizer(documents, tmp_path):
    manifest, skipped = train_tokenizer(documents, tmp_path / "out", SMALL)
    tokenizer = load(tmp_path / "out")
    assert not skipped and tokenizer.vocab_size == 400 and tokenizer.lossless
    assert manifest.content["fingerprint"] == tokenizer.fingerprint()
    assert (manifest.content["pad_id"], manifest.content["bos_id"], manifest.content["eos_id"]) == (0, 2, 3)
    for name, sha256 in manifest.content["files"].items():
        assert sha256_file(tmp_path / "out" / name) == sha256
    assert set(manifest.content["files"]) == {"tokenizer.model", "tokenizer_kind.json", "report.json"}
    train = [d for s in "ab" for d in read_written(documents / "train" / f"{s}.jsonl.zst")]
    assert manifest.counts["sample_documents"] == len(train)
    assert manifest.counts["sample_bytes"] == sum(len(document.text) for document in train)
    report = read_json(tmp_path / "out" / "report.json")
    assert set(report["sources"]) == {"a", "b"} and report["lossy_strings"] == 0
    validation = list(read_written(documents / "validation" / "a.jsonl.zst"))
    tokens = sum(len(tokenizer.encode(document.text)) for document in validation)
    assert report["sources"]["a"]["tokens"] == tokens and report["bytes_per_token"] > 1.5


def test_the_same_documents_give_the_same_bytes(documents, tmp_path):
    for algorithm in ("bpe", "unigram"):
        config = TokenizerConfig(vocab_size=380, algorithm=algorithm)
        first, _ = train_tokenizer(documents, tmp_path / f"{algorithm}1", config)
        second, _ = train_tokenizer(documents, tmp_path / f"{algorithm}2", config)
        assert first.fingerprint() == second.fingerprint()
        assert train_tokenizer(documents, tmp_path / f"{algorithm}2", config) == (second, True)


def test_the_sample_is_of_the_training_split_by_hash(documents):
    split = read_manifest(documents, "split")
    train = written_files(epath.Path(documents), split)["train"]
    everything = [d.text for s in "ab" for d in read_written(documents / "train" / f"{s}.jsonl.zst")]
    total = sum(len(text) for text in everything)
    half = list(draw_sample(train, split, TokenizerConfig(sample_bytes=total // 2)))
    assert half == [text for text in everything if draw(text, "tokenizer", 0) < 0.5]
    assert abs(sum(map(len, half)) / total - 0.5) < 0.1
    assert list(draw_sample(train, split, TokenizerConfig(sample_bytes=2 * total))) == everything
    assert list(draw_sample(train, split, TokenizerConfig(sample_bytes=total // 2, seed=1))) != half
    smaller = list(draw_sample(train, split, TokenizerConfig(sample_bytes=total // 4)))
    assert set(smaller) < set(half)  # a larger sample only adds


def test_sentences_hold_everything_but_what_the_trainer_cannot_take():
    texts = ["a" * 25_000, "b\u2581c\u2585d\ud800e\tf\n\0", ""]
    found = list(sentences(texts))
    assert max(map(len, found)) == SENTENCE_CHARACTERS
    assert "".join(found) == "a" * 25_000 + "bcde\tf\n\0"


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_training_survives_hard_text(algorithm):
    hard = [
        "x" * 200_000,
        "\0" * 100,
        "\ud800" * 50,
        "\u2585\u2581" * 50,
        "\t" * 3000 + "\n" * 3000 + " " * 3000,
        "\ufffd",
    ]
    model = train_model([*words(0, 200), *hard], TokenizerConfig(vocab_size=350, algorithm=algorithm))
    assert len(model) > 1000


def test_white_space_gets_pieces(tokenizers):
    tokenizer = tokenizers["bpe"]
    for text, most in (("        ", 1), ("            ", 2), (":\n", 1), ("\n\n", 1)):
        assert len(tokenizer.encode(text)) <= most, repr(text)


def test_split_digits():
    texts = [*words(0, 100), "2024\n" * 2000]
    lengths = {}
    for split in (True, False):
        model = train_model(texts, TokenizerConfig(vocab_size=400, split_digits=split))
        lengths[split] = len(SentencePieceTokenizer(model).encode("2024"))
    assert lengths == {True: 4, False: 1}


def test_no_sentence_is_lost_for_its_length():
    texts = [*words(0, 100), " ".join(["needle"] * 3000)]  # far past the trainer's own limit for a sentence
    assert len(SentencePieceTokenizer(train_model(texts, SMALL)).encode(" needle")) == 1


# ----------------------------------------------------------------------------------------------------------------- importing


@pytest.mark.parametrize("name, kind, file", [("imported", "sentencepiece", "x.model"), ("hf", "hf", "x.json")])
def test_import(tokenizers, documents, tmp_path, name, kind, file):
    model = tokenizers[name].model
    (tmp_path / file).write_bytes(model if isinstance(model, bytes) else model.encode())
    manifest, _ = train_tokenizer(documents, tmp_path / "out", TokenizerConfig(kind=kind, path=str(tmp_path / file)))
    loaded = load(tmp_path / "out")
    assert loaded.fingerprint() == tokenizers[name].fingerprint() == manifest.content["fingerprint"]
    np.testing.assert_array_equal(loaded.encode("some text"), tokenizers[name].encode("some text"))
    assert manifest.counts["vocab_size"] == 500 and manifest.counts["lossy_strings"] > 0
    assert str(tmp_path) not in str(manifest.config)


def test_where_a_model_lies_does_not_matter_but_what_it_is_does(tokenizers, tmp_path):
    for name in ("x.model", "y.model"):
        (tmp_path / name).write_bytes(tokenizers["bpe"].model)
        config = TokenizerConfig(path=str(tmp_path / name))
        _, skipped = train_tokenizer(None, tmp_path / "out", config)
        assert skipped == (name == "y.model")
    (tmp_path / "x.model").write_bytes(tokenizers["unigram"].model)
    with pytest.raises(UserError, match="made from other inputs"):
        train_tokenizer(None, tmp_path / "out", TokenizerConfig(path=str(tmp_path / "x.model")))


def test_the_special_tokens_beside_a_model_are_part_of_it(tokenizers, tmp_path):
    """What is read of them: another field changes nothing."""
    tokenizers["hf"].save(epath.Path(tmp_path / "given"))
    config = TokenizerConfig(kind="hf", path=str(tmp_path / "given" / "tokenizer.json"))
    beside = tmp_path / "given" / "tokenizer_config.json"
    beside.write_text('{"eos_token": "a"}')
    train_tokenizer(None, tmp_path / "out", config)
    beside.write_text('{"eos_token": {"content": "a"}, "clean": true}')
    assert train_tokenizer(None, tmp_path / "out", config)[1]
    beside.write_text('{"eos_token": "b"}')
    with pytest.raises(UserError, match="made from other inputs"):
        train_tokenizer(None, tmp_path / "out", config)


def test_bytes_need_no_documents(tmp_path):
    manifest, _ = train_tokenizer(None, tmp_path / "out", TokenizerConfig(kind="byte"))
    assert manifest.counts["vocab_size"] == load(tmp_path / "out").vocab_size == 262
    assert read_json(tmp_path / "out" / "report.json")["bytes_per_token"] is None


# ----------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "config, says",
    [
        ({"vocab_size": 30_000}, r"config\.vocab_size=30000 is too large for the sample, which supports \d+"),
        ({"vocab_size": 30_000, "algorithm": "unigram"}, r"too large for the sample, which supports \d+"),
        ({"vocab_size": 400, "sample_bytes": 1}, "holds no text: raise it, or give more documents"),
        ({"path": "none.model"}, r"config\.path='none\.model' cannot be read: No such file"),
        ({"path": "/"}, r"config\.path='/' cannot be read: Is a directory"),
        ({"kind": "hf", "path": __file__}, r"is not a tokenizer\.json"),
        ({"path": __file__}, "is not a SentencePiece model"),
    ],
)
def test_mistakes(documents, tmp_path, config, says):
    with pytest.raises(UserError, match=says) as error:
        train_tokenizer(documents, tmp_path / "out", TokenizerConfig(**config))
    assert "\n" not in str(error.value)


def test_too_few_pieces_for_the_characters():
    many = ["".join(chr(0x4E00 + i) for i in range(500))] * 3
    with pytest.raises(UserError, match=r"too small for the sample's characters: at least \d+"):
        train_model(many, TokenizerConfig(vocab_size=400))


def test_no_documents(tmp_path):
    with pytest.raises(UserError, match="needs documents"):
        train_tokenizer(None, tmp_path / "out", SMALL)
    with pytest.raises(UserError, match="no such folder"):
        train_tokenizer(tmp_path / "none", tmp_path / "out2", SMALL)


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"kind": "hf"}, "set config.path"),
        ({"kind": "byte", "path": "x"}, "nothing to import"),
        ({"vocab_size": 100}, "must exceed 300"),
        ({"sample_bytes": 0}, "must be positive"),
    ],
)
def test_impossible_configs(fields, says):
    with pytest.raises(UserError, match=says):
        TokenizerConfig(**fields)
