r"""Words and sentences, as all stages count them.

A word is a run of letters, digits and their marks (vowel signs, accents, joiners), or one sign. The rules of the field depend on
the splitter: their ratios count signs among the words. Scripts that write without spaces (Han, kana, Thai, Lao, Khmer, Burmese)
give one word a character, or a Chinese page would be a handful of enormous words. White space, and nothing else, is left out.
"""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator

import numpy as np

SMALL = 600  # characters from which arrays are the faster way
ASSIGNED = 0x33480  # above stand signs, private characters, and some marks
CACHED_CHARACTERS = 1 << 20  # longer texts are split anew each time: their words take fifty times their room
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
ASCII_WORD = re.compile(r"[a-zA-Z0-9_]+(?:'[a-zA-Z0-9_]+)*|[^\w\s]")  # explicit, for `\w` is slower
INVISIBLE = "\u00ad\u200c\u200d"  # soft hyphen and joiners stand within words


def split_words(text: str) -> list[str]:
    """Words and signs in order. "Don't stop, 3.5!" → Don't stop , 3 . 5 !

    The stages that follow one another ask for the words of the same text: the list is shared, do not change it.
    """
    return cached_words(text) if len(text) <= CACHED_CHARACTERS else find_words(text)


def find_words(text: str) -> list[str]:
    """The words, found anew: by patterns, or the same by arrays, which is faster but takes a while to begin and much room."""
    if SMALL <= len(text) <= CACHED_CHARACTERS:
        return part_words(text)
    return (ASCII_WORD if text.isascii() else unicode_word()).findall(text)


cached_words = functools.lru_cache(maxsize=2)(find_words)


@functools.cache
def unicode_word() -> re.Pattern:
    """The pattern of a word in any script: each alternative starts unlike the others and none goes back, so time is linear."""
    marks, letters = as_class(mark_codes()) + INVISIBLE, rf"[^\W{UNSPACED}]++"
    run = rf"{letters}(?:[{marks}]++(?:{letters})?)*+"
    return re.compile(rf"[{UNSPACED}][{marks}]*+|{run}(?:['’]{run})*+|[^\w\s][{marks}]*+")


@functools.cache
def mark_codes() -> list[int]:
    """All combining marks (Unicode's M)."""
    blocks = (range(0x300, ASSIGNED), range(0xE0100, 0xE01F0))
    return [code for block in blocks for code in block if unicodedata.category(chr(code))[0] == "M"]


def as_class(codes: list[int]) -> str:
    """The inside of a character class, as ranges: a class of single characters is slow to search."""
    starts = [code for code, before in zip(codes, [-1, *codes]) if code != before + 1]
    ends = [code for code, after in zip(codes, [*codes[1:], -1]) if code != after - 1]
    return "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends))


# ----------------------------------------------------------------------------------------------------------- words by arrays

SPACE, LETTER, SIGN, MARK = range(4)  # a letter of a script without spaces counts as a sign: both stand alone


@functools.cache
def kinds() -> np.ndarray:
    """The kind of each character."""
    table = np.full(sys.maxunicode + 1, SIGN, np.uint8)
    assigned = list(map(chr, range(ASSIGNED)))
    table[:ASSIGNED][[c.isalnum() or c == "_" for c in assigned]] = LETTER
    table[:ASSIGNED][[c.isspace() for c in assigned]] = SPACE
    for start, end in re.findall("(.)-(.)", UNSPACED):
        table[ord(start) : ord(end) + 1] = SIGN
    table[mark_codes()] = table[list(map(ord, INVISIBLE))] = MARK
    return table


@functools.cache
def joins() -> np.ndarray:
    """[kind of a word's last letter or sign, kind of the next character] → whether a space must part the two."""
    table = np.zeros((4, 4), bool)
    table[[LETTER, SIGN, SIGN], [SIGN, LETTER, SIGN]] = True
    return table.ravel()


def part_words(text: str) -> list[str]:
    """The words, by putting a space wherever two meet."""
    ascii = text.isascii()
    encoding, width = ("ascii", np.uint8) if ascii else ("utf-32-le", np.uint32)
    codes = np.frombuffer(text.encode(encoding, "surrogatepass"), width)
    kind = kinds()[codes]
    head = kind if ascii else carry_marks(kind)
    if "'" in text or "’" in text:
        quotes = np.flatnonzero((codes[1:-1] == ord("'")) | (codes[1:-1] == ord("’"))) + 1
        quotes = quotes[(head[quotes - 1] == LETTER) & (kind[quotes + 1] == LETTER)]
        kind[quotes] = head[quotes] = LETTER
    gaps = np.flatnonzero(joins()[(head[:-1] << 2) | kind[1:]]) + 1
    return np.insert(codes, gaps, ord(" ")).tobytes().decode(encoding, "surrogatepass").split()


def carry_marks(kind: np.ndarray) -> np.ndarray:
    """The kind of each character, for a mark that of what bears it; a mark after white space (in `kind`, too) is a sign."""
    if not (marks := kind == MARK).any():
        return kind
    stray = marks.copy()
    stray[1:] &= kind[:-1] == SPACE
    kind[stray] = SIGN
    bearer = np.where(kind == MARK, 0, np.arange(len(kind)))
    return kind[np.maximum.accumulate(bearer)]


# --------------------------------------------------------------------------------------------------------------- sentences

# Unicode's Sentence_Terminal, with the Khmer signs that end a section, without the small dots and the forms for vertical text
TERMINAL_RANGES = """21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736
17d4-17d6 17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e
2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01
ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df
11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43
11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88"""


def characters(ranges: str) -> frozenset[str]:
    """Characters of hexadecimal ranges: "21 61d-61f" """
    bounds = ([int(bound, 16) for bound in part.split("-")] for part in ranges.split())
    return frozenset(chr(code) for bound in bounds for code in range(bound[0], bound[-1] + 1))


TERMINAL = characters(TERMINAL_RANGES)
UNSPACED_END = frozenset("。．！？｡")  # end a sentence without a space behind
ENDS = (
    "".join(sorted(sign for sign in TERMINAL if sign <= "\uffff")) + "…"
)  # the scripts above it cost every search ten times
CLOSING = "\"'”’»)\\]）」』】"
INITIAL = r"(?<! [a-zA-Z]\.(?= (?!\s)))"  # behind the stop of one in the midst of a text, which may hold nothing else
# A class stands first, so that the search is fast, and nothing goes back: linear on a million dots.
BOUNDARY = re.compile(rf"[{ENDS}\n]{INITIAL}[{ENDS}\n]*+[{CLOSING}]*+\s*+")
ABBREVIATIONS = frozenset(re.findall(r"\S+", """mr mrs ms dr prof st vs e.g i.e cf fig figs eq no vol pp ed eds al approx dept
inc ltd jr sr z.b bzw ca"""))  # fmt: skip
LAST_WORD = 12  # characters before a full stop in which an abbreviation is looked for


def split_sentences(text: str) -> list[str]:
    """Sentences without white space around them; a blank line ends one, an abbreviation or an initial does not."""
    return list(find_sentences(text))


def find_sentences(text: str) -> Iterator[str]:
    """The same one by one, so that who has enough need not read on."""
    start = 0
    for match in BOUNDARY.finditer(text):
        if ends_sentence(text, match):
            if sentence := text[start : match.end()].strip():
                yield sentence
            start = match.end()
    if sentence := text[start:].strip():
        yield sentence


def ends_sentence(text: str, match: re.Match) -> bool:
    """Whether a sentence ends in what `BOUNDARY` found."""
    found = match.group()
    if found == ". ":  # the most frequent by far
        return is_full_stop(text, match.start(), match.end())
    signs = found.strip()
    if not signs or "\n\n" in found:
        return found.count("\n") > 1
    if not UNSPACED_END.isdisjoint(signs):
        return True
    if not found[-1].isspace():
        return False  # within a number, a name, an address
    return signs != "." or is_full_stop(text, match.start(), match.end())


def is_full_stop(text: str, start: int, end: int) -> bool:
    """Whether what follows a stop is no small letter, and what stands before it neither abbreviation nor initial."""
    if text[end : end + 1].islower():
        return False
    word = text[max(start - LAST_WORD, 0) : start].rsplit(None, 1)
    before = word[-1].lstrip("(['\"“‘").lower() if word else ""
    return before not in ABBREVIATIONS and not (len(before) == 1 and before.isalpha() and before.isascii())
