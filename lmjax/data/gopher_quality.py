"""Gopher's quality rules (Rae et al. 2021, arXiv:2112.11446): whether a text looks like prose."""

import dataclasses
from typing import ClassVar

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.rules import above, below, check_counts, check_order, check_shares, share, shown
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.data.words import TERMINAL, characters, split_words

# A word of these alone is a sign. ASCII's, those of texts in Chinese, Japanese and European languages, and control characters.
SIGNS = TERMINAL | characters(
    """0-8 b-1f 21-2f 3a-40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001 3008-300d 3010-3011
    ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e"""
)


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
