"""Three simple rules that guides to the field give, and that need no language: length, repetition, signs."""

import dataclasses
from typing import ClassVar

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.rules import above, below, check_counts, check_order, check_shares, share, shown
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.data.words import split_words


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
