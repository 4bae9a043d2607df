"""Items of benchmarks: every form of file gives the same ones, and what cannot be read is named."""

import gzip
import json

import pytest

from lmjax.data.benchmarks import read_items
from lmjax.errors import UserError

TEXTS = (
    "Which river is the longest of all? Say its name.",
    "Who follows whom over the long bridge, and at which hour?",
)


def items(path, fields=()):
    return list(read_items({"b": str(path)}, {"b": fields} if fields else {}))


def test_every_form_of_file_gives_the_same_items(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = "".join(json.dumps({"text": text, "label": 3}) + "\n\n" for text in TEXTS)
    (tmp_path / "a.txt").write_text("\n".join([TEXTS[0], "", TEXTS[1]]))
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS, "label": [1, 2]}), tmp_path / "d.parquet")
    found = [items(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.jsonl.gz", "d.parquet")]
    assert found[0][0].parts[0][:3] == ("which", "river", "is")
    assert all([item.parts for item in one] == [item.parts for item in found[0]] for one in found)
    assert [item.name for item in found[1]] == ["b.jsonl#1", "b.jsonl#3"]


def test_names_and_parts(tmp_path):
    """The first field of an id names an item; of two of one name the second is known by its place; long fields are parts."""
    long = "one two three four five six seven eight"
    rows = [{"id": 1, "q": long, "choices": ["a b", "c"]}, {"id": 1, "q": "x", "more": {"deep": "y"}}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = items(tmp_path / "b.jsonl")
    assert (first.name, second.name) == ("1", "1@b.jsonl#2")
    assert first.parts == ((*long.split(), "a", "b", "c"), tuple(long.split()))
    assert second.parts == (("x", "y"),)
    assert [item.parts[0] for item in items(tmp_path / "b.jsonl", ("q",))] == [tuple(long.split()), ("x",)]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "behind record 1"),
        ("empty.jsonl", b"\n", "holds no items"),
        ("empty.jsonl.gz", b"", "behind record 0: the file was cut short"),
        ("no.parquet", b"not parquet", "behind record 0"),
        ("page.html", b"<p>x", "items come in"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=says) as error:
        items(tmp_path / name)
    assert name in str(error.value)
