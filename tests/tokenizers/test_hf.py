"""A tokenizer.json: its own ids, without what would add to a text or cut it."""

import json

import pytest
import tokenizers as hf_library
from etils import epath

from lmjax.errors import UserError
from lmjax.tokenizers.hf import HfTokenizer


def test_nothing_is_added_padded_or_cut(tokenizers):
    tokenizer = tokenizers["hf"]
    oracle = hf_library.Tokenizer.from_str(tokenizer.model)
    assert len(oracle.encode("x").ids) == 8  # it pads, as the file says
    oracle.no_padding()
    oracle.no_truncation()
    text = "def f(x):\n    return x  # a text of more than eight tokens\n"
    assert tokenizer.encode(text).tolist() == oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).size > 8 and tokenizer.encode("x").size == 1
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_by_their_usual_names(tokenizers):
    tokenizer = tokenizers["hf"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, 2, 500)


@pytest.mark.parametrize(
    "names, bos, eos, pad",
    [
        (["<|endoftext|>"], None, 0, None),
        (["<|begin_of_text|>", "<|end_of_text|>"], 0, 1, None),
        (["[PAD]", "[CLS]", "[SEP]"], 1, 2, 0),
    ],
)
def test_other_families(names, bos, eos, pad):
    tokenizer = hf_library.Tokenizer(hf_library.models.BPE())
    tokenizer.add_special_tokens(names)
    built = HfTokenizer(tokenizer.to_str())
    assert (built.bos_id, built.eos_id, built.pad_id) == (bos, eos, pad)


def test_a_piece_with_a_special_name_is_no_special_token():
    added = hf_library.Tokenizer(hf_library.models.BPE())
    added.add_tokens(["<s>", "a"])
    assert HfTokenizer(added.to_str()).bos_id is None
    built = HfTokenizer(hf_library.Tokenizer(hf_library.models.BPE({"<s>": 0, "a": 1}, [])).to_str())
    assert built.bos_id is None and built.vocab_size == 2


def test_a_lone_surrogate_is_replaced(tokenizers):
    tokenizer = tokenizers["hf"]
    assert tokenizer.decode(tokenizer.encode("a\ud800\udfffb")) == "a\ufffd\ufffdb"


def test_a_file_that_is_no_tokenizer(tmp_path):
    for data in (b"not json", json.dumps({"model": 1}).encode(), b"\xff\xfe"):
        (tmp_path / "x.json").write_bytes(data)
        with pytest.raises(UserError, match=r"x\.json is not a tokenizer\.json"):
            HfTokenizer.read(tmp_path / "x.json")
    with pytest.raises(UserError, match=r"cannot read .*y\.json"):
        HfTokenizer.read(tmp_path / "y.json")


@pytest.mark.parametrize("text", ['{"eos_token": 5}', '{"eos_token": {"text": "</s>"}}', "[]", "{"])
def test_a_config_that_names_no_token(tokenizers, tmp_path, text):
    tokenizers["hf"].save(epath.Path(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer_config\.json") as error:
        HfTokenizer.read(tmp_path / "tokenizer.json")
    assert "\n" not in str(error.value)
