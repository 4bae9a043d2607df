"""The whole way of a crawl by the commands that a user types: archive → prepare → split → shards → the documents of a step."""

import gzip
import html
import json
import pydoc_data.topics
import re
from pathlib import Path

import pytest
from test_web import warc

from lmjax import cli
from lmjax.data.config import DataConfig
from lmjax.data.loader import build_train_reader
from lmjax.data.trace import trace
from lmjax.data.written import read_written
from lmjax.files import read_json

ROOT = Path(__file__).parent.parent.parent
MENU = "<nav><ul>" + "".join(f"<li><a href='/{i}'>Section {i}</a></li>" for i in range(20)) + "</ul></nav>"
SECRET = "Write to jane.doe@mail.example-corp.com if you want to know more about it, and she will answer."
QUESTION = (
    "Which of the two operands of the augmented assignment statement does the interpreter evaluate first, and why so?"
)


def pages() -> list[tuple[str, str]]:
    """(what it is, HTML): prose from this Python's documentation, whole, twice, almost twice, in German, and as a list."""
    found = []
    for name, text in sorted(pydoc_data.topics.topics.items()):
        prose = [part for part in re.sub(r"[*`|]", "", text).split("\n\n") if len(part) > 200 and ":" not in part[-3:]]
        if len(prose) >= 4:
            found.append((f"prose {name}", [part.replace("\n", " ") for part in prose[:12]]))
    kept = found[:30]
    kept[0] = ("with a secret", [*kept[0][1], SECRET])
    kept[1] = ("with a benchmark's item", [*kept[1][1], QUESTION])
    kept.append(("copy", kept[5][1]))
    kept.append(("near copy", [*kept[6][1], "One sentence more."]))
    german = "Dies ist ein deutscher Satz, der nichts weiter sagt und doch lang genug ist, um erkannt zu werden. "
    kept.append(("german", [german * 3] * 5))
    kept.append(("list", ["- x"] * 100))
    return [(what, "".join(f"<p>{html.escape(part)}</p>" for part in parts)) for what, parts in kept]


@pytest.mark.slow
def test_a_crawl_becomes_shards_and_a_step_names_its_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    made = pages()
    body = "<html lang='en'><head><title>T</title></head><body>{}<main><article>{}</article></main></body></html>"
    records = [warc(i, body.format(MENU, page).encode()) for i, (_, page) in enumerate(made)]
    (tmp_path / "crawl.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    (tmp_path / "items.jsonl").write_text(json.dumps({"id": "q1", "question": QUESTION}) + "\n")
    out = tmp_path / "prepared"
    words = [
        "prepare",
        "--config",
        "configs/data/web.py",
        "--documents",
        str(tmp_path / "crawl.warc.gz"),
        "--source",
        "web",
    ]
    words += [f"--config.decontaminate.benchmarks.quiz={tmp_path / 'items.jsonl'}", "--config.c4.curly_bracket=false"]
    words += ["--config.gopher_quality.min_alphabetic=0.6"]
    assert cli.main([*words, "--dry-run", "--sample", "10"]) == 0
    assert "the whole, estimated" in capsys.readouterr().out
    assert cli.main([*words, "--out", str(out)]) == 0
    assert str(out / "report.html") in capsys.readouterr().out
    number = {what: i for i, (what, _) in enumerate(made)}
    dropped = {}
    for stage in read_json(out / "report.json")["stages"]:
        for reason, samples in stage["samples"].items():
            dropped |= {int(name): (stage["stage"], reason) for _, name, *_ in samples if reason != "changed"}
    assert dropped[number["german"]] == ("language", "other_language")
    assert dropped[number["copy"]] == ("exact_dedup", "exact_duplicate")
    assert dropped[number["near copy"]] == ("near_dedup", "near_duplicate")
    assert dropped[number["with a benchmark's item"]] == ("decontaminate", "contaminated")
    assert number["list"] in dropped
    kept = {int(document.id): document for document in read_written(out / "web.jsonl.zst")}
    assert "<EMAIL>" in kept[number["with a secret"]].text and "jane.doe" not in kept[number["with a secret"]].text
    assert len(kept) >= 15 and not any("Section 3" in document.text for document in kept.values())
    flags = [json.loads(line) for line in (out / "decontaminate" / "quiz.jsonl").read_text().splitlines()]
    assert [flag["contaminated"] for flag in flags] == [True]
    assert cli.main(["prepare", "--out", str(out), "--explain", str(number["near copy"])]) == 0
    assert "dropped in near_dedup because near_duplicate" in capsys.readouterr().out

    split = [
        "split",
        "--documents",
        str(out),
        "--out",
        str(tmp_path / "documents"),
        "--config.validation=0.2",
        "--config.test=0",
    ]
    assert cli.main(split) == 0
    assert cli.main(["tokenizer", "--config.kind=byte", "--out", str(tmp_path / "tokenizer")]) == 0
    shards = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "shards"), "--config.num_workers=0"]
    assert cli.main(["tokenize", "--documents", str(tmp_path / "documents"), *shards]) == 0
    reader = build_train_reader(DataConfig(shards=(str(tmp_path / "shards"),), seq_len=512), 4, seed=0)
    for row in trace(reader, 0):
        for document in row["documents"]:
            assert document["meta"]["url"] == f"https://example.org/{document['id']}"
            assert document["meta"]["language"] == "en" and document["meta"]["date"] == "2024-05-06T07:08:09Z"
