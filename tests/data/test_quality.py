"""Scores, thresholds, and what the two models learn."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
from linear_time import assert_linear

from lmjax.config import build
from lmjax.data.document import Document
from lmjax.data.ngram_model import normalize
from lmjax.data.quality import (
    BUCKETS,
    PIECE_WORDS,
    Lexicon,
    Piece,
    Quality,
    auc,
    count_syllables,
    features,
    fit_classifier,
    ordered,
    pieces,
    probability,
    quantiles,
    readability,
    sample,
)
from lmjax.data.stage import Counts, Drop, Tally, run
from lmjax.data.written import write_documents
from lmjax.errors import UserError
from lmjax.files import read_json

GOOD, SPAM = (
    line.split()
    for line in (
        "the model reads a row of tokens and learns to say what comes next because its weights follow the slope of a loss",
        "click here buy cheap watches now free offer best price casino bonus win money fast order online the a of and to",
    )
)


def text(words: list[str], seed: int, length: int = 200) -> str:
    """Sentences of random words, of which each likes its neighbours in the list."""
    rng, i, found = random.Random(seed), 0, []
    for number in range(length):
        i = (i + rng.choice([1, 1, 1, 2, 5])) % len(words)
        found.append(words[i] + ("." if number % 12 == 11 else ""))
    return " ".join(found)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[Quality, Path]:
    """A stage that has seen good text and a raw shard, half of it spam."""
    folder = tmp_path_factory.mktemp("quality")
    good, shard = folder / "good.jsonl.zst", folder / "shard.jsonl.zst"
    write_documents(good, [Document(f"g{i}", text(GOOD, i), "good") for i in range(120)])
    raw = [Document(f"r{i}", text(SPAM if i % 4 else GOOD, 1000 + i), "raw") for i in range(160)]
    write_documents(shard, raw)
    stage = Quality(good=(str(good),))
    stage.fit([shard], folder)
    return stage, folder


def test_good_text_scores_better(fitted):
    stage, folder = fitted
    apply = stage.open(folder)
    good, spam = (apply(Document("d", text(words, 5000), "s"), Tally()).meta for words in (GOOD, SPAM))
    assert good["perplexity"] < 0.1 * spam["perplexity"] and good["quality"] > 0.6 > 0.3 > spam["quality"]
    shuffled = text(GOOD, 5000).split()
    random.Random(0).shuffle(shuffled)
    assert apply(Document("d", " ".join(shuffled), "s"), Tally()).meta["perplexity"] > 2 * good["perplexity"]
    facts = read_json(folder / "fit.json")
    assert facts["documents"] == {"good": 120, "raw": 160}
    assert facts["classifier"]["held_out_accuracy"] > 0.75  # a quarter of raw is good: 0.875 at best
    assert facts["classifier"]["held_out_auc"] > 0.75


def test_nothing_is_dropped_without_thresholds(fitted):
    stage, folder = fitted
    documents = [Document(str(i), text(GOOD if i % 2 else SPAM, i), "s", {"url": "u"}) for i in range(20)]
    counts = Counts("quality")
    kept = list(run(stage, documents, counts, folder))
    assert [document.text for document in kept] == [document.text for document in documents]
    assert all(document.meta.keys() == {"url", "perplexity", "quality", "readability"} for document in kept)
    report = stage.finish(counts.close()["tally"], folder)
    assert report["quantiles"].keys() == {"perplexity", "quality", "reading_ease"}
    bits = sorted(math.log2(document.meta["perplexity"]) for document in kept)
    assert math.log2(report["quantiles"]["perplexity"]["50%"]) == pytest.approx(bits[9], abs=0.06)
    for kind in ("bits_per_word", "quality", "reading_ease"):
        histogram = report["histograms"][kind]
        assert sum(histogram.values()) == 20 and list(histogram) == sorted(histogram, key=float)
        values = list(report["quantiles"][kind if kind != "bits_per_word" else "perplexity"].values())
        assert values == sorted(values)


@pytest.mark.parametrize(
    ("option", "score"),
    [
        ("max_perplexity", "perplexity"),
        ("min_quality", "quality"),
        ("min_ease", "readability"),
        ("max_grade", "readability"),
    ],
)
def test_thresholds_drop_what_is_beyond(fitted, option, score):
    stage, folder = fitted
    documents = [Document(str(i), text(GOOD if i % 2 else SPAM, 77 + i), "s") for i in range(12)]
    scores = {document.id: document.meta[score] for document in run(stage, documents, Counts("quality"), folder)}
    scores = {id_: value[option[4:]] if score == "readability" else value for id_, value in scores.items()}
    limit = sorted(scores.values())[5]
    strict = Quality(good=stage.good, **{option: limit})
    counts = Counts("quality")
    kept = {document.id for document in run(strict, documents, counts, folder)}
    inside = {id_ for id_, value in scores.items() if (value <= limit if option.startswith("max") else value >= limit)}
    assert kept == inside and 0 < len(kept) < 12
    assert counts.close()["dropped"] == {score: 12 - len(kept)}
    verdict = strict.open(folder)(next(document for document in documents if document.id not in kept), Tally())
    assert isinstance(verdict, Drop) and verdict.detail in scores.values()


def test_a_fit_is_the_same_bytes_again(fitted, tmp_path):
    stage, folder = fitted
    assert stage.files() == stage.good
    stage.fit([folder / "shard.jsonl.zst"], tmp_path)
    for name in ("ngram_model.npz", "classifier.npy", "fit.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_without_good_text_only_readability():
    (document,) = run(Quality(), [Document("d", "The cat sat on the mat.", "s")], Counts("quality"))
    assert document.meta.keys() == {"readability"}
    for options in ({"max_perplexity": 100.0}, {"min_quality": 0.5}):
        with pytest.raises(UserError, match="good"):
            Quality(**options)
    assert Quality(min_ease=30.0).open(Path("."))(
        Document("d", "Incomprehensibilities antidisestablishmentarianism", "s"), Tally()
    ) == Drop("readability", readability_of("Incomprehensibilities antidisestablishmentarianism")["ease"])


def test_options():
    assert build(Quality, {"good": ["a.txt"], "min_quality": 0.25}).good == ("a.txt",)
    for options in (
        {"min_quality": 1.5},
        {"max_perplexity": 0.5},
        {"vocabulary": 0},
        {"train_bytes": 0},
        {"max_ngrams": 0},
    ):
        with pytest.raises(UserError, match=next(iter(options))):
            Quality(good=("x",), **options)
    with pytest.raises(UserError, match="no such file"):
        Quality(good=("x", "y")).files()


def test_too_little_to_learn_from(tmp_path):
    write_documents(tmp_path / "good.jsonl.zst", [Document("g", text(GOOD, 1), "good")])
    write_documents(tmp_path / "raw.jsonl.zst", [Document(f"r{i}", text(SPAM, i), "raw") for i in range(30)])
    with pytest.raises(UserError, match="good text are too few"):
        Quality(good=(str(tmp_path / "good.jsonl.zst"),)).fit([tmp_path / "raw.jsonl.zst"], tmp_path)


def test_a_book_is_held_out_by_pieces(tmp_path):
    write_documents(tmp_path / "good.jsonl.zst", [Document("book", text(GOOD, 1, 40 * PIECE_WORDS), "good")])
    write_documents(tmp_path / "raw.jsonl.zst", [Document(f"r{i}", text(SPAM, i), "raw") for i in range(30)])
    stage = Quality(good=(str(tmp_path / "good.jsonl.zst"),))
    stage.fit([tmp_path / "raw.jsonl.zst"], tmp_path)
    facts = read_json(tmp_path / "fit.json")["classifier"]
    assert facts["pieces"]["held_out_good"] >= 4 and facts["held_out_accuracy"] == 1


def test_sample_is_bounded_and_does_not_depend_on_the_order():
    documents = [Document(str(i), "x" * (i % 7 + 1), "s") for i in range(500)]
    drawn = sample(documents, 100, 0)
    assert 100 <= sum(len(document.text) for document in drawn) < 107
    assert drawn == sample(reversed(documents), 100, 0) != sample(documents, 100, 1)
    assert sample(documents, 10**9, 0) != documents and len(sample(documents, 10**9, 0)) == 500
    assert len(sample(documents, 1, 0)) == 1 and sample([], 1, 0) == []


def test_pieces():
    lexicon = Lexicon({})
    whole = pieces([Document("a", text(GOOD, 1, 900), "s")])
    assert [piece.number for piece in whole] == [0, PIECE_WORDS]
    words = normalize(text(GOOD, 1, 900))
    np.testing.assert_array_equal(whole[0].features, features(lexicon.of(words[:PIECE_WORDS])))
    assert len(pieces([Document("a", "one two", "s")])) == 1 and pieces([Document("a", "", "s")]) == []
    assert len(pieces([Document("a", "w " * (PIECE_WORDS + 3), "s")])) == 1  # a small rest is left out


def test_pairs_are_in_order():
    lexicon = Lexicon({})
    one, other = features(lexicon.of(["a", "b"])), features(lexicon.of(["b", "a"]))
    assert set(one[:2]) == set(other[:2]) and one[2] != other[2]


def test_auc_by_the_definition():
    rng = np.random.default_rng(0)
    good, raw = rng.integers(0, 9, 40) * 1.0, rng.integers(-3, 6, 30) * 1.0
    pairs = [(g > r) + 0.5 * (g == r) for g in good for r in raw]
    assert auc(good, raw) == pytest.approx(np.mean(pairs))


def test_classes_of_unequal_size_weigh_the_same():
    good = [Document(f"g{i}", text(GOOD, i, 60), "s") for i in range(25)]
    raw = [Document(f"r{i}", text(SPAM, i, 60), "s") for i in range(500)]
    weights, facts = fit_classifier(pieces(good), pieces(raw), 0)
    assert 0.3 < probability(weights, features(Lexicon({}).of(["unheard-of"]))) < 0.7
    assert facts["pieces"] == {"good": 25, "raw": 500, "held_out_good": 3, "held_out_raw": 50}
    assert facts["held_out_accuracy"] == facts["held_out_auc"] == 1


def test_quantiles():
    assert list(ordered({"100": 1, "-5": 2, "20": 3})) == ["-5", "20", "100"]
    assert quantiles({"1": 50, "2": 49, "10": 1}) == {
        "1%": 1, "5%": 1, "10%": 1, "25%": 1, "50%": 1, "75%": 2, "90%": 2, "95%": 2, "99%": 2,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- readability


def readability_of(text: str) -> dict[str, float] | None:
    """Of a text alone."""
    return readability(text, Lexicon({}).of(normalize(text)))


SYLLABLES = {
    1: "the cat through strength asked looked makes loved great high scene wished words code league",
    2: "people little table ended wanted happy reading science lion being doctor something million prison playing region makers houses",
    3: "banana idea various example probable computer animal serious library opinion area create-d"[:-9],
    4: "information society reality community available television january education",
    5: "university examination possibility characteristic",
    6: "responsibility",
}


def test_syllables():
    """Against the counts of a dictionary of pronunciation, with the share of errors that rules are known to make."""
    words = [(word, count) for count, line in SYLLABLES.items() for word in line.split()]
    wrong = [word for word, count in words if count_syllables(word) != count]
    assert len(wrong) <= 0.1 * len(words), wrong


def test_readability_by_the_formula():
    assert readability_of("The cat sat on the mat.") == {
        "ease": 116.1,
        "grade": -1.4,
    }  # 6 words, 1 sentence, 6 syllables
    assert readability_of("cat " * 40) == {"ease": 81.6, "grade": 11.8}
    two = readability_of("The cat sat. The dog ran to the house!")
    words, sentences, syllables = 9, 2, 9
    assert two == {
        "ease": round(206.835 - 1.015 * words / sentences - 84.6 * syllables / words, 1),
        "grade": round(0.39 * words / sentences + 11.8 * syllables / words - 15.59, 1),
    }


def test_readability_of_a_known_text():
    """textstat 0.7.13 with a dictionary of pronunciation says grade 9.3, ease 65.0."""
    gettysburg = (
        "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated"
        " to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that nation, or"
        " any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that war. We have come to"
        " dedicate a portion of that field, as a final resting place for those who here gave their lives that that nation might live."
        " It is altogether fitting and proper that we should do this."
    )
    found = readability_of(gettysburg)
    assert found["grade"] == pytest.approx(9.3, abs=0.5) and found["ease"] == pytest.approx(65.0, abs=2.5)


def test_ends_of_sentences():
    one = readability_of("The cat sat on the mat with the dog")
    assert (
        one
        == readability_of("The cat sat on the mat with the dog.")
        == readability_of('The cat sat on the mat with the dog."')
    )
    assert readability_of("The cat sat. On the mat with the dog") == readability_of(
        "The cat sat\n\non the mat with the dog"
    )
    assert readability_of("It is 3.5 or e.g.x here") == readability_of("It is 3,5 or e,g,x here")


def test_only_english_is_read():
    assert (
        readability_of("")
        is readability_of("123, 456.")
        is readability_of("这是一个测试。")
        is readability_of("Это просто текст.")
        is None
    )
    stage = Quality()
    apply = stage.open(Path("."))
    for meta, there in (
        ({"language": "en"}, True),
        ({"language": "de"}, False),
        ({}, True),
        ({"language": None}, True),
    ):
        assert ("readability" in apply(Document("d", "A cat sat here.", "s", meta), Tally()).meta) == there


@pytest.mark.parametrize("text_", ["", "a", "\ud800", "\n\n\n", "...", "1" * 1000, "word " * 3])
def test_edges(fitted, text_):
    stage, folder = fitted
    document = stage.open(folder)(Document("d", text_, "s"), Tally())
    assert document.text == text_ and math.isfinite(document.meta["perplexity"]) and 0 <= document.meta["quality"] <= 1


@pytest.mark.parametrize("piece", ["a", ".", "a ", "a. ", "\n\n", '."', "é", "\ud800", "a\n\n", "x1'"])
def test_time_is_linear(fitted, piece):
    stage, folder = fitted
    apply = stage.open(folder)
    assert_linear(apply, piece, 40_000)


def test_what_is_held_out_is_not_trained_on():
    """Texts without a word in common: what is known of them by heart says nothing of others."""
    rng = np.random.default_rng(0)
    good, raw = (
        [Piece(f"{kind}{i}", 0, rng.integers(0, BUCKETS, 50).astype(np.int32)) for i in range(200)] for kind in "gr"
    )
    assert 0.25 < fit_classifier(good, raw, 0)[1]["held_out_auc"] < 0.75
