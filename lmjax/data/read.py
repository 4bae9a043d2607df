"""Documents in: text, Markdown, HTML, JSON lines (plain, gzip, zstd), Parquet, WARC and WET that someone else wrote.

A bad byte becomes U+FFFD; a bad record is counted, named and set aside, and never costs the rest of its file: read = kept +
failed. What is in a web archive and is no document (requests, redirects, images) is counted apart, by kind. The project's own
form, where every fault is an error, is in `written.py`.
"""

import codecs
import collections
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from etils import epath

from lmjax.data.compression import Fault, decompressed, raw_blocks, salvaged, split_lines
from lmjax.data.document import Document
from lmjax.data.inputs import (
    HTML_SUFFIXES,
    LINE_SUFFIXES,
    PARQUET_SUFFIX,
    WARC_SUFFIXES,
    find_files,
    known_suffix,
)
from lmjax.data.web import OPENING, Bad, LeftOut, decode_page, read_archive
from lmjax.errors import UserError

log = logging.getLogger(__name__)

PARQUET_ROWS = 256  # rows of a Parquet file in memory at a time
SHOWN = 10  # failures that are told one by one; all are counted
RECORD_BYTES = 1 << 27  # of a line, a page, a text file: memory holds one, and a larger one fails
RAW_BYTES = 1 << 20  # of a failed record that are set aside
NESTED = (
    100  # lists and objects within one another in a record: what reads it later may have less of Python's stack left
)
OWN_FIELDS = {"id", "text", "source", "meta"}  # of a line of it


@dataclasses.dataclass
class Counts:
    """What became of the records that were read: read = kept + failed."""

    read: int = 0  # records met; blank lines are none
    kept: int = 0
    failed: int = 0
    repaired: int = 0  # records whose bytes were not UTF-8: U+FFFD stands where they were
    skipped_files: int = 0  # files in a folder that have no known extension
    failures: list[str] = dataclasses.field(default_factory=list)  # the first ones: `file:line: why`
    left_out: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # archives' records, by kind
    # gets (where, why, bytes) of what failed, where there are any
    quarantine: Callable[[str, str, bytes], None] | None = None

    def keep(self) -> None:
        """One record became a document."""
        self.read += 1
        self.kept += 1

    def fail(self, where: str, why: str, records: int = 1, raw: bytes = b"") -> None:
        """`records` records did not; the first few are told at once, the bytes are set aside."""
        if self.quarantine is not None:
            self.quarantine(where, why, raw[:RAW_BYTES])
        self.read += records
        self.failed += records
        if len(self.failures) < SHOWN:
            self.failures.append(f"{where}: {why}")
            log.warning("%s: %s", where, why)
        elif len(self.failures) == SHOWN:
            self.failures.append("…")
            log.warning("further failures are only counted")

    def numbers(self) -> dict[str, int]:
        """The plain numbers."""
        return {key: value for key, value in vars(self).items() if isinstance(value, int)}


@dataclasses.dataclass(frozen=True)
class Origin:
    """What all records of one file share."""

    name: str  # of the file, relative to what the user named
    source: str
    text_field: str
    id_field: str | None
    counts: Counts
    max_bytes: int = RECORD_BYTES  # of a record


def read_documents(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    source: str,
    counts: Counts | None = None,
    text_field: str = "text",
    id_field: str | None = "id",
    max_bytes: int = RECORD_BYTES,
) -> Iterator[Document]:
    """Streams the documents of files, folders (recursively) and globs, always in the same order.

    Args:
      paths: local or remote; the files' extensions say what they hold (`inputs.SUFFIXES`).
      source: the source of all these documents.
      counts: is filled as the iterator is consumed.
      text_field: of JSON lines and Parquet; the other fields go to `meta`.
      id_field: holds the id; where it is missing (or None) the id is `path#line`, relative to the folder that was named.
        The id of a record of a web archive is its WARC-Record-ID, which is unique; a URL comes back with every crawl.
      max_bytes: of a record, decompressed; a larger one fails, and memory holds one.

    Raises:
      UserError: nothing is there, an extension is unknown, or a file cannot be opened as what its extension says.
    """
    counts = Counts() if counts is None else counts
    files, skipped = find_files(paths)
    counts.skipped_files += skipped
    return (
        document
        for name, path in files
        for document in read_file(path, Origin(name, source, text_field, id_field, counts, max_bytes))
    )


def read_file(path: epath.Path, origin: Origin) -> Iterator[Document]:
    """The documents of one file."""
    suffix = known_suffix(path)
    try:
        with path.open("rb") as file:
            if suffix == PARQUET_SUFFIX:
                yield from read_parquet(file, path, origin)
            elif suffix in WARC_SUFFIXES:
                yield from read_web(salvaged(raw_blocks(file), suffix, path, OPENING), origin)
            elif suffix in LINE_SUFFIXES:
                yield from read_lines(decompressed(raw_blocks(file), suffix, path), origin)
            else:
                yield from read_text(decompressed(raw_blocks(file), suffix, path), origin, suffix in HTML_SUFFIXES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------------------------- lines to documents


def until_fault(blocks: Iterable[bytes], origin: Origin) -> Iterator[bytes]:
    """Blocks as far as they can be read; what is lost counts as one failed record, however many it was."""
    try:
        yield from blocks
    except Fault as fault:
        origin.counts.fail(origin.name, f"{fault}; what stands before is kept, the rest is lost")


def read_lines(blocks: Iterable[bytes], origin: Origin) -> Iterator[Document]:
    """One document for each JSON line."""
    for number, line in enumerate(split_lines(until_fault(blocks, origin), origin.max_bytes), 1):
        if not line.removeprefix(codecs.BOM_UTF8).strip():
            continue
        try:
            if len(line) > origin.max_bytes:
                raise Fault(f"the line has more than {origin.max_bytes} bytes")
            document = to_document(parse_line(line, origin.counts), f"{origin.name}#{number}", origin)
        except Fault as fault:
            origin.counts.fail(f"{origin.name}:{number}", str(fault), raw=line)
            continue
        origin.counts.keep()
        yield document


def parse_line(line: bytes, counts: Counts) -> Any:
    """The JSON value of a line."""
    text, repaired = decode(line)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault(f"not valid JSON: {error}") from error
    if text.count("[") + text.count("{") > NESTED and depth(value) > NESTED:
        raise Fault(f"the record nests deeper than {NESTED}")
    counts.repaired += repaired
    return value


def depth(value: Any) -> int:
    """How deep lists and objects stand within one another."""
    level, number = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        number += 1
    return number


def to_document(record: Any, place: str, origin: Origin) -> Document:
    """A record's text, its id (or its place), and the rest as meta."""
    if not isinstance(record, dict):
        raise Fault(f"a record must be a JSON object, not {type(record).__name__}")
    ours = record.keys() == OWN_FIELDS and isinstance(record["meta"], dict)  # a file of a stage, given by itself
    meta = {**record["meta"], "id": record["id"], "text": record["text"]} if ours else dict(record)
    text = meta.pop(origin.text_field, None)
    if not isinstance(text, str):
        why = f"is {type(text).__name__}, not a text" if origin.text_field in record else "is missing"
        raise Fault(f"field {origin.text_field!r} {why}")
    given = record.get(origin.id_field) if origin.id_field else None
    if type(given) not in (str, int) or given == "":
        return Document(place, text, origin.source, meta)
    del meta[origin.id_field]
    return Document(str(given), text, origin.source, meta)


def read_text(blocks: Iterable[bytes], origin: Origin, is_html: bool) -> Iterator[Document]:
    """A whole file as one document."""
    data = bytearray()
    try:
        for block in blocks:
            data += block
            if len(data) > origin.max_bytes:
                raise Fault(f"the file has more than {origin.max_bytes} bytes")
    except Fault as fault:
        origin.counts.fail(origin.name, str(fault), raw=bytes(data[:RAW_BYTES]))
        return
    text, repaired = decode_page(bytes(data)) if is_html else decode(bytes(data))
    origin.counts.repaired += repaired
    origin.counts.keep()
    yield Document(origin.name, text, origin.source, {"format": "html"} if is_html else {})


def read_web(pieces: Iterable[bytes | Fault], origin: Origin) -> Iterator[Document]:
    """One document for each record of an archive that is one."""
    for number, item in enumerate(read_archive(pieces, origin.max_bytes), 1):
        place = f"{origin.name}#{number}"
        if isinstance(item, LeftOut):
            origin.counts.left_out[item.kind] += 1
        elif isinstance(item, Bad):
            origin.counts.fail(place, item.why, raw=item.raw)
        else:
            origin.counts.repaired += item.repaired
            origin.counts.keep()
            yield Document(item.id or place, item.text, origin.source, item.meta)


def decode(data: bytes) -> tuple[str, bool]:
    """Text without its byte-order mark, and whether bytes had to be replaced by U+FFFD. UTF-16 is known by its mark."""
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode(encoding), False
    except UnicodeDecodeError:
        return data.decode(encoding, "replace"), True


# ------------------------------------------------------------------------------------------------------- rows to documents


def read_parquet(file: Any, path: epath.Path, origin: Origin) -> Iterator[Document]:
    """One document for each row; memory is bounded by one row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error
    row = 0
    for group in range(table.num_row_groups):
        end = row + table.metadata.row_group(group).num_rows
        try:
            for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group]):
                yield from read_batch(batch, row, origin)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            origin.counts.fail(origin.name, f"row group {group} is damaged: {error}", end - row)
        row = end


def read_batch(batch: Any, start: int, origin: Origin) -> Iterator[Document]:
    """The documents of a record batch; rows count from 1, as lines do."""
    repaired: set[int] = set()
    columns = {name: column_values(batch.column(name), repaired) for name in batch.schema.names}
    for i in range(batch.num_rows):
        number, record = start + i + 1, {name: values[i] for name, values in columns.items()}
        try:
            document = to_document(record, f"{origin.name}#{number}", origin)
        except Fault as fault:
            origin.counts.fail(f"{origin.name}:{number}", str(fault), raw=json.dumps(record, default=str).encode())
            continue
        origin.counts.repaired += i in repaired
        origin.counts.keep()
        yield document


def column_values(column: Any, repaired: set[int]) -> list[Any]:
    """A column as JSON values; rows whose bytes had to be replaced join `repaired`."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())  # as bytes, or one bad byte costs the whole batch
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz and "UTC"), safe=False)  # what Python's datetime holds
    values = []
    for i, item in enumerate(column):
        try:
            value = item.as_py()
        except (ValueError, OverflowError) as error:
            value = f"unreadable: {error}"  # in meta: no reason to lose the text beside it
        if isinstance(value, bytes):
            value, bad = decode(value)
            repaired.update([i] if bad else [])
        elif not isinstance(value, str | int | float | None):
            value = json.loads(json.dumps(value, default=str))  # dates, decimals, lists of them
        values.append(value)
    return values
