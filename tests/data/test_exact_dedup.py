"""Exact repeats against dictionaries, over shards, blocks and orders of tasks; who survives; what is cut out."""

import random

import pytest
import xxhash
from global_run import finished, run_global

from lmjax.config import build
from lmjax.data import exact_dedup, sketches, sortmerge
from lmjax.data.dedup import days
from lmjax.data.document import Document
from lmjax.data.exact_dedup import ExactDedup
from lmjax.errors import UserError


def documents(texts, **metas) -> list[Document]:
    """Numbered ones, the meta given as lists."""
    return [Document(str(i), text, "web", {k: v[i] for k, v in metas.items()}) for i, text in enumerate(texts)]


@pytest.fixture(params=[False, True], ids=["one range", "many ranges, small blocks"])
def small(request, monkeypatch):
    """Runs in one piece, and with groups that span blocks."""
    if request.param:
        for module, name, value in (
            (sortmerge, "BLOCK_RECORDS", 8),
            (sortmerge, "LEAST_BLOCK", 1),
            (sortmerge, "RUN_RECORDS", 60),
            (sortmerge, "RANGE_RECORDS", 40),
            (sketches, "BLOCK_RECORDS", 5),
        ):
            monkeypatch.setattr(module, name, value)


def test_the_first_of_equal_documents_survives(tmp_path, small):
    rng = random.Random(0)
    texts = [f"text {rng.randrange(30)}" if rng.random() < 0.6 else f"alone {i}" for i in range(80)] + [
        "",
        " \n",
        "\ud800",
    ]
    docs = documents(texts)
    first: dict[str, str] = {}
    for document in docs:
        first.setdefault(document.text.strip(), document.id)
    result = run_global(ExactDedup(), docs, tmp_path / "a")
    assert result.ids == list(first.values())
    for name, (reason, detail) in result.dropped.items():
        assert (reason, detail) == ("exact_duplicate", {"survivor": first[texts[int(name)].strip()], "similarity": 1.0})
    assert len(result.dropped) == len(docs) - len(first)
    for size, seed in ((3, 1), (1000, 2)):
        other = run_global(ExactDedup(), docs, tmp_path / f"{size}", size, seed)
        assert (other.ids, other.dropped, other.report) == (result.ids, result.dropped, result.report)


def test_both_halves_of_a_hash_decide(tmp_path, monkeypatch):
    digest = xxhash.xxh3_128_digest
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: bytes(8) + digest(data)[8:])
    for level, kept in (("document", ["0", "1"]), ("line", ["0", "1"])):
        stage = ExactDedup(level=level, min_length=1)
        assert run_global(stage, documents(["a", "b", "a"]), tmp_path / level).ids == kept


def test_the_report_counts_the_clusters(tmp_path, small):
    sizes = [1, 2, 3, 4, 5, 9, 2]
    docs = documents([f"cluster {i}" for i, size in enumerate(sizes) for _ in range(size)])
    report = run_global(ExactDedup(alarm_share=0.9), docs, tmp_path).report
    assert report["clusters"] == 6 and report["sizes"] == {"2": 2, "3-4": 2, "5-8": 1, "9-16": 1}
    assert [cluster["size"] for cluster in report["largest"]] == [9, 5, 4, 3, 2, 2]
    assert report["largest"][0] == {
        "size": 9,
        "survivor": "15",
        "members": ["16", "17", "18", "19", "20"],
        "text": "cluster 5",
    }
    assert report["alarms"] == [] and report["share_lost"] == {"web": pytest.approx(19 / 26, abs=1e-6)}


def test_a_source_that_loses_much_is_told(tmp_path, caplog):
    result = run_global(ExactDedup(), documents(["same"] * 4), tmp_path)
    assert result.report["alarms"] == ["source 'web' loses 75% of its documents as duplicates (alarm_share is 50%)"]
    assert "loses 75%" in caplog.text
    assert not run_global(ExactDedup(alarm_share=0.75), documents(["same"] * 4), tmp_path / "just").report["alarms"]


@pytest.mark.parametrize(
    "keep, survivor",
    [("first", "0"), ("oldest", "2"), ("newest", "4"), ("longest", "3"), ("best", "1")],
)
def test_who_survives(tmp_path, keep, survivor):
    dates = [
        "2024-05-01",
        None,
        "2020-01-01T00:00:00Z",
        "no date",
        "Tue, 02 Jun 2026 10:00:00 GMT",
        "2026-06-02T10:00:00+00:00",
    ]
    docs = documents(
        ["a b", "a  b", "a b ", "a   b  ", "a b", "a b"],
        date=dates,
        quality=[0.1, 0.9, None, "high", float("nan"), 0.9],
    )
    assert run_global(ExactDedup(keep=keep), docs, tmp_path).ids == [survivor]


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True])
@pytest.mark.parametrize("keep, field", [("best", "quality"), ("newest", "date")])
def test_a_number_that_is_none_never_survives(tmp_path, keep, field, value):
    """JSON holds integers that no float does, and infinity; an earlier corpus survives them, too."""
    docs = documents(["a b", "a b"], **{field: [value, 1]})
    assert run_global(ExactDedup(keep=keep), docs, tmp_path / "own").ids == ["1"]
    folder = finished(documents(["a b"]), tmp_path / "earlier")
    assert run_global(ExactDedup(keep=keep, earlier=(str(folder),)), docs, tmp_path / "new").ids == []


def test_ignoring_case_and_white_space(tmp_path):
    docs = documents(["A b", "a b", "a  b"])
    for ignore, kept in (
        ((), ["0", "1", "2"]),
        (("space",), ["0", "1"]),
        (("case",), ["0", "2"]),
        (("case", "space"), ["0"]),
    ):
        assert run_global(ExactDedup(ignore=ignore), docs, tmp_path / "-".join(ignore)).ids == kept


def test_recurring_texts_stay(tmp_path, small):
    texts = ["happy new year"] * 7
    dates = ["2024-01-01", "2024-01-03", "2025-01-01", "2025-01-02", "2023-12-30", None, "2024-01-06"]
    result = run_global(ExactDedup(within_days=3.0), documents(texts, date=dates), tmp_path / "first")
    assert result.ids == ["0", "2", "5", "6"]
    assert result.dropped["4"][1]["survivor"] == "0" and result.dropped["3"][1]["survivor"] == "2"
    newest = run_global(ExactDedup(within_days=3.0, keep="newest"), documents(texts, date=dates), tmp_path / "newest")
    assert newest.ids == ["0", "3", "5", "6"]  # 4 January is no survivor: 1 January is more than 3 days from 6 January


def test_an_undated_copy_stands_in_nobodys_way(tmp_path):
    docs = documents(["happy new year"] * 3, date=["2024-01-03", None, "2024-01-01"])
    assert run_global(ExactDedup(within_days=3.0), docs, tmp_path).ids == ["0", "1"]


def test_dates():
    assert (
        days("1970-01-02")
        == days(86400)
        == days("Fri, 02 Jan 1970 00:00:00 GMT")
        == days("1970-01-02T01:00+01:00")
        == 1
    )
    assert all(
        days(value) != days(value) for value in (None, "", "soon", float("inf"), 10**400, [], True, "9999-99-99")
    )


def test_thousands_of_copies(tmp_path):
    result = run_global(ExactDedup(), documents(["the same page"] * 3000), tmp_path, 1000)
    assert result.ids == ["0"] and result.report["sizes"] == {"2049-4096": 1}


def test_documents_of_earlier_corpora_survive(tmp_path):
    earlier = finished([Document("old", "b", "web"), Document("older", "b", "web")], tmp_path / "earlier")
    result = run_global(
        ExactDedup(earlier=(str(earlier),), keep="longest"), documents(["a", "b", "b", "a"]), tmp_path / "new"
    )
    assert result.ids == ["0"]
    assert result.dropped["1"] == ("in_earlier_corpus", {"survivor": "old", "similarity": 1.0, "folder": str(earlier)})
    assert result.dropped["3"][0] == "exact_duplicate"
    assert {(c["survivor"], c["size"]) for c in result.report["largest"]} == {("old", 3), ("0", 2)}
    with pytest.raises(UserError, match="no such folder"):
        ExactDedup(earlier=(str(tmp_path / "missing"),)).files()


# ------------------------------------------------------------------------------------------------------------------- pieces


def without_repeats(texts: list[str], breaks: str, least: int, min_length: int) -> list[str]:
    """The same by counting in memory."""
    pieces = [text.split(breaks) for text in texts]
    flat = [piece for text in pieces for piece in text]
    seen, left = set(), []
    for text in pieces:
        kept = []
        for piece in text:
            if len(piece) < min_length or flat.count(piece) < least or piece not in seen:
                kept.append(piece)
            seen.add(piece)
        left.append(breaks.join(kept))
    return left


@pytest.mark.parametrize("level, breaks", [("line", "\n"), ("paragraph", "\n\n")])
@pytest.mark.parametrize("least", [2, 4])
def test_repeated_pieces_are_cut_out(tmp_path, small, level, breaks, least):
    rng = random.Random(least)
    pool = ["ab", "abc", *(f"piece number {i}" for i in range(40))]
    texts = [breaks.join(rng.choices(pool, k=rng.randint(0, 6))) for _ in range(40)]
    stage = ExactDedup(level=level, min_length=3, min_repeats=least, min_left=0.0)
    result = run_global(stage, documents(texts), tmp_path)
    expected = without_repeats(texts, breaks, least, 3)
    for document in result.kept:
        assert document.text == expected[int(document.id)]
    for name, (reason, detail) in result.dropped.items():
        assert reason == "mostly_duplicate" and detail == {"left": 0.0} and not expected[int(name)] and texts[int(name)]
    removed = sum(counts.tally.counts["repeated_pieces"]["characters"] for counts in result.counts)
    assert removed == sum(len(texts[int(d.id)]) - len(d.text) for d in result.kept) > 0
    assert sum(counts.changed for counts in result.counts) == sum(texts[int(d.id)] != d.text for d in result.kept)
    other = run_global(stage, documents(texts), tmp_path / "other", 3, 5)
    assert (other.kept, other.dropped, other.report) == (result.kept, result.dropped, result.report)


def test_the_report_shows_the_pieces(tmp_path, small):
    texts = ["long enough\nfirst alone", "long enough\nsecond alone", "short\nshort", "x\nlong enough\ny"]
    report = run_global(ExactDedup(level="line", min_length=6), documents(texts), tmp_path).report
    assert report["sizes"] == {"3-4": 1}
    assert report["largest"] == [{"size": 3, "survivor": "0", "members": [], "text": "long enough"}]


def test_a_document_of_which_too_little_is_left_goes(tmp_path):
    texts = ["a menu line of a site\nstory one", "a menu line of a site\nanother menu line\nshort", "another menu line"]
    stage = ExactDedup(level="line", min_length=6, min_left=0.2)
    result = run_global(stage, documents(texts), tmp_path)
    assert [(d.id, d.text) for d in result.kept] == [("0", texts[0]), ("1", "another menu line\nshort")]
    assert result.dropped == {"2": ("mostly_duplicate", {"left": 0.0})}


def test_a_share_that_is_just_enough_and_blank_lines(tmp_path):
    texts = ["copied", "copied\nabcdefg", "one\n\ncopied\n\ntwo"]
    for least, kept in ((0.5, [texts[0], "abcdefg", "one\n\n\ntwo"]), (0.51, [texts[0], "one\n\n\ntwo"])):
        stage = ExactDedup(level="line", min_length=6, min_left=least)
        assert [d.text for d in run_global(stage, documents(texts), tmp_path / str(least)).kept] == kept


def test_lines_of_earlier_corpora_are_cut_out(tmp_path):
    earlier = finished([Document("old", "this line is known\nand this", "web")], tmp_path / "earlier")
    stage = ExactDedup(level="line", min_length=5, earlier=(str(earlier),))
    result = run_global(stage, documents(["new text here\nthis line is known", "\n"]), tmp_path / "new")
    assert [d.text for d in result.kept] == ["new text here", "\n"]


def test_an_empty_corpus(tmp_path):
    for level in ("document", "line"):
        assert run_global(ExactDedup(level=level), [], tmp_path / level).ids == []


def test_options():
    assert build(ExactDedup, {"level": "line", "ignore": ["case"]}) == ExactDedup(level="line", ignore=("case",))
    for wrong in ({"min_repeats": 1}, {"min_left": 2.0}, {"level": "line", "within_days": 1.0}, {"alarm_share": 0.0}):
        with pytest.raises(UserError):
            ExactDedup(**wrong)


def test_a_group_over_many_blocks_is_told_once(monkeypatch):
    """`repeats` on blocks of every size gives what one block gives."""
    import numpy as np

    records = np.zeros(60, exact_dedup.RECORD)
    records["hash"] = np.repeat(np.arange(9), [1, 2, 20, 3, 1, 4, 1, 25, 3])
    records["place"] = np.arange(60)

    def told(size: int) -> tuple[list, list]:
        blocks = [records[i : i + size] for i in range(0, 60, size)]
        groups = list(exact_dedup.repeats(iter(blocks), 3))
        copies = [int(place) for _, _, copies in groups for place in copies["place"]]
        return copies, [(int(head["place"]), size) for head, size, _ in groups if size]

    assert all(told(size) == told(60) for size in range(1, 60))
    assert told(60)[1] == [(3, 20), (23, 3), (27, 4), (32, 25), (57, 3)]
