"""Probabilities sum to one, agree with Kneser-Ney by the book, and tell good text from shuffled."""

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from lmjax.data.ngram_model import END, SPECIAL, START, UNKNOWN, NgramModel, bucketed, find, normalize, train
from lmjax.errors import UserError

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ri", "so") for b in ("t", "n", "r", "s")]


def chain(length: int, seed: int) -> str:
    """A text in which a word says a lot about the next."""
    rng, i, words = random.Random(seed), 0, []
    for _ in range(length):
        i = rng.choice([(3 * i + 1) % len(WORDS), (5 * i + 2) % len(WORDS), rng.randrange(len(WORDS))])
        words.append(WORDS[i])
    return " ".join(words)


def perplexity(model: NgramModel, text: str) -> float:
    """By word."""
    words = normalize(text)
    return 2 ** (model.bits(words) / len(words))


def by_the_book(texts: list[str], ids: dict[str, int], size: int):
    """Interpolated Kneser-Ney with dictionaries, one discount for each order: p(w | a, b)."""
    grams: list[Counter] = [Counter(), Counter(), Counter()]
    for text in texts:
        row = [START, START] + [ids.get(word, UNKNOWN) for word in normalize(text)]
        grams[2].update(zip(row, row[1:], row[2:]))
    grams[1].update((b, c) for _, b, c in grams[2])
    grams[0].update((c,) for _, c in grams[1])

    def discount(counts: Counter) -> float:
        met = Counter(counts.values())
        return met[1] / (met[1] + 2 * met[2]) if met[1] and met[2] else 0.5

    discounts = [discount(counts) for counts in grams]
    followers: list[dict] = [defaultdict(list) for _ in grams]
    for order, counts in enumerate(grams):
        for gram, count in counts.items():
            followers[order][gram[:-1]].append(count)

    def p(word: int, context: tuple[int, ...]) -> float:
        order = len(context)
        after = followers[order].get(context)
        lower = p(word, context[1:]) if order else 1 / (size - 1) * (word != START)
        if after is None:
            return lower
        total, d = sum(after), discounts[order]
        return (
            max(grams[order][(*context, word)] - d, 0) / total + lower * sum(min(d, count) for count in after) / total
        )

    return p


def test_agrees_with_kneser_ney_by_the_book():
    texts = [chain(150, seed) + " rare" + str(seed) + "x" * seed for seed in range(6)]
    model = train(texts)
    p = by_the_book(texts, model.ids, model.size)
    rng = random.Random(0)
    contexts = [(START, START), (START, 5), (UNKNOWN, 7)] + [
        tuple(rng.choices(range(1, model.size), k=2)) for _ in range(40)
    ]
    for context in contexts:
        ours = [float(model.probabilities(np.array([*context, word]))[0]) for word in range(model.size)]
        np.testing.assert_allclose(ours, [p(word, context) for word in range(model.size)], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("max_ngrams", [1 << 20, 50, 1])
def test_probabilities_sum_to_one_however_much_is_pruned(max_ngrams):
    texts = [chain(400, 1), chain(400, 2)]
    pairs, triples = train(texts).ngrams()
    model = train(texts, max_ngrams=max_ngrams)
    assert model.ngrams()[1] == min(max_ngrams, triples) and model.ngrams()[0] >= min(max_ngrams, pairs)
    rng = random.Random(3)
    for context in [(START, START), (START, 4)] + [
        (rng.randrange(model.size), rng.randrange(1, model.size)) for _ in range(30)
    ]:
        total = sum(float(model.probabilities(np.array([*context, word]))[0]) for word in range(model.size))
        assert total == pytest.approx(1, abs=1e-5)


def test_spellings_sum_to_one():
    model = train([chain(100, 1) + " once only"])
    assert float((2.0 ** -model.spelling.astype(np.float64)).sum()) == pytest.approx(1, abs=1e-5)
    word = "zqx"
    bits = sum(float(model.spelling[byte]) for byte in word.encode()) + float(model.spelling[END])
    assert model.spelled([word]) == pytest.approx(bits)
    unknown = float(model.probabilities(np.array([START, START, UNKNOWN]))[0])
    assert model.bits([word]) == pytest.approx(bits - math.log2(unknown), rel=1e-6)


def test_perplexity_of_uniform_text_is_the_number_of_words():
    rng = random.Random(0)
    text, other = (" ".join(rng.choices(WORDS[:16], k=60_000)) for _ in range(2))
    noise = math.exp(16**3 / (2 * 60_000))  # of 16³ shares, each estimated from 60,000 words
    assert 16 <= perplexity(train([text]), other) == pytest.approx(16 * noise, rel=0.01)


def test_order_is_learned():
    model = train([chain(20_000, 1)])
    text = chain(2000, 2)
    shuffled = text.split()
    random.Random(0).shuffle(shuffled)
    assert perplexity(model, text) < 0.75 * perplexity(model, " ".join(shuffled))
    assert perplexity(model, text) < 0.01 * perplexity(model, "xqzzy qwrtplk jjzq " * 100)  # gibberish is spelled


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 100, 5000])
@pytest.mark.parametrize("crowded", [False, True])
def test_table_finds_what_is_there_and_nothing_else(number, crowded, monkeypatch):
    if crowded:  # all in one bucket
        monkeypatch.setattr("lmjax.data.ngram_model.MIX", np.uint64(1))
    keys = np.unique(np.random.default_rng(number).integers(0, 1 << 60, number))
    table, value = bucketed(keys, np.arange(len(keys), dtype=np.float32) + 1)
    place, known = find(table, keys)
    assert known.all() and (table[place] == keys).all() and (value[place] == np.arange(len(keys)) + 1).all()
    place, known = find(table, np.setdiff1d(np.append(keys + 1, [0, 1 << 59]), keys))
    assert not known.any() and (value[place] >= 0).all()


def test_case_and_digits_do_not_matter():
    assert normalize("Year 1984, YEAR 2023.") == ["year", "0000", ",", "year", "0000", "."]


def test_vocabulary_is_the_most_frequent_words():
    model = train(["b b b a a a c c d"], vocabulary=3)
    assert model.vocabulary == ("a", "b", "c")  # of equals the first by letter; a word met once is unknown
    assert train(["c c c b b b a a d"], vocabulary=2).vocabulary == ("b", "c")
    assert train(["c c c b b b a a d"], vocabulary=9).vocabulary == ("b", "c", "a")
    with pytest.raises(UserError, match="vocabulary"):
        train(["a"], vocabulary=0)


def test_saved_and_loaded(tmp_path):
    texts = [chain(300, 1), "a\ud800 a\ud800 été été"]
    model = train(texts)
    model.save(tmp_path / "a.npz")
    train(iter(texts)).save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    loaded = NgramModel.load(tmp_path / "a.npz")
    assert loaded.vocabulary == model.vocabulary
    for text in (chain(100, 2), "unknown words", "a\ud800 été"):
        assert loaded.bits(normalize(text)) == model.bits(normalize(text))


def test_blocks_do_not_matter(monkeypatch):
    model, words = train([chain(2000, 1)]), normalize(chain(1000, 2) + " zzz qqq")
    whole = model.bits(words)
    monkeypatch.setattr("lmjax.data.ngram_model.BLOCK_WORDS", 7)
    assert model.bits(words) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("text", ["", "a", "\ud800", "\n", "10", "ß" * 3])
def test_edges(text):
    model = train([chain(100, 1)])
    bits = model.bits(normalize(text))
    assert math.isfinite(bits) and (bits > 0) == bool(normalize(text))
    small = train([text])
    assert math.isfinite(small.bits(normalize("a b c"))) and small.size >= SPECIAL
