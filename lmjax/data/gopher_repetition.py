"""Gopher's repetition rules (Rae et al. 2021, arXiv:2112.11446): whether a text says the same again.

Runs of words are compared by the polynomial hash of their characters, H(i) = Σ_{j<i} c_j b^j modulo 2^64: of those from i to k it
is (H(k) − H(i)) b^-i, so all n-grams of a text cost a few array operations, whatever n.
"""

import dataclasses
import re
from typing import ClassVar, NamedTuple

import numpy as np

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.hashing import GOLDEN, powers
from lmjax.data.rules import above, check_shares, count_duplicates, shown
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.data.words import split_words


@dataclasses.dataclass(frozen=True)
class GopherRepetition(MapStage):
    """Whether a text says the same again: paragraphs, lines, and runs of words."""

    name: ClassVar[str] = "gopher_repetition"

    max_duplicate_paragraphs: float | None = 0.30  # share that stood before in the text; empty lines part paragraphs
    max_duplicate_paragraph_characters: float | None = 0.20  # what they hold of the text's characters
    max_duplicate_lines: float | None = 0.30  # the same of lines that are not empty
    max_duplicate_line_characters: float | None = 0.20
    # n → share of the text's characters in all occurrences of its most frequent n-gram of words
    top_ngrams: dict[str, float] = dataclasses.field(default_factory=lambda: {"2": 0.20, "3": 0.18, "4": 0.16})
    # n → share of the text's characters in n-grams of words that stood before, none counted twice
    duplicate_ngrams: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"5": 0.15, "6": 0.14, "7": 0.13, "8": 0.12, "9": 0.11, "10": 0.10}
    )

    def __post_init__(self):
        check_shares(self, "max_duplicate_paragraphs", "max_duplicate_paragraph_characters")
        check_shares(self, "max_duplicate_lines", "max_duplicate_line_characters")
        for field in ("top_ngrams", "duplicate_ngrams"):
            for n, limit in getattr(self, field).items():
                need(n.isdecimal() and int(n) > 0, f"{self.name}.{field}: {n!r} must be a number of words, such as '5'")
                need(0 <= limit <= 1, f"{self.name}.{field}.{n}={limit} must be a share from 0 to 1")

    def apply(self, document: Document, tally: Tally) -> Verdict:
        """Keeps the document, or names the first rule that it breaks."""
        if not document.text:
            return Drop("empty")
        return self.judge_parts(document.text) or self.judge_ngrams(document.text) or document

    def judge_parts(self, text: str) -> Drop | None:
        """Paragraphs and lines that stood before."""
        paragraphs = PARAGRAPH.split(text.strip())
        number, size = count_duplicates(paragraphs)
        if above(number / len(paragraphs), self.max_duplicate_paragraphs):
            return Drop("duplicate_paragraphs", shown(number / len(paragraphs)))
        if above(size / len(text), self.max_duplicate_paragraph_characters):
            return Drop("duplicate_paragraph_characters", shown(size / len(text)))
        lines = split_lines(text)
        number, size = count_duplicates(lines)
        if above(number / len(lines), self.max_duplicate_lines):
            return Drop("duplicate_lines", shown(number / len(lines)))
        if above(size / len(text), self.max_duplicate_line_characters):
            return Drop("duplicate_line_characters", shown(size / len(text)))
        return None

    def judge_ngrams(self, text: str) -> Drop | None:
        """Runs of words, by their hashes."""
        hashes = hash_words(split_words(text))
        for n, limit in ascending(self.top_ngrams):
            size = top_ngram_characters(hashes, n) / len(text)
            if size > limit:
                return Drop(f"top_{n}_gram", shown(size))
        for n, limit in ascending(self.duplicate_ngrams):
            size = duplicate_ngram_characters(hashes, n) / len(text)
            if size > limit:
                return Drop(f"duplicate_{n}_grams", shown(size))
        return None


def ascending(limits: dict[str, float]) -> list[tuple[int, float]]:
    """(n, limit), small n first, whatever the order in a config."""
    return sorted((int(n), limit) for n, limit in limits.items())


PARAGRAPH = re.compile(r"\n{2,}")


def split_lines(text: str) -> list[str]:
    r"""The text cut at each run of \n: as `re.split("\n+", text)`, faster."""
    lines = text.split("\n")
    inner = list(filter(None, lines[1:-1]))
    return [lines[0], *inner, lines[-1]] if len(lines) > 1 else lines


class Hashes(NamedTuple):
    """What hashes of n-grams are made of, for each word and the end."""

    place: np.ndarray  # int64: characters of the words before
    prefix: np.ndarray  # uint64: the polynomial hash of these characters, mod 2⁶⁴
    inverse: np.ndarray  # uint64: GOLDEN to the power of minus their number

    @property
    def num_words(self) -> int:
        """How many there are."""
        return len(self.place) - 1

    def joined(self, n: int) -> np.ndarray:
        """Hashes of the n-grams of words, written without spaces."""
        return (self.prefix[n:] - self.prefix[:-n]) * self.inverse[:-n]

    def lengths(self, n: int) -> np.ndarray:
        """Characters of the n-grams, without spaces."""
        return self.place[n:] - self.place[:-n]


BLOCK = 1 << 15  # characters hashed at a time: the powers of so many are made


def hash_words(words: list[str]) -> Hashes:
    """Prefix hashes at the places of words; equal runs of characters have equal hashes, others differ but for chance."""
    power, inverse = powers(BLOCK + 1)
    joined = "".join(words)
    place = np.zeros(len(words) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=place[1:])
    hashes = Hashes(place, np.zeros(len(place), np.uint64), np.ones(len(place), np.uint64))
    before = 0  # the hash of the blocks before, and the powers at their end
    first = 1
    for start in range(0, len(joined), BLOCK):
        codes = np.frombuffer(joined[start : start + BLOCK].encode("utf-32-le", "surrogatepass"), np.uint32)
        values = spread(codes + np.uint64(1)) * power[: len(codes)]
        sums = np.cumsum(values) * np.uint64(pow(GOLDEN, start, 1 << 64)) + np.uint64(before)
        last = int(np.searchsorted(place, start + len(values), "right"))
        local = place[first:last] - start
        hashes.prefix[first:last] = sums[local - 1]
        hashes.inverse[first:last] = inverse[local] * np.uint64(pow(GOLDEN, -start, 1 << 64))
        before, first = int(sums[-1]), last
    return hashes


def spread(values: np.ndarray) -> np.ndarray:
    """Each number as another that says nothing of its size: one to one."""
    values = values * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def places_of(keys: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Where the hashes are among `keys`, which are few and in order: the leading bits settle most, a search the rest."""
    leading = np.zeros(1 << 16, bool)
    leading[keys >> np.uint64(48)] = True
    places = np.flatnonzero(leading[hashes >> np.uint64(48)])
    found = hashes[places]
    return places[keys[np.minimum(np.searchsorted(keys, found), len(keys) - 1)] == found]


def top_ngram_characters(hashes: Hashes, n: int) -> int:
    """Characters, spaces between words counted, of all occurrences of the most frequent n-gram; of equals the first counts."""
    if n > hashes.num_words:
        return 0
    words = spread(hashes.joined(1))  # or the sum of two words would be that of others, of the same characters
    mixed = words
    for i in range(1, n):
        mixed = mixed[:-1] * np.uint64(GOLDEN) + words[i:]
    ordered = np.sort(mixed)
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = np.concatenate([[0], starts, [len(ordered)]])
    counts = np.diff(starts)
    most = int(counts.max())
    tops = ordered[starts[:-1][counts == most]]
    first = int(places_of(tops, mixed)[0]) if most > 1 else 0
    return (int(hashes.place[first + n] - hashes.place[first]) + n - 1) * most


def duplicate_ngram_characters(hashes: Hashes, n: int) -> int:
    """Characters of the n-grams that stood before; after one of them the search goes on behind it."""
    if n > hashes.num_words:
        return 0
    joined = hashes.joined(n)
    ordered = np.sort(joined)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return 0
    places = places_of(twice, joined)
    seen, total, free = set(), 0, 0
    for place, key, size in zip(places.tolist(), joined[places].tolist(), hashes.lengths(n)[places].tolist()):
        if place < free:
            continue
        if key in seen:
            total, free = total + size, place + n
        seen.add(key)
    return total
