"""Trained models lose nothing; imported ones behave exactly as the library does."""

import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer


def test_which_models_lose_nothing(tokenizers):
    lossless = {name for name, tokenizer in tokenizers.items() if getattr(tokenizer, "lossless", False)}
    assert lossless == {"bpe", "unigram"}


def test_ids_are_the_librarys_own_where_it_can_carry_the_text(tokenizers):
    for name in ("bpe", "unigram", "imported", "llama"):
        tokenizer = tokenizers[name]
        for text in ("def f(x):\n    return x\n", "नमस्ते <eos>", "  two  spaces\t", ""):
            assert tokenizer.encode(text).tolist() == tokenizer.processor.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.processor.decode(
                tokenizer.processor.encode(text)
            )


def test_special_ids_of_trained_models(tokenizers):
    for name in ("bpe", "unigram"):
        tokenizer = tokenizers[name]
        pieces = [tokenizer.processor.id_to_piece(id) for id in range(6)]
        assert pieces == ["<pad>", "<unk>", "<bos>", "<eos>", "<mask>", "<sep>"]
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)
        assert all(tokenizer.decode([id]) == "" for id in range(6))


def test_imported_models_keep_their_special_ids(tokenizers):
    imported = tokenizers["imported"]
    assert (imported.pad_id, imported.bos_id, imported.eos_id) == (None, 1, 2)


def test_the_mark_of_a_space_and_a_space_are_two_things(tokenizers):
    tokenizer = tokenizers["bpe"]
    assert tokenizer.encode("a\u2581b").tolist() != tokenizer.encode("a b").tolist()
    spelled = [tokenizer.byte_ids[byte] for byte in "\u2581".encode()]
    np.testing.assert_array_equal(tokenizer.encode("\u2581"), spelled)


def test_a_lone_surrogate_in_an_imported_model(tokenizers):
    imported = tokenizers["imported"]
    np.testing.assert_array_equal(imported.encode("a\ud800"), imported.encode("a\ufffd"))


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"x\.model is not a SentencePiece model"):
        SentencePieceTokenizer.read(tmp_path / "x.model")
    with pytest.raises(UserError, match=r"cannot read .*y\.model"):
        SentencePieceTokenizer.read(tmp_path / "y.model")
