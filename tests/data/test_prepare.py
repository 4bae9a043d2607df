"""Preparation as a whole: the law of counts, resumption, what a changed option redoes, the engines, the report."""

import collections
import dataclasses
import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from lmjax.data import dry_run, engine, passes, prepare, report
from lmjax.data.document import Document
from lmjax.data.engine import Engine, Task
from lmjax.data.stage import Counts, Drop, Failed, GlobalStage, MapStage, Shard, Tally, Verdict, run
from lmjax.data.units import InputConfig
from lmjax.data.written import read_written, write_documents
from lmjax.errors import RunError, UserError
from lmjax.files import read_json

NOT_COMPARED = ("report.html", "report.json", "manifest.json", ".unfinished")  # times, and a mark that a kill may leave
WORDS = ("stone", "river", "the", "and", "cloud", "seven", "of", "bread", "light", "a", "in", "field")


@dataclasses.dataclass(frozen=True)
class Short(MapStage):
    """Drops short texts, fails on some, doubles some, changes some."""

    name: ClassVar[str] = "short"
    min_characters: int = 40
    split: bool = False

    def apply(self, document: Document, tally: Tally) -> Verdict:
        tally.add("letters", "a", document.text.count("a"))
        if "seven seven seven" in document.text:
            raise Failed("seven thrice")
        if len(document.text) < self.min_characters:
            return Drop("short", len(document.text))
        changed = dataclasses.replace(document, text=document.text.replace("bread", "cake"))
        if self.split and "cloud cloud" in document.text:
            return [changed, dataclasses.replace(changed, id=f"{document.id}#2", text="cloud")]
        return changed


@dataclasses.dataclass(frozen=True)
class Once(GlobalStage):
    """Drops all but the first text of each length."""

    name: ClassVar[str] = "once"

    def decide(self, shards, folder: Path, engine: Engine) -> dict[str, Path]:
        tasks = [Task(f"lengths/{shard.key}", lengths, (shard,)) for shard in shards]
        seen, paths = set(), {}
        for shard, found in zip(shards, engine.run(tasks, folder, "lengths")):
            rows = [row for row, length in enumerate(found) if length in seen or seen.add(length)]
            paths[shard.key] = folder / f"{shard.source}-{shard.number}.json"
            paths[shard.key].write_text(json.dumps(rows))
        return paths

    def decisions(self, path: Path):
        return ((row, None) for row in json.loads(path.read_text()))

    def carry_out(self, document: Document, decision, tally: Tally) -> Verdict:
        return Drop("again", len(document.text))

    def finish(self, tally, folder: Path):
        (folder / "publish").mkdir(exist_ok=True)
        (folder / "publish" / "note.txt").write_text("found")
        return {"clusters": [{"size": 2}]}


def lengths(shard: Shard) -> list[int]:
    return [len(document.text) for document in read_written(shard.path)]


@dataclasses.dataclass(frozen=True)
class Config(prepare.PrepareConfig):
    short: Short = dataclasses.field(default_factory=Short)
    once: Once = dataclasses.field(default_factory=Once)


def make_inputs(folder: Path, documents: int = 300) -> Path:
    """JSON lines in two sources, one line of a file broken."""
    rng = random.Random(1)
    for source in ("web", "books"):
        for part in range(3):
            path = folder / source / f"{part}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {
                    "id": f"{part}-{i}",
                    "text": " ".join(rng.choices(WORDS, k=rng.randint(2, 40))),
                    "url": f"http://x/{i}",
                }
                for i in range(documents // 3)
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows) + ("{broken\n" if part == 0 else ""))
    return folder


def config(inputs: Path, **options) -> Config:
    sources = {name: InputConfig((str(inputs / name),)) for name in ("web", "books")}
    options = {"stages": ("short", "once"), "shard_bytes": 4000, "max_failed_share": 0.05, **options}
    return Config(sources=sources, **options)


def outputs(out: Path) -> dict[str, bytes]:
    """All that must not depend on how it was made: everything but times, and the work."""
    found = {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and prepare.WORK not in path.parts and path.name not in NOT_COMPARED
    }
    manifest = read_json(out / "manifest.json")
    return found | {
        "manifest": json.dumps({key: manifest[key] for key in ("inputs", "config", "counts", "content")}).encode()
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """An undisturbed preparation."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare.prepare(config(inputs), out)
    return out


def test_every_document_is_accounted_for(inputs, whole):
    """Independent of the code's own counts: ids in = ids kept + ids told of in events and aside."""
    for source in ("web", "books"):
        lines = [line for part in range(3) for line in (inputs / source / f"{part}.jsonl").read_text().splitlines()]
        ids = [json.loads(line)["id"] for line in lines if line != "{broken"]
        kept = [document.id for document in read_written(whole / f"{source}.jsonl.zst")]
        events = list(passes.read_lines(whole / "events" / f"{source}.jsonl.zst"))
        gone = [event["id"] for event in events if event["what"] in ("dropped", "failed")]
        assert sorted(ids) == sorted(kept + gone)
        aside = list(passes.read_lines(whole / "aside" / f"{source}.jsonl.zst"))
        assert [line["raw"] for line in aside if line["stage"] == "read"] == ["{broken"]
        failed = {event["id"] for event in events if event["what"] == "failed"}
        assert {line["document"]["id"] for line in aside if line["stage"] == "short"} == failed and failed
        reasons = collections.Counter(event["reason"] for event in events if event["what"] == "dropped")
        stages = {stage["stage"]: stage["sources"][source] for stage in read_json(whole / "report.json")["stages"]}
        assert reasons == {"short": stages["short"]["dropped"]["short"], "again": stages["once"]["dropped"]["again"]}
        assert stages["read"]["failed"] == 1 and stages["once"]["kept"] == len(kept)


@pytest.mark.parametrize(
    "options",
    [{"save": "pass"}, {"num_workers": 2}, {"keep_work": False}],
    ids=["in passes", "two workers", "no work kept"],
)
def test_output_does_not_depend_on_how(inputs, whole, tmp_path, options):
    prepare.prepare(config(inputs, **options), tmp_path / "out")
    assert outputs(tmp_path / "out") == outputs(whole)


def test_kept_and_duplicates_do_not_depend_on_shards(inputs, whole, tmp_path):
    prepare.prepare(config(inputs, shard_bytes=1_000_000), tmp_path / "out")
    for source in ("web", "books"):
        a, b = (list(read_written(out / f"{source}.jsonl.zst")) for out in (tmp_path / "out", whole))
        assert a == b
    samples = [read_json(out / "report.json")["stages"][1]["samples"] for out in (tmp_path / "out", whole)]
    assert samples[0] == samples[1] and len(samples[0]["short"]) == 20


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 5, 9, 14, 20, 30])
def test_interrupted_at_any_task_and_rerun(inputs, whole, tmp_path, monkeypatch, after):
    """The run ends in the midst of its nth task, files half written; the next one gives the same bytes and redoes no task."""
    ran = []
    write, perform = (
        passes.DocumentWriter.write,
        prepare.Engine and __import__("lmjax.data.engine", fromlist=["perform"]).perform,
    )

    def count(task, folder):
        ran.append((folder.name, task.key))
        return perform(task, folder)

    def dying(self, document):
        write(self, document)
        if len(ran) >= after:
            raise Killed

    monkeypatch.setattr("lmjax.data.engine.perform", count)
    monkeypatch.setattr(passes.DocumentWriter, "write", dying)
    try:
        prepare.prepare(config(inputs), tmp_path / "out")
    except Killed:
        assert not (tmp_path / "out" / "manifest.json").exists()
    first = list(ran)
    monkeypatch.setattr(passes.DocumentWriter, "write", write)
    ran.clear()
    prepare.prepare(config(inputs), tmp_path / "out")
    assert outputs(tmp_path / "out") == outputs(whole)
    assert len(set(first) & set(ran)) <= 1, "only the task in work is done again"


def test_changed_option_redoes_what_it_changes(inputs, tmp_path, monkeypatch):
    out, ran = tmp_path / "out", []
    perform = engine.perform
    monkeypatch.setattr(
        "lmjax.data.engine.perform", lambda task, folder: (ran.append(folder.name[:7]), perform(task, folder))[1]
    )
    _, skipped = prepare.prepare(config(inputs), out)
    assert not skipped
    assert {name[:2] for name in ran} == {"00", "01", "02", "in", "de"}
    ran.clear()
    assert prepare.prepare(config(inputs), out)[1] and not ran
    before = outputs(out)
    prepare.prepare(config(inputs, short=Short(min_characters=60)), out)
    assert {name[:2] for name in ran} == {"01", "02", "de"}, "the reading stays"
    assert outputs(out) != before
    ran.clear()
    prepare.prepare(config(inputs, short=Short(min_characters=60), stages=("short",)), out)
    assert not ran, "the stages before the one that went away stay"
    assert len(list((out / prepare.WORK).iterdir())) == 3  # inputs, read, short


def test_changed_input_is_seen(tmp_path):
    inputs = make_inputs(tmp_path / "in", 30)
    prepare.prepare(config(inputs), tmp_path / "out")
    path = inputs / "web" / "1.jsonl"
    path.write_text(path.read_text() + json.dumps({"id": "new", "text": "x " * 100}) + "\n")
    assert not prepare.prepare(config(inputs), tmp_path / "out")[1]
    assert "new" in [document.id for document in read_written(tmp_path / "out" / "web.jsonl.zst")]
    before = outputs(tmp_path / "out")
    path.write_text(path.read_text().replace("x x x", "y x x"))  # of the same size
    assert not prepare.prepare(config(inputs), tmp_path / "out")[1]
    assert outputs(tmp_path / "out") != before


def test_a_changed_file_of_a_stage_redoes_it(tmp_path):
    rows = [{"id": name, "text": name, "url": f"https://{name}.org/"} for name in "ab"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = dataclasses.replace(prepare.PrepareConfig().url, lists=(str(tmp_path / "blocked"),))
    wanted = Config(sources={"web": InputConfig((str(tmp_path / "in.jsonl"),))}, stages=("url",), url=url)
    for blocked, kept in (("a.org", "b"), ("b.org", "a")):
        (tmp_path / "blocked").write_text(blocked)
        prepare.prepare(wanted, tmp_path / "out")
        assert [document.id for document in read_written(tmp_path / "out" / "web.jsonl.zst")] == [kept]


def test_another_field_of_the_same_files_is_another_input(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "body": "b", "id": "1", "key": "2"}\n')
    for fields, found in (({}, ("1", "a")), ({"text_field": "body"}, ("1", "b")), ({"id_field": "key"}, ("2", "a"))):
        wanted = Config(sources={"web": InputConfig((str(tmp_path / "in.jsonl"),), **fields)})
        assert not prepare.prepare(wanted, tmp_path / "out")[1]
        (document,) = read_written(tmp_path / "out" / "web.jsonl.zst")
        assert (document.id, document.text) == found


def test_a_stage_that_came_to_decide_otherwise_is_done_again(inputs, tmp_path, monkeypatch):
    wanted = config(inputs)
    before = prepare.prepare(wanted, tmp_path / "out")[0].counts["documents"]
    monkeypatch.setattr(Short, "apply", lambda self, document, tally: Drop("short"))
    assert prepare.prepare(wanted, tmp_path / "out")[1]  # nobody told
    monkeypatch.setattr(Short, "version", 2)
    manifest, skipped = prepare.prepare(wanted, tmp_path / "out")
    assert not skipped and manifest.counts["documents"] == 0 < before


def test_added_documents_count(inputs, tmp_path):
    prepare.prepare(config(inputs, short=Short(split=True), stages=("short",)), tmp_path / "out")
    (_, stage) = read_json(tmp_path / "out" / "report.json")["stages"]
    total = stage["total"]
    assert total["added"] > 0
    assert total["read"] + total["added"] == total["kept"] + sum(total["dropped"].values()) + total["failed"]


def test_a_stage_may_stand_twice(inputs, tmp_path):
    """Each time with its own counts; one that keeps what it learns by its name may not."""
    prepare.prepare(config(inputs, stages=("short", "short"), save="pass"), tmp_path / "out")
    _, first, second = (stage["total"] for stage in read_json(tmp_path / "out" / "report.json")["stages"])
    assert first["dropped"]["short"] > 100 and second["dropped"] == {"short": 1}, "bread became cake, which is shorter"
    assert first["read"] > first["kept"] == second["read"] == second["kept"] + 1
    with pytest.raises(UserError, match="'once' can stand once only"):
        config(inputs, stages=("once", "short", "once"))


def test_the_law_can_fail():
    """A stage that loses a document, or makes one from nothing, is caught."""

    class Loses(Short):
        def process(self, documents, counts, folder):
            for number, document in enumerate(documents):
                if number != 1:
                    yield from counts.settle(document, document)

    documents = [Document(str(i), "text " * 20, "web") for i in range(3)]
    counts = Counts("loses")
    assert len(list(run(Loses(), documents, counts))) == 2
    with pytest.raises(RuntimeError, match="lost count"):
        counts.close()


def test_the_counts_of_each_verdict():
    """Kept, changed (to a text of another size), made two, dropped, failed."""
    long = "stone " * 10
    texts = [long, long + "bread é", long + "cloud cloud", "short", long + "seven seven seven"]
    counts = Counts("short")
    documents = [Document(str(i), text, "s") for i, text in enumerate(texts)]
    kept = list(run(Short(split=True), documents, counts))
    assert [document.id for document in kept] == ["0", "1", "2", "2#2"]
    told = counts.close()
    assert [told[key] for key in ("read", "added", "kept", "failed", "changed")] == [5, 1, 4, 1, 1]
    assert told["dropped"] == {"short": 1} and told["tally"] == {"letters": {"a": 1}}
    assert told["bytes_read"] == sum(len(text.encode()) for text in texts)
    assert told["bytes_kept"] == sum(len(document.text.encode()) for document in kept) < told["bytes_read"]


def test_a_replaced_document_has_an_event_of_its_own():
    """Else --explain would deny that it was ever there; one that stays beside others needs none."""
    document, events = Document("a", "text", "s"), []
    counts = Counts("cut", lambda event, _: events.append((event.id, event.what, event.detail)))
    others = [dataclasses.replace(document, id=f"a#{i}") for i in range(5)]
    list(counts.settle(document, others))
    assert events[0] == ("a", "replaced", {"by": ["a#0", "a#1", "a#2"], "documents": 5})
    assert events[1:] == [(other.id, "added", {"from": "a"}) for other in others]
    events.clear()
    list(counts.settle(document, [document, others[0]]))
    assert events == [("a#0", "added", {"from": "a"})]


def test_a_document_lost_between_stages_is_seen():
    rows = [{"stage": name, "sources": {"web": {"read": 5, "kept": kept}}} for name, kept in (("read", 5), ("once", 4))]
    counts = {"read": 3, "added": 1, "kept": 2, "dropped": {"short": 1}, "failed": 1}
    report.law("once", counts)
    with pytest.raises(RuntimeError, match="the counts of stage once do not add up"):
        report.law("once", counts | {"failed": 0})
    report.check_chain(rows)
    rows[0]["sources"]["web"]["kept"] = 6
    with pytest.raises(RuntimeError, match="once read 5 documents of web, but read kept 6"):
        report.check_chain(rows)


def test_a_stage_that_breaks_sets_aside(caplog):
    class Breaks(Short):
        def apply(self, document, tally):
            return 1 / (len(document.text) - 3)

    counts, seen = Counts("breaks"), []
    counts.record = lambda event, document: seen.append((event.what, document.id))
    assert list(run(Breaks(), [Document("a", "abc", "web")], counts)) == []
    assert counts.close()["failed"] == 1 and seen == [("failed", "a")]
    assert "ZeroDivisionError" in caplog.text


def test_what_is_wrong_with_the_run_is_no_documents_fault():
    class Down(Short):
        def apply(self, document, tally):
            raise RunError("the endpoint is down")

    with pytest.raises(RunError, match="endpoint"):
        list(run(Down(), [Document("a", "abc", "web")], Counts("down")))


def test_failure_budget(inputs, tmp_path):
    with pytest.raises(UserError, match=r"1 of 301 documents of web failed in read.*0\.jsonl:101"):
        prepare.prepare(config(make_inputs(tmp_path / "in", 300), max_failed_share=0.001), tmp_path / "out")
    with pytest.raises(RunError, match=r"failed in short.*seven thrice"):
        prepare.prepare(config(inputs, max_failed_share=0.004), tmp_path / "out2")


@pytest.mark.parametrize("tries_again", [True, False])
def test_failures_that_may_pass_end_one_run_only(inputs, tmp_path, monkeypatch, tries_again):
    """What failed has gone by the next run: its output, and what it tells, are those of a run without a failure."""
    monkeypatch.setattr(Short, "tries_again", tries_again)
    apply, down = Short.apply, [True]

    def fails(self, document, tally):
        if down and len(document.text) % 7 == 0:
            raise Failed("down")
        verdict = apply(self, document, tally) if "seven seven seven" not in document.text else document
        return document if isinstance(verdict, Drop) else verdict  # no event of any kind but of failures

    monkeypatch.setattr(Short, "apply", fails)
    wanted = config(inputs, stages=("short",))
    for _ in range(2):
        with pytest.raises(RunError, match=r"failed in short.*down"):
            prepare.prepare(wanted, tmp_path / "out")
    down.clear()
    if not tries_again:  # what a document does to a stage, it does again
        with pytest.raises(RunError, match=r"failed in short.*down"):
            prepare.prepare(wanted, tmp_path / "out")
        return
    prepare.prepare(wanted, tmp_path / "out")
    prepare.prepare(wanted, tmp_path / "fresh")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "fresh")


def test_user_errors(inputs, tmp_path):
    with pytest.raises(UserError, match=r"no stage 'shrt'; did you mean 'short'"):
        Config(stages=("shrt",))
    with pytest.raises(UserError, match="nothing to prepare"):
        prepare.prepare(Config(), tmp_path / "out")
    with pytest.raises(UserError, match="no such file"):
        prepare.prepare(Config(), tmp_path / "out", [str(tmp_path / "none")], "web")
    with pytest.raises(UserError, match="need the name of their source"):
        prepare.prepare(Config(), tmp_path / "out", [str(inputs / "web")])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not the output of a stage"):
        prepare.prepare(config(inputs), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    "stage, option, value",
    [
        ("clean", "code_sources", ("wbe",)),
        ("language", "skip_sources", ("web", "wbe")),
        ("license", "sources", {"wbe": "MIT"}),
    ],
)
def test_a_source_that_is_not_read_is_named(inputs, tmp_path, stage, option, value):
    """The option would do nothing, in silence."""
    options = dataclasses.replace(getattr(prepare.PrepareConfig(), stage), **{option: value})
    wanted = config(inputs, stages=(stage,), **{stage: options})
    says = pytest.raises(UserError, match=rf"config\.{stage}\.{option}: no source 'wbe' is read; did you mean 'web'")
    with says:
        prepare.prepare(wanted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with says:
        dry_run.estimate(wanted, [], None, 10)


@pytest.mark.parametrize("how", ["it is one", "it holds one", "of a source", "a link", "of a stage", "a tokenizer"])
def test_an_output_that_would_delete_its_input_is_refused(tmp_path, how):
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n')
    out = tmp_path / "out"
    raw = [str(tmp_path / "in.jsonl")]
    prepare.prepare(Config(), out, raw, "web")
    (out / "mine.jsonl").write_text('{"text": "mine"}\n')
    (tmp_path / "links").mkdir()
    os.symlink(out / "mine.jsonl", tmp_path / "links" / "a.jsonl")
    before = outputs(out)
    wanted, documents, source = {
        "it is one": (Config(), [f"{out}/"], None),
        "it holds one": (Config(), [str(out / "mine.jsonl")], "web"),
        "of a source": (Config(sources={"web": InputConfig((str(out),))}), [], None),
        "a link": (Config(), [str(tmp_path / "links")], "web"),
        "of a stage": (
            Config(
                stages=("exact_dedup",),
                exact_dedup=dataclasses.replace(prepare.PrepareConfig().exact_dedup, earlier=(str(out),)),
            ),
            raw,
            "web",
        ),
        "a tokenizer": (Config(tokenizer=str(out / "tokenizer")), raw, "web"),
    }[how]
    with pytest.raises(UserError, match=r"is, or holds, the input .*, which it would delete"):
        prepare.prepare(wanted, out, documents, source)
    assert outputs(out) == before


def test_an_output_inside_an_input_is_refused(tmp_path):
    """The second time it would be read as input."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="lies in the input"):
        prepare.prepare(Config(), tmp_path / "in" / "out", [str(tmp_path / "in")], "web")
    assert not (tmp_path / "in" / "out").exists()
    prepare.prepare(Config(), tmp_path / "in" / "out", [str(tmp_path / "in" / "a.jsonl")], "web")


@pytest.mark.parametrize("first", [True, False])
def test_an_empty_file_among_others(tmp_path, first):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ("a" if first else "z")).with_suffix(".jsonl").write_text("")
    wanted = Config(sources={"web": InputConfig((str(tmp_path / "in"),))})
    with pytest.raises(UserError, match="the inputs hold no document"):
        prepare.prepare(wanted, tmp_path / "out")
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "x"}\n')
    assert prepare.prepare(wanted, tmp_path / "out")[0].counts["documents"] == 1


def test_buckets_are_refused_in_both_directions(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = pytest.raises(UserError, match=r"gs://bucket/x: preparation reads and writes files of a disk")
    with refused:
        prepare.prepare(config(inputs), "gs://bucket/x")
    with refused:
        prepare.prepare(Config(), tmp_path / "out", ["gs://bucket/x"], "web")
    with refused:
        prepare.prepare(Config(sources={"web": InputConfig(("gs://bucket/x",))}), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_fields_that_are_one():
    with pytest.raises(UserError, match="text_field and id_field are both 'body'"):
        InputConfig(("x",), text_field="body", id_field="body")


def test_only_one_process_works_in_a_folder(inputs, tmp_path):
    with prepare.claimed(tmp_path / "out"), pytest.raises(UserError, match="another `lmjax prepare` is working"):
        prepare.prepare(config(inputs), tmp_path / "out")


def test_made_corpus_is_read_by_source_and_split_reads_the_output(whole, tmp_path):
    from lmjax.data.config import SplitConfig
    from lmjax.data.split import split_documents

    prepare.prepare(Config(stages=("once",)), tmp_path / "again", [str(whole)])
    for source in ("web", "books"):
        assert list(read_written(tmp_path / "again" / f"{source}.jsonl.zst")) == list(
            read_written(whole / f"{source}.jsonl.zst")
        )
    manifest, _ = split_documents([whole], tmp_path / "split", SplitConfig(validation=0.3, test=0.2))
    assert manifest.counts["documents"] == read_json(whole / "manifest.json")["counts"]["documents"]


def test_dealt_by_a_field_each_value_is_a_source(tmp_path):
    """Three languages and none: every document lands in the source of its language, in order."""
    rows = [{"id": str(i), "text": f"text {i}", "language": ("en", "de", "zh/Hant", None)[i % 4]} for i in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = {"web": InputConfig((str(tmp_path / "in.jsonl"),))}
    manifest, _ = prepare.prepare(Config(sources=sources, deal_by="language", shard_bytes=100), tmp_path / "out")
    found = {name: list(read_written(tmp_path / "out" / f"{name}.jsonl.zst")) for name in manifest.counts["sources"]}
    assert list(found) == ["web-de", "web-en", "web-unknown", "web-zh_Hant_fc5d7c87"]
    assert [document.id for document in found["web-de"]] == [str(i) for i in range(1, 50, 4)]
    assert {document.source for document in found["web-unknown"]} == {"web-unknown"}
    assert manifest.counts["documents"] == 50
    manifest, skipped = prepare.prepare(Config(sources=sources, shard_bytes=100), tmp_path / "out")
    assert not skipped and list(manifest.counts["sources"]) == ["web"]


def test_different_values_are_dealt_apart():
    """Also where a name cannot show what is different; only what says nothing is unknown."""
    values = ["a", "0", "a/b", "a_b", "a-b", "日本", "文学", "x" * 300, "x" * 301, "\ud800", "unknown", False, 1.5]
    names = [passes.value_name(value) for value in values]
    assert len(set(names)) == len(values) and all(re.fullmatch(r"[A-Za-z0-9_.]{1,120}", name) for name in names)
    assert [passes.value_name(value) for value in (0, "en", None, "")] == ["0", "en", "unknown", "unknown"]


def test_dealt_by_a_field_of_long_and_of_many_values(tmp_path, monkeypatch):
    """What names files must fit in a name; what is different in each document is no source."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "x", "f": c * 300}) + "\n" for c in "abcd"))
    wanted = Config(sources={"web": InputConfig((str(tmp_path / "in.jsonl"),))}, deal_by="f")
    manifest, _ = prepare.prepare(wanted, tmp_path / "out")
    assert [name[:104] for name in manifest.counts["sources"]] == [f"web-{c * 100}" for c in "abcd"]
    monkeypatch.setattr(passes, "VALUES", 3)
    with pytest.raises(UserError, match=r"config.deal_by='f' has more than 3 values.*: name a field of few"):
        prepare.prepare(wanted, tmp_path / "many")


@pytest.mark.parametrize("index", [False, True], ids=["documents", "index"])
def test_pieces_of_a_document_that_went_are_not_in_the_index(tmp_path, index):
    """Nine tenths of `b` are a copy, so all of it goes: its last line is new when it comes again."""
    copied, alone, new = (
        "\n".join(f"{word} line {i:04d} of a text" for i in range(9)) for word in ("copied", "alone", "new")
    )
    alone = alone.split("\n")[0]
    for part, texts in (("old", [copied, f"{copied}\n{alone}"]), ("new", [f"{new}\n{alone}", f"{copied}\n{new}!"])):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stage = dataclasses.replace(prepare.PrepareConfig().exact_dedup, level="line", min_length=10)
    for part, more in (("old", {"index": index}), ("new", {"earlier": (str(tmp_path / "old"),)})):
        wanted = Config(stages=("exact_dedup",), exact_dedup=dataclasses.replace(stage, **more))
        prepare.prepare(wanted, tmp_path / part, [str(tmp_path / f"{part}.jsonl")], "web")
    assert [d.text for d in read_written(tmp_path / "old" / "web.jsonl.zst")] == [copied]
    kept = [d.text for d in read_written(tmp_path / "new" / "web.jsonl.zst")]
    assert kept == [f"{new}\n{alone}"]


@pytest.mark.parametrize("index", [False, True], ids=["documents", "index"])
@pytest.mark.parametrize("name", ["exact_dedup", "near_dedup"])
def test_an_earlier_preparation_is_not_taken_in_again(tmp_path, name, index):
    """What an earlier run kept comes back as `in_earlier_corpus`; what it dropped is new."""
    texts = [" ".join(random.Random(i).choices(WORDS, k=60)) for i in range(40)]
    for part, chosen in (("old", texts[:25]), ("new", texts[10:])):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    stage = getattr(prepare.PrepareConfig(), name)
    old = Config(stages=(name,), **{name: dataclasses.replace(stage, index=index)})
    prepare.prepare(old, tmp_path / "old", [str(tmp_path / "old.jsonl")], "web")
    new = Config(stages=(name,), **{name: dataclasses.replace(stage, earlier=(str(tmp_path / "old"),))})
    prepare.prepare(new, tmp_path / "new", [str(tmp_path / "new.jsonl")], "web")
    total = read_json(tmp_path / "new" / "report.json")["stages"][-1]["total"]
    assert total["dropped"] == {"in_earlier_corpus": 15}
    assert {document.text for document in read_written(tmp_path / "new" / "web.jsonl.zst")} == set(texts[25:])


def test_explain(whole):
    events = list(passes.read_lines(whole / "events" / "web.jsonl.zst"))
    dropped = next(event for event in events if event["reason"] == "short")
    assert f"web: dropped in short because short: {dropped['detail']}" in list(report.explain(whole, dropped["id"]))
    kept = next(read_written(whole / "web.jsonl.zst"))
    assert any(line.startswith("web: kept") for line in report.explain(whole, kept.id))
    with pytest.raises(UserError, match="no document 'nobody'"):
        list(report.explain(whole, "nobody"))


def test_report_shows_samples_and_escapes(tmp_path):
    evil = "<script>alert(1)</script>&\ud800\x00\x1b[31m" + "x" * 3000
    write_documents(tmp_path / "web.jsonl.zst", [Document(f"</div><b>{i}", evil, "web") for i in range(50)])
    shutil.copy(tmp_path / "web.jsonl.zst", tmp_path / "input.jsonl.zst")
    sources = {"web": InputConfig((str(tmp_path / "input.jsonl.zst"),))}
    prepare.prepare(Config(sources=sources, stages=("short",), short=Short(min_characters=10_000)), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page and "</div><b>" not in page and html.escape("<script>alert(1)</script>") in page
    (_, stage) = read_json(tmp_path / "out" / "report.json")["stages"]
    assert len(stage["samples"]["short"]) == 20


@pytest.mark.slow
def test_killed_processes_leave_nothing_behind(tmp_path):
    """SIGKILL at random moments of the command; the last run's bytes are those of an undisturbed one."""
    inputs = make_inputs(tmp_path / "in", 3000)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "import test_prepare as t\n"
        "t.prepare.prepare(t.config(Path(sys.argv[2]), num_workers=2), sys.argv[3])\n"
    )
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), str(inputs)]
    start = time.monotonic()
    subprocess.run([*arguments, str(tmp_path / "whole")], check=True)
    seconds, rng = time.monotonic() - start, random.Random(int(time.time()))
    for _ in range(20):
        process = subprocess.Popen([*arguments, str(tmp_path / "out")], start_new_session=True)
        time.sleep(rng.uniform(0.2, 1.0) * seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (tmp_path / "out" / "manifest.json").exists():
            assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
            shutil.rmtree(tmp_path / "out")
    subprocess.run([*arguments, str(tmp_path / "out")], check=True)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
