r"""An n-gram model over words: interpolated Kneser-Ney trigrams (Kneser and Ney 1995; Chen and Goodman 1999), in NumPy.

    p(w | a b) = α(a b w) + γ(a b) · [ α(b w) + γ(b) · [ α(w) + γ() / V ] ],    γ(h) = 1 − Σ_w α(h w)

α is the discounted share that an n-gram has of its context, 0 where it was not kept. γ is made from what was kept, so that the
probabilities sum to one over the vocabulary however hard the counts are pruned. A word that is not in the vocabulary costs
p(<unk>) and then its spelling, by bytes: gibberish is expensive, and the model is a distribution over all texts.

Words are lower case and their digits are 0. n-grams are exact integers ((a·V + b)·V + w): nothing collides, and the
same text gives a file of the same bytes.
"""

import dataclasses
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from lmjax.config import need
from lmjax.data.document import to_bytes
from lmjax.data.hashing import GOLDEN
from lmjax.data.words import split_words
from lmjax.files import write_atomic

START, UNKNOWN, SPECIAL = (
    0,
    1,
    2,
)  # ids: before the first word of a text; any word outside the vocabulary; how many those are
END = 256  # ends a spelling, beside the 256 bytes
DIGITS = {ord(digit): "0" for digit in "123456789"}
MAX_VOCABULARY = 1 << 20  # three ids must fit 63 bits
BLOCK_WORDS = 1 << 16  # scored at a time, so that a book needs no more memory than a page


def normalize(text: str) -> list[str]:
    """The words that the model counts."""
    return split_words(text.lower().translate(DIGITS))


@dataclasses.dataclass(frozen=True)
class NgramModel:
    """Scores words; `train` makes one, `save` and `load` keep it. V is `size`."""

    vocabulary: tuple[str, ...]  # words by id, from SPECIAL
    unigram: np.ndarray  # float32 [V]: p(w), nothing for START
    unigram_gamma: np.ndarray  # float32 [V]: γ(w)
    bigrams: np.ndarray  # int64: pairs of ids, as a table (below)
    bigram_alpha: np.ndarray  # float32
    bigram_gamma: np.ndarray  # float32
    trigrams: np.ndarray  # int64: triples, as a table
    trigram_alpha: np.ndarray  # float32
    spelling: np.ndarray  # float32 [257]: bits of a byte in an unknown word

    def __post_init__(self) -> None:
        ids = {word: i for i, word in enumerate(self.vocabulary, SPECIAL)}
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "size", len(ids) + SPECIAL)

    def ngrams(self) -> tuple[int, int]:
        """How many pairs and triples are kept."""
        return int((self.bigrams >= 0).sum()) - 1, int((self.trigrams >= 0).sum()) - 1

    def bits(self, words: Sequence[str], ids: Int[np.ndarray, " n"] | None = None) -> float:
        """−log2 p of the words of one text, as `normalize` gives them; `ids` are theirs, where they are known already."""
        ids = np.array([self.ids.get(word, UNKNOWN) for word in words], np.int64) if ids is None else ids
        ids, total = np.concatenate([[START, START], ids]), 0.0
        for start in range(0, len(words), BLOCK_WORDS):
            block = ids[start : start + BLOCK_WORDS + 2]
            total -= float(np.log2(self.probabilities(block)).sum(dtype=np.float64))
        return total + self.spelled([words[i] for i in np.flatnonzero(ids[2:] == UNKNOWN)])

    def probabilities(self, ids: Int[np.ndarray, " n_plus_2"]) -> Float[np.ndarray, " n"]:
        """p of each id from the third on, given the two before it."""
        pairs = ids[:-1] * self.size + ids[1:]
        place, known = find(self.bigrams, pairs)
        alpha, gamma = self.bigram_alpha[place[1:]] * known[1:], np.where(known, self.bigram_gamma[place], 1)[:-1]
        lower = alpha + self.unigram_gamma[ids[1:-1]] * self.unigram[ids[2:]]
        place, known = find(self.trigrams, pairs[:-1] * self.size + ids[2:])
        return self.trigram_alpha[place] * known + gamma * lower

    def spelled(self, unknown: Sequence[str]) -> float:
        """Bits of the spelling of words that are not in the vocabulary."""
        counts = np.bincount(np.frombuffer(to_bytes("".join(unknown)), np.uint8), minlength=END + 1)
        counts[END] = len(unknown)
        return float((counts * self.spelling.astype(np.float64)).sum())

    def save(self, path: Path) -> None:
        """Writes the model, whole or not at all; equal models give equal bytes."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays["vocabulary"] = np.frombuffer(to_bytes("\n".join(self.vocabulary)), np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        write_atomic(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> "NgramModel":
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        vocabulary = arrays.pop("vocabulary").tobytes().decode("utf-8", "surrogatepass")
        return NgramModel(tuple(vocabulary.split("\n")) if vocabulary else (), **arrays)


# ------------------------------------------------------------------------------------------------------------------ a table

# 2^b buckets of WAYS keys, the bucket of a key in the top bits of key · MIX, -1 where none is; then, sorted, the few keys whose
# bucket was full. A search reads one line of memory, where a binary search over millions of keys reads twenty.
WAYS = 4
MIX = np.uint64(GOLDEN)


def bucketed(keys: Int[np.ndarray, " n"], *values: np.ndarray) -> list[np.ndarray]:
    """Keys (different, sorted, not negative) as a table, and the values of the keys in the same places."""
    bits = math.ceil(math.log2(max(len(keys), 2) / 2))
    bucket = bucket_of(keys, bits)
    order = np.argsort(bucket, kind="stable")
    bucket = bucket[order]
    way = np.arange(len(keys)) - np.searchsorted(bucket, bucket)
    rest = np.sort(order[way >= WAYS])
    place = np.empty(len(keys), np.int64)
    place[order] = bucket * WAYS + way
    place[rest] = (WAYS << bits) + np.arange(len(rest))
    length = (WAYS << bits) + len(rest) + 1
    tables = [np.full(length, -1 if i == 0 else 0, array.dtype) for i, array in enumerate((keys, *values))]
    tables[0][-1] = np.iinfo(np.int64).max  # the rest is never empty
    for table, array in zip(tables, (keys, *values)):
        table[place] = array
    return tables


def bucket_of(keys: Int[np.ndarray, " n"], bits: int) -> Int[np.ndarray, " n"]:
    """The top bits of a product modulo 2^64."""
    return (keys.astype(np.uint64) * MIX >> np.uint64(63 - bits) >> np.uint64(1)).astype(np.int64)


def find(keys: Int[np.ndarray, " k"], wanted: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """The place of each wanted key in a table, and whether it is there at all."""
    bits = (len(keys) // WAYS).bit_length() - 1
    slots, rest = keys[: WAYS << bits].reshape(-1, WAYS), keys[WAYS << bits :]
    bucket = bucket_of(wanted, bits)
    same = slots[bucket] == wanted[:, None]
    way = same.argmax(1)
    known = same[np.arange(len(wanted)), way]
    place = bucket * WAYS + way
    elsewhere = np.flatnonzero(~known)
    spot = np.searchsorted(rest, wanted[elsewhere])
    place[elsewhere] = (WAYS << bits) + spot
    known[elsewhere] = rest[spot] == wanted[elsewhere]
    return place, known


# --------------------------------------------------------------------------------------------------------------- training


def train(texts: Iterable[str], vocabulary: int = 1 << 16, max_ngrams: int = 1 << 21) -> NgramModel:
    """A model of the texts.

    Args:
      texts: are held as 4 bytes a word, and their n-grams as 8: bound them.
      vocabulary: words that are kept, the most frequent ones; a word met once is always unknown.
      max_ngrams: pairs, and triples, that are kept: the most frequent ones.
    """
    need(
        0 < vocabulary <= MAX_VOCABULARY - SPECIAL, f"vocabulary={vocabulary} must be 1 to {MAX_VOCABULARY - SPECIAL:,}"
    )
    first_seen: dict[str, int] = {}
    numbers = [
        np.array([first_seen.setdefault(word, len(first_seen)) for word in normalize(text)], np.int32) for text in texts
    ]
    words, counts = list(first_seen), np.bincount(np.concatenate([np.zeros(0, np.int32), *numbers]))
    often = sorted((i for i in range(len(words)) if counts[i] > 1), key=lambda i: (-counts[i], words[i]))[:vocabulary]
    ids = np.full(len(words), UNKNOWN, np.int64)
    ids[often] = np.arange(len(often)) + SPECIAL
    size = len(often) + SPECIAL
    triples = [np.concatenate([[START, START], ids[text]]) for text in numbers if len(text)]
    triples = [(text[:-2] * size + text[1:-1]) * size + text[2:] for text in triples]
    keys, seen = np.unique(np.concatenate([np.zeros(0, np.int64), *triples]), return_counts=True)
    rare = Counter({words[i]: int(counts[i]) for i in np.flatnonzero(ids == UNKNOWN)})
    return estimate(tuple(words[i] for i in often), keys, seen, max_ngrams, spelling_bits(rare))


def estimate(
    vocabulary: tuple[str, ...],
    trigrams: Int[np.ndarray, " n"],
    counts: Int[np.ndarray, " n"],
    max_ngrams: int,
    spelling: Float[np.ndarray, "257"],
) -> NgramModel:
    """Kneser-Ney from the counts of the trigrams: an order below counts in how many contexts it was met."""
    size = len(vocabulary) + SPECIAL
    bigrams, contexts = np.unique(trigrams % (size * size), return_counts=True)
    continuations = np.bincount(bigrams % size, minlength=size)
    trigrams, trigram_alpha = keep(trigrams, shares(trigrams // size, counts), counts, max_ngrams)
    kept, alpha = keep(bigrams, shares(bigrams // size, contexts), contexts, max_ngrams)
    bigrams = np.union1d(kept, trigrams // size)  # a context is there though it was not worth keeping as a pair
    bigram_alpha = np.zeros(len(bigrams), np.float32)
    bigram_alpha[np.searchsorted(bigrams, kept)] = alpha
    bigram_gamma, unigram_gamma = np.ones(len(bigrams)), np.ones(size)
    np.subtract.at(bigram_gamma, np.searchsorted(bigrams, trigrams // size), trigram_alpha)
    np.subtract.at(unigram_gamma, bigrams // size, bigram_alpha)
    unigram = shares(np.zeros(size, np.int64), continuations).astype(np.float64)
    unigram[1:] += (1 - unigram.sum()) / (size - 1)  # all but START
    return NgramModel(
        vocabulary,
        unigram.astype(np.float32),
        positive(unigram_gamma),
        *bucketed(bigrams, bigram_alpha, positive(bigram_gamma)),
        *bucketed(trigrams, trigram_alpha),
        spelling,
    )


def shares(contexts: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """α: (count − discount) / (all counts of the context), the discount estimated from how many were met once and twice."""
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once and twice else 0.5
    _, which = np.unique(contexts, return_inverse=True)
    totals = np.bincount(which, counts) if len(counts) else np.zeros(0)
    return (np.maximum(counts - discount, 0) / np.maximum(totals[which], 1)).astype(np.float32)


def keep(keys: np.ndarray, alpha: np.ndarray, counts: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The most frequent ones, still sorted by key; of equals the first."""
    chosen = np.sort(np.argsort(-counts, kind="stable")[:limit])
    return keys[chosen], alpha[chosen]


def positive(gamma: np.ndarray) -> np.ndarray:
    """Rounding must not make a probability 0."""
    return np.maximum(gamma, 1e-6).astype(np.float32)


def spelling_bits(words: Counter) -> Float[np.ndarray, "257"]:
    """Bits of each byte, and of the end, in the words met too rarely to know; one of each is assumed."""
    counts = np.ones(END + 1)
    for word, number in words.items():
        np.add.at(counts, np.frombuffer(to_bytes(word), np.uint8), number)
        counts[END] += number
    return -np.log2(counts / counts.sum()).astype(np.float32)
