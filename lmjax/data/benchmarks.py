"""The items of benchmarks, from files as they are handed out: JSON lines, Parquet, or a line of text an item."""

import itertools
import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from lmjax.config import did_you_mean, need
from lmjax.data.compression import Fault, decompressed, raw_blocks, split_lines
from lmjax.data.inputs import LINE_SUFFIXES, PARQUET_SUFFIX, TEXT_SUFFIXES, find_files, known_suffix
from lmjax.data.overlap import Item, content_words
from lmjax.data.read import decode
from lmjax.errors import UserError

FORMS = (*LINE_SUFFIXES, PARQUET_SUFFIX, *TEXT_SUFFIXES)
ID_FIELDS = ("id", "task_id", "question_id", "qid", "idx")  # the first that an item has names it
FIELD_WORDS = 8  # a shorter field is not sought apart from its item: the least n of Brown et al.


def read_items(benchmarks: Mapping[str, str], fields: Mapping[str, tuple[str, ...]]) -> Iterator[Item]:
    """The items of all benchmarks, in order.

    Args:
      benchmarks: name → file, folder or glob.
      fields: benchmark → the fields that make an item's text; where it is not named: all that hold texts or lists of texts.

    Raises:
      UserError: a file cannot be read, a record is no item, or none has a field that the config names.
    """
    for benchmark, where in benchmarks.items():
        names: set[str] = set()
        count = 0
        for place, record in itertools.chain.from_iterable(read_records(*file) for file in find_files(where)[0]):
            name, texts = item_texts(record, fields.get(benchmark), place)
            name = name if name not in names else f"{name}@{place}"
            names.add(name)
            count += 1
            words = [tuple(content_words(unicodedata.normalize("NFC", text))) for text in texts]
            whole = tuple(itertools.chain.from_iterable(words))
            parts = dict.fromkeys([whole, *(part for part in words if len(part) >= FIELD_WORDS)])
            yield Item(benchmark, name, tuple(parts))
        need(count > 0, f"benchmarks.{benchmark}: {where} holds no items")


def read_records(name: str, path: epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record) of a benchmark's file, which must be whole: what could not be read could not be sought."""
    suffix, number = known_suffix(path), 0
    need(suffix in FORMS, f"benchmark {path}: items come in {', '.join(FORMS)}")
    try:
        with path.open("rb") as file:
            for number, record in enumerate(parquet_rows(file) if suffix == PARQUET_SUFFIX else lines(file, path), 1):
                if record is not None:
                    yield f"{name}#{number}", record
    except (Fault, ValueError, RecursionError, OSError) as error:  # Arrow's are some of these
        raise UserError(f"benchmark {path}, behind record {number}: {error}") from error


def parquet_rows(file: Any) -> Iterator[dict[str, Any]]:
    """The rows of a file."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(file).iter_batches(256):
        yield from batch.to_pylist()


def lines(file: Any, path: epath.Path) -> Iterator[dict[str, Any] | None]:
    """The records of lines; none for a blank one."""
    suffix = known_suffix(path)
    for line in split_lines(decompressed(raw_blocks(file), suffix, path)):
        text = decode(line)[0]
        yield as_record(text, suffix in LINE_SUFFIXES) if text.strip() else None


def as_record(line: str, is_json: bool) -> dict[str, Any]:
    """A line of a file as an item's fields."""
    record = json.loads(line) if is_json else line
    return record if isinstance(record, dict) else {"text": record}


def item_texts(record: dict[str, Any], fields: tuple[str, ...] | None, place: str) -> tuple[str, list[str]]:
    """An item's name, and its texts by field."""
    key = next((key for key in ID_FIELDS if type(record.get(key)) in (str, int) and record[key] != ""), None)
    for field in fields or ():
        need(field in record, f"benchmark item {place} has no field {field!r}{did_you_mean(field, record)}")
    values = [record[field] for field in fields or record if fields or field != key]
    return place if key is None else str(record[key]), [text for value in values if (text := all_text(value))]


def all_text(value: Any) -> str:
    """The texts in a value, one after another; numbers and flags are none."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    return "\n".join(filter(None, map(all_text, value))) if isinstance(value, list) else ""
