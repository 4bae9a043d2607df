"""FineWeb's own rules (Penedo et al. 2024, arXiv:2406.17557): whether the lines of a text are those of prose."""

import dataclasses
from typing import ClassVar

import numpy as np

from lmjax.data.document import Document, to_bytes
from lmjax.data.rules import above, below, check_counts, check_shares, count_duplicates, shown
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.data.words import TERMINAL, split_words


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
    codes = np.frombuffer(to_bytes(text), np.uint8)
    starts = (codes[:-1] <= ord(" ")) & (codes[1:] - np.uint8(ord(" ") + 1) < 128 - ord(" ") - 1)
    return max(int(np.count_nonzero(starts)), 1)
