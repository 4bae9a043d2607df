"""C4's rules (Raffel et al. 2020, arXiv:1910.10683; mC4: Xue et al. 2021, arXiv:2010.11934), line by line."""

import collections
import dataclasses
import itertools
import re
from typing import ClassVar

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.rules import check_counts
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.data.words import find_sentences


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
            if len(full) < len(lines):
                removed["blank"] += len(lines) - len(full)
            lines = full
        for line in lines:
            given = line  # citations are among the words
            if len(line) > longest and max(map(len, line.split())) > longest:
                removed["long_word"] += 1
                continue
            if cite and "[" in line:
                line, number = CITATION.subn("", line)
                removed["citation"] += number
            if self.terminal_punctuation and (not line.endswith(LINE_ENDS) or line.endswith("...")):
                removed["no_terminal_punctuation"] += 1
                continue
            if least and len(given.split(None, least - 1)) < least:  # no more than are wanted: the rest stays in one
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
