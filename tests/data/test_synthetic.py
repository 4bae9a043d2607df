"""Synthetic documents against an endpoint of our own: seeds, provenance, and what is no document."""

import dataclasses
import json
import os

import pytest
from test_answers import TEXT, documents, judge, rewrite, server, stage_of

from lmjax.data import prepare
from lmjax.data.config import SplitConfig
from lmjax.data.document import Document, grouped
from lmjax.data.split import side
from lmjax.data.synthetic import Synthetic, fill, jaccard, shingled
from lmjax.data.written import read_written
from lmjax.errors import RunError, UserError


def test_new_documents_say_what_they_were_made_from(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "secret")
    with server(rewrite) as (address, asked):
        stage = stage_of(address, key_variable="OUR_KEY", samples=2, temperature=0.5, max_tokens=99, batch_size=4)
        kept, counts = judge(stage, documents(), tmp_path)
    new = f"d0#synthetic-{stage.mark('m')}"
    assert [d.id for d in kept[:4]] == ["d0", f"{new}-0", f"{new}-1", "d1"]
    assert kept[0] == grouped(documents()[0]) and (counts["read"], counts["added"], counts["kept"]) == (10, 20, 30)
    new = kept[1]
    assert new.meta == {
        "url": "u0", "group": kept[0].meta["group"], "synthetic": True, "from": "d0", "model": "m", "seed": new.meta["seed"],
        "template": stage.template_hash(),
    }  # fmt: skip
    assert {a["path"] for a in asked} == {"/v1/chat/completions"} and {a["key"] for a in asked} == {"Bearer secret"}
    assert {(a["model"], a["temperature"], a["max_tokens"]) for a in asked} == {("m", 0.5, 99)}
    by_prompt = {(a["messages"][0]["content"], a["seed"]) for a in asked}
    assert (f"Rewrite: {TEXT} Number 0.", new.meta["seed"]) in by_prompt and len({seed for _, seed in by_prompt}) == 20
    assert counts["tally"] == {"synthetic": {"accepted": 20, "requested": 20}}
    report = stage.finish(counts["tally"], tmp_path)
    assert report["template"] == "Rewrite: {text}" and report["hash"] == new.meta["template"]
    assert "secret" not in json.dumps(report) + "".join(p.read_text() for p in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("mode, on_failure, failed, kept", [
    ("add", "fail", 1, 4), ("add", "keep", 0, 5), ("replace", "fail", 1, 2), ("replace", "keep", 0, 3),
])  # fmt: skip
def test_a_request_that_fails_is_counted(tmp_path, mode, on_failure, failed, kept):
    def reply(body, number):
        return (400, "too long") if "Number 1." in body["messages"][0]["content"] else rewrite(body, number)

    with server(reply) as (address, asked):
        out, counts = judge(stage_of(address, mode=mode, on_failure=on_failure), documents(3), tmp_path)
    assert (counts["failed"], len(out), len(asked)) == (failed, kept, 3)
    if on_failure == "fail":
        assert "HTTP 400" in counts["samples"]["failed"][0][3]
    else:
        assert counts["tally"]["synthetic_rejected"] == {"request_failed": 1}
        assert documents(3)[1] in out, "it goes on as it is"


def test_what_was_answered_badly_is_not_kept_for_a_request_that_failed(tmp_path):
    """Of two samples one fails and one is empty: the model was there, and gave nothing to put in the document's place."""
    with server(lambda _, number: (400, "no") if number else (200, "")) as (address, _):
        stage = stage_of(address, mode="replace", on_failure="keep", samples=2, concurrency=1)
        kept, counts = judge(stage, documents(1), tmp_path)
    assert not kept and counts["dropped"] == {"synthetic_rejected": 1}


def test_back_translation_is_a_pair(tmp_path):
    def reply(body, _):
        verb, _, text = body["messages"][0]["content"].partition(": ")
        return 200, text.translate(
            str.maketrans("aeiou", "uioae")
        ) if verb == "To" else f"back {text.upper()} again and again"

    with server(reply) as (address, asked):
        stage = Synthetic(
            endpoint=address, model="m", template="To: {text}", second_template="Fro: {text}", mode="replace"
        )
        kept, counts = judge(stage, documents(2), tmp_path)
        judge(stage, documents(2), tmp_path)
    changed = f"{TEXT} Number 1.".translate(str.maketrans("aeiou", "uioae"))
    assert [d.text for d in kept][1] == f"back {changed.upper()} again and again"
    assert len(asked) == 4 and counts["added"] == 0
    assert [d.id for d in kept] == [f"d{i}#synthetic-{stage.mark('m')}-0" for i in range(2)]


@pytest.mark.parametrize(
    "answer, reason",
    [
        (" \n ", "empty"),
        ("Too short", "too_short"),
        ("words " * 100, "too_long"),
        (TEXT, "copy_of_source"),
        (f"Here: {TEXT.upper()}", "copy_of_source"),
        ("Eleven twelve thirteen one two three four five six.", None),
    ],
)
def test_what_is_no_document(tmp_path, answer, reason):
    with server(lambda *_: (200, answer)) as (address, _):
        stage = stage_of(address, mode="replace", samples=2)
        kept, counts = judge(stage, [Document("a", TEXT, "web")], tmp_path)
    if reason is None:  # one is accepted, and the other is its copy
        assert [d.text for d in kept] == [answer]
        assert counts["tally"]["synthetic_rejected"] == {"copy_of_sibling": 1}
    else:
        assert counts["dropped"] == {"synthetic_rejected": 1}
        assert counts["tally"]["synthetic_rejected"] == {reason: 2}


@pytest.mark.parametrize("length, reason", [(19, "too_short"), (20, None), (300, None), (301, "too_long")])
def test_ratios_that_are_just_met(length, reason):
    stage = Synthetic(endpoint="http://x", model="m", template="{text}", min_ratio=0.2, max_ratio=3.0)
    source, answer = "a" * 100, "b" * length
    assert stage.why_not(source, answer, shingled(answer), [shingled(source)]) == reason


def test_share_extend_and_odd_texts(tmp_path):
    odd = [
        Document(str(i), text, "web") for i, text in enumerate(["", "a", "\ud800 b", "{text} {{x}}", "x" * 1_000_000])
    ]
    with server(lambda body, _: (200, " and more\ud800 of it")) as (address, asked):
        stage = stage_of(address, extend=True, min_ratio=0.0, max_ratio=1e9)
        kept, counts = judge(stage, odd, tmp_path / "a")
        some, _ = judge(stage_of(address, share=0.3), documents(300), tmp_path / "b")
    texts = {d.id: d.text for d in kept}
    new = texts[f"3#synthetic-{stage.mark('m')}-0"]
    assert new.startswith("{text} {{x}} and more") and counts["added"] == 4
    assert counts["tally"]["synthetic_rejected"] == {"too_long": 1}  # of the empty one
    assert {"Rewrite: {text} {{x}}", "Rewrite: ? b"} <= {a["messages"][0]["content"] for a in asked}
    assert 60 < len(asked) - 5 < 120 and [d.text for d in some if "#" not in d.id] == [d.text for d in documents(300)]


@pytest.mark.parametrize("mode", ["add", "replace"])
def test_a_split_divides_no_document_from_what_was_made_of_it(tmp_path, mode):
    """Here the new text holds the old one; a document that has a group keeps it, and a stage that follows may change texts."""
    given = [*documents(40), Document("in a group", TEXT, "web", {"group": "g"})]
    with server(rewrite) as (address, _):
        stage = stage_of(address, extend=True, samples=2, mode=mode, max_overlap=1.0)
        kept, _ = judge(stage, given, tmp_path)
    kept = [dataclasses.replace(d, text=d.text.replace("seven", "eight")) for d in kept]
    config, sides = SplitConfig(validation=0.3, test=0.3), {}
    for d in kept:
        sides.setdefault(d.meta.get("from", d.id), []).append(side(d, config))
    assert {len(found) for found in sides.values()} == {3 if mode == "add" else 2}
    assert all(len(set(found)) == 1 for found in sides.values()) and len({found[0] for found in sides.values()}) == 3
    assert {d.meta["group"] for d in kept if d.meta.get("from", d.id) == "in a group"} == {"g"}


@pytest.mark.parametrize(
    "other", [{"template": "Extend: {text}"}, {"seed": 1}, {"temperature": 0.1}, {"max_tokens": 9}, {"model": "n"}]
)
def test_stages_over_one_corpus_give_no_id_twice(tmp_path, other):
    """The second takes the documents and what the first made of them."""
    with server(rewrite) as (address, _):
        stage = stage_of(address, max_overlap=1.0)
        kept, _ = judge(stage, documents(3), tmp_path / "a")
        kept, _ = judge(dataclasses.replace(stage, **other), kept, tmp_path / "b")
    assert len({d.id for d in kept}) == len(kept) == 12


def test_a_template_takes_fields(tmp_path):
    assert fill("{{{url}}} {text}", {"url": "{text}", "text": "x"}) == "{{text}} x"
    with server(rewrite) as (address, _):
        stage = Synthetic(endpoint=address, model="m", template="{url}: {text}")
        kept, counts = judge(stage, [*documents(1), Document("bare", TEXT, "web")], tmp_path)
    assert counts["failed"] == 1 and "no field 'url'" in str(counts["samples"]["failed"]) and len(kept) == 2


def prepared(tmp_path, address, numbers=20, **options):
    """A preparation of numbered documents; options of the stage, or of the config where they name a field of it."""
    names = {field.name for field in dataclasses.fields(prepare.PrepareConfig)}
    others = {name: options.pop(name) for name in names & options.keys()}
    rows = [{"id": d.id, "text": d.text} for d in documents(numbers)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = dataclasses.replace(stage_of(address, retries=0, min_ratio=0.0), **options)
    config = prepare.PrepareConfig(**{"stages": ("synthetic",), "synthetic": stage, "shard_bytes": 400, **others})
    return prepare.prepare(config, tmp_path / "out", [str(tmp_path / "in.jsonl")], "web")


def test_a_rerun_asks_for_what_failed_alone(tmp_path):
    down = [True]

    def reply(body, number):
        return (500, "down") if down and number % 5 == 4 else rewrite(body, number)

    with server(reply) as (address, asked):
        with pytest.raises(RunError, match="4 of 20 documents of web failed in synthetic"):
            prepared(tmp_path, address)
        down.clear()
        prepared(tmp_path, address)
    assert len(asked) == 24 and not (tmp_path / "out" / "aside").exists()
    assert len(list(read_written(tmp_path / "out" / "web.jsonl.zst"))) == 40


def test_what_cannot_change_an_answer_asks_for_none_again(tmp_path):
    """Options that change no output leave nothing to do; others redo the stage from the answers that are there."""
    with server(rewrite) as (address, asked):
        prepared(tmp_path, address)
        free = {"concurrency": 2, "give_up_after": 7, "key_variable": "HOME"}
        assert all(prepared(tmp_path, address, **{name: value})[1] for name, value in free.items())
        others = {
            "batch_size": 3,
            "timeout_s": 9.0,
            "retries": 1,
            "max_ratio": 9.0,
            "on_failure": "keep",
            "mode": "replace",
        }
        for name, value in {**others, "shard_bytes": 1000, "stages": ("clean", "synthetic")}.items():
            assert not prepared(tmp_path, address, **{name: value})[1] and len(asked) == 20, name
        prepared(tmp_path, address, 23)
        assert len(asked) == 23
        (link,) = (tmp_path / "out" / "work").glob("*/fit/synthetic/answers")
        assert not os.path.isabs(os.readlink(link)), "the folder may be moved"
        for wanted, (name, value) in enumerate(
            [("temperature", 0.1), ("max_tokens", 9), ("seed", 3), ("model", "n")], 1
        ):
            prepared(tmp_path, address, 10, **{name: value})
            assert len(asked) == 23 + 10 * wanted, name
        prepared(tmp_path, address, stages=(), max_failed_share=0.5)
    assert not (tmp_path / "out" / "work" / "answers").exists(), "no stage asks for them any more"


def test_overlap():
    assert jaccard(shingled("a b c d e f"), shingled("A B C D E g")) == 1 / 3
    assert jaccard(shingled("a b"), shingled("A  b")) == 1 and jaccard(shingled(""), shingled("")) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs a workdir or an endpoint"),
        ({"workdir": "x"}, "needs a template"),
        ({"endpoint": "http://x", "workdir": "y"}, "either workdir or endpoint"),
        ({"endpoint": "http://x", "template": "{text}"}, "needs model"),
        ({"endpoint": "ftp://x", "model": "m", "template": "{text}"}, "no http"),
        ({"workdir": "x", "template": "{{text}}"}, r"must hold \{text\}"),
        ({"workdir": "x", "template": "{text}", "share": 0.0}, "share=0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        Synthetic(**options).files()
