"""Web archives in: WARC and WET records, and HTML of any charset.

The framing is ours, so that damage costs the record it hits and no other: a record ends where its Content-Length says, which
must be where the next one begins; after damage the reader looks for the next line `WARC/1.0`, or the next gzip member that
opens with it. What is in a record (headers, chunks, Content-Encoding) fastwarc reads.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lmjax.data.compression import Fault

HEADER_BYTES = 1 << 16  # of a record at most
SHOWN_BYTES = 1 << 16  # of a damaged record that are handed on for inspection
BODY_BYTES = 1 << 16  # read at a time: fastwarc makes room for all that it is asked for
OPENING = b"WARC/"  # of every record
VERSION = re.compile(rb"WARC/\d\.\d{1,2}\r?\n")
VERSION_BYTES = 11  # at most
HEADER_END = re.compile(rb"\n\r?\n")
LENGTH = re.compile(rb"(?mi)^content-length:[ \t]*(\d{1,18})[ \t]*\r?$")
KINDS = frozenset(["warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion", "continuation"])
HTML_TYPES = frozenset(("text/html", "application/xhtml+xml"))
MAIN_TYPES = frozenset(["application", "audio", "font", "image", "message", "model", "multipart", "text", "video"])
# WHATWG encodings whose Python codec of that name is stricter than what browsers read
CODECS = {"shift_jis": "cp932", "euc_kr": "cp949", "gbk": "gb18030", "iso8859-11": "cp874"}
DECLARED = re.compile(
    rb"""<meta[^>]{0,200}?charset[ \t]{0,9}=[ \t"']{0,9}([\w:.-]{1,40})|<\?xml[^>]{0,200}?encoding[ \t]{0,9}=[ \t"']{0,9}([\w:.-]{1,40})""",
    re.IGNORECASE,
)
DECLARED_BYTES = 1024  # within which a page declares its charset (HTML standard)


class Page(NamedTuple):
    """A record that is a document."""

    id: str  # WARC-Record-ID, or "": a URL comes back with every crawl
    text: str
    meta: dict[str, Any]  # format, url, date, content_type
    repaired: bool  # bytes had to be replaced by U+FFFD


class Bad(NamedTuple):
    """A record that should have been a document, and could not be read."""

    why: str
    raw: bytes  # or the first part of it


class LeftOut(NamedTuple):
    """A record that is no document."""

    kind: str  # `request`, `http_404`, `type_image` …: few different ones


# ----------------------------------------------------------------------------------------------------------------- framing


class Window:
    """Bytes of a stream that have not been used yet; a fault ends a segment, and the next one begins behind it."""

    def __init__(self, pieces: Iterable[bytes | Fault]):
        self.pieces, self.bytes = iter(pieces), bytearray()
        self.fault: Fault | None = None  # ended the segment
        self.ended = False

    def more(self) -> bool:
        """Another piece; False where the segment ends."""
        if self.fault is not None or self.ended:
            return False
        piece = next(self.pieces, None)
        if isinstance(piece, Fault):
            self.fault = piece
            return False
        self.ended = piece is None
        self.bytes += piece or b""
        return not self.ended

    def holds(self, length: int) -> bool:
        """Whether the segment has that many bytes more."""
        while len(self.bytes) < length:
            if not self.more():
                return False
        return True

    def skip_lines(self) -> None:
        """Drops the empty lines that stand before a record."""
        while True:
            used = len(self.bytes) - len(self.bytes.lstrip(b"\r\n"))
            del self.bytes[:used]
            if self.bytes or not self.more():
                return

    def skip(self, length: int) -> None:
        """Drops bytes without holding them all."""
        while length > len(self.bytes):
            length -= len(self.bytes)
            self.bytes.clear()
            if not self.more():
                return
        del self.bytes[:length]

    def skip_to_record(self) -> bytes:
        """Drops all up to where a record opens; returns the first part of it."""
        shown = bytearray()
        while True:
            found = VERSION.search(self.bytes)
            used = found.start() if found else max(0, len(self.bytes) - VERSION_BYTES)
            shown += self.bytes[: min(used, SHOWN_BYTES - len(shown))]
            del self.bytes[:used]
            if found:
                return bytes(shown)
            if not self.more():
                shown += self.bytes[: SHOWN_BYTES - len(shown)]
                self.bytes.clear()
                return bytes(shown)


def split_records(pieces: Iterable[bytes | Fault], max_bytes: int) -> Iterator[bytes | Bad]:
    """The records of an archive, one at a time in memory, and what could not be framed.

    Args:
      pieces: the decompressed content; a `Fault` stands where some is missing.
      max_bytes: a record's size; a larger one is skipped unread.
    """
    window = Window(pieces)
    while True:
        window.skip_lines()
        if window.bytes:
            yield from next_record(window, max_bytes)
        elif window.fault is not None:
            yield Bad(f"records are lost: {window.fault}", b"")
            window.fault = None
        elif window.ended:
            return


def next_record(window: Window, max_bytes: int) -> Iterator[bytes | Bad]:
    """The record at the start of the window, or what is wrong with it."""
    head = find_head(window)
    length = LENGTH.search(window.bytes, 0, head) if head else None
    if length is None:
        yield bad_segment("the record is cut short" if head == 0 else "no WARC record begins here", window)
        return
    size = head + int(length[1])
    if size > max_bytes:
        yield Bad(f"the record has {size} bytes, more than {max_bytes}", bytes(window.bytes[:SHOWN_BYTES]))
        window.skip(size)
        return
    if not window.holds(size):
        yield bad_segment("the record is cut short", window)
        return
    window.holds(size + len(OPENING) + 4)
    behind = bytes(window.bytes[size : size + len(OPENING) + 4])
    if not behind.startswith(b"\r\n\r\n") and behind.lstrip(b"\r\n")[: len(OPENING)] not in (b"", OPENING):
        following = VERSION.search(window.bytes, head, size)
        yield wrong_length(window, following.start() if following else size)
        return
    record = bytes(window.bytes[:size])
    del window.bytes[:size]
    yield record


def find_head(window: Window) -> int | None:
    """Where the record's headers end: 0 if the segment ends before, None if it is no record."""
    if not window.holds(len(OPENING)):
        return 0
    if not window.bytes.startswith(OPENING):
        return None
    start = 0
    while True:
        if end := HEADER_END.search(window.bytes, start, HEADER_BYTES):
            return end.end()
        if len(window.bytes) >= HEADER_BYTES:
            return None
        start = max(0, len(window.bytes) - 2)
        if not window.more():
            return 0


def bad_segment(why: str, window: Window) -> Bad:
    """What stands before the next record is lost; the fault that ended the segment is told with it, once."""
    if window.bytes.startswith(OPENING):
        shown = bytes(window.bytes[:1]) + (window.skip(1) or window.skip_to_record())
    else:
        shown = window.skip_to_record()
    if window.fault is not None and not window.bytes:
        why, window.fault = f"{why}: {window.fault}", None
    return Bad(why, shown)


def wrong_length(window: Window, size: int) -> Bad:
    """A record whose Content-Length is not its length; what follows it up to the next record is part of it."""
    shown = bytes(window.bytes[: min(size, SHOWN_BYTES)])
    window.skip(size)
    if not window.bytes.startswith(OPENING):
        shown = (shown + window.skip_to_record())[:SHOWN_BYTES]
    return Bad("the record's Content-Length is wrong", shown)


# ----------------------------------------------------------------------------------------------------------------- records


def read_archive(pieces: Iterable[bytes | Fault], max_bytes: int) -> Iterator[Page | Bad | LeftOut]:
    """What each record of a WARC or WET file is, in order."""
    for record in split_records(pieces, max_bytes):
        try:
            yield record if isinstance(record, Bad) else read_record(record, max_bytes)
        except BaseException as error:
            if not is_panic(error):
                raise
            yield Bad(f"fastwarc gave up on the record: {error}", record)


def read_record(raw: bytes, max_bytes: int) -> Page | Bad | LeftOut:
    """A document, if the record is one: a response 200 (or a resource) of HTML or plain text, or a conversion (WET)."""
    from fastwarc.warc import WarcRecord

    try:
        record = WarcRecord.from_bytes(raw)
        kind = str(record.record_type)
    except (OSError, ValueError) as error:
        return Bad(f"fastwarc cannot read the record: {error}", raw)
    if kind not in ("response", "resource", "conversion"):
        return LeftOut(kind if kind in KINDS else "unknown")
    if kind == "response" and not record.is_http:
        return LeftOut("not_http")
    try:
        status, declared, data = payload(raw, record, max_bytes)
    except (OSError, ValueError) as error:
        return Bad(f"the payload cannot be read: {error}", raw)
    if record.is_http and status != 200:
        return LeftOut(f"http_{status}" if status and 100 <= status < 600 else "http_unknown")
    if len(data) > max_bytes:
        return Bad(f"the payload has more than {max_bytes} bytes", raw[:SHOWN_BYTES])
    return to_page(record.headers, declared, data)


def payload(raw: bytes, record: Any, max_bytes: int) -> tuple[int | None, str, bytes]:
    """HTTP status, Content-Type and body; a body that is not encoded as its headers say (crawlers decode) is taken as it is."""
    from fastwarc.warc import WarcRecord

    headers = record.headers
    if not record.is_http:
        return None, headers.get("Content-Type", ""), read_all(record.reader, max_bytes)
    try:
        record.parse_http(auto_decode="all")
        data = read_all(record.reader, max_bytes)
    except OSError:
        record = WarcRecord.from_bytes(raw)
        record.parse_http(auto_decode="none")
        data = read_all(record.reader, max_bytes)
        if b"\0" in data[:1024]:
            raise
    http = record.http_headers
    return (http.status_code, http.get("Content-Type", ""), data) if http is not None else (None, "", data)


def read_all(reader: Any, most: int) -> bytes:
    """What a reader gives, and a little more than `most` bytes of it at most."""
    data = bytearray()
    while len(data) <= most and (block := reader.read(BODY_BYTES)):
        data += block
    return bytes(data)


def to_page(headers: Any, declared: str, data: bytes) -> Page | LeftOut:
    """The document of a body."""
    from resiliparse.parse.encoding import detect_mime

    content_type = declared.partition(";")[0].strip().lower()
    content_type = content_type or headers.get("WARC-Identified-Payload-Type", "").strip().lower() or detect_mime(data)
    if content_type not in HTML_TYPES and content_type != "text/plain":
        main = content_type.partition("/")[0]
        if main == "text":
            return LeftOut("type_text_other")
        return LeftOut(f"type_{main}" if main in MAIN_TYPES else "type_unknown")
    is_html = content_type in HTML_TYPES
    charset = re.search(r"charset\s{0,9}=[\s\"']{0,9}([\w:.-]{1,40})", declared, re.IGNORECASE)
    text, repaired = decode_page(data, charset and charset[1], is_html)
    meta = {"format": "html" if is_html else "text", "url": headers.get("WARC-Target-URI", "").strip("<>")}
    meta |= {"date": headers.get("WARC-Date", ""), "content_type": content_type}
    if headers.get("WARC-Truncated"):
        meta["truncated"] = headers["WARC-Truncated"]
    name = headers.get("WARC-Record-ID", "").strip("<>").removeprefix("urn:uuid:")
    return Page(name, text, {key: value for key, value in meta.items() if value}, repaired)


# ---------------------------------------------------------------------------------------------------------------- charsets


def decode_page(data: bytes, label: str | None = None, is_html: bool = True) -> tuple[str, bool]:
    """Text of a page and whether bytes had to be replaced.

    The charset: byte-order mark, then HTTP's `label`, then the page's own declaration, then UTF-8 where it is valid, then
    detection. A label is disbelieved where not half of what is beyond ASCII can be read by it.
    """
    for mark, codec in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if data.startswith(mark):
            return decode_by(data[len(mark) :], codec)
    codec = known_codec(label) or (declared_codec(data) if is_html else None) or "utf-8"
    text, repaired = decode_by(data, codec)
    if repaired and 2 * text.count("\ufffd") > len(text) - len(text.encode("ascii", "ignore")):
        return decode_by(data, detected_codec(data) or codec)
    return text, repaired


def decode_by(data: bytes, codec: str) -> tuple[str, bool]:
    """Text, and whether bytes had to be replaced by U+FFFD."""
    try:
        return data.decode(codec), False
    except UnicodeDecodeError:
        return data.decode(codec, "replace"), True


def known_codec(label: str | None) -> str | None:
    """Python's codec for a label of the web, as browsers understand it, or None."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    codec = map_encoding_to_html5(label, False) if label else None
    return CODECS.get(codec, codec) if codec else None


def declared_codec(data: bytes) -> str | None:
    """The charset that a page states; one that says UTF-16 in ASCII is UTF-8 (HTML standard)."""
    found = DECLARED.search(data[:DECLARED_BYTES])
    codec = known_codec((found[1] or found[2]).decode("ascii", "replace")) if found else None
    return "utf-8" if codec and codec.startswith("utf-16") else codec


def detected_codec(data: bytes) -> str | None:
    """The charset that the bytes look like."""
    from resiliparse.parse.encoding import detect_encoding

    codec = detect_encoding(data)
    return CODECS.get(codec, codec) if codec else None


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library gave up on its input: such an error is no `Exception`, and yet it is the record's fault."""
    return type(error).__name__ == "PanicException"
