r"""Personal data, masked by placeholders: e-mail, phone, public IP addresses, credit cards, IBAN, US social security numbers.

What can be checked is checked: a card by Luhn (ISO/IEC 7812) and its issuer's prefix, an IBAN by mod 97 (ISO 13616) and its
country's length, an address by `ipaddress`, a phone by `phonenumbers`. What only looks alike stays: versions, sections, OIDs,
ISBNs, ids, timestamps, hashes, prices. Every pattern has a bounded reach from a rare sign (`@`, `::`, a run of digits), so the time
is linear in the text whatever the text is.
"""

import dataclasses
import functools
import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.stage import MapStage, Tally
from lmjax.errors import UserError

Kind = Literal["email", "phone", "ip", "card", "iban", "ssn"]
KINDS: tuple[Kind, ...] = ("email", "iban", "card", "ssn", "ip", "phone")  # of two that overlap the earlier one stands
REGIONS = ("US", "GB", "DE", "FR", "ES", "IT", "NL", "AU", "IN", "BR", "JP")
PLACEHOLDERS = {kind: f"<{kind.upper()}>" for kind in KINDS}


class Hit(NamedTuple):
    """A piece of a text that is somebody's."""

    start: int
    end: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Pii(MapStage):
    """Masks personal data, counts it by kind, and notes the counts in `meta.pii`."""

    name: ClassVar[str] = "pii"

    kinds: tuple[Kind, ...] = KINDS  # what is looked for
    placeholders: dict[str, str] = dataclasses.field(default_factory=dict)  # by kind, in place of `<EMAIL>` …
    # whose national phone numbers are looked for (ISO 3166); international ones (+…) are found for all countries
    regions: tuple[str, ...] = REGIONS
    mask: bool = True  # false: only count

    def __post_init__(self) -> None:
        unknown = sorted(set(self.placeholders) - set(KINDS))
        need(not unknown, f"pii.placeholders: no such kind: {', '.join(unknown)}; known: {', '.join(KINDS)}")
        need(len(set(self.kinds)) > 0, "pii.kinds must name what is looked for")
        bad = [region for region in self.regions if not re.fullmatch("[A-Z]{2}", region)]
        need(not bad, f"pii.regions={bad} must be countries of two capital letters (ISO 3166), as 'US'")

    def files(self) -> Sequence[str]:
        """None; but the library of phone numbers must be there."""
        if "phone" in self.kinds:
            phonenumbers()
        return ()

    def apply(self, document: Document, tally: Tally) -> Document:
        """Masks one document."""
        hits = find(document.text, self.kinds, self.regions)
        if not hits:
            return document
        counts: dict[str, int] = {}
        for hit in hits:
            counts[hit.kind] = counts.get(hit.kind, 0) + 1
            tally.add("pii", hit.kind)
        text = replace(document.text, hits, PLACEHOLDERS | self.placeholders) if self.mask else document.text
        return dataclasses.replace(document, text=text, meta=document.meta | {"pii": counts})


def replace(text: str, hits: list[Hit], placeholders: dict[str, str]) -> str:
    """The text with placeholders for the hits, which are in order and apart."""
    parts, end = [], 0
    for hit in hits:
        parts += (text[end : hit.start], placeholders[hit.kind])
        end = hit.end
    return "".join((*parts, text[end:]))


def find(text: str, kinds: tuple[str, ...] = KINDS, regions: tuple[str, ...] = ("US",)) -> list[Hit]:
    """What is personal in a text, in order and without overlaps."""
    hits: list[Hit] = []
    if "@" in text and "email" in kinds:
        hits.extend(find_emails(text))
    if "ip" in kinds and ":" in text:
        hits.extend(find_ipv6(text))
    if "iban" in kinds:
        hits.extend(find_ibans(text))
    for run in NUMBERS.finditer(text):
        hits.extend(find_numbers(text, run.start(), run.end(), kinds, regions))
    if len(hits) < 2:
        return hits
    rank = {kind: i for i, kind in enumerate(KINDS)}
    chosen: list[Hit] = []
    for hit in sorted(hits, key=lambda hit: (hit.start, rank[hit.kind], -hit.end)):
        if chosen and hit.start < chosen[-1].end:
            if rank[hit.kind] < rank[chosen[-1].kind]:
                chosen[-1] = hit
            continue
        chosen.append(hit)
    return chosen


# ------------------------------------------------------------------------------------------------------------------ e-mail

# The sign is found first and its surroundings are read from there, so that a run of letters costs nothing.
DOMAIN = re.compile(
    r"@(?<=[\w%+-]@)((?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}([^\W\d_]{2,24}|xn--[\w-]{2,59}))(?![\w@(-]|\.\w)"
)
LOCAL_REVERSED = re.compile(r"[\w.%+'-]{1,64}")
FILES_AND_UNITS = (  # `icon@2x.png`, `getty@tty1.service`: no top-level domains
    "png jpg jpeg gif svg webp html htm css js json txt service socket timer target mount slice path device conf cfg lock"
)
NOT_TOP = frozenset(FILES_AND_UNITS.split())


def find_emails(text: str) -> Iterator[Hit]:
    """Addresses of mail."""
    for match in DOMAIN.finditer(text):
        if match[2].lower() in NOT_TOP:
            continue
        at = match.start()
        local = LOCAL_REVERSED.match(text[max(0, at - 64) : at][::-1])
        name = local[0][::-1].lstrip(".'-") if local is not None else ""
        if name and ".." not in name:
            yield Hit(at - len(name), match.end(), "email")


# --------------------------------------------------------------------------------------------------------------------- IBAN

IBAN = re.compile(r"[0-9](?<=[A-Z]{2}.)(?<![A-Za-z0-9].{3})[0-9](?:[ \u00a0-]?[A-Z0-9]){11,30}")
COUNTRIES = (  # ISO 13616: code and length
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24 FI18"
    " FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20"
    " LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24"
    " SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30"
)
IBAN_LENGTHS = {code[:2]: int(code[2:]) for code in COUNTRIES.split()}


def find_ibans(text: str) -> Iterator[Hit]:
    """Bank accounts; what follows in capital letters is not part of one."""
    for match in IBAN.finditer(text):
        start = match.start() - 2
        written = text[start : match.end()]
        places = [i for i, sign in enumerate(written) if sign.isalnum()]
        length = IBAN_LENGTHS.get(written[:2], len(written) + 1)
        if len(places) < length:
            continue
        end = start + places[length - 1] + 1
        compact = "".join(written[i] for i in places[:length])
        digits = "".join(str(int(sign, 36)) for sign in compact[4:] + compact[:4])
        if not text[end : end + 1].isalnum() and int(digits) % 97 == 1:
            yield Hit(start, end, "iban")


# -------------------------------------------------------------------------------------------------------------- IP addresses

# 2000::/3 is all that is given out; `add::face` and `std::vector` are not in it.
IPV6 = re.compile(r"[23][0-9A-Fa-f]{3}:(?<![\w:.].{5})[0-9A-Fa-f:]{2,35}(?:(?<=:)[0-9]{1,3}(?:\.[0-9]{1,3}){3})?(?!\w)")
OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = re.compile(rf"(?<![0-9.]){OCTET}(?:\.{OCTET}){{3}}(?![\w]|[.~+_]\w|-[A-Za-z]|-[0-9]+(?![.0-9]))")
VERSION_BEFORE = re.compile(
    r"(?:\b(?:v|ver|version|versione|versión|versão|версия|release|rel|rev|revision|build|firmware|patch|section|sections|sect?"
    r"|chapter|clause|paragraph|article|appendix|figure|fig|table|step|rule|item|oid|update|upgrade[ds]?|agent)s?[\s.:#=(\"'v]*"
    r"|§\s?|[<>~!^=]=\s?|[A-Za-z_)][\w)]*[/_-]|[\w.]-)$",
    re.IGNORECASE,
)
ADDRESS_BEFORE = re.compile(
    r"(?://|@|=|\[|\b(?:ip|ips|ipv4|ip4|addr|address|addresses|adresse|dirección|endereço|host|hosts|hostname|server|servers|dns"
    r"|nameserver|gateway|client|ping|peer|proxy|router|connect|connected|connection|login|logged|request|requests|resolver|subnet"
    r"|network|traceroute|inet|whois|ban|banned|block|blocked|remote|адрес)\b[^\n]{0,24})$",
    re.IGNORECASE,
)
# a port, a network, a line of a web server's log
ADDRESS_AFTER = re.compile(r":[0-9]{1,5}\b|/[0-9]{1,2}\b(?![./])| - [-\w]")


def find_ipv6(text: str) -> Iterator[Hit]:
    """Public addresses of version 6."""
    for match in IPV6.finditer(text):
        address = match[0][:-1] if match[0].endswith(":") and not match[0].endswith("::") else match[0]
        if ("::" in address or address.count(":") >= 6) and is_global(address):
            yield Hit(match.start(), match.start() + len(address), "ip")


def find_ipv4(text: str, start: int, end: int) -> Iterator[Hit]:
    """Public addresses of version 4 that are no versions: numbers as low as a version's must be called an address."""
    for match in IPV4.finditer(text, start, end):
        before = text[max(0, match.start() - 48) : match.start()]
        if before[-1:].isalnum() or not is_global(match[0]) or VERSION_BEFORE.search(before):
            continue
        octets = [int(octet) for octet in match[0].split(".")]
        low = max(octets) < 64
        if low and not ADDRESS_AFTER.match(text, match.end()) and not ADDRESS_BEFORE.search(before):
            continue
        yield Hit(match.start(), match.end(), "ip")


@functools.lru_cache(4096)
def is_global(address: str) -> bool:
    """Whether it is an address that the internet routes: not private, not for documentation, not loopback."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global and not found.is_multicast


# --------------------------------------------------------------------------------------------------------- runs of digits

GAP = r" .()/\u00a0\u202f\u2010-\u2013-"  # what stands between the digits of a number that people write
NUMBERS = re.compile(rf"[0-9][0-9{GAP}]{{5,}}[0-9]")
SSN = re.compile(r"(?<![0-9])(?!000|666|9)[0-9]{3}([ -]?)(?!00)[0-9]{2}\1(?!0000)[0-9]{4}(?![0-9]|[.-][0-9])")
SSN_BEFORE = re.compile(r"\b(?:ssn|social security)\b[^\n]{0,24}$", re.IGNORECASE)
CARD = re.compile(
    r"(?<![0-9])(?:3[0-9]{3}([ -])[0-9]{6}\1[0-9]{4,5}|[0-9]{4}([ -])[0-9]{4}\2[0-9]{4}\2[0-9]{1,4}(?:\2[0-9]{3})?|[0-9]{13,19})"
    r"(?![0-9]|[.,-][0-9]|[ ][0-9]{4}\b)"
)


def find_numbers(text: str, start: int, end: int, kinds: tuple[str, ...], regions: tuple[str, ...]) -> Iterator[Hit]:
    """What a run of digits and gaps holds: addresses, cards, social security numbers, phones."""
    stop = min(end + 3, len(text))  # what a pattern may look at behind the run
    if "ip" in kinds and text.find(".", start, end) >= 0:
        yield from find_ipv4(text, start, stop)
    if "card" in kinds and end - start >= 13:
        for match in CARD.finditer(text, start, stop):
            if not glued(text, match.start()) and is_card(re.sub("[ -]", "", match[0])):
                yield Hit(match.start(), match.end(), "card")
    if "ssn" in kinds and end - start >= 9:
        for match in SSN.finditer(text, start, stop):
            called = match[1] == "-" or SSN_BEFORE.search(text[max(0, match.start() - 48) : match.start()])
            if called and not glued(text, match.start()) and not text[match.end() : match.end() + 1].isalnum():
                yield Hit(match.start(), match.end(), "ssn")
    if "phone" in kinds:
        yield from find_phones(text, start, end, regions)


def glued(text: str, start: int) -> bool:
    """Whether a number is the rest of something longer: a word, a decimal, a path."""
    before = text[max(0, start - 2) : start]
    if before[-1:] in (",", ":"):
        return before[:1].isdigit()
    return before[-1:].isalnum() or before[-1:] in ("_", ".", "-", "/", "+", "\\")


def is_card(digits: str) -> bool:
    """Luhn's sum, and an issuer that gives out numbers of that length."""
    twice = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
    total = sum(twice[int(digit)] if i % 2 else int(digit) for i, digit in enumerate(reversed(digits)))
    return total % 10 == 0 and len(digits) in card_lengths(int(digits[:4]))


def card_lengths(prefix: int) -> tuple[int, ...]:
    """How long the numbers of an issuer are, by their first four digits."""
    two = prefix // 100
    if two // 10 == 4:  # Visa
        return (13, 16, 19)
    if 51 <= two <= 55 or 2221 <= prefix <= 2720:  # Mastercard
        return (16,)
    if two in (34, 37):  # American Express
        return (15,)
    if two in (36, 38, 39) or 3000 <= prefix <= 3059 or prefix == 3095:  # Diners Club
        return (14, 16)
    if prefix == 6011 or 6440 <= prefix <= 6599 or two == 62 or 3528 <= prefix <= 3589:  # Discover, UnionPay, JCB
        return (16, 17, 18, 19)
    return ()


# -------------------------------------------------------------------------------------------------------------------- phones

AMERICAN = re.compile(
    r"(?<![0-9])(?:1[ .-])?(?:\([0-9]{3}\) ?[0-9]{3}[ .-][0-9]{4}|[0-9]{3}-[0-9]{3}-[0-9]{4}"
    r"|[0-9]{3}([. ])[0-9]{3}\1[0-9]{4})(?![0-9]|[.-][0-9])"
)
WRITTEN = re.compile(rf"\+? ?\(?\+?[0-9]+\)?(?:[{GAP}]{{0,2}}[0-9]+\)?){{0,9}}")
PHONE_BEFORE = re.compile(
    r"(?:\b(?:tel|tél|tlf|phone|telephone|téléphone|telefon|telefono|teléfono|telefone|telefoon|mobile|mobil|móvil|celular|cell"
    r"|handy|fax|whatsapp|hotline|call|ring|dial|appelez|тел|телефон)s?\b|電話|电话|전화)"
    r"(?:\W{0,3}\b(?:us|me|now|at|on|no|nr|number|is|the|office|home|work|le|au|desk)\b){0,3}[^\w\n]{0,4}$",
    re.IGNORECASE,
)
HEX_BEFORE = re.compile(r"(?:^|\s)[0-9A-Fa-f]{2}\s$")  # a dump of bytes, of which a part looks like a French number


@functools.cache
def phonenumbers() -> Any:
    """The library, on first use."""
    try:
        import phonenumbers as library
    except ImportError as error:
        raise UserError("stage pii needs phonenumberslite for phones: pip install phonenumberslite") from error
    return library


def find_phones(text: str, start: int, end: int, regions: tuple[str, ...]) -> Iterator[Hit]:
    """Phone numbers of a run: international ones, American ones by their form, others as their country writes them."""
    before = text[max(0, start - 3) : start]
    sign = before.rfind("+")
    if sign >= 0 and before[sign + 1 :] in ("", "(", " ") and not before[:sign][-1:].isalnum():
        yield from international(text, start - len(before) + sign, end)
        return
    if "US" in regions or "CA" in regions:
        found = False
        for match in AMERICAN.finditer(text, start - (before[-1:] == "("), min(end + 2, len(text))):
            behind, ahead = text[max(0, match.start() - 1) : match.start()], text[match.end() : match.end() + 1]
            plain = match[1] is not None  # three groups by spaces or dots are a phone only where there is such a phone
            if behind == "$" or glued(text, match.start()) or ahead.isalnum():
                continue
            if plain and not (alone(text, match.start(), match.end()) and is_phone(match[0], "US")):
                continue
            found = True
            yield Hit(match.start(), match.end(), "phone")
        if found:
            return
    argument = before[-1:] == "(" and before[-2:-1].isalnum()  # f(011 1000)
    if not argument and not glued(text, start) and not HEX_BEFORE.search(before):
        yield from national(text, start - (before[-1:] == "("), end, regions)


def alone(text: str, start: int, end: int) -> bool:
    """Whether no number stands beside: a row of numbers is no phone."""
    return not (text[max(0, start - 2) : start - 1].isdigit() or text[end + 1 : end + 2].isdigit())


def international(text: str, start: int, end: int) -> Iterator[Hit]:
    """+44 20 7946 0958; groups are left off from the right until a number remains that exists."""
    match = WRITTEN.match(text, start, min(end, start + 32))
    written = match[0] if match is not None else ""
    for _ in range(5):
        digits = sum(map(str.isdigit, written))
        if digits < 7:
            return
        follows = text[start + len(written) : start + len(written) + 1]
        if (
            digits <= 15
            and not follows.isalnum()
            and (is_phone(written, None) or re.fullmatch(AMERICAN_ABROAD, written))
        ):
            yield Hit(start, start + len(written), "phone")
            return
        written = re.sub(rf"[{GAP}]*[0-9]+\)?$", "", written)


AMERICAN_ABROAD = re.compile(r"\+1[ .-]\(?[0-9]{3}\)?[ .-][0-9]{3}[ .-][0-9]{4}")


def national(text: str, start: int, end: int, regions: tuple[str, ...]) -> Iterator[Hit]:
    """A number as its country writes it, or any that is called a phone."""
    match = WRITTEN.match(text, start, end)
    written = match[0] if match is not None else ""
    if written.startswith("(") and ")" not in written:
        written, start = written[1:], start + 1
    if written.count("(") != written.count(")"):
        return
    digits = re.sub("[^0-9]", "", written)
    follows = text[start + len(written) : start + len(written) + 2]
    if not 7 <= len(digits) <= 15 or follows[:1].isalnum() or (follows[:1] in GAP and follows[1:].isdigit()):
        return
    usual = written[0] in "0(" and (
        is_phone("+" + digits[2:], None) and digits != written
        if digits.startswith("00")
        else any(is_phone(written, region) and grouped(written, region) for region in regions)
    )
    if usual or (PHONE_BEFORE.search(text[max(0, start - 40) : start]) and is_called(written, digits, regions)):
        yield Hit(start, start + len(written), "phone")


def is_called(written: str, digits: str, regions: tuple[str, ...]) -> bool:
    """Whether what is called a phone can be one; American numbers that nobody has (555) included."""
    if digits.startswith("00"):
        return is_phone("+" + digits[2:], None)
    american = bool({"US", "CA"} & set(regions)) and len(digits) == 10 and digits[0] not in "01"
    return american or any(is_phone(written, region) for region in regions)


@functools.lru_cache(1 << 14)
def is_phone(written: str, region: str | None) -> bool:
    """Whether there is such a number."""
    library = phonenumbers()
    try:
        return library.is_valid_number(library.parse(written, region))
    except library.NumberParseException:
        return False


@functools.lru_cache(1 << 14)
def grouped(written: str, region: str) -> bool:
    """Whether its digits stand in the groups that its country uses."""
    library = phonenumbers()
    usual = library.format_number(library.parse(written, region), library.PhoneNumberFormat.NATIONAL)
    groups = re.findall("[0-9]+", written)
    return len(groups) > 1 and groups == re.findall("[0-9]+", usual)
