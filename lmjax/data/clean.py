"""Clean: HTML to main text, boilerplate lines, wrong decodings (mojibake), control and invisible characters, white space, NFC.

What is taken out of a text is tallied: characters by kind, lines by rule. Source code is left as it is but for its line ends.
"""

import dataclasses
import functools
import importlib.util
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lmjax.config import need
from lmjax.data.boilerplate import remove_boilerplate
from lmjax.data.document import Document
from lmjax.data.extract import EXTRACTORS, extract
from lmjax.data.stage import Apply, Drop, MapStage, Tally, Verdict
from lmjax.errors import UserError

# scripts that need joiners: Arabic, Syriac, N'Ko, the scripts of India, Tibetan, Burmese, Khmer, Mongolian; and emoji
JOINED = (
    "\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1780-\u18af\ufb50-\ufdff\ufe70-\ufefc"
    "\u2190-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff"
)
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
KINDS = (  # what is taken out of a text, and what takes its place
    ("surrogate", re.compile("[\ud800-\udfff]"), "\ufffd"),
    ("control", re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]"), ""),
    ("bidi", re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"), ""),
    ("zero_width", re.compile("[\u00ad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff]"), ""),
    ("joiner", re.compile(f"(?<![{JOINED}])[\u200c\u200d]+"), ""),
    ("tag", re.compile("[\U000e0000-\U000e007f]"), ""),
    ("noncharacter", re.compile("[\ufdd0-\ufdef\ufff9-\ufffc\ufffe\uffff]"), ""),
    ("space", re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]"), " "),
)
UNCLEAN = re.compile(  # what any of them begins with, and the line ends: one search tells that nothing is to be done
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f"
    "\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffc\ufffe\uffff\U000e0000-\U000e007f]"
)
MAX_MARKS = (
    30  # combining marks in a row: the Unicode standard's stream-safe format; sorting more takes the square of time
)
MANY_MARKS = re.compile(  # a superset that is found fast, and never in Latin, Han or kana
    "[\u0300-\u2fff\u302a-\u302f\u3099\u309a\ua000-\uabff\ufb1e\ufe20-\ufe2f\U00010000-\U0001ffff]{31}"
)
BLANK_LINES = re.compile("\n{4,}")


@dataclasses.dataclass(frozen=True)
class Clean(MapStage):
    """HTML to text, and text to clean text."""

    name: ClassVar[str] = "clean"

    extractor: Literal["resiliparse", "trafilatura"] = "resiliparse"  # resiliparse is about 16 times as fast
    main_content: bool = True  # without headers, menus, footers, side bars; False: all visible text
    links: bool = False  # targets of links stand in the text
    bullets: bool = True  # list items keep their signs
    alt_text: bool = False  # descriptions of images stand in the text
    comments: bool = False  # readers' comments are part of the text
    max_html_characters: int = 10_000_000  # a longer page is dropped; crawls cut pages at 1 to 5 MB
    boilerplate: Literal["web", "all", "none"] = (
        "web"  # lines by rule are taken out: of what has a URL or was HTML, of all
    )
    menu_lines: int = 8  # so many entries of a menu in a row are taken out of web text whose main content nobody sought (WET); 0: none
    fix_encoding: bool = True  # lines that were decoded by a wrong charset are mended (ftfy)
    code: bool = False  # all documents are source code: nothing but the line ends changes
    code_sources: tuple[str, ...] = ()  # the documents of these sources are

    def __post_init__(self) -> None:
        need(self.max_html_characters > 0, f"clean.max_html_characters={self.max_html_characters} must be positive")
        need(self.menu_lines >= 0, f"clean.menu_lines={self.menu_lines} must not be negative")
        need(self.menu_lines != 1, "clean.menu_lines=1 takes single lines for menus; give 0 or more than 1")

    def files(self) -> Sequence[str]:
        for module in ("trafilatura", "lxml_html_clean") if self.extractor == "trafilatura" else ():
            if importlib.util.find_spec(module) is None:
                raise UserError(
                    f"clean.extractor='trafilatura' needs {module}: pip install trafilatura lxml_html_clean"
                )
        return ()

    def open(self, folder: Path) -> Apply:
        make = EXTRACTORS[self.extractor]
        extract_text = make(self.main_content, self.links, self.bullets, self.alt_text, self.comments)
        return lambda document, tally: self.clean(document, extract_text, tally)

    def clean(self, document: Document, extract_text: Callable[[Any], str], tally: Tally) -> Verdict:
        """The verdict on one document."""
        text, meta = document.text, document.meta
        if self.code or document.source in self.code_sources:
            text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
            return self.result(document, text, meta)
        is_html = meta.get("format") == "html"
        if is_html:
            if len(text) > self.max_html_characters:
                return Drop("html_too_large", len(text))
            text, head = extract(text, extract_text, tally)
            meta = {**head, **meta, "format": "text", "extractor": self.extractor}
        text = tidy(clean_text(text, tally, self.fix_encoding))
        if self.boilerplate == "all" or (self.boilerplate == "web" and (is_html or "url" in meta)):
            sought = is_html and self.main_content  # a table's cells would look like a menu
            text = tidy(remove_boilerplate(text, 0 if sought else self.menu_lines, tally))
        return self.result(document, text, meta)

    @staticmethod
    def result(document: Document, text: str, meta: dict[str, Any]) -> Verdict:
        """The document with its new text, if anything is left."""
        if not text or text.isspace():
            return Drop("empty", len(document.text))
        return dataclasses.replace(document, text=text, meta=meta)


def clean_text(text: str, tally: Tally, mend: bool = True) -> str:
    """Text in NFC of characters that are seen; lines end in \n."""
    if not text.isascii() and mend:
        text = mend_lines(text, tally)
    if UNCLEAN.search(text) is not None:
        text = LINE_ENDS.sub("\n", text)
        for kind, pattern, instead in KINDS:
            text, number = pattern.subn(instead, text)
            if number:
                tally.add("characters", kind, number)
    if text.isascii():
        return text
    if MANY_MARKS.search(text) is not None:
        text, number = marks().subn(r"\1", text)
        if number:
            tally.add("characters", "marks_in_a_row", number)
    return unicodedata.normalize("NFC", text)


def tidy(text: str) -> str:
    """No white space at the ends of lines, at most two blank lines in a row, none around the text; what opens a line stays."""
    lines = BLANK_LINES.sub("\n\n\n", text).split("\n")  # first, or a line costs what a letter does
    text = "\n".join([line.rstrip() for line in lines])
    return BLANK_LINES.sub("\n\n\n", text).strip("\n")


@functools.cache
def marks() -> re.Pattern[str]:
    """More combining marks in a row than any language needs."""
    ranges: list[list[int]] = []
    for code in filter(lambda code: unicodedata.combining(chr(code)), range(0x300, min(0x20000, sys.maxunicode))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    signs = "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
    return re.compile(f"([{signs}]{{{MAX_MARKS}}})[{signs}]+")


# ------------------------------------------------------------------------------------------------------------ wrong charset


@functools.cache
def suspicious() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A character without which ftfy sees nothing wrong, and the surroundings of such, in which it finds what it looks for."""
    from ftfy.badness import MOJIBAKE_CATEGORIES

    usual = ("common", "lower_common", "upper_common")  # signs and letters that are wrong only beside others
    signs = "".join(signs for name, signs in MOJIBAKE_CATEGORIES.items() if name not in usual) + "\u0402\u045e"
    return re.compile(f"[{signs}]"), re.compile(f"(?:[^{signs}\n]{{0,5}}[{signs}])++[^{signs}\n]{{0,3}}")


def mend_lines(text: str, tally: Tally) -> str:
    """Mends lines that were UTF-8 and were read as something else; the check for them is dear, so it sees what may fail it."""
    from ftfy import fix_encoding
    from ftfy.badness import is_bad

    sign, near = suspicious()
    if sign.search(text) is None or not is_bad("\n".join(near.findall(text))):
        return text
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if sign.search(line) and is_bad("\n".join(near.findall(line))) and (mended := fix_encoding(line)) != line:
            lines[i] = mended
            tally.add("mended", "lines")
    return "\n".join(lines)
