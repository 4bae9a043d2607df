"""Url: documents of unwanted sites are dropped, by lists of domains and pages that the user brings, and by words in the URL.

A list is a text file (also .gz, .zst): on each line a domain (`example.org`, which means its subdomains too), a page
(`example.org/path`), or a line of a hosts file (`0.0.0.0 example.org`); `#` begins a comment. In memory an entry is 8 bytes, so
lists of millions of domains do.
"""

import dataclasses
import itertools
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from etils import epath

from lmjax.config import need
from lmjax.data.compression import Fault, decompressed, raw_blocks, split_lines
from lmjax.data.document import Document, to_bytes
from lmjax.data.stage import Apply, Drop, MapStage, Tally, Verdict
from lmjax.errors import UserError

HOST_CHARACTERS = 253  # of a name (RFC 1035)
WORD = re.compile(r"[^\W_]+")


@dataclasses.dataclass(frozen=True)
class Url(MapStage):
    """Drops documents by their `meta["url"]`; those without one are kept."""

    name: ClassVar[str] = "url"

    lists: tuple[str, ...] = ()  # files of domains and pages that are blocked
    domains: tuple[str, ...] = ()  # more of them, as a line of such a file
    words: tuple[str, ...] = ()  # whole words of a URL, letters and digits, in any case, that block it
    allow: tuple[str, ...] = ()  # domains that are never blocked

    def __post_init__(self) -> None:
        for word in self.words:
            need(
                WORD.fullmatch(word) is not None,
                f"url.words: {word!r} must be letters and digits only, as URLs are split",
            )
        for entry in (*self.domains, *self.allow):
            need(next(entries([entry]), None) is not None, f"url: {entry!r} is no domain")

    def files(self) -> Sequence[str]:
        for path in self.lists:
            if not epath.Path(path).exists():
                raise UserError(f"url.lists: no such file: {path}")
        return self.lists

    def open(self, folder: Path) -> Apply:
        listed = itertools.chain.from_iterable(map(read_list, self.lists))
        blocked = members(itertools.chain(listed, entries(self.domains)))
        allowed, words = members(entries(self.allow)), frozenset(word.lower() for word in self.words)
        return lambda document, tally: judge(document, blocked, allowed, words, tally)


def judge(
    document: Document,
    blocked: Callable[[list[str]], str | None],
    allowed: Callable[[list[str]], str | None],
    words: frozenset[str],
    tally: Tally,
) -> Verdict:
    """The verdict on one document."""
    url = document.meta.get("url")
    parts = split_url(url) if isinstance(url, str) else None
    if parts is None:
        tally.add("url", "unreadable" if url else "none")
        return document
    host, page = parts
    sites = suffixes(host)
    if allowed(sites) is not None:
        return document
    if (found := blocked([*sites, f"{host}/{page}"])) is not None:
        return Drop("blocked_page" if "/" in found else "blocked_domain", found)
    if words and (hits := words.intersection(WORD.findall(urllib.parse.unquote(f"{host}/{page}").lower()))):
        return Drop("blocked_word_in_url", min(hits))
    return document


def split_url(url: str) -> tuple[str, str] | None:
    """Host (lower case, punycode, without `www.`) and what follows it; None where there is no host."""
    url = url.strip()
    try:
        parts = urllib.parse.urlsplit(url if "://" in url[:12] or url.startswith("//") else f"//{url}")
        host = (parts.hostname or "").strip(".").removeprefix("www.")
        if not host.isascii() and len(host) <= HOST_CHARACTERS:
            host = host.encode("idna").decode()
    except ValueError:  # UnicodeError is one
        return None
    if not host or len(host) > HOST_CHARACTERS:
        return None
    return host, parts.path.strip("/") + (f"?{parts.query}" if parts.query else "")


def suffixes(host: str) -> list[str]:
    """The domains that a host lies in: a.b.org → a.b.org, b.org, org."""
    labels = host.split(".")
    return [".".join(labels[i:]) for i in range(len(labels))]


# ------------------------------------------------------------------------------------------------------------------- lists


def read_list(path: str) -> Iterator[str]:
    """The entries of a file."""
    path = epath.Path(path)
    try:
        with path.open("rb") as file:
            lines = split_lines(decompressed(raw_blocks(file), path.name, path))
            yield from entries(line.decode("utf-8", "replace") for line in lines)
    except (Fault, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def entries(lines: Iterable[str]) -> Iterator[str]:
    """Domains and pages, as `judge` looks for them."""
    for line in lines:
        words = line.partition("#")[0].split()
        if not words or (len(words) == 1 and words[0].startswith(("!", "["))):
            continue
        parts = split_url(words[-1].removeprefix("||").removesuffix("^"))
        if parts is not None and "*" not in parts[0]:
            yield "/".join(parts) if parts[1] else parts[0]


def members(found: Iterable[str]) -> Callable[[list[str]], str | None]:
    """A function that gives the first of some texts that is an entry; entries stand as sorted 64-bit hashes."""
    import xxhash

    table = np.unique(np.fromiter((xxhash.xxh3_64_intdigest(to_bytes(entry)) for entry in found), np.uint64))

    def first(texts: list[str]) -> str | None:
        if not len(table):
            return None
        hashes = np.array([xxhash.xxh3_64_intdigest(to_bytes(text)) for text in texts], np.uint64)
        places = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
        hits = np.flatnonzero(table[places] == hashes)
        return texts[hits[0]] if len(hits) else None

    return first
