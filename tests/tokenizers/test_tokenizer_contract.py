"""What `lmjax.tokenizers.base.Tokenizer` promises, for every kind."""

import pickle
import random

import numpy as np
import pytest
from etils import epath

from lmjax.errors import UserError
from lmjax.files import read_json, write_json
from lmjax.tokenizers.base import METADATA, Tokenizer
from lmjax.tokenizers.build import KINDS, load
from lmjax.tokenizers.report import HARD_STRINGS

NAMES = ["byte", "bpe", "unigram", "imported", "llama", "hf"]
LOSSLESS = ["byte", "bpe", "unigram"]


@pytest.fixture(params=NAMES)
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


@pytest.fixture(params=LOSSLESS)
def lossless(request, tokenizers):
    return tokenizers[request.param]


def random_strings(n=400):
    rng = random.Random(0)
    blocks = [(0, 128), (0, 0x300), (0x900, 0x980), (0x2000, 0x2070), (0x2580, 0x2590), (0xD800, 0xE000), (0, 0x110000)]
    for _ in range(n):
        low, high = rng.choice(blocks)
        yield "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(30)))


def test_is_a_tokenizer(tokenizer):
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize("name", HARD_STRINGS)
def test_hard_strings_come_back(lossless, name):
    assert lossless.decode(lossless.encode(HARD_STRINGS[name])) == HARD_STRINGS[name]


def test_random_strings_come_back(lossless):
    for text in random_strings():
        assert lossless.decode(lossless.encode(text)) == text


def test_ids_are_int32_in_the_vocabulary(tokenizer):
    for text in [*random_strings(100), *HARD_STRINGS.values()]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert not ids.size or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


def test_a_batch_is_each_text(tokenizer):
    texts = [*HARD_STRINGS.values(), *random_strings(100), ""]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert tokenizer.encode_batch([]) == []


def test_no_special_ids_from_text(tokenizer):
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} - {None}
    assert special
    for text in ("x", "<pad><unk><bos><eos><mask><sep>", "<s>a</s> <pad>", "<0x41><0x00>", *HARD_STRINGS.values()):
        assert not special & set(tokenizer.encode(text).tolist())


def test_special_ids_decode_to_nothing(tokenizer):
    ids = tokenizer.encode("some text").tolist()
    special = [id for id in (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) if id is not None]
    assert tokenizer.decode([*special, *ids, *special]) == tokenizer.decode(ids)
    assert tokenizer.decode(special) == tokenizer.decode([]) == ""
    assert tokenizer.decode(np.array(ids, np.uint16)) == tokenizer.decode(ids)


@pytest.mark.parametrize("id", [-1, 1_000_000])
def test_ids_outside_the_vocabulary_are_errors(tokenizer, id):
    with pytest.raises(ValueError, match="leave the vocabulary"):
        tokenizer.decode([id])


def test_bytes_that_are_not_utf8_become_replacements(lossless):
    ids = lossless.encode("é")  # two bytes in each kind
    if len(ids) == 2:
        assert lossless.decode(ids[:1]) == "\ufffd" and lossless.decode(ids[::-1]) == "\ufffd\ufffd"
    surrogate = lossless.encode("a\ud800b")
    assert lossless.decode(surrogate[1:3]) in ("\ufffd", "\ufffd\ufffd")


def test_concatenated_ids_are_concatenated_texts(lossless):
    a, b = "def f(x):\n    ", "    return x \u2581\ud800"
    assert lossless.decode(np.concatenate([lossless.encode(a), lossless.encode(b)])) == a + b


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(epath.Path(tmp_path))
    loaded = load(tmp_path)
    assert loaded.fingerprint() == tokenizer.fingerprint() and type(loaded) is type(tokenizer)
    for name in ("vocab_size", "pad_id", "bos_id", "eos_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name) == read_json(tmp_path / METADATA)[name]
    for text in HARD_STRINGS.values():
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))


def test_goes_to_another_process(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint() == tokenizer.fingerprint()
    np.testing.assert_array_equal(copy.encode("some text"), tokenizer.encode("some text"))


def test_fingerprints_differ(tokenizers):
    assert len({tokenizer.fingerprint() for tokenizer in tokenizers.values()}) == len(tokenizers)


def test_what_is_no_tokenizer(tokenizers, tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        load(tmp_path / "missing")
    tokenizers["bpe"].save(epath.Path(tmp_path))
    metadata = read_json(tmp_path / METADATA)
    write_json(tmp_path / METADATA, metadata | {"kind": "sentencepeice"})
    with pytest.raises(UserError, match="did you mean 'sentencepiece'"):
        load(tmp_path)
    write_json(tmp_path / METADATA, metadata)
    (tmp_path / "tokenizer.model").write_bytes(tokenizers["unigram"].model)
    with pytest.raises(UserError, match="not the one that was saved"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"not the one that was saved|not a SentencePiece model"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load(tmp_path)


def test_every_kind_is_tested(tokenizers):
    assert {type(tokenizer) for tokenizer in tokenizers.values()} == set(KINDS.values())
