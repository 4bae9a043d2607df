"""License: under which licence a document stands, as an SPDX expression, and an allow list.

In this order, the first that says something: an `SPDX-License-Identifier` in the text, the page's rel=license link, a notice at
the head of the text (phrases of the well-known licences), the licence in the metadata, the licence that the config gives for the
source. Expressions are read by `license-expression`: `MIT OR GPL-2.0-only` is allowed where MIT is, `MIT AND GPL-2.0-only`
where both are. It is a reading of what was written, not advice.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.stage import Drop, MapStage, Tally, Verdict
from lmjax.errors import UserError

META_KEYS = ("license", "licence", "licenses", "license_expression", "detected_licenses", "max_stars_repo_licenses")
TAG = re.compile(r"SPDX-License-Identifier:[ \t]{0,9}([^\n\r\"'`|]{1,200})")
TAG_END = re.compile(r"[ \t]*(\*+/|-->|\*\)|#\}|\*\}|--%>|[*#;/-]+)?[ \t]*$")  # of the comment that a tag stands in
CREATIVE_COMMONS = re.compile(
    r"creativecommons\.org/(?:licenses/(by(?:-nc)?(?:-sa|-nd)?|by-nd-nc|sa|nc)/(\d\.\d)|publicdomain/(zero|mark)/1\.0)"
)
ADDRESS = re.compile(
    r"opensource\.org/licenses?/([\w.-]+?)(?:\.(?:php|html))?$|spdx\.org/licenses/([\w.-]+?)(?:\.html)?$|gnu\.org/licenses/(?:old-licenses/)?([la])?gpl-(\d\.\d)"
)
GNU = re.compile(
    r"\b(?:under|governed by|covered by|subject to) (?:(?:\w+ ){0,12}?)(?:version (\d)(?: (\d))? (?:or later |only )?of )?(?:the )?"
    r"(?:gnu (lesser |library |affero )?(general )?public license|(?:gnu )?(l|a)?gpl)(?: |$)((?:\w+ ){0,28}(?:\w+)?)"
)
# the licence itself, which begins with its name
TITLE = re.compile(
    r"(apache license version 2 0 january 2004)|(mozilla public license version 2 0)|"
    r"gnu (lesser |library |affero )?general public license version ([123])(?: ([01])(?!\d))?"
)
TITLE_CHARACTERS = 300  # within which it stands
VERSION = re.compile(r"(?:version|v|l?gpl ?v?) ?([123])(?: ([01])\b)?|^([123])(?: ([01]))?\b|\bv([123])\b")
LATER = re.compile(r"(?:any|or) (?:\w+ ){0,3}?(?:later|newer|higher)|\bor later\b|\bor newer\b")
NOT_WORD = re.compile(r"[\W_]+")
REDISTRIBUTION = "redistribution and use in source and binary forms with or without modification are permitted"
PERMISSION = "permission is hereby granted free of charge to any person obtaining a copy of this"
FEE = "permission to use copy modify and or distribute this software for any purpose with or without fee is hereby granted"
WHOLE = "the above copyright notice and this permission notice"
# SPDX → phrases that must stand in the text (of small letters and digits, one space between words), and that must not
PHRASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("MIT", (PERMISSION, WHOLE), ("except as contained in this notice",)),
    ("X11", (PERMISSION, WHOLE, "except as contained in this notice"), ()),
    ("MIT-0", (PERMISSION, "without restriction"), (WHOLE,)),
    ("MIT", ("governed by an mit style license",), ()),
    ("MIT", ("under the mit license",), ()),
    ("MIT", ("under the terms of the mit license",), ()),
    ("BSD-4-Clause", (REDISTRIBUTION, "all advertising materials mentioning features"), ()),
    ("BSD-3-Clause", (REDISTRIBUTION, "endorse or promote products"), ("all advertising materials mentioning",)),
    ("BSD-2-Clause", (REDISTRIBUTION,), ("endorse or promote products", "all advertising materials mentioning")),
    ("BSD-3-Clause", ("governed by a bsd style license",), ()),
    ("ISC", (FEE, "provided that the above copyright notice"), ()),
    ("0BSD", (FEE,), ("provided that the above copyright notice",)),
    ("Apache-2.0", ("under the apache license version 2 0",), ()),
    ("Apache-2.0", ("apache org licenses license 2 0",), ()),
    ("MPL-2.0", ("subject to the terms of the mozilla public license v 2 0",), ()),
    ("MPL-1.1", ("subject to the mozilla public license version 1 1",), ()),
    ("PSF-2.0", ("licensed to psf under a contributor agreement",), ()),
    ("PSF-2.0", ("python software foundation license version 2",), ()),
    ("Unlicense", ("this is free and unencumbered software released into the public domain",), ()),
    ("CC0-1.0", ("cc0 1 0 universal",), ()),
    ("BSL-1.0", ("under the boost software license version 1 0",), ()),
    ("EPL-2.0", ("under the terms of the eclipse public license 2 0",), ()),
    ("EPL-2.0", ("under the terms of the eclipse public license v 2 0",), ()),
    ("Zlib", ("in no event will the authors be held liable for any damages arising from the use", "misrepresented"), ()),
    ("WTFPL", ("do what the fuck you want to public license",), ()),
    ("Artistic-2.0", ("under the artistic license 2 0",), ()),
)  # fmt: skip
# what people write for a licence (as `words` gives it), where SPDX has another name
ALIASES = {
    "apache": "Apache-2.0", "apache 2": "Apache-2.0", "apache2": "Apache-2.0", "asl 2 0": "Apache-2.0",
    "apache software": "Apache-2.0", "apache software 2 0": "Apache-2.0", "mit x11": "MIT", "expat": "MIT",
    "bsd": "BSD-3-Clause", "new bsd": "BSD-3-Clause", "modified bsd": "BSD-3-Clause", "revised bsd": "BSD-3-Clause",
    "simplified bsd": "BSD-2-Clause", "freebsd": "BSD-2-Clause", "3 clause bsd": "BSD-3-Clause",
    "2 clause bsd": "BSD-2-Clause", "bsd 3": "BSD-3-Clause", "bsd 2": "BSD-2-Clause", "gpl": "GPL-1.0-or-later",
    "gnu gpl": "GPL-1.0-or-later", "lgpl": "LGPL-2.0-or-later", "agpl": "AGPL-3.0-only", "mpl": "MPL-2.0",
    "mozilla 2 0": "MPL-2.0", "mozilla public 2 0": "MPL-2.0", "mozilla public": "MPL-2.0", "psf": "PSF-2.0",
    "psfl": "PSF-2.0", "python software foundation": "PSF-2.0", "python": "Python-2.0", "cc0": "CC0-1.0",
    "cc zero": "CC0-1.0", "cc0 1 0 universal": "CC0-1.0", "boost": "BSL-1.0", "boost software 1 0": "BSL-1.0",
    "zope": "ZPL-2.1", "eclipse 2 0": "EPL-2.0", "iscl": "ISC", "odbl": "ODbL-1.0", "odc by": "ODC-By-1.0",
    "open data commons attribution 1 0": "ODC-By-1.0",
}  # fmt: skip
GNU_ALIAS = re.compile(
    r"(?:gnu )?(l|a)?(?:gpl|(lesser |library |affero )?general(?: public)?)(?: ?v)? ?(\d)(?: (\d))?( or later|\+| only| or newer)?"
)
CC_ALIAS = re.compile(
    r"(?:cc|creative commons) (by|attribution)((?: (?:nc|sa|nd|non ?commercial|share ?alike|no ?deriv\w*))*)(?: (\d) (\d))(?: \w+)*"
)
CC_PARTS = (("nc", r"nc|non ?commercial"), ("nd", r"nd|no ?deriv\w*"), ("sa", r"sa|share ?alike"))


@dataclasses.dataclass(frozen=True)
class License(MapStage):
    """Writes `meta["license"]` (SPDX) and `meta["license_from"]`, and keeps what the allow list allows."""

    name: ClassVar[str] = "license"

    allow: tuple[str, ...] = ()  # SPDX ids that are kept, `*` stands for any characters: "CC-BY-*"; empty: all are
    # with an allow list: documents that say nothing, or nothing that is understood, are kept
    keep_unknown: bool = False
    # source → licence, where its documents say nothing
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    header_characters: int = 6000  # in which a notice is looked for; 0: the metadata decide

    def __post_init__(self) -> None:
        need(self.header_characters >= 0, f"license.header_characters={self.header_characters} must not be negative")
        for source, text in self.sources.items():
            need(to_spdx(text) is not None, f"license.sources.{source}={text!r} is no SPDX expression")
        for pattern in self.allow:
            known = "*" in pattern or to_spdx(pattern) is not None
            need(known, f"license.allow: {pattern!r} is no SPDX id, see https://spdx.org/licenses")

    def sources_named(self) -> Mapping[str, Iterable[str]]:
        """See `Stage`."""
        return {"sources": self.sources}

    def apply(self, document: Document, tally: Tally) -> Verdict:
        meta = dict(document.meta)
        found = next(self.readings(document), None)
        given = meta.pop("license", None)
        if found is None:
            tally.add("license", "unknown")
            return Drop("license_unknown", shown(given)) if self.allow and not self.keep_unknown else document
        meta["license"], meta["license_from"] = found
        if given is not None and given != found[0]:
            meta["license_given"] = given
        tally.add("license", found[0])
        if self.allow and not is_allowed(found[0], self.allow):
            return Drop("license_not_allowed", found[0])
        return dataclasses.replace(document, meta=meta)

    def readings(self, document: Document) -> Iterator[tuple[str, str]]:
        """(SPDX expression, where it was found), the one that counts first."""
        head = document.text[: self.header_characters]
        if found := read_tags(head):
            yield found, "tag"
        link = document.meta.get("license_link")
        if isinstance(link, str) and (found := to_spdx(link)):
            yield found, "link"
        if found := read_notice(head):
            yield found, "notice"
        for key in META_KEYS:
            if found := read_meta(document.meta.get(key)):
                yield found, "metadata"
        if found := to_spdx(self.sources.get(document.source, "")):
            yield found, "source"


def shown(value: Any) -> Any:
    """What a document said, short enough for a record of losses."""
    return None if value is None else str(value)[:100]


# ---------------------------------------------------------------------------------------------------------------- readings


def read_tags(head: str) -> str | None:
    """The expression of the file's own tags."""
    if "SPDX-License-Identifier" not in head:
        return None
    return together([found for tag in TAG.findall(head) if (found := to_spdx(TAG_END.sub("", tag)))])


def read_notice(head: str) -> str | None:
    """The licences whose words stand in a text."""
    text = words(head)
    if "licen" not in text and "permi" not in text and "public domain" not in text and "liable" not in text:
        return None
    if title := TITLE.search(text[:TITLE_CHARACTERS]):
        apache, mozilla, family, major, minor = title.groups()
        return (
            "Apache-2.0"
            if apache
            else "MPL-2.0"
            if mozilla
            else gnu((family or "")[:1], major, minor or "", later=False)
        )
    found = []
    for spdx, needed, unwanted in PHRASES:
        if all(phrase in text for phrase in needed) and not any(phrase in text for phrase in unwanted):
            found.append(spdx)
    found += gnu_notices(text)
    found += [spdx for match in CREATIVE_COMMONS.finditer(head) if (spdx := creative_commons(match))]
    return together(found)


def gnu_notices(text: str) -> Iterator[str]:
    """Licences of the GNU family that a notice names: "under the terms of the GNU General Public License … version 2 …"."""
    for before, minor, family, general, short, after in GNU.findall(text):
        version = VERSION.search(after)
        digits = [before, minor] if before else [digit for digit in version.groups() if digit] if version else []
        major, minor = (*digits, "", "")[:2]
        found = gnu(family[:1] or short, major, minor, LATER.search(after) is not None)
        if found and (digits or general):  # "GPL" alone is talk
            yield found


def gnu(letter: str, major: str, minor: str, later: bool) -> str | None:
    """SPDX id of a licence of the GNU family; one without a version allows any."""
    family = {"l": "LGPL", "a": "AGPL"}.get(letter, "GPL")
    if not major:
        return {"LGPL": "LGPL-2.0-or-later", "AGPL": "AGPL-3.0-or-later"}.get(family, "GPL-1.0-or-later")
    return parse(f"{family}-{major}.{minor or 0}-{'or-later' if later else 'only'}")


def creative_commons(match: re.Match) -> str | None:
    """SPDX id of an address at creativecommons.org."""
    kind, version, public = match.groups()
    if public:
        return "CC0-1.0" if public == "zero" else "CC-PDM-1.0"
    return to_spdx(f"CC-{kind.replace('nd-nc', 'nc-nd')}-{version}")


def read_meta(value: Any) -> str | None:
    """The expression of a field: a text, or a list of texts that all apply."""
    if isinstance(value, str):
        return to_spdx(value)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        found = [to_spdx(item) for item in value]
        return together([item for item in found if item]) if all(found) else None
    return None


def together(found: list[str]) -> str | None:
    """All of them apply."""
    unique = sorted(set(found))
    if len(unique) < 2:
        return unique[0] if unique else None
    return to_spdx(" AND ".join(f"({item})" if " OR " in item else item for item in unique))


# ------------------------------------------------------------------------------------------------------------- expressions


@functools.cache
def licensing() -> Any:
    """The SPDX list.

    Raises:
      UserError: the package is missing.
    """
    try:
        from license_expression import get_spdx_licensing
    except ImportError as error:
        raise UserError(f"license needs license-expression: pip install license-expression ({error})") from error
    return get_spdx_licensing()


@functools.lru_cache(maxsize=1 << 14)
def to_spdx(text: str) -> str | None:
    """The SPDX expression that a text means, in its own spelling or in one that people use, or None."""
    text = text.strip()
    if not text or len(text) > 1000:
        return None
    if found := CREATIVE_COMMONS.search(text.lower()):
        return creative_commons(found)
    if found := ADDRESS.search(text.lower()):
        osi, spdx, letter, version = found.groups()
        return parse(osi or spdx) if osi or spdx else gnu(letter or "", *version.split("."), later=False)
    if "apache.org/licenses/license-2.0" in text.lower():
        return "Apache-2.0"
    name = re.sub(r"\([^()]{0,60}\)", " ", text.rpartition("::")[2])  # of a classifier
    if found := parse(text) or alias(words(name.replace("+", " or later "))):
        return found
    parts = [to_spdx(part) for part in text.split("/")] if "/" in text else []  # "MIT/Apache-2.0": as one likes
    return parse(" OR ".join(f"({part})" for part in parts if part)) if parts and all(parts) else None


def parse(text: str) -> str | None:
    """An expression as SPDX writes it; names of other lists (`LicenseRef-scancode-…`) are not taken."""
    from license_expression import ExpressionError

    try:
        found = licensing().parse(text, validate=True, strict=True)
    except (ExpressionError, RecursionError):
        return None
    spdx = None if found is None else found.render()
    return None if spdx is None or "LicenseRef-" in spdx else spdx


def alias(name: str) -> str | None:
    """What people write for a licence."""
    name = re.sub(
        r"\b(the|licen[cs]es?|licensed|version|v(?=\d| \d)|clause license)\b", " ", re.sub(r"\bv(?=\d)", " ", name)
    )
    name = " ".join(name.split())
    if name in ALIASES:
        return ALIASES[name]
    if found := GNU_ALIAS.fullmatch(name):
        short, long, major, minor, later = found.groups()
        return gnu(short or (long or "")[:1], major, minor or "", later in (" or later", "+", " or newer"))
    if found := CC_ALIAS.fullmatch(name):
        parts = "".join(f"-{short}" for short, sign in CC_PARTS if re.search(rf"\b(?:{sign})\b", found[2]))
        return parse(f"CC-BY{parts}-{found[3]}.{found[4]}")
    return parse(name.replace(" ", "-")) or parse(re.sub(r" (\d) (\d)$", r"-\1.\2", name).replace(" ", "-"))


def words(text: str) -> str:
    """Small letters and digits, one space between words: comment signs and line breaks are gone."""
    return NOT_WORD.sub(" ", text.lower()).strip()


@functools.lru_cache(maxsize=1 << 12)
def is_allowed(expression: str, allow: tuple[str, ...]) -> bool:
    """Whether one may choose so that every licence that applies is on the list."""
    return satisfies(licensing().parse(expression), allow)


def satisfies(node: Any, allow: tuple[str, ...]) -> bool:
    """See `is_allowed`."""
    if node.isliteral:  # a licence with an exception is allowed as itself, or where the licence alone is
        names = [node.render(), *([node.license_symbol.key] if hasattr(node, "license_symbol") else [])]
        return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for name in names for pattern in allow)
    choose = any if node.operator.strip().upper() == "OR" else all
    return choose(satisfies(part, allow) for part in node.args)
