"""The report's numbers, by hand on bytes."""

import json

from rich.console import Console

from lmjax.data.document import Document
from lmjax.tokenizers.report import HARD_STRINGS, make_report, show


def test_numbers_of_the_byte_tokenizer(tokenizers):
    documents = {"a": [Document("1", "abca", "a"), Document("2", "é\ud800", "a")], "b": [Document("3", "", "b")]}
    report = make_report(tokenizers["byte"], documents)
    assert report["sources"]["a"] == {"documents": 2, "bytes": 9, "tokens": 9, "bytes_per_token": 1.0}
    assert report["sources"]["b"] == {"documents": 1, "bytes": 0, "tokens": 0, "bytes_per_token": None}
    assert report["bytes_per_token"] == 1.0 and report["lossy_strings"] == 0
    assert report["unused_pieces"] == 262 - 3 - len("é\ud800".encode("utf-8", "surrogatepass"))
    assert json.loads(json.dumps(report)) == report


def test_what_is_lost_is_said(tokenizers):
    report = make_report(tokenizers["imported"], {})
    assert report["lossy_strings"] == sum(not s["lossless"] for s in report["hard_strings"].values()) > 5
    assert not report["hard_strings"]["tabs"]["lossless"] and report["hard_strings"]["empty"]["lossless"]
    assert report["unused_pieces"] is None


def test_many_documents_go_in_batches(tokenizers):
    documents = [Document(str(i), "text " * (i % 7), "a") for i in range(300)]
    report = make_report(tokenizers["bpe"], {"a": iter(documents)})
    assert report["sources"]["a"]["documents"] == 300
    assert report["sources"]["a"]["tokens"] == sum(len(tokenizers["bpe"].encode(d.text)) for d in documents)


def test_tables(tokenizers):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    show(make_report(tokenizers["bpe"], {"a": [Document("1", "abc", "a")]}), console)
    text = console.export_text()
    assert "bytes/token" in text and all(name in text for name in HARD_STRINGS) and "pieces are not used" in text
