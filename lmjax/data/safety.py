"""Toxic, adult, violent and hateful documents, by lists of words with weights: scored for each category, then dropped or tagged.

A category's score is the weighted hits per 1,000 words. Words count only whole (Scunthorpe, Essex and analysis are innocent), the
longest at a place counts, and one word, however often, is no verdict: a document needs several different ones. The lists of
`lists/<language>/<category>.txt` come with lmjax; files of the user add to them, or make categories of their own.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from etils import epath

from lmjax.config import did_you_mean, need
from lmjax.data.document import Document
from lmjax.data.stage import Apply, Drop, MapStage, Tally
from lmjax.data.words import UNSPACED, split_words
from lmjax.errors import UserError

LISTS = Path(__file__).parent / "lists"
CATEGORIES = ("toxic", "adult", "violent", "hate")
WITHOUT_SPACES = re.compile(f"[{UNSPACED}]")
SHOWN = 5  # words that a drop names


class Entry(NamedTuple):
    """A word or phrase of a list."""

    category: str
    weight: float


@dataclasses.dataclass(frozen=True)
class Safety(MapStage):
    """Scores documents by category in `meta.safety`, and drops those above a threshold."""

    name: ClassVar[str] = "safety"

    categories: tuple[str, ...] = CATEGORIES  # bundled ones that are used
    # of the bundled lists; a document whose `meta.language` is known meets that one alone
    languages: tuple[str, ...] = ("en",)
    # category → file, for documents of every language: a word or phrase a line, then a tab and a weight where it is not 1
    lists: dict[str, str] = dataclasses.field(default_factory=dict)
    action: Literal["drop", "tag"] = "drop"  # for a document above the threshold; scores are noted in any case
    # by category, in place of `action`
    actions: dict[str, Literal["drop", "tag"]] = dataclasses.field(default_factory=dict)
    threshold: float = 10.0  # weighted hits per 1,000 words: one word in a hundred
    thresholds: dict[str, float] = dataclasses.field(default_factory=dict)  # by category, in place of `threshold`
    min_distinct: int = 3  # different words of a category, below which a document is never above its threshold

    def __post_init__(self) -> None:
        for category in self.categories:
            need(
                category in CATEGORIES,
                f"safety.categories: no bundled {category!r}{did_you_mean(category, CATEGORIES)}",
            )
        for category in self.lists:
            need(
                re.fullmatch("[a-z0-9_]+", category) is not None,
                f"safety.lists: {category!r} must be lower case, digits and _",
            )
        for field in ("actions", "thresholds"):
            for category in getattr(self, field):
                known = self.known()
                need(category in known, f"safety.{field}: no such category {category!r}{did_you_mean(category, known)}")
        for value in (self.threshold, *self.thresholds.values()):
            need(value > 0, "safety.threshold must be above 0: weighted hits per 1,000 words")
        need(self.min_distinct >= 1, "safety.min_distinct must be at least 1")
        for language in self.languages:
            known = sorted(path.name for path in LISTS.iterdir() if path.is_dir())
            need(language in known, f"safety.languages: no bundled list for {language!r}; there are {', '.join(known)}")
        need(bool(self.known()), "safety has no lists: set categories, or lists")

    def known(self) -> tuple[str, ...]:
        """The categories, each once."""
        return tuple(dict.fromkeys((*self.categories, *self.lists)))

    def files(self) -> Sequence[str]:
        """The user's lists."""
        ahocorasick()
        for path in self.lists.values():
            read_own(path)
        return tuple(self.lists.values())

    def open(self, folder: Path) -> Apply:
        """Reads the lists and builds their automatons: one for each language, one for documents of no known language."""
        own = [(category, read_own(path)) for category, path in self.lists.items()]
        bundled = {language: list(self.bundled(language)) for language in self.languages}
        matchers = {language: Matcher(own + bundled[language]) for language in self.languages}
        every = Matcher(own + [item for language in self.languages for item in bundled[language]])
        return functools.partial(self.judge, matchers, every, Matcher(own))

    def bundled(self, language: str) -> Iterator[tuple[str, str]]:
        """(category, list) of a language."""
        for category in self.categories:
            path = LISTS / language / f"{category}.txt"
            if path.exists():
                yield category, path.read_text("utf-8")

    def judge(
        self, matchers: dict[str, "Matcher"], every: "Matcher", own: "Matcher", document: Document, tally: Tally
    ) -> Document | Drop:
        """Scores one document, then asks the thresholds."""
        language = document.meta.get("language")
        hits = (matchers.get(language, own) if isinstance(language, str) else every).count(document.text)
        if not hits:
            return document
        words = max(1, len(split_words(document.text)))
        scores: dict[str, float] = {}
        worst, drop = 0.0, None
        for category in self.known():
            found = {word: number for (word, kind), number in hits.items() if kind == category}
            if not found:
                continue
            weights = sum(number for number, _ in found.values())
            scores[category] = round(1000 * weights / words, 2)
            for word, (_, number) in found.items():
                tally.add("safety_words", f"{category}: {word}", number)
            over = scores[category] / self.thresholds.get(category, self.threshold)
            if over < 1 or len(found) < self.min_distinct:
                continue
            tally.add("safety", category)
            if self.actions.get(category, self.action) == "drop" and over > worst:
                top = sorted(found, key=lambda word: (-found[word][0], word))[:SHOWN]
                worst, drop = over, Drop(category, {"score": scores[category], "words": top})
        return drop or dataclasses.replace(document, meta=document.meta | {"safety": scores})


def ahocorasick() -> Any:
    """The library that finds many words at once."""
    try:
        import ahocorasick_rs
    except ImportError as error:
        raise UserError("stage safety needs ahocorasick_rs: pip install ahocorasick_rs") from error
    return ahocorasick_rs


class Matcher:
    """Finds the words of lists in a text.

    Args:
      lists: (category, text of a list); of a word that two name, the first counts.

    Raises:
      UserError: a weight is none.
    """

    def __init__(self, lists: Sequence[tuple[str, str]]):
        library = ahocorasick()
        entries: dict[str, Entry] = {}
        for category, text in lists:
            for word, weight in read_list(text, category):
                entries.setdefault(word, Entry(category, weight))
        self.words, self.entries = list(entries), list(entries.values())
        self.automaton = library.AhoCorasick(self.words)
        # beside a sign, and in scripts without spaces, a word needs no boundary
        self.left = [bounded(word[0]) for word in self.words]
        self.right = [bounded(word[-1]) for word in self.words]

    def count(self, text: str) -> dict[tuple[str, str], tuple[float, int]]:
        """(word, category) → (weighted hits, hits)."""
        text = text.lower().replace("\n", " ")
        try:
            matches = self.automaton.find_matches_as_indexes(text, overlapping=True)
        except UnicodeEncodeError:  # lone surrogates
            text = text.encode("utf-8", "replace").decode()
            matches = self.automaton.find_matches_as_indexes(text, overlapping=True)
        whole = [match for match in matches if self.is_whole(text, *match)]
        hits: dict[tuple[str, str], tuple[float, int]] = {}
        end = 0
        for which, start, stop in sorted(whole, key=lambda match: (match[1], -match[2])):
            if start < end:
                continue
            end, entry = stop, self.entries[which]
            weight, number = hits.get(key := (self.words[which], entry.category), (0.0, 0))
            hits[key] = (weight + entry.weight, number + 1)
        return hits

    def is_whole(self, text: str, which: int, start: int, stop: int) -> bool:
        """Whether a match stands as a word of its own."""
        if self.left[which] and start and joins(text[start - 1]):
            return False
        return not (self.right[which] and stop < len(text) and joins(text[stop]))


def read_own(path: str) -> str:
    """The text of a user's list.

    Raises:
      UserError: it cannot be read, or is no UTF-8.
    """
    try:
        return epath.Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"safety.lists: no such file: {path}") from error
    except OSError as error:
        raise UserError(f"safety.lists: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"safety.lists: {path} is not UTF-8 ({error}): save it in UTF-8") from error


def read_list(text: str, name: str) -> Iterator[tuple[str, float]]:
    """(word, weight) of each line."""
    for line in text.splitlines():
        word, _, weight = line.partition("\t")
        word = " ".join(word.lower().split())
        if not word or word.startswith("#"):
            continue
        try:
            yield word, float(weight) if weight.strip() else 1.0
        except ValueError as error:
            raise UserError(f"safety: list {name!r}: the weight of {word!r} is {weight!r}, not a number") from error


def bounded(sign: str) -> bool:
    """Whether a word that begins or ends so must be apart from its neighbours."""
    return joins(sign) and not WITHOUT_SPACES.match(sign)


@functools.lru_cache(4096)
def joins(sign: str) -> bool:
    """Whether a sign is part of a word: letters, digits, `_`, and marks on letters."""
    return sign.isalnum() or sign == "_" or unicodedata.category(sign)[0] == "M"
