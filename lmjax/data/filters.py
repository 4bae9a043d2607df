"""Rule filters: each set of rules is a stage whose thresholds are its fields; `None` turns a rule off.

Gopher's (Rae et al. 2021, arXiv:2112.11446), C4's (Raffel et al. 2020, arXiv:1910.10683; mC4: Xue et al. 2021,
arXiv:2010.11934) and FineWeb's (Penedo et al. 2024, arXiv:2406.17557), with the order and strictness of datatrove 0.10; and
the simple rules that guides to the field give. The first rule that a document breaks names its drop.
"""

import collections
import dataclasses
import functools
import itertools
import re
from typing import ClassVar, NamedTuple

import numpy as np

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.data.words import TERMINAL, characters, find_sentences, split_words

# A word of these alone is a sign. ASCII's, those of texts in Chinese, Japanese and European languages, and control characters.
SIGNS = TERMINAL | characters(
    """0-8 b-1f 21-2f 3a-40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001 3008-300d 3010-3011
    ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e"""
)


def share(part: int | float, whole: int) -> float:
    """part / whole; nothing of nothing is 0."""
    return part / whole if whole else 0.0


def above(value: int | float, limit: int | float | None) -> bool:
    """Whether a rule with an upper limit is broken."""
    return limit is not None and value > limit


def below(value: int | float, limit: int | float | None) -> bool:
    """Whether a rule with a lower limit is broken."""
    return limit is not None and value < limit


def shown(value: int | float) -> float:
    """A figure as a drop's detail."""
    return round(float(value), 4)


def check_shares(stage: MapStage, *names: str) -> None:
    """These fields are shares: from 0 to 1."""
    for name in names:
        value = getattr(stage, name)
        need(value is None or 0 <= value <= 1, f"{stage.name}.{name}={value} must be a share from 0 to 1, or none")


def check_counts(stage: MapStage, *names: str) -> None:
    """These fields count something."""
    for name in names:
        value = getattr(stage, name)
        need(value is None or value >= 0, f"{stage.name}.{name}={value} must be at least 0, or none")


def check_order(stage: MapStage, low: str, high: str) -> None:
    """What passes one limit must be able to pass the other."""
    least, most = getattr(stage, low), getattr(stage, high)
    need(
        least is None or most is None or least <= most,
        f"{stage.name}.{low}={least} is above {stage.name}.{high}={most}: nothing would pass",
    )


# ----------------------------------------------------------------------------------------------------------- Gopher, quality


@dataclasses.dataclass(frozen=True)
class GopherQuality(MapStage):
    """Whether a text looks like prose: its length, its words, its signs, its lines."""

    name: ClassVar[str] = "gopher_quality"

    min_words: int | None = 50  # words that are not only signs
    max_words: int | None = 100_000  # the same
    min_word_length: float | None = 3.0  # mean, in characters, of words that are not only signs
    max_word_length: float | None = 10.0  # the same
    max_hashes: float | None = 0.1  # `#` for each word, signs counted
    max_ellipses: float | None = 0.1  # `...` and `…` for each word, signs counted
    max_bullet_lines: float | None = 0.9  # share of lines that begin with `•` or `-`
    max_ellipsis_lines: float | None = 0.3  # share of lines that end with an ellipsis
    min_alphabetic: float | None = 0.8  # share of words, signs counted, with a letter
    min_stop_words: int | None = 2  # different ones
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")  # as written: case counts
    # in place of `stop_words` where meta["language"] is a key; an empty tuple turns the rule off for that language
    language_stop_words: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_shares(self, "max_bullet_lines", "max_ellipsis_lines", "min_alphabetic")
        check_counts(self, "min_words", "max_words", "min_word_length", "max_word_length", "max_hashes", "max_ellipses")
        check_counts(self, "min_stop_words")
        check_order(self, "min_words", "max_words")
        check_order(self, "min_word_length", "max_word_length")
        need(
            (self.min_stop_words or 0) <= len(set(self.stop_words)),
            f"{self.name}.min_stop_words={self.min_stop_words}, but stop_words holds {len(set(self.stop_words))}",
        )

    def apply(self, document: Document, tally: Tally) -> Verdict:
        """Keeps the document, or names the first rule that it breaks."""
        words = split_words(document.text)
        mixed = [word for word in words if not word.isalpha()]  # the others have letters only
        return (
            self.judge_words(words, mixed)
            or self.judge_signs(document.text, len(words))
            or self.judge_letters(len(words), mixed)
            or self.judge_stop_words(document, words)
            or document
        )

    def judge_words(self, words: list[str], mixed: list[str]) -> Drop | None:
        """How many words, and how long."""
        signs = [word for word in mixed if word[0] in SIGNS and (len(word) == 1 or SIGNS.issuperset(word))]
        count = len(words) - len(signs)
        if below(count, self.min_words):
            return Drop("too_few_words", count)
        if above(count, self.max_words):
            return Drop("too_many_words", count)
        length = share(len("".join(words)) - len("".join(signs)), count)
        if below(length, self.min_word_length):
            return Drop("short_words", shown(length))
        if above(length, self.max_word_length):
            return Drop("long_words", shown(length))
        return None

    def judge_signs(self, text: str, words: int) -> Drop | None:
        """Hashes, ellipses, and the lines they make."""
        hashes, ellipses = text.count("#"), text.count("...") + text.count("…")
        if above(share(hashes, words), self.max_hashes):
            return Drop("too_many_hashes", shown(share(hashes, words)))
        if above(share(ellipses, words), self.max_ellipses):
            return Drop("too_many_ellipses", shown(share(ellipses, words)))
        lines = text.splitlines()
        # a line begins with its bullet and ends with its ellipsis: there are no more such lines than such signs
        if above(share(text.count("-") + text.count("•"), len(lines)), self.max_bullet_lines):
            bullets = share(sum(line.lstrip().startswith(("•", "-")) for line in lines), len(lines))
            if above(bullets, self.max_bullet_lines):
                return Drop("bullet_lines", shown(bullets))
        if above(share(ellipses, len(lines)), self.max_ellipsis_lines):
            ends = share(sum(line.rstrip().endswith(("...", "…")) for line in lines), len(lines))
            if above(ends, self.max_ellipsis_lines):
                return Drop("ellipsis_lines", shown(ends))
        return None

    def judge_letters(self, words: int, mixed: list[str]) -> Drop | None:
        """How many words have a letter."""
        alphabetic = sum(len(word) > 1 and any(map(str.isalpha, word)) for word in mixed)
        alphabetic = share(words - len(mixed) + alphabetic, words)
        return Drop("few_alphabetic_words", shown(alphabetic)) if below(alphabetic, self.min_alphabetic) else None

    def judge_stop_words(self, document: Document, words: list[str]) -> Drop | None:
        """How many different stop words stand in the text."""
        wanted = self.language_stop_words.get(str(document.meta.get("language")), self.stop_words)
        if not self.min_stop_words or not wanted:
            return None
        found = 0
        for word in dict.fromkeys(wanted):
            found += word in document.text and word in words  # the first look is quick and often enough
            if found >= self.min_stop_words:
                return None
        return Drop("few_stop_words", found)


# -------------------------------------------------------------------------------------------------------- Gopher, repetition


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


def count_duplicates(parts: list[str]) -> tuple[int, int]:
    """(number, characters) of the parts that stood before."""
    if len(set(parts)) == len(parts):
        return 0, 0
    seen, number, size = set(), 0, 0
    for part in parts:
        if part in seen:
            number, size = number + 1, size + len(part)
        seen.add(part)
    return number, size


class Hashes(NamedTuple):
    """What hashes of n-grams are made of, for each word and the end."""

    place: np.ndarray  # int64: characters of the words before
    prefix: np.ndarray  # uint64: the polynomial hash of these characters, mod 2⁶⁴
    inverse: np.ndarray  # uint64: BASE to the power of minus their number

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


BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
BLOCK = 1 << 15  # characters hashed at a time: the powers of so many are kept


@functools.cache
def powers(number: int) -> tuple[np.ndarray, np.ndarray]:
    """BASE and its inverse to the powers 0 … number, mod 2⁶⁴."""
    tables = np.ones((2, number + 1), np.uint64)
    tables[:, 1:] = np.array([[BASE], [pow(BASE, -1, 1 << 64)]], np.uint64)
    return tuple(np.multiply.accumulate(tables, axis=1))


def hash_words(words: list[str]) -> Hashes:
    """Prefix hashes at the places of words; equal runs of characters have equal hashes, others differ but for chance."""
    power, inverse = powers(BLOCK)
    joined = "".join(words)
    place = np.zeros(len(words) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=place[1:])
    hashes = Hashes(place, np.zeros(len(place), np.uint64), np.ones(len(place), np.uint64))
    before = 0  # the hash of the blocks before, and the powers at their end
    first = 1
    for start in range(0, len(joined), BLOCK):
        codes = np.frombuffer(joined[start : start + BLOCK].encode("utf-32-le", "surrogatepass"), np.uint32)
        values = spread(codes + np.uint64(1)) * power[: len(codes)]
        sums = np.cumsum(values) * np.uint64(pow(BASE, start, 1 << 64)) + np.uint64(before)
        last = int(np.searchsorted(place, start + len(values), "right"))
        local = place[first:last] - start
        hashes.prefix[first:last] = sums[local - 1]
        hashes.inverse[first:last] = inverse[local] * np.uint64(pow(BASE, -start, 1 << 64))
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
        mixed = mixed[:-1] * np.uint64(BASE) + words[i:]
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


# ------------------------------------------------------------------------------------------------------------------------ C4


@dataclasses.dataclass(frozen=True)
class C4(MapStage):
    """Keeps the lines that are sentences; drops what is no text or has too few of them. FineWeb: `terminal_punctuation=False`."""

    name: ClassVar[str] = "c4"

    max_word_characters: int | None = 1000  # a longer word costs its line
    citations: bool = True  # take out [1], [edit], [citation needed]
    terminal_punctuation: bool = True  # a line must end in . ? ! " ' and in no ellipsis
    min_line_words: int | None = 3  # parted by white space
    lorem_ipsum: bool = True  # costs the document
    javascript: bool = True  # "javascript" costs its line
    curly_bracket: bool = True  # costs the document, unless its line went before
    # phrases that cost their line, small letters
    policy: tuple[str, ...] = (
        "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
    )  # fmt: skip
    min_sentences: int | None = 5  # in the lines that are left
    min_long_lines: int | None = None  # mC4: 3 lines, of those left, of `long_line_characters` or more
    long_line_characters: int = 200

    def __post_init__(self):
        check_counts(self, "max_word_characters", "min_line_words", "min_sentences", "min_long_lines")
        check_counts(self, "long_line_characters")
        for phrase in self.policy:
            need(phrase == phrase.lower() != "", f"{self.name}.policy: {phrase!r} must be in small letters, not empty")

    def apply(self, document: Document, tally: Tally) -> Verdict:
        """The document with the lines that passed; what went is tallied by rule."""
        text, removed = document.text, collections.Counter()
        lines = self.judge_lines(text, removed)
        if isinstance(lines, Drop):
            return lines
        if self.min_sentences is not None:
            sentences = count_sentences(lines, self.min_sentences)
            if sentences < self.min_sentences:
                return Drop("too_few_sentences", sentences)
        kept = "\n".join(lines).strip()
        if not kept:
            return Drop("no_lines_left")
        if self.min_long_lines is not None:
            long = sum(len(line) >= self.long_line_characters for line in kept.split("\n"))
            if long < self.min_long_lines:
                return Drop("too_few_long_lines", long)
        for rule, number in removed.items():
            tally.add("c4_lines", rule, number)
        tally.add("c4_lines", "kept", len(lines))
        return document if kept == text else dataclasses.replace(document, text=kept)

    def judge_lines(self, text: str, removed: collections.Counter) -> list[str] | Drop:
        """The lines that pass, or why the document does not."""
        cite = self.citations and "[" in text
        # a rule whose sign is nowhere in the text need not see the lines
        whole = (CITATION.sub("", text) if cite else text).lower()
        banned = [phrase for phrase in self.policy if phrase in whole]
        lorem, script = self.lorem_ipsum and "lorem ipsum" in whole, self.javascript and "javascript" in whole
        bracket, seek = self.curly_bracket and "{" in whole, bool(banned) or lorem or script
        longest = len(text) if self.max_word_characters is None else self.max_word_characters
        least = self.min_line_words or 0
        kept = []
        lines = [line.strip() for line in text.splitlines()]
        if least:
            full = list(filter(None, lines))
            removed += collections.Counter(blank=len(lines) - len(full))
            lines = full
        for line in lines:
            words = line.split(None, least)  # no more than are wanted: the rest stays in one
            if len(line) > longest and max(map(len, line.split())) > longest:
                removed["long_word"] += 1
                continue
            if cite and "[" in line:
                line, number = CITATION.subn("", line)
                removed["citation"] += number
            if self.terminal_punctuation and (not line.endswith(LINE_ENDS) or line.endswith("...")):
                removed["no_terminal_punctuation"] += 1
                continue
            if len(words) < least:
                removed["too_few_words"] += 1
                continue
            small = line.lower() if seek else ""
            if lorem and "lorem ipsum" in small:
                return Drop("lorem_ipsum")
            if script and "javascript" in small:
                removed["javascript"] += 1
            elif bracket and "{" in line:
                return Drop("curly_bracket")
            elif banned and any(phrase in small for phrase in banned):
                removed["policy"] += 1
            else:
                kept.append(line)
        return kept


CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
LINE_ENDS = (".", "?", "!", '"', "'")


def count_sentences(lines: list[str], enough: int) -> int:
    """Sentences of the lines; counting stops where there are enough."""
    sentences = (sentence for line in lines for sentence in find_sentences(line))
    return sum(1 for _ in itertools.islice(sentences, enough))


# ------------------------------------------------------------------------------------------------------------------- FineWeb


@dataclasses.dataclass(frozen=True)
class FineWeb(MapStage):
    """Whether the lines of a text are those of prose: ended, long, not repeated."""

    name: ClassVar[str] = "fineweb"

    min_ended_lines: float | None = 0.12  # share of lines that end in a sentence's last sign, in any script
    max_short_lines: float | None = 0.67  # share of lines of at most `short_line_characters`
    short_line_characters: int = 30
    max_duplicate_characters: float | None = 0.01  # share of characters in lines that stood before
    max_newlines: float | None = 0.3  # line ends for each word, signs counted

    def __post_init__(self):
        check_shares(self, "min_ended_lines", "max_short_lines", "max_duplicate_characters")
        check_counts(self, "short_line_characters", "max_newlines")

    def apply(self, document: Document, tally: Tally) -> Verdict:
        """Keeps the document, or names the first rule that it breaks."""
        text = document.text
        parts = text.split("\n")
        lines = [line for line in filter(None, parts) if not line.isspace()]
        if not lines:
            return Drop("empty")
        ended = sum([line[-1] in TERMINAL for line in lines]) / len(lines)  # lists: faster than generators
        if below(ended, self.min_ended_lines):
            return Drop("few_ended_lines", shown(ended))
        limit = self.short_line_characters
        short = len([line for line in lines if len(line) <= limit]) / len(lines)
        if above(short, self.max_short_lines):
            return Drop("short_lines", shown(short))
        newlines = len(parts) - 1
        repeated = count_duplicates(lines)[1] / (len(text) - newlines)
        if above(repeated, self.max_duplicate_characters):
            return Drop("duplicate_characters", shown(repeated))
        if above(newlines / least_words(text), self.max_newlines):
            newlines = newlines / len(split_words(text))
            if above(newlines, self.max_newlines):
                return Drop("too_many_newlines", shown(newlines))
        return document


def least_words(text: str) -> int:
    """A number of words that a text has at least, quickly: a word begins where ASCII follows a blank. 1 where none does."""
    codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    starts = (codes[:-1] <= ord(" ")) & (codes[1:] - np.uint8(ord(" ") + 1) < 128 - ord(" ") - 1)
    return max(int(np.count_nonzero(starts)), 1)


# -------------------------------------------------------------------------------------------------------------------- simple


@dataclasses.dataclass(frozen=True)
class Simple(MapStage):
    """Three rules that need no language: length, repetition, signs."""

    name: ClassVar[str] = "simple"

    min_characters: int | None = 100
    max_characters: int | None = 100_000
    max_repetition: float | None = 0.3  # share of the n-grams of words that stood before in the text
    repetition_words: int = 3  # n; with 1, a long text of any kind repeats more than 0.3 of its words
    max_symbols: float | None = 0.1  # share of characters that are neither in a word nor white space

    def __post_init__(self):
        check_counts(self, "min_characters", "max_characters")
        check_shares(self, "max_repetition", "max_symbols")
        check_order(self, "min_characters", "max_characters")
        need(self.repetition_words >= 1, f"{self.name}.repetition_words={self.repetition_words} must be at least 1")

    def apply(self, document: Document, tally: Tally) -> Verdict:
        """Keeps the document, or names the first rule that it breaks."""
        length = len(document.text)
        if below(length, self.min_characters):
            return Drop("too_short", length)
        if above(length, self.max_characters):
            return Drop("too_long", length)
        words = split_words(document.text)
        grams = words if self.repetition_words == 1 else list(zip(*(words[i:] for i in range(self.repetition_words))))
        repetition = share(len(grams) - len(set(grams)), len(grams))
        if above(repetition, self.max_repetition):
            return Drop("repetitive", shown(repetition))
        signs = sum(len(word) for word in words if not (word[0].isalnum() or word[0] == "_"))
        if above(share(signs, length), self.max_symbols):
            return Drop("too_many_symbols", shown(share(signs, length)))
        return document
