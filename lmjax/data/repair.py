"""Characters and white space: wrong decodings (mojibake), control and invisible characters, line ends, NFC.

All is built to be quick where there is nothing to do: a text is searched by classes within the basic plane, which Python's `re`
looks up in a table, and only what was found is replaced.
"""

import functools
import re
import unicodedata

from lmjax.data.stage import Tally

# scripts that need joiners: Arabic, Syriac, N'Ko, the scripts of India, Tibetan, Burmese, Khmer, Mongolian; and emoji
JOINED = (
    "\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1780-\u18af\ufb50-\ufdff\ufe70-\ufefc"
    "\u2190-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff"
)
KINDS = {  # what is taken out of a text: pattern of a run of it, and what takes the place of each character
    "surrogate": (re.compile("[\ud800-\udfff]+"), "\ufffd"),
    "control": (re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]+"), ""),
    "bidi": (re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]+"), ""),
    "zero_width": (re.compile("[\u00ad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff]+"), ""),
    "joiner": (re.compile(f"(?<![{JOINED}\u200c\u200d])[\u200c\u200d]+"), ""),
    "noncharacter": (re.compile("[\ufdd0-\ufdef\ufff9-\ufffc\ufffe\uffff]+"), ""),
    "space": (re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]+"), " "),
    "tag": (re.compile("[\U000e0000-\U000e007f]+"), ""),
}
UNCLEAN = re.compile(  # all of them within the basic plane, and the line ends
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    "\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffc\ufffe\uffff]"
)
BEYOND = re.compile("[\U00010000-\U0010ffff]")  # the basic plane
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
BLANK_LINES = re.compile("\n{4,}")
MAX_MARKS = 30  # combining marks in a row (Unicode's stream-safe format): to sort more takes the square of time


def clean_text(text: str, tally: Tally, mend: bool = True) -> str:
    """Text in NFC of characters that are seen; lines end in a line feed."""
    if mend and not text.isascii():
        text = mend_lines(text, tally)
    found = "".join(set(UNCLEAN.findall(text)))
    if found and LINE_ENDS.search(found):
        text = LINE_ENDS.sub("\n", text)
    if text.isascii() and not found:
        return text
    beyond = not text.isascii() and BEYOND.search(text) is not None
    for kind, (pattern, instead) in KINDS.items():
        if pattern.search(found) or (beyond and kind == "tag"):
            number = sum(map(len, pattern.findall(text)))
            if number:  # a joiner may be where it belongs
                tally.add("characters", kind, number)
                text = pattern.sub(lambda run, sign=instead: sign * len(run[0]), text)
    return text if text.isascii() else compose(text, beyond, tally)


def compose(text: str, beyond: bool, tally: Tally) -> str:
    """NFC, after runs of combining marks that no language needs were cut."""
    pattern = marks(beyond)
    if pattern.search(text) is not None:
        text, number = pattern.subn(r"\1", text)
        tally.add("characters", "marks_in_a_row", number)
    return unicodedata.normalize("NFC", text)


@functools.cache
def marks(beyond: bool) -> re.Pattern[str]:
    """More combining marks in a row than any language needs; within the basic plane, or of all."""
    ranges: list[list[int]] = []
    for code in filter(lambda code: unicodedata.combining(chr(code)), range(0x300, 0x20000 if beyond else 0x10000)):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    signs = "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
    return re.compile(f"([{signs}]{{{MAX_MARKS}}})[{signs}]+")


def tidy(text: str) -> str:
    """No white space at the ends of lines, at most two blank lines in a row, none around the text; what opens a line stays."""
    text = BLANK_LINES.sub("\n\n\n", text) if "\n\n\n\n" in text else text  # first, or a line costs what a letter does
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    return (BLANK_LINES.sub("\n\n\n", text) if "\n\n\n\n" in text else text).strip("\n")


# ------------------------------------------------------------------------------------------------------------ wrong charset


@functools.cache
def suspicious() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A character without which ftfy sees nothing wrong, and a run of such with at most 5 others between."""
    from ftfy.badness import MOJIBAKE_CATEGORIES

    usual = ("common", "lower_common", "upper_common")  # signs and letters that are wrong only beside others
    signs = "".join(signs for name, signs in MOJIBAKE_CATEGORIES.items() if name not in usual) + "\u0402\u045e"
    return re.compile(f"[{signs}]"), re.compile(f"[{signs}](?:[^{signs}\n]{{0,5}}[{signs}])*+")


def around(text: str) -> str:
    """The surroundings of suspicious characters: all that ftfy's check could find fault with, and little else."""
    runs = suspicious()[1].finditer(text)
    return "\n".join([text[max(0, run.start() - 5) : run.end() + 3] for run in runs])


def mend_lines(text: str, tally: Tally) -> str:
    """Mends lines that were UTF-8 and were read as something else; the check for them is dear, so it sees what may fail it."""
    from ftfy import fix_encoding
    from ftfy.badness import is_bad

    sign = suspicious()[0]
    if sign.search(text) is None or not is_bad(around(text)):
        return text
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if sign.search(line) and is_bad(around(line)) and (mended := fix_encoding(line)) != line:
            lines[i] = mended
            tally.add("mended", "lines")
    return "\n".join(lines)
