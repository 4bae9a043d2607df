"""The project's own form of documents on disk: it gives back what was written, and any change to it is an error."""

import random

import pytest
import zstandard

from lmjax.data.document import Document
from lmjax.data.written import read_written, write_documents
from lmjax.errors import UserError

HARD = [
    "plain",
    "",
    "line\u2028separator\u0085next\x0b\x0c\x1c",
    "nul\0 tab\t crlf\r\n bom\ufeff",
    "lone \ud800 and \udfff, turned round \ude00\ud83d",
    "\U0001f469\u200d\U0001f467 \u2581 <eos>",
    "\n\n",
]


def documents(n=50):
    return [
        Document(f"é{i}\ud800", text + str(i), "s", {"path": f"p{i}", "n": [i, None]})
        for i in range(n)
        for text in HARD
    ]


def test_written_is_read_back_equal(tmp_path):
    counts = write_documents(tmp_path / "x" / "s.jsonl.zst", documents())
    assert list(read_written(tmp_path / "x" / "s.jsonl.zst")) == documents()
    size = sum(len(d.text.encode("utf-8", "surrogatepass")) for d in documents())
    assert counts == {"documents": 50 * len(HARD), "bytes": size}


def test_written_bytes_are_deterministic(tmp_path):
    for name in "ab":
        write_documents(tmp_path / f"{name}.jsonl.zst", iter(documents()))
    assert (tmp_path / "a.jsonl.zst").read_bytes() == (tmp_path / "b.jsonl.zst").read_bytes()


def test_an_empty_file_is_valid(tmp_path):
    assert write_documents(tmp_path / "a.jsonl.zst", []) == {"documents": 0, "bytes": 0}
    assert list(read_written(tmp_path / "a.jsonl.zst")) == []


def test_any_change_to_a_written_file_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    write_documents(path, documents(5))
    data = path.read_bytes()
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"a\.jsonl\.zst"):
            list(read_written(path))
    for i in random.Random(0).sample(range(len(data)), 100):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :])
        with pytest.raises(UserError, match=r"a\.jsonl\.zst"):
            assert list(read_written(path)) == documents(5), "damage changed the documents"
            raise UserError("a.jsonl.zst: the flipped bit carries nothing")


def test_another_file_than_the_manifest_says(tmp_path):
    write_documents(tmp_path / "a.jsonl.zst", documents(1))
    with pytest.raises(UserError, match="sha256 differs"):
        list(read_written(tmp_path / "a.jsonl.zst", "0" * 64))
    for line in ('{"text": "a"}', "[]", '{"id": "", "text": "", "source": "", "meta": {}, "more": 1}'):
        (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(line.encode()))
        with pytest.raises(UserError, match="is damaged"):
            list(read_written(tmp_path / "b.jsonl.zst"))
    with pytest.raises(UserError, match="no such file"):
        list(read_written(tmp_path / "c.jsonl.zst"))
