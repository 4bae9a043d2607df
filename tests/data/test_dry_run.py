"""The dry run: what a sample says of the whole, against what the whole then gives."""

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_prepare
import zstandard

from lmjax.data import dry_run, prepare
from lmjax.data.config import DataConfig
from lmjax.data.report import BYTES_PER_TOKEN
from lmjax.data.units import InputConfig
from lmjax.errors import UserError
from lmjax.files import read_json


def test_all_of_a_small_source_is_exact(tmp_path):
    config = test_prepare.config(
        test_prepare.make_inputs(tmp_path / "in", 60),
        data=DataConfig(weights={"web": 3.0, "books": 1.0}),
        run_tokens=4000,
    )
    estimated = dry_run.estimate(config, [], None, 1000)
    prepare.prepare(config, tmp_path / "out")
    last = read_json(tmp_path / "out" / "report.json")["stages"][-1]["sources"]
    for source in ("web", "books"):
        row = estimated["sources"][source]
        assert (
            row["exact"] and row["documents"] == last[source]["kept"] and row["tokens"] == last[source]["tokens_kept"]
        )
    books, web = estimated["budget"]
    assert (books.source, books.tokens_read, web.tokens_read) == ("books", 1000, 3000)
    assert web.epochs == 3000 / last["web"]["tokens_kept"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_sample_of_a_large_source_comes_near(tmp_path, suffix):
    rng = random.Random(0)
    for part in range(3):
        lines = [
            json.dumps({"id": f"{part}/{i}", "text": " ".join(rng.choices(test_prepare.WORDS, k=rng.randint(2, 120)))})
            + "\n"
            for i in range(1500)
        ]
        opened = gzip.open if suffix.endswith("gz") else open
        (tmp_path / "in").mkdir(exist_ok=True)
        with opened(tmp_path / "in" / f"{part}.{suffix}", "wt") as file:
            file.writelines(lines)
    sources = {"web": InputConfig((str(tmp_path / "in"),))}
    config = test_prepare.Config(sources=sources, stages=("short",), max_failed_share=0.2)
    row = dry_run.estimate(config, [], None, 300)["sources"]["web"]
    prepare.prepare(config, tmp_path / "out")
    kept = read_json(tmp_path / "out" / "report.json")["stages"][-1]["total"]
    assert not row["exact"] and row["sampled"] == 300
    assert row["documents"] == pytest.approx(kept["kept"], rel=0.35)
    assert row["tokens"] == pytest.approx(kept["tokens_kept"], rel=0.35)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "warc.gz"])
def test_what_is_no_text_is_part_of_the_file(tmp_path, suffix):
    """Short texts, much meta: bytes of text say nothing of how far a file was read."""
    rng = random.Random(0)
    rows = [{"text": f"text {i}", "other": "".join(rng.choices("abcdefgh ", k=800))} for i in range(3000)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "warc.gz":
        path.write_bytes(b"".join(gzip.compress(page(row["text"], row["other"])) for row in rows))
    else:
        data = "".join(json.dumps(row) + "\n\n" for row in rows).encode()  # blank lines are no records
        squeeze = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[suffix]
        path.write_bytes(squeeze(data))
    config = test_prepare.Config(sources={"web": InputConfig((str(path),))})
    row = dry_run.estimate(config, [], None, 100)["sources"]["web"]
    assert not row["exact"] and row["sampled"] == 100
    assert row["documents"] == pytest.approx(3000, rel=0.1)


def page(text: str, other: str) -> bytes:
    """A record of an archive."""
    body = text.encode()
    head = f"WARC/1.0\r\nWARC-Type: conversion\r\nX-Other: {other}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def test_files_of_a_document_each(tmp_path):
    for i in range(300):
        (tmp_path / f"{i:03d}.txt").write_text("some text " * 20)
    config = test_prepare.Config(sources={"web": InputConfig((str(tmp_path),))})
    row = dry_run.estimate(config, [], None, 10)["sources"]["web"]
    assert (row["sampled"], row["documents"], row["exact"]) == (10, 300, False)


def test_sources_that_are_dealt_are_mixed(tmp_path):
    """By the names and with the tokens that the output has."""
    rows = [{"text": "some text " * (1 + i % 7), "language": ("en", "de", "en")[i % 3]} for i in range(90)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = test_prepare.Config(
        sources={"web": InputConfig((str(tmp_path / "in.jsonl"),))},
        deal_by="language",
        data=DataConfig(weights={"web-de": 1.0, "web-en": 3.0}),
    )
    estimated = dry_run.estimate(config, [], None, 100)
    manifest, _ = prepare.prepare(config, tmp_path / "out")
    for name, counts in manifest.counts["sources"].items():
        row = estimated["dealt"][name]
        assert row["exact"] and row["documents"] == counts["documents"]
        assert row["tokens"] == pytest.approx(counts["bytes"] / BYTES_PER_TOKEN, abs=1)
    assert [row.source for row in estimated["budget"]] == ["web-de", "web-en"]
    assert "web-de" in str([list(column.cells) for column in list(dry_run.tables(estimated))[1].columns])


def test_a_source_without_tokens_may_be_named(tmp_path):
    """A weight of 0 leaves it out, as in a run."""
    for name, text in (("web", "long " * 20), ("books", "short")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config = test_prepare.Config(
        sources={name: InputConfig((str(tmp_path / f"{name}.jsonl"),)) for name in ("web", "books")},
        stages=("short",),
        data=DataConfig(weights={"web": 1.0, "books": 0.0}),
    )
    budget = dry_run.estimate(config, [], None, 10)["budget"]
    assert [(row.source, row.tokens, row.tokens_read > 0) for row in budget] == [("books", 0, False), ("web", 25, True)]


def test_nothing_left(tmp_path):
    config = test_prepare.config(
        test_prepare.make_inputs(tmp_path / "in", 30), short=test_prepare.Short(min_characters=10**6)
    )
    with pytest.raises(UserError, match="nothing to mix"):
        dry_run.estimate(config, [], None, 10)


def test_tables(tmp_path, capsys):
    dry_run.show(
        dry_run.estimate(
            test_prepare.config(test_prepare.make_inputs(tmp_path / "in", 60), max_failed_share=1.0), [], None, 10
        )
    )
    printed = capsys.readouterr().out
    assert "the whole, estimated" in printed and "about" in printed and "once was tried on the sample alone" in printed
