"""Documents in: nothing is lost, everything that is wrong is counted, and the form on disk is exact."""

import gzip
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from test_written import HARD

from lmjax.data.document import Document
from lmjax.data.inputs import find_files
from lmjax.data.read import Counts, read_documents
from lmjax.data.written import write_documents
from lmjax.errors import UserError
from lmjax.files import MANIFEST, UNFINISHED, Manifest, write_manifest


def lines(*records) -> bytes:
    return b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records)


def texts(path, counts=None, **kwargs) -> list[str]:
    return [document.text for document in read_documents(path, "s", counts, **kwargs)]


def check(counts: Counts, kept: int, failed: int):
    assert (counts.kept, counts.failed, counts.read) == (kept, failed, kept + failed)


# ------------------------------------------------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("ascii", [True, False])
def test_every_text_arrives(tmp_path, pack, ascii):
    suffix = {bytes: "", gzip.compress: ".gz"}.get(pack, ".zst")
    hard = [text for text in HARD if ascii or text.isprintable() or "\ud800" not in text]
    data = b"".join(json.dumps({"text": text}, ensure_ascii=ascii).encode() + b"\n\n \r\n" for text in hard)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(data))
    counts = Counts()
    assert texts(tmp_path, counts) == hard
    check(counts, len(hard), 0)


def test_last_line_without_newline_and_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert texts(tmp_path / "a.jsonl") == ["a", "b"]
    counts = Counts()
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"text": "b"}')
    assert texts(tmp_path / "a.jsonl", counts) == ["b"]
    check(counts, 1, 0)  # a line of a mark alone is blank


def test_id_and_meta(tmp_path):
    records = [
        {"id": "x", "text": "a", "url": "u", "meta": {"k": [1]}},
        {"id": 7, "text": "b"},
        {"id": None, "text": "c"},
    ]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_bytes(lines(*records))
    found = list(read_documents(tmp_path, "web"))
    assert found[0] == Document("x", "a", "web", {"url": "u", "meta": {"k": [1]}})
    assert [d.id for d in found] == ["x", "7", "d/a.jsonl#3"] and found[2].meta == {"id": None}
    assert [d.id for d in read_documents(tmp_path, "web", id_field=None)] == [f"d/a.jsonl#{i}" for i in (1, 2, 3)]


def test_a_stages_file_given_by_itself_keeps_its_meta(tmp_path):
    """A glob over the project's own files is no reason to bury meta one level deeper."""
    written = [Document("a", "text", "old", {"url": "u", "id": 3}), Document("b", "more", "old", {})]
    write_documents(tmp_path / "old.jsonl.zst", written)
    again = list(read_documents(tmp_path / "old.jsonl.zst", "new"))
    assert again == [Document("a", "text", "new", {"url": "u"}), Document("b", "more", "new", {})]


def test_another_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"content": "a", "text": "title"}))
    (document,) = read_documents(tmp_path, "s", text_field="content")
    assert (document.text, document.meta) == ("a", {"text": "title"})


BAD = {
    "not JSON": (b'{"text": "a"\n', "not valid JSON"),
    "no object": (b"[1]\n", "a record must be a JSON object"),
    "no text": (b'{"txt": "a"}\n', "field 'text' is missing"),
    "null": (b'{"text": null}\n', "field 'text' is NoneType"),
    "number": (b'{"text": 3}\n', "field 'text' is int"),
    "binary": (b"\x00\xff\xfe\x01\n", "not valid JSON"),
    "deep": (b"[" * 200_000 + b"\n", "not valid JSON"),
    "nested": (
        b'{"text": "a", "m": ' + b'[{"k": ' * 50 + b"1" + b"}]" * 50 + b"}\n",
        "the record nests deeper than 100",
    ),
    "long number": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", "not valid JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_costs_nothing_else(tmp_path, name, caplog):
    line, why = BAD[name]
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "a"}, line, {"text": "b"}))
    counts = Counts()
    assert texts(tmp_path, counts) == ["a", "b"]
    check(counts, 2, 1)
    assert counts.failures[0].startswith(f"a.jsonl:2: {why}") and counts.failures[0] in caplog.text


def test_signs_in_a_text_are_no_nesting(tmp_path):
    """A record may nest a hundred deep, and its text may hold any number of brackets."""
    nested = json.loads("[" * 99 + "]" * 99)
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "[{" * 500, "m": nested}))
    counts = Counts()
    assert texts(tmp_path, counts) == ["[{" * 500]
    check(counts, 1, 0)


def test_bad_bytes_are_replaced_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(b'{"text": "caf\xe9 \xed\xa0\x80"}\n', {"text": "b"}))
    (tmp_path / "b.txt").write_bytes(b"\xff one")
    counts = Counts()
    assert texts(tmp_path, counts) == ["caf\ufffd \ufffd\ufffd\ufffd", "b", "\ufffd one"]
    check(counts, 3, 0)
    assert counts.repaired == 2


def test_only_the_first_failures_are_told(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(b"x\n" * 500)
    counts = Counts()
    assert texts(tmp_path, counts) == []
    check(counts, 0, 500)
    assert len(counts.failures) == 11 and len(caplog.records) == 11


# ------------------------------------------------------------------------------------------------------------- compression


def members(pack, suffix, tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=300)) for _ in range(2000)]
    parts = [pack(lines(*({"text": w} for w in words[i : i + 500]))) for i in range(0, 2000, 500)]
    return words, parts, tmp_path / f"a.jsonl{suffix}"


KINDS = [(gzip.compress, ".gz"), (zstandard.compress, ".zst")]


@pytest.mark.parametrize("pack, suffix", KINDS)
def test_all_members_are_read(tmp_path, pack, suffix):
    words, parts, path = members(pack, suffix, tmp_path)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" if suffix == ".zst" else b"\0" * 600
    path.write_bytes(skippable.join(parts) if suffix == ".zst" else parts[0] + b"".join(parts[1:]) + skippable)
    counts = Counts()
    assert texts(path, counts) == words
    check(counts, 2000, 0)


@pytest.mark.parametrize("pack, suffix", KINDS)
@pytest.mark.parametrize("lost", [1, 5, 5000])
def test_a_file_that_was_cut_short(tmp_path, pack, suffix, lost, caplog):
    words, parts, path = members(pack, suffix, tmp_path)
    path.write_bytes(b"".join(parts)[:-lost])
    counts = Counts()
    found = texts(path, counts)
    assert found == words[: len(found)] and len(found) >= (1900 if lost < 5000 else 1500)
    assert counts.failed in (1, 2) and counts.read == counts.kept + counts.failed
    assert "cut short" in caplog.text and "a.jsonl" in caplog.text


@pytest.mark.parametrize("pack, suffix", KINDS)
def test_damage_in_the_middle(tmp_path, pack, suffix, caplog):
    _, parts, path = members(pack, suffix, tmp_path)
    data = bytearray(b"".join(parts))
    data[len(parts[0]) + len(parts[1]) // 2] ^= 0xFF
    path.write_bytes(data)
    counts = Counts()
    found = texts(path, counts)
    assert len(found) >= 300 and counts.failed >= 1 and "damaged" in caplog.text


@pytest.mark.parametrize("pack, suffix", KINDS)
def test_garbage_after_the_last_member(tmp_path, pack, suffix):
    words, parts, path = members(pack, suffix, tmp_path)
    path.write_bytes(b"".join(parts) + b"garbage")
    counts = Counts()
    assert texts(path, counts) == words
    check(counts, 2000, 1)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_compressed_file_is_a_failure(tmp_path, suffix):
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"")
    counts = Counts()
    assert texts(tmp_path, counts) == []
    check(counts, 0, 1)


# ----------------------------------------------------------------------------------------------------------------- Parquet


def test_parquet_rows(tmp_path):
    table = pa.table(
        {
            "text": pa.array(["a", None, "c\u2028", ""] * 300),
            "id": [f"n{i}" for i in range(1200)],
            "when": pa.array([0, 1, 2, 3] * 300, pa.timestamp("ns")),
            "tags": [["x"], [], None, ["y", "z"]] * 300,
            "data": [b"b"] * 1200,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    counts = Counts()
    found = list(read_documents(tmp_path, "s", counts))
    check(counts, 900, 300)
    assert counts.failures[0] == "a.parquet:2: field 'text' is NoneType, not a text"
    assert (found[1].id, found[1].text) == ("n2", "c\u2028")
    assert found[0].meta == {"when": "1970-01-01 00:00:00", "tags": ["x"], "data": "b"}
    assert found[-1].id == "n1199" and json.loads(json.dumps(found[0].meta)) == found[0].meta


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()])
def test_parquet_bad_bytes(tmp_path, kind):
    raw = pa.array([b"good", b"bad \xff", b"good"])
    column = raw.cast(pa.string(), safe=False) if kind != pa.binary() else raw
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers()) if kind != pa.binary() else raw
    if pa.types.is_large_string(kind):
        column = pa.array([b"good", b"bad \xff", b"good"], pa.large_binary())
        column = pa.Array.from_buffers(kind, 3, column.buffers())
    if pa.types.is_dictionary(kind):
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()), column)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    counts = Counts()
    assert texts(tmp_path, counts) == ["good", "bad \ufffd", "good"]
    check(counts, 3, 0)
    assert counts.repaired == 1


def test_parquet_without_the_text_column(tmp_path):
    pq.write_table(pa.table({"body": ["a", "b"]}), tmp_path / "a.parquet")
    counts = Counts()
    assert texts(tmp_path, counts) == [] and texts(tmp_path, text_field="body") == ["a", "b"]
    check(counts, 0, 2)


def test_a_value_that_python_cannot_hold_costs_no_text(tmp_path):
    when = pa.array([0, 1 << 60, 0], pa.timestamp("us", "Europe/Paris"))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "when": when}), tmp_path / "a.parquet")
    found = list(read_documents(tmp_path, "s"))
    assert [d.text for d in found] == ["a", "b", "c"]
    assert found[0].meta == {"when": "1970-01-01 00:00:00+00:00"} and "unreadable" in found[1].meta["when"]


def test_a_damaged_row_group_costs_itself_alone(tmp_path):
    text = ["".join(random.Random(i).choices("abcdefgh", k=200)) for i in range(300)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": text}), path, row_group_size=100, use_dictionary=False, write_page_checksum=True)
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset + group.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)
    counts = Counts()
    assert texts(tmp_path, counts) == text[:100] + text[200:]
    check(counts, 200, 100)


# ----------------------------------------------------------------------------------------------------------- finding files


def test_folders_globs_and_order(tmp_path):
    for name in ("b/2.txt", "b/1.md", "a.txt", "b/c/3.TXT", "b/.hidden.txt", "b/image.png", "b/manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    counts = Counts()
    assert texts(tmp_path, counts) == ["a.txt", "b/1.md", "b/2.txt", "b/c/3.TXT"]
    assert counts.skipped_files == 1
    assert [d.id for d in read_documents(tmp_path / "b", "s")] == ["1.md", "2.txt", "c/3.TXT"]
    assert texts(f"{tmp_path}/*/*.txt") == ["b/2.txt"]
    assert texts([f"{tmp_path}/b/2.txt", tmp_path]) == ["b/2.txt", "a.txt", "b/1.md", "b/c/3.TXT"]  # each once


def test_equal_names_become_whole_paths(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    found = list(read_documents([tmp_path / "a", tmp_path / "b"], "s"))
    assert [d.id for d in found] == [f"{tmp_path}/a/x.txt", f"{tmp_path}/b/x.txt"]


def test_a_file_of_two_paths_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    os.symlink("a.txt", tmp_path / "b.txt")
    assert texts(["a.txt", tmp_path / "a.txt", "./b.txt", tmp_path]) == ["a"]


@pytest.mark.parametrize("where", ["made", "."], ids=["the folder", "a folder above"])
def test_of_a_folder_that_a_stage_made_its_documents_are_read(tmp_path, where):
    """Its work, its events, its report and what stages publish are none."""
    made = tmp_path / "made"
    for name in (
        "web.jsonl.zst",
        "work/00-read/kept/web.jsonl.zst",
        "events/web.jsonl.zst",
        "near_dedup/web.jsonl.zst",
    ):
        write_documents(made / name, [Document(name, "x", "web")])
    (made / "report.html").write_text("a report")
    hashes = dict.fromkeys(("web.jsonl.zst", "events/web.jsonl.zst", "near_dedup/web.jsonl.zst"), "")
    write_manifest(made, Manifest("prepare", {}, {}, {}, {"files": hashes}, "", 0.0))
    assert [d.id for d in read_documents(tmp_path / where, "s")] == ["web.jsonl.zst"]
    (made / MANIFEST).write_text('{"stage": "prepare", "inputs": {}, "content": {}, "old": 1}')
    with pytest.raises(UserError, match="is not a manifest of this version"):
        texts(tmp_path / where)
    (made / MANIFEST).unlink()
    (made / UNFINISHED).write_text("prepare")
    with pytest.raises(UserError, match="the stage did not finish"):
        texts(tmp_path / where)


def test_a_manifest_of_something_else_is_no_stages(tmp_path):
    for i, text in enumerate(('{"name": "x"}', "[1]", "{")):
        (tmp_path / MANIFEST).write_text(text)
        (tmp_path / "a.txt").write_text(str(i))
        assert texts(tmp_path) == [str(i)]


def test_a_circle_of_links_ends(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    os.symlink(tmp_path, tmp_path / "loop")
    assert texts(tmp_path) == ["a"]


def test_a_name_with_glob_characters_is_a_name(tmp_path):
    (tmp_path / "a[1].txt").write_text("a")
    assert texts(tmp_path / "a[1].txt") == ["a"]


def test_utf16_text_is_known_by_its_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\n".encode("utf-16"))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfx")
    assert texts(tmp_path) == ["é\n", "x"]


@pytest.mark.parametrize(
    "name, data, says",
    [
        ("missing.txt", None, "no such file or folder"),
        ("a.csv", b"x", "no known extension"),
        ("a.parquet", b"not parquet", "not a readable Parquet file"),
        ("a.jsonl.gz", b'{"text": "a"}', "is not a .jsonl.gz file"),
        ("a.jsonl.zst", b'{"text": "a"}', "is not a .jsonl.zst file"),
        ("*.nothing", None, "holds no file"),
    ],
)
def test_mistakes_name_the_path(tmp_path, name, data, says):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=says) as error:
        texts(tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_an_empty_folder_and_no_paths(tmp_path):
    with pytest.raises(UserError, match="holds no file"):
        texts(tmp_path)
    with pytest.raises(UserError, match="no input paths"):
        texts([])


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    ((_, path),), _ = find_files(tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        texts(tmp_path)
