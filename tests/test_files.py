"""Atomic writes, hashes, manifests, and the rules of a stage's folder."""

import contextlib
import json
import os
import pathlib
import random

import pytest

from lmjax.errors import UserError
from lmjax.files import (
    MANIFEST,
    UNFINISHED,
    Manifest,
    check_apart,
    code_version,
    read_json,
    read_manifest,
    run_stage,
    sha256_bytes,
    sha256_file,
    sha256_json,
    write_atomic,
    write_json,
    write_manifest,
)

INPUTS, CONFIG = {"a": "1"}, {"n": 2, "shape": (3, 4)}


def make_one(folder):
    (folder / "data").write_text("made")
    return {"items": 1}, {"files": {"data": sha256_file(folder / "data")}}


def unwanted(folder):
    raise AssertionError("the stage must not run")


def names(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*"))


# ------------------------------------------------------------------------------------------------------ hashes and writing


def test_hashes_are_sha256(tmp_path):
    assert sha256_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    data = random.Random(0).randbytes(3 * (1 << 20) + 7)  # more than one block
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == sha256_bytes(data)


def test_hash_of_json_ignores_the_order_of_keys_alone():
    assert sha256_json({"a": 1, "b": [1, 2]}) == sha256_json({"b": [1, 2], "a": 1})
    values = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": [1]}, {"a": None}, {"a": "\ud800"}]
    assert len({sha256_json(value) for value in values}) == len(values)


def test_atomic_write_replaces_and_makes_folders(tmp_path):
    write_atomic(tmp_path / "x" / "y" / "a", "old")
    write_atomic(tmp_path / "x" / "y" / "a", b"new")
    assert (tmp_path / "x" / "y" / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["x", "x/y", "x/y/a"]


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    from etils import epath

    write_atomic(tmp_path / "a", "old")

    def fail(self, data):
        if step == "write_bytes":
            pathlib.Path(self).write_bytes(b"ha")  # a disk that is full leaves half a file
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(epath.Path(tmp_path)), step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_json_comes_back(tmp_path):
    value = {"text": "é\u2028 \ud800 \"'\\", "numbers": [1, 2.5, None, True], "nested": {"ü": {}}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "é" in (tmp_path / "a.json").read_text(encoding="utf-8")  # readable, and valid UTF-8


@pytest.mark.parametrize("data", [b"", b'{"a": 1', b"\xff\xfe\x00", b"not json"])
def test_broken_json_names_the_file(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"no such file: .*b\.json"):
        read_json(tmp_path / "b.json")


def test_code_version_names_the_version():
    assert code_version().startswith("0.")


# --------------------------------------------------------------------------------------------------------------- manifests


def manifest(**changes) -> Manifest:
    values = {"stage": "s", "inputs": INPUTS, "config": {}, "counts": {}, "content": {}, "code": "c", "seconds": 1.0}
    return Manifest(**(values | changes))


def test_manifest_comes_back(tmp_path):
    write_manifest(tmp_path, manifest(counts={"n": 1}))
    assert read_manifest(tmp_path) == read_manifest(tmp_path, "s") == manifest(counts={"n": 1})


def test_fingerprint_is_of_what_was_made_not_of_when_and_by_which_code():
    same = [manifest(), manifest(code="other"), manifest(seconds=2.0)]
    assert len({m.fingerprint() for m in same}) == 1
    changes = [{"stage": "t"}, {"inputs": {}}, {"config": {"a": 1}}, {"counts": {"a": 1}}, {"content": {"a": 1}}]
    assert len({manifest(**change).fingerprint() for change in [{}, *changes]}) == len(changes) + 1


def test_what_is_no_finished_folder(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_manifest(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, manifest())
    with pytest.raises(UserError, match="made by `lmjax s`, but the output of `lmjax t` is needed"):
        read_manifest(tmp_path, "t")
    for value in ({"stage": "s"}, [1], 3):
        write_json(tmp_path / MANIFEST, value)
        with pytest.raises(UserError, match="is not a manifest of this version"):
            read_manifest(tmp_path)


# ------------------------------------------------------------------------------------------------------------------ stages


def test_a_stage_runs_once(tmp_path):
    made, skipped = run_stage(tmp_path / "x" / "out", "s", INPUTS, CONFIG, make_one)
    assert not skipped and read_manifest(tmp_path / "x" / "out", "s") == made
    assert (made.stage, made.inputs, made.config) == ("s", INPUTS, {"n": 2, "shape": [3, 4]})
    assert (made.counts, made.content) == ({"items": 1}, {"files": {"data": sha256_bytes(b"made")}})
    assert names(tmp_path / "x" / "out") == ["data", "manifest.json"]
    assert run_stage(tmp_path / "x" / "out", "s", INPUTS, CONFIG, unwanted) == (made, True)


@pytest.mark.parametrize(
    "stage, inputs, config, says",
    [
        ("t", INPUTS, CONFIG, "other stage;"),
        ("s", {"a": "2"}, CONFIG, "other inputs;"),
        ("s", INPUTS, {"n": 3}, "other config;"),
        ("t", {}, {}, "other stage and inputs and config;"),
    ],
)
def test_another_output_is_refused_and_stays(tmp_path, stage, inputs, config, says):
    run_stage(tmp_path, "s", INPUTS, CONFIG, make_one)
    before = (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(UserError, match=says):
        run_stage(tmp_path, stage, inputs, config, unwanted)
    assert names(tmp_path) == ["data", "manifest.json"] and (tmp_path / MANIFEST).read_bytes() == before


def test_a_folder_of_the_users_is_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and is not the output of a stage"):
        run_stage(tmp_path, "s", INPUTS, CONFIG, unwanted)
    assert names(tmp_path) == ["thesis.txt"]
    with pytest.raises(UserError, match="is a file"):
        run_stage(tmp_path / "thesis.txt", "s", INPUTS, CONFIG, unwanted)
    with pytest.raises(UserError, match="cannot write to"):
        run_stage(tmp_path / "thesis.txt" / "out", "s", INPUTS, CONFIG, unwanted)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    "out, given, apart",
    [
        ("a", "a", False),
        ("a", "a/b.txt", False),
        ("a/b", "a", False),
        ("link/b", "a", False),
        ("a", "ab", True),
        ("a/b", "a/*.jsonl", True),
        ("a", "a/*.jsonl", False),
        ("a/b", "a/*/*.jsonl", True),  # no file of an output ends so
        ("gs://x/a/b", "gs://x/a/", False),
        ("gs://x/a", "gs://x/b", True),
    ],
)
def test_outputs_stand_apart_from_inputs(tmp_path, out, given, apart):
    os.symlink(tmp_path / "a", tmp_path / "link")
    out, given = (path if "://" in path else tmp_path / path for path in (out, given))
    with contextlib.nullcontext() if apart else pytest.raises(UserError, match="choose another --out"):
        check_apart(out, [given])


def test_an_empty_folder_may_be_filled(tmp_path):
    run_stage(tmp_path, "s", INPUTS, CONFIG, make_one)
    assert names(tmp_path) == ["data", "manifest.json"]


def test_a_half_written_folder_is_never_trusted_and_done_again(tmp_path):
    def killed(folder):
        (folder / "half").mkdir()
        (folder / "half" / "old").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path / "out", "s", INPUTS, CONFIG, killed)
    assert (tmp_path / "out" / UNFINISHED).exists()
    with pytest.raises(UserError, match="did not finish"):
        read_manifest(tmp_path / "out")
    _, skipped = run_stage(tmp_path / "out", "t", {}, {}, make_one)  # another stage, too: nothing there was finished
    assert not skipped and names(tmp_path / "out") == ["data", "manifest.json"]


def test_a_kill_while_the_half_written_folder_is_emptied(tmp_path, monkeypatch):
    from etils import epath

    for name in (UNFINISHED, "a", "b", "zz"):
        (tmp_path / name).write_text("old")
    unlink = type(epath.Path(tmp_path)).unlink

    def kill(self, *arguments, **kwargs):
        unlink(self, *arguments, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path(tmp_path)), "unlink", kill)
        with pytest.raises(KeyboardInterrupt):
            run_stage(tmp_path, "s", INPUTS, CONFIG, unwanted)
    assert UNFINISHED in os.listdir(tmp_path)
    run_stage(tmp_path, "s", INPUTS, CONFIG, make_one)
    assert names(tmp_path) == ["data", "manifest.json"]


def test_a_failing_stage_writes_no_manifest(tmp_path):
    def fails(folder):
        make_one(folder)
        raise UserError("no documents")

    with pytest.raises(UserError, match="no documents"):
        run_stage(tmp_path, "s", INPUTS, CONFIG, fails)
    assert MANIFEST not in names(tmp_path)


def test_a_kill_between_manifest_and_marker_counts_as_done(tmp_path):
    made, _ = run_stage(tmp_path, "s", INPUTS, CONFIG, make_one)
    (tmp_path / UNFINISHED).write_text("s")
    assert run_stage(tmp_path, "s", INPUTS, CONFIG, unwanted) == (made, True)


def test_the_manifest_on_disk_is_plain_json(tmp_path):
    run_stage(tmp_path, "s", INPUTS, CONFIG, make_one)
    assert set(json.loads((tmp_path / MANIFEST).read_text())) == set(Manifest.__dataclass_fields__)
