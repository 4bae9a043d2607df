"""Near-duplicates against all pairs: who goes resembles who stays, and of those that stay no two that met resemble each other."""

import random

import numpy as np
import pytest
from global_run import finished, run_global

from lmjax.config import build
from lmjax.data import minhash, near_dedup, sketches, sortmerge
from lmjax.data.document import Document
from lmjax.data.near_dedup import NearDedup
from lmjax.errors import UserError

RANDOM = random.Random(0)
WORDS = ["".join(RANDOM.choices("abcdefghij", k=5)) for _ in range(5000)]


def text(rng: random.Random, words: int = 150) -> list[str]:
    """A text like no other."""
    return rng.choices(WORDS, k=words)


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    """The same with a few words changed: each costs five shingles."""
    words = list(words)
    for place in rng.sample(range(len(words)), edits):
        words[place] = rng.choice(WORDS)
    return words


def families(seed: int, sizes: list[int], edits: int) -> list[Document]:
    """Groups of edited copies of one text, in a random order."""
    rng, documents = random.Random(seed), []
    for number, size in enumerate(sizes):
        base = text(rng)
        for copy in range(size):
            words = edited(rng, base, rng.randint(0, edits)) if copy else base
            documents.append(Document(f"{number}.{copy}", " ".join(words), "web", {"quality": rng.random()}))
    rng.shuffle(documents)
    return documents


def similarity(left: Document, right: Document) -> float:
    """Of the sets of shingles."""
    a, b = (set(minhash.shingle_hashes(d.text, 5).tolist()) for d in (left, right))
    return len(a & b) / len(a | b) if a | b else 0.0


def meet(left: Document, right: Document) -> bool:
    """Whether two share a band."""
    hasher = minhash.MinHasher(112, 1)
    bands = [
        minhash.band_hashes(hasher.signature(minhash.shingle_hashes(d.text, 5))[None], 14)[0] for d in (left, right)
    ]
    return bool((bands[0] == bands[1]).any())


def greedy(documents: list[Document], threshold: float) -> dict[str, str]:
    """Who goes, and for whom: in order, compared with everyone who stays and shares a band."""
    kept: list[Document] = []
    gone = {}
    for document in documents:
        alike = [(similarity(document, other), other) for other in kept if meet(document, other)]
        alike = [(s, other) for s, other in alike if s >= threshold]
        if alike:
            gone[document.id] = max(alike, key=lambda pair: pair[0])[1].id
        else:
            kept.append(document)
    return gone


def assert_lawful(documents: list[Document], result, threshold: float) -> None:
    """Each that goes resembles one that stays, as it says; no two that stay, and met, resemble each other."""
    by_id, kept = {d.id: d for d in documents}, set(result.ids)
    assert kept | result.dropped.keys() == by_id.keys() and not kept & result.dropped.keys()
    for name, (reason, detail) in result.dropped.items():
        assert reason == "near_duplicate" and detail["survivor"] in kept
        true = similarity(by_id[name], by_id[detail["survivor"]])
        assert true >= threshold and detail["similarity"] == pytest.approx(true, abs=1e-4)
    for i, left in enumerate(result.kept):
        for right in result.kept[i + 1 :]:
            assert similarity(left, right) < threshold or not meet(left, right)


@pytest.fixture(params=[False, True], ids=["one range", "many ranges, small blocks"])
def small(request, monkeypatch):
    """Runs in one piece, and with buckets that span blocks."""
    if request.param:
        for module, name, value in (
            (sortmerge, "BLOCK_RECORDS", 50),
            (sortmerge, "LEAST_BLOCK", 1),
            (sortmerge, "RUN_RECORDS", 60),
            (sortmerge, "RANGE_RECORDS", 400),
            (sketches, "BLOCK_RECORDS", 30),
            (near_dedup, "REMEMBERED", 20),
        ):
            monkeypatch.setattr(module, name, value)


def test_small_families_are_decided_as_one_after_the_other(tmp_path, small):
    documents = families(1, [1] * 10 + [2] * 6 + [3] * 4 + [8] * 2, 5)
    result = run_global(NearDedup(), documents, tmp_path)
    assert {name: detail["survivor"] for name, (_, detail) in result.dropped.items()} == greedy(documents, 0.8)
    assert len(result.dropped) > 15 and result.report["undecided_kept"] == 0
    assert_lawful(documents, result, 0.8)


@pytest.mark.parametrize("edits", [2, 8])  # alike all, and so far apart that neighbours' neighbours are not
def test_large_families_need_rounds_and_end_lawful(tmp_path, small, edits):
    documents = families(edits, [40, 15], edits)
    result = run_global(NearDedup(), documents, tmp_path / "a")
    assert_lawful(documents, result, 0.8)
    for size, seed in ((13, 1), (1000, 2)):
        other = run_global(NearDedup(), documents, tmp_path / str(size), size, seed)
        assert (other.ids, other.dropped, other.report) == (result.ids, result.dropped, result.report)


def test_a_leader_that_goes_takes_nobody_along(tmp_path):
    """Z resembles A, A resembles forty copies, Z does not resemble them: A goes for Z, one of the forty stays, for the rest."""
    rng = random.Random(3)
    base = text(rng, 300)
    tail = [edited(rng, base[150:], 1) for _ in range(40)]
    z = edited(rng, base[:150], 5) + base[150:]
    copies = [
        Document(f"m{i}", " ".join(base[:140] + text(rng, 4) + base[144:150] + part), "web")
        for i, part in enumerate(tail)
    ]
    documents = [Document("z", " ".join(z), "web"), Document("a", " ".join(base), "web"), *copies]
    a_z, limit = similarity(documents[0], documents[1]), 0.83
    assert a_z >= limit and meet(documents[0], documents[1])
    assert (
        max(similarity(documents[0], copy) for copy in copies)
        < limit
        < min(similarity(documents[1], c) for c in copies)
    )
    result = run_global(NearDedup(threshold=limit), documents, tmp_path)
    assert result.dropped["a"][1]["survivor"] == "z"
    assert result.report["rounds"] > 1 and result.report["undecided_kept"] == 0
    assert_lawful(documents, result, limit)
    assert 2 <= len(result.ids) < 20


def test_neighbours_neighbours_are_not_swallowed(tmp_path):
    """A ~ B ~ C, A ≁ C: whatever the order, B goes for one of them or they for it, and A never goes for C."""
    rng = random.Random(5)
    b = text(rng, 200)
    a, c = text(rng, 12) + b[12:], b[:-12] + text(rng, 12)
    named = {name: Document(name, " ".join(words), "web") for name, words in (("a", a), ("b", b), ("c", c))}
    assert min(similarity(named["a"], named["b"]), similarity(named["b"], named["c"])) > 0.85 > 0.8
    assert similarity(named["a"], named["c"]) < 0.8
    for i, (order, kept) in enumerate((("abc", "ac"), ("bac", "b"), ("cab", "ca"), ("acb", "ac"))):
        result = run_global(NearDedup(), [named[name] for name in order], tmp_path / str(i))
        assert result.ids == list(kept)
        assert all({name, detail["survivor"]} != {"a", "c"} for name, (_, detail) in result.dropped.items())


@pytest.mark.parametrize("keep", ["longest", "best", "newest", "oldest"])
def test_who_survives(tmp_path, keep):
    rng = random.Random(7)
    base = text(rng, 200)
    documents = [
        Document(str(i), " ".join(base + text(rng, extra)), "web", {"quality": score, "date": date})
        for i, (extra, score, date) in enumerate([(1, 0.2, "2020"), (3, 0.3, "2024-01-05"), (2, 0.9, "2021-01-01")])
    ]
    best = {"longest": "1", "best": "2", "newest": "1", "oldest": "2"}[keep]  # "2020" is no date
    assert run_global(NearDedup(keep=keep), documents, tmp_path).ids == [best]


def test_recurring_texts_stay(tmp_path):
    rng = random.Random(8)
    base = text(rng, 200)
    dates = ["2024-01-01", "2024-01-02", "2024-02-01", "2024-02-02", None]
    documents = [
        Document(str(i), " ".join(edited(rng, base, 1)), "news", {"date": date}) for i, date in enumerate(dates)
    ]
    for days in (2.0, 1.0):  # a day apart is within a day
        result = run_global(NearDedup(keep="newest", within_days=days), documents, tmp_path / str(days))
        assert result.ids == ["1", "3", "4"]
        assert {name: detail["survivor"] for name, (_, detail) in result.dropped.items()} == {"0": "1", "2": "3"}


def test_texts_without_shingles_are_never_duplicates(tmp_path):
    documents = [
        Document(str(i), text, "web")
        for i, text in enumerate(["", "", "four words are few", "four words are few", "\ud800"])
    ]
    for method in ("minhash", "simhash"):
        result = run_global(NearDedup(method=method, ngram=5), documents, tmp_path / method)
        assert len(result.ids) == 5 and result.report["clusters"] == 0
    assert run_global(NearDedup(), [], tmp_path / "none").ids == []
    assert run_global(NearDedup(), documents[:1], tmp_path / "one").ids == ["0"]


def test_a_page_repeated_costs_a_comparison_a_copy(tmp_path):
    page = " ".join(text(random.Random(9), 100))
    documents = [Document(str(i), page + (" and more" if i % 2 else ""), "web") for i in range(1500)]
    result = run_global(NearDedup(), documents, tmp_path, 600)
    assert result.ids == ["0"] and result.report["rounds"] == 1
    assert result.report["compared"] < 2 * len(documents)
    assert result.report["largest"][0]["size"] == 1500


def test_buckets_of_strangers_stay_linear(tmp_path, monkeypatch):
    """All in one bucket and no two alike: each meets so many leaders and no more, and the rest is counted."""
    monkeypatch.setattr(NearDedup, "hashes", lambda self, sketches: np.zeros((len(sketches), 1), np.uint64))
    rng = random.Random(10)
    documents = [Document(str(i), " ".join(text(rng, 30)), "web") for i in range(300)]
    report = run_global(NearDedup(), documents, tmp_path).report
    assert report["compared"] <= near_dedup.LEADERS * len(documents)
    assert report["beyond_leaders"] == len(documents) - near_dedup.LEADERS


def test_simhash_finds_what_differs_in_few_bits(tmp_path, small):
    documents = families(11, [1] * 20 + [2] * 10, 2)
    result = run_global(NearDedup(method="simhash"), documents, tmp_path)
    prints = {d.id: minhash.simhash(minhash.shingle_hashes(d.text, 3)) for d in documents}
    kept: list[str] = []
    for document in documents:
        near = [name for name in kept if minhash.bits_apart(prints[name], prints[document.id]) <= 3]
        if not near:
            kept.append(document.id)
    assert result.ids == kept and result.dropped


def test_signatures_decide_where_asked_to(tmp_path):
    documents = families(12, [1] * 10 + [2] * 10, 5)
    result = run_global(NearDedup(verify="signature"), documents, tmp_path)
    hasher, by_id = minhash.MinHasher(112, 1), {d.id: d for d in documents}
    assert result.dropped
    for name, (_, detail) in result.dropped.items():
        left, right = (hasher.signature(minhash.shingle_hashes(by_id[n].text, 5)) for n in (name, detail["survivor"]))
        assert detail["similarity"] == pytest.approx(minhash.agreement(left, right), abs=1e-4)


def test_documents_of_ten_megabytes(tmp_path):
    rng = random.Random(13)
    words = text(rng, 200_000) * 2
    documents = [Document(str(i), " ".join(words[i:]), "web") for i in range(2)] + [Document("x", "x" * 10**7, "web")]
    result = run_global(NearDedup(), documents, tmp_path)
    assert result.ids == ["0", "x"] and result.dropped["1"][1]["similarity"] > 0.99


# ------------------------------------------------------------------------------------------------------------------ earlier


def test_an_index_serves_as_the_documents_do(tmp_path, caplog):
    old = families(20, [1] * 15 + [3] * 5, 3)
    first = run_global(NearDedup(index=True), old, tmp_path / "first")
    new = [Document(f"new{d.id}", d.text, "web") for d in old[::2]] + families(21, [1] * 5, 0)
    folders = {
        "documents": finished(first.kept, tmp_path / "documents"),
        "index": finished(first.kept, tmp_path / "index", tmp_path / "first" / "stage"),
    }
    results = {}
    for name, folder in folders.items():
        results[name] = run_global(NearDedup(earlier=(str(folder),)), new, tmp_path / f"run-{name}")
        (folder / "web.jsonl.zst").write_bytes(b"not read" if name == "index" else b"")
    assert results["index"].ids == results["documents"].ids
    assert {n: d["survivor"] for n, (_, d) in results["index"].dropped.items()} == {
        n: d["survivor"] for n, (_, d) in results["documents"].dropped.items()
    }
    reasons = {reason for reason, _ in results["index"].dropped.values()}
    assert reasons == {"in_earlier_corpus"}
    assert all(detail["folder"] == str(folders["index"]) for _, detail in results["index"].dropped.values())
    assert all(d.id not in results["index"].dropped for d in new[-5:])
    with pytest.raises(UserError, match="is not a"):  # with other options its index does not serve
        run_global(NearDedup(earlier=(str(folders["index"]),), ngram=4), new, tmp_path / "other")
    assert "other options" in caplog.text


def test_a_damaged_index_is_refused(tmp_path):
    old = families(22, [2, 1], 1)
    first = run_global(NearDedup(index=True), old, tmp_path / "first")
    folder = finished(first.kept, tmp_path / "index", tmp_path / "first" / "stage")
    run = sorted((folder / "near_dedup").rglob("run0"))[0]
    run.write_bytes(run.read_bytes()[:-1])
    with pytest.raises(UserError, match="prepare that corpus again"):
        run_global(NearDedup(earlier=(str(folder),)), old, tmp_path / "second")


def test_earlier_documents_stay_whatever_the_rule(tmp_path):
    rng = random.Random(23)
    base = text(rng, 200)
    old = [Document("old", " ".join(base), "web"), Document("old copy", " ".join(base), "web")]
    folder = finished(old, tmp_path / "old")
    new = [Document(str(i), " ".join(edited(rng, base, 1) + text(rng, 3)), "web") for i in range(30)]
    result = run_global(NearDedup(keep="longest", earlier=(str(folder),)), new, tmp_path / "new")
    assert result.ids == []
    assert {d["survivor"] for _, (_, d) in result.dropped.items()} <= {"old", "old copy"}


def test_options():
    assert build(NearDedup, {"keep": "newest", "within_days": 3, "earlier": ["x"]}).within_days == 3
    assert NearDedup(method="simhash").words == 3 and NearDedup().words == 5
    for wrong in (
        {"threshold": 0.0},
        {"bands": 0},
        {"ngram": 0},
        {"max_bits": 20},
        {"within_days": -1.0},
        {"seed": -1},
    ):
        with pytest.raises(UserError):
            NearDedup(**wrong)
