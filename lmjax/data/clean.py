"""Clean: HTML to main text, boilerplate lines, wrong decodings (mojibake), control and invisible characters, white space, NFC.

What is taken out of a text is tallied: characters by kind, lines by rule. Source code is left as it is but for its line ends.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lmjax.config import need
from lmjax.data.boilerplate import remove_boilerplate
from lmjax.data.document import Document
from lmjax.data.extract import EXTRACTORS, extract
from lmjax.data.repair import clean_text, tidy
from lmjax.data.stage import Apply, Drop, MapStage, Tally, Verdict
from lmjax.errors import UserError


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
    # lines are taken out by rule: "web" of what has a URL or was HTML, "all" of everything
    boilerplate: Literal["web", "all", "none"] = "web"
    # so many entries of a menu in a row are taken out where no extractor sought the main content (WET); 0: none
    menu_lines: int = 8
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

    def sources_named(self) -> Mapping[str, Iterable[str]]:
        """See `Stage`."""
        return {"code_sources": self.code_sources}

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
        if self.boilerplate == "all" or (self.boilerplate == "web" and (is_html or meta.get("url"))):
            sought = is_html and self.main_content  # a table's cells would look like a menu
            rest = remove_boilerplate(text, 0 if sought else self.menu_lines, tally)
            text = text if rest is text else tidy(rest)
        return self.result(document, text, meta)

    @staticmethod
    def result(document: Document, text: str, meta: dict[str, Any]) -> Verdict:
        """The document with its new text, if anything is left."""
        if not text or text.isspace():
            return Drop("empty", len(document.text))
        return dataclasses.replace(document, text=text, meta=meta)
