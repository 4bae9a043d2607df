"""The split depends on text and seed alone, keeps every document, and says what it could not."""

import json

import pytest

from lmjax.data.config import SplitConfig
from lmjax.data.document import Document, grouped
from lmjax.data.split import SPLITS, side, split_documents
from lmjax.data.written import read_written, write_documents
from lmjax.errors import UserError
from lmjax.files import Manifest, sha256_file, write_manifest

HALF = SplitConfig(validation=0.2, test=0.3)


def make_folder(folder, stage="corpus", **sources):
    """A finished folder of documents, as a stage makes it."""
    for source, texts in sources.items():
        documents = [Document(f"{source}{i}", text, source, {"n": i}) for i, text in enumerate(texts)]
        write_documents(folder / f"{source}.jsonl.zst", documents)
    files = {f"{source}.jsonl.zst": sha256_file(folder / f"{source}.jsonl.zst") for source in sources}
    write_manifest(folder, Manifest(stage, {}, {}, {}, {"files": files}, "", 0.0))
    return folder


def written(out):
    """(split, source) → documents."""
    return {
        (path.parent.name, path.name.removesuffix(".jsonl.zst")): list(read_written(path))
        for path in out.glob("*/*.jsonl.zst")
    }


def text_only(text):
    return Document("id", text, "a")


def numbered(n, start=0):
    return [f"text {i} \ud800\u2028" for i in range(start, start + n)]


def test_every_document_arrives_once_on_its_side(tmp_path):
    folder = make_folder(tmp_path / "in", a=numbered(300), b=numbered(100, 1000))
    manifest, _ = split_documents(folder, tmp_path / "out", HALF)
    found = written(tmp_path / "out")
    assert set(found) == {(split, source) for split in SPLITS for source in "ab"}
    for (split, source), documents in found.items():
        assert all(side(document, HALF) == split and document.source == source for document in documents)
        assert [d.meta["n"] for d in documents] == sorted(d.meta["n"] for d in documents)  # the order is kept
        size = sum(len(document.text.encode("utf-8", "surrogatepass")) for document in documents)
        assert manifest.counts["splits"][split][source] == {"documents": len(documents), "bytes": size}
    assert sorted(d.id for documents in found.values() for d in documents) == sorted(
        [f"a{i}" for i in range(300)] + [f"b{i}" for i in range(100)]
    )
    assert manifest.counts["read"] == manifest.counts["kept"] == manifest.counts["documents"] == 400
    for name, digest in manifest.content["files"].items():
        assert sha256_file(tmp_path / "out" / name) == digest


def test_a_group_is_not_divided(tmp_path):
    """A module's code and its docstrings: other texts, other sources, one side."""
    for source in "ab":
        documents = [Document(f"{i}", f"{source} {i}", source, {"group": f"module {i}"}) for i in range(200)]
        write_documents(tmp_path / "in" / f"{source}.jsonl.zst", documents)
    files = {f"{source}.jsonl.zst": sha256_file(tmp_path / "in" / f"{source}.jsonl.zst") for source in "ab"}
    write_manifest(tmp_path / "in", Manifest("corpus", {}, {}, {}, {"files": files}, "", 0.0))
    split_documents(tmp_path / "in", tmp_path / "out", HALF)
    ids = {key: {document.id for document in documents} for key, documents in written(tmp_path / "out").items()}
    assert all(ids[split, "a"] == ids[split, "b"] for split in SPLITS) and len(ids["train", "a"]) < 200


def test_an_empty_group_is_none():
    """A column that only some rows fill: the others are divided by their texts."""
    for text in numbered(20):
        assert side(Document("d", text, "s", {"group": None}), HALF) == side(text_only(text), HALF)


def test_a_group_of_its_own_moves_no_document():
    """Whoever lets a model write more from what he has split keeps his held-out documents."""
    documents = [text_only(text) for text in numbered(300)]
    assert all(side(grouped(document), HALF) == side(document, HALF) for document in documents)
    assert {side(document, HALF) for document in documents} == set(SPLITS)


def test_shares_are_met():
    sides = [side(text_only(text), HALF) for text in numbered(5000)]
    assert abs(sides.count("test") / 5000 - 0.3) < 0.02 and abs(sides.count("validation") / 5000 - 0.2) < 0.02


def test_copies_agree_and_new_documents_move_none(tmp_path):
    few, more = numbered(50), ["new one", *numbered(60), *numbered(50), *numbered(10, 900)]
    split_documents(make_folder(tmp_path / "few", a=few), tmp_path / "out1", HALF)
    split_documents(make_folder(tmp_path / "more", b=more), tmp_path / "out2", HALF)
    where = {d.text: split for (split, _), documents in written(tmp_path / "out1").items() for d in documents}
    for (split, _), documents in written(tmp_path / "out2").items():
        assert all(where.get(d.text, split) == split for d in documents)


def test_another_seed_is_another_split():
    texts = numbered(2000)
    other = SplitConfig(validation=0.2, test=0.3, seed=1)
    same = sum(side(text_only(text), HALF) == side(text_only(text), other) for text in texts) / 2000
    assert abs(same - (0.5**2 + 0.2**2 + 0.3**2)) < 0.04


def test_again_is_skipped_and_gives_the_same_bytes(tmp_path):
    folder = make_folder(tmp_path / "in", a=numbered(100))
    first, skipped = split_documents(folder, tmp_path / "out", HALF)
    assert not skipped and split_documents(folder, tmp_path / "out", HALF) == (first, True)
    assert split_documents([folder], tmp_path / "again", HALF)[0].fingerprint() == first.fingerprint()


def test_raw_files(tmp_path):
    (tmp_path / "raw").mkdir()
    records = [{"body": text, "url": "u"} for text in numbered(100)]
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    (tmp_path / "raw" / "a.jsonl").write_bytes(data + b"broken\n" + b'{"no": 1}\n')
    config = SplitConfig(validation=0.2, test=0.3, text_field="body")
    manifest, _ = split_documents(tmp_path / "raw", tmp_path / "out", config, source="web")
    counts = manifest.counts
    assert (counts["read"], counts["kept"], counts["failed"], counts["documents"]) == (102, 100, 2, 100)
    assert manifest.content["failures"][0].startswith("a.jsonl:101: not valid JSON") and str(tmp_path) not in str(
        manifest
    )
    assert {source for _, source in written(tmp_path / "out")} == {"web"}
    (tmp_path / "raw" / "a.jsonl").write_bytes(data)
    with pytest.raises(UserError, match="made from other inputs"):
        split_documents(tmp_path / "raw", tmp_path / "out", config, source="web")


def test_several_inputs(tmp_path):
    (tmp_path / "raw").mkdir()
    for i in range(40):
        (tmp_path / "raw" / f"{i}.txt").write_text(f"raw {i}")
    folder = make_folder(tmp_path / "in", a=numbered(50))
    manifest, _ = split_documents([folder, tmp_path / "raw"], tmp_path / "out", HALF, source="web")
    assert set(manifest.inputs) == {"a", "web"} and manifest.counts["kept"] == 90


def test_no_share_no_split(tmp_path):
    manifest, _ = split_documents(make_folder(tmp_path / "in", a=numbered(20)), tmp_path / "out", SplitConfig(0.0, 0.0))
    assert list(manifest.counts["splits"]) == ["train"] and set(written(tmp_path / "out")) == {("train", "a")}


def test_a_source_without_documents_in_a_split_is_told(tmp_path, caplog):
    lonely = next(text for text in numbered(100) if side(text_only(text), HALF) == "train")
    manifest, _ = split_documents(make_folder(tmp_path / "in", a=numbered(100), b=[lonely]), tmp_path / "out", HALF)
    assert manifest.counts["splits"]["test"]["b"] == {"documents": 0, "bytes": 0}
    assert "the source b has no document in test" in caplog.text
    assert not (tmp_path / "out" / "test" / "b.jsonl.zst").exists()


# ----------------------------------------------------------------------------------------------------------------- mistakes


def fails(match, *arguments, **kwargs):
    with pytest.raises(UserError, match=match) as error:
        split_documents(*arguments, **kwargs)
    assert "\n" not in str(error.value)


def test_too_few_documents(tmp_path):
    text = next(text for text in numbered(100) if side(text_only(text), HALF) == "train")
    folder = make_folder(tmp_path / "in", a=[text])
    fails(r"none of the 1 documents fell into validation .*raise config\.validation", folder, tmp_path / "out", HALF)


def test_nothing_to_read(tmp_path):
    fails("hold no document", make_folder(tmp_path / "in", a=[]), tmp_path / "out", HALF)
    (tmp_path / "a.jsonl").write_text("broken\n")
    fails(
        "hold no document; the first of 1 failures: a.jsonl:1", tmp_path / "a.jsonl", tmp_path / "b", HALF, source="a"
    )
    fails("no such file or folder", tmp_path / "none", tmp_path / "c", HALF, source="a")
    fails("raw files need the name|no input", [], tmp_path / "c", HALF)


def test_an_output_inside_an_input_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    with pytest.raises(UserError, match="lies in the input"):
        split_documents(tmp_path / "in", tmp_path / "in" / "out", SplitConfig(), "web")
    assert not (tmp_path / "in" / "out").exists()


def test_names_of_sources(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    folder = make_folder(tmp_path / "in", a=numbered(3))
    fails("--source NAME", tmp_path / "a.txt", tmp_path / "out", HALF)
    fails("names files: use letters", tmp_path / "a.txt", tmp_path / "out", HALF, source="a/b")
    fails("two inputs hold the source 'a'", [folder, tmp_path / "a.txt"], tmp_path / "out", HALF, source="a")
    fails("two inputs hold the source 'a'", [folder, folder], tmp_path / "out", HALF)
    fails("sources have names: a", folder, tmp_path / "out", HALF, source="b")


def test_folders_that_are_no_documents(tmp_path):
    split_documents(make_folder(tmp_path / "in", a=numbered(50)), tmp_path / "out", HALF)
    fails("made by `lmjax split`: it holds no documents", tmp_path / "out", tmp_path / "again", HALF)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / ".unfinished").write_text("corpus")
    fails("did not finish", tmp_path / "half", tmp_path / "again", HALF)


def test_a_file_that_changed_after_its_manifest(tmp_path):
    folder = make_folder(tmp_path / "in", a=numbered(50))
    write_documents(folder / "a.jsonl.zst", [Document("x", "other", "a")])
    fails("sha256 differs", folder, tmp_path / "out", HALF)
