"""Sketches against their formulas, against datatrove where it is installed, and against sets."""

import itertools
import random
import time

import numpy as np
import pytest
import xxhash

from lmjax.data import minhash
from lmjax.data.words import split_words

WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "row",
    "of",
    "tokens",
    "and",
    "learns",
    "to",
    "say",
    "what",
    "comes",
    "next",
    "so",
    "far",
]
TEXTS = [
    "",
    "x",
    "Too few words here.",
    " ".join(WORDS * 3),
    "Prices rose by 3.5% to 1,234.50 on 12/31; 1.2.3 and 1,2.3,4 are versions — or “not”? Café, naïve, Ångström!",
    "Ｆｕｌｌ １２３ ％ 日本語のテキストです。数字は１２３、です。 ภาษาไทย कि हिन्दी ١٢٫٣ ΟΔΥΣΣΕΥΣ İstanbul Ǆ",
    "a\u2028b\u0085c\u00a0d\u3000e\x1cf\x00g h\u200di j\u00adk l_m n’o p'q ¶ r • s © t\u0301u \u037e \u1fef \u212a",
    "\n\n".join(f"line {i} of {i * i}" for i in range(2000)),
]


def formula(shingles: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[int]:
    """The signature by Python's integers."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return [min((h * x + y) % 2**64 % (2**61 - 1) for h in shingles.tolist()) for x, y in pairs]


def test_shingles_are_xxh64_of_runs_of_words():
    words = ["prices", "rose", "by", "0", "to", "0", "0", "cafe"]  # 1,234 is a number, .50 another
    expected = {xxhash.xxh64_intdigest(" ".join(words[i : i + 5])) for i in range(len(words) - 4)}
    assert minhash.shingle_hashes("Prices rose by 3.5% to 1,234.50 (café)!", 5).tolist() == sorted(expected)
    for text, count in (
        ("", 0),
        ("one two three four", 0),
        ("one two three four five", 1),
        ("!!! ... ---", 0),
        ("a " * 90, 1),
    ):
        assert len(minhash.shingle_hashes(text, 5)) == count


def test_the_signature_is_the_formula():
    hasher = minhash.MinHasher(112, 1)
    for text in TEXTS[3:7]:
        shingles = minhash.shingle_hashes(text, 5)
        assert hasher.signature(shingles).tolist() == formula(shingles, hasher.a, hasher.b)
    long = np.random.default_rng(0).integers(0, 2**64, 3 * minhash.BLOCK + 5, np.uint64)
    assert hasher.signature(long).tolist() == minhash.exact_minimum(long, hasher.a, hasher.b).tolist()
    with pytest.raises(ValueError, match="no signature"):
        hasher.signature(np.empty(0, np.uint64))


def test_products_at_the_prime_and_close_to_each_other():
    """x mod (2^61 − 1) goes from the low bits of x only by a step that these products do not allow."""
    hasher = minhash.MinHasher(4, 1)
    hasher.a |= np.uint64(1)  # odd, so that any product can be asked for
    hasher.a8 = (hasher.a << np.uint64(3))[:, None]
    prime = 2**61 - 1
    for wanted in ([prime, 7], [prime + 3, 1], [5, (1 << 61) + 4, 9], [(7 << 61) + prime - 3, 8], [2, (3 << 61) + 1]):
        a, b = int(hasher.a[0]), int(hasher.b[0])
        shingles = np.array([(x - b) * pow(a, -1, 2**64) % 2**64 for x in wanted], np.uint64)
        assert hasher.signature(shingles).tolist() == formula(shingles, hasher.a, hasher.b)
        assert int(hasher.signature(shingles)[0]) == min(x % prime for x in wanted)


@pytest.mark.filterwarnings("ignore")
def test_signatures_are_bit_equal_to_datatroves(monkeypatch, tmp_path):
    dedup = pytest.importorskip("datatrove.pipeline.dedup.minhash")

    class Splitter:
        def word_tokenize(self, text: str) -> list[str]:
            return split_words(text)

    monkeypatch.setattr(dedup, "load_word_tokenizer", lambda language: Splitter())
    theirs, ours = dedup.MinhashDedupSignature(str(tmp_path)), minhash.MinHasher(112, 1)
    rng = random.Random(0)
    alphabet = [
        *map(chr, range(0x600)),
        *"ßΣİı한글日本、。‰…–—\u0301\u0e33\u093e\u200d\u2028１２",
        *"  aeiou0123.,\n" * 99,
    ]
    texts = [*TEXTS, *("".join(rng.choices(alphabet, k=rng.choice((20, 300, 900)))) for _ in range(300))]
    compared = 0
    for text in texts:
        shingles = theirs.get_shingles(text)
        assert minhash.shingle_hashes(text, 5).tolist() == sorted({int(h) for h in shingles.ravel()})
        if len(shingles):
            compared += 1
            expected = [h for bucket in theirs.get_signature(shingles) for h in bucket]
            assert ours.signature(minhash.shingle_hashes(text, 5)).tolist() == expected
    assert compared > 250


def test_bands_agree_where_their_hashes_do():
    rng = np.random.default_rng(0)
    left = rng.integers(0, 2**61, (50, 112), np.uint64)
    right = left.copy()
    right[:, ::8] += np.uint64(1)  # the first hash of each band
    right[:, 8:16] = left[:, 8:16]  # but in band 1
    left_bands, right_bands = minhash.band_hashes(left, 14), minhash.band_hashes(right, 14)
    assert (left_bands == right_bands).nonzero()[1].tolist() == [1] * 50
    assert len(np.unique(left_bands)) == 50 * 14
    same = np.repeat(left[:, :8], 14, axis=0).reshape(50, 112)  # equal bands of different numbers do not meet
    assert len(np.unique(minhash.band_hashes(same, 14))) == 50 * 14


@pytest.mark.parametrize("bits", [0, 1, 3, 5])
def test_prints_within_the_bits_share_a_table(bits):
    rng = random.Random(bits)
    tables = minhash.print_hashes(np.array([[1]], np.uint64), bits).shape[1]
    assert tables == len(list(itertools.combinations(range(bits + 3), 3)))
    for _ in range(300):
        left = rng.getrandbits(64)
        right = left
        for bit in rng.sample(range(64), bits):
            right ^= 1 << bit
        hashes = minhash.print_hashes(np.array([[left], [right]], np.uint64), bits)
        assert (hashes[0] == hashes[1]).any()
        assert minhash.bits_apart(np.array([left], np.uint64), np.array([right], np.uint64)) == bits


def test_a_print_has_the_bits_of_the_majority():
    rng = np.random.default_rng(0)
    shingles = rng.integers(0, 2**64, 999, np.uint64)
    expected = sum(1 << k for k in range(64) if sum(h >> k & 1 for h in shingles.tolist()) > 999 / 2)
    assert minhash.simhash(shingles).tolist() == [expected]


def test_jaccard_is_that_of_the_sets():
    rng = np.random.default_rng(0)
    for sizes in ((5, 7), (1, 1), (400, 3)):
        left, right = (np.unique(rng.integers(0, 12, size, np.uint64)) for size in sizes)
        a, b = set(left.tolist()), set(right.tolist())
        assert minhash.jaccard(left, right, 1 << 15) == len(a & b) / len(a | b)
    both = rng.integers(0, 2**64, 40_000, np.uint64)
    left, right = np.sort(both[:30_000]), np.sort(both[10_000:])
    assert minhash.jaccard(left[:4096], right[:4096], 4096) == pytest.approx(0.5, abs=0.02)
    assert minhash.jaccard(left[:4096], left[:4096], 4096) == 1
    assert minhash.jaccard(left[:4096], left[:50], 4096) == 50 / 4096


def test_the_least_of_each_permutation_estimates_the_jaccard_similarity():
    rng, hasher = np.random.default_rng(0), minhash.MinHasher(4096, 1)
    both = rng.integers(0, 2**64, 1500, np.uint64)
    left, right = hasher.signature(np.sort(both[:1000])), hasher.signature(np.sort(both[500:]))
    assert minhash.agreement(left, right) == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize(
    "text", ["a" * 10**7, "1" * 10**7, "é" * 10**6, "1." * 10**6, "\ud800 " * 10**6, "日" * 10**6, " " * 10**7]
)
def test_ten_million_of_one_character_take_seconds(text):
    start = time.process_time()
    minhash.shingle_hashes(text, 5)
    assert time.process_time() - start < 5
