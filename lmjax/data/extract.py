"""HTML → main text, by resiliparse (Bevendorff et al. 2018) or trafilatura (Barbaresi 2021), in linear time whatever the page.

The main-content rules of resiliparse cost the square of the depth to which `div` and `article` nest, and its parser the square of
the number of attributes of one tag; so both are cut before it sees the page. The text of the page stays whole.
"""

import re
from collections.abc import Callable
from typing import Any

from lmjax.data.stage import Failed, Tally
from lmjax.data.web import is_panic
from lmjax.errors import UserError

MAX_DEPTH = 512  # tags that lie deeper are taken out; pages of people nest to about 50
MAX_ATTRIBUTES = 250  # of a tag of more than LONG_TAG characters; one with more loses them all
LONG_TAG = 1024
TITLE_CHARACTERS = 300
BLOCK = re.compile(r"<(?:[dD][iI][vV]|[aA][rR][tT][iI][cC][lL][eE])")
# what nests, and what an end tag does not reach out of
NESTED = re.compile(
    r"<(/?)(div|article|table|object|template|button|marquee|applet|select)(?=[\s/>])[^>]*>?", re.IGNORECASE
)
SCOPES = frozenset(("table", "object", "template", "button", "marquee", "applet", "select"))
LONG = re.compile(r">[^>]{1024}")
TAG = re.compile(r"<[a-zA-Z][^\s/>]*")
SURROGATE = re.compile("[\ud800-\udfff]")


def extract(html: str, extract_text: Callable[[Any], str], tally: Tally) -> tuple[str, dict[str, Any]]:
    """Text of a page, and what its head says: title, html_lang, license_link.

    Raises:
      Failed: the parser gave up.
    """
    from resiliparse.parse.html import HTMLTree

    html, surrogates = SURROGATE.subn("\ufffd", html)
    if surrogates:
        tally.add("characters", "surrogate", surrogates)
    html = flatten(trim_tags(html, tally), tally)
    try:
        tree = HTMLTree.parse(html)
        meta = read_head(tree, html)
        return extract_text(tree), meta
    except BaseException as error:
        if is_panic(error) or isinstance(error, ValueError | RuntimeError):
            raise Failed(f"the page cannot be parsed: {error}") from error
        raise


def read_head(tree: Any, html: str) -> dict[str, Any]:
    """What the page says of itself, where it does."""
    root = tree.document.query_selector("html")
    meta = {"title": " ".join((tree.title or "").split())[:TITLE_CHARACTERS]}
    meta["html_lang"] = (root.getattr("lang") or "").strip()[:TITLE_CHARACTERS] if root is not None else ""
    if "license" in html or "LICENSE" in html:
        links = tree.document.query_selector_all("a[rel~=license], link[rel~=license]")
        meta["license_link"] = next((link.getattr("href") for link in links if link.getattr("href")), "")
    return {key: value for key, value in meta.items() if value}


def flatten(html: str, tally: Tally) -> str:
    """The page without the tags that nest deeper than `MAX_DEPTH`."""
    if len(BLOCK.findall(html)) <= MAX_DEPTH:
        return html
    depth, scopes, cut = 0, [], 0  # scopes: the depth at which each open table (and its like) stands

    def keep(match: re.Match) -> str:
        nonlocal depth, cut
        opens, is_scope = not match[1], match[2].lower() in SCOPES
        if opens:
            depth += 1
            scopes.extend([depth] if is_scope else [])
            deep = depth > MAX_DEPTH
        elif is_scope:
            depth = scopes.pop() if scopes else 0
            deep, depth = depth > MAX_DEPTH, max(0, depth - 1)
        else:  # closes nothing outside its scope
            floor = scopes[-1] if scopes else 0
            deep, depth = depth > MAX_DEPTH, max(floor, depth - 1)
        cut += deep
        return "" if deep else match[0]

    html = NESTED.sub(keep, html)
    if cut:
        tally.add("html", "deep_tags", cut)
    return html


def trim_tags(html: str, tally: Tally) -> str:
    """The page with bare tags where they had too many attributes."""
    if LONG.search(">" + html) is None:
        return html
    pieces = html.split(">")
    for i, piece in enumerate(pieces):
        if len(piece) > LONG_TAG and (tag := TAG.search(piece)) and len(piece[tag.end() :].split()) > MAX_ATTRIBUTES:
            pieces[i] = piece[: tag.end()]
            tally.add("html", "tags_without_their_attributes")
    return ">".join(pieces)


# -------------------------------------------------------------------------------------------------------------- extractors


def resiliparse(main_content: bool, links: bool, bullets: bool, alt_text: bool, comments: bool) -> Callable[[Any], str]:
    """The fast one: about 16 times trafilatura's speed. It takes a `ul` that stands almost at the top of a page for a menu."""
    from resiliparse.extract.html2text import extract_plain_text

    return lambda tree: extract_plain_text(
        tree, main_content=main_content, links=links, list_bullets=bullets, alt_texts=alt_text, comments=comments
    )


def trafilatura(main_content: bool, links: bool, bullets: bool, alt_text: bool, comments: bool) -> Callable[[Any], str]:
    """The careful one. `bullets` it always makes; whole pages (`main_content=False`) it gives as `html2txt`."""
    try:
        import trafilatura
    except ImportError as error:
        raise UserError(
            f"extractor='trafilatura' needs it: pip install trafilatura lxml_html_clean ({error})"
        ) from error

    def extract_text(tree: Any) -> str:
        html = tree.document.html
        if not main_content:
            return trafilatura.html2txt(html)
        return trafilatura.extract(html, include_links=links, include_images=alt_text, include_comments=comments) or ""

    return extract_text


EXTRACTORS = {"resiliparse": resiliparse, "trafilatura": trafilatura}
