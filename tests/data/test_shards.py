"""What comes out of the shards is what went in, and whatever was damaged on the way is named."""

import itertools
import json
import os
import shutil
import signal
import tracemalloc
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from etils import epath
from tiny_shards import BARE, Bytes, make_shards, random_texts, write_split

from lmjax.data import shards as shards_module
from lmjax.data.config import ShardsConfig
from lmjax.data.shards import verify_shards, write_shards
from lmjax.data.source import MAX_OPEN_SHARDS, open_reader, open_source, open_sources
from lmjax.errors import UserError
from lmjax.tokenizers.byte import ByteTokenizer

TEXTS = random_texts(200, seed=0)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def data_files(folder):
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


def texts_of(source, tokenizer=BARE):
    documents = source.read(np.arange(source.num_documents))
    return {source.document(i)["id"]: tokenizer.decode(ids) for i, ids in enumerate(documents)}


def test_round_trip(tmp_path):
    folder = make_shards(tmp_path, {"code": TEXTS, "docs": ["é", "\ud800", ""]}, Bytes(), shard_tokens=500)
    source = open_source(folder, "train", "code")
    documents = source.read(np.arange(source.num_documents))
    assert len(source.shards) > 3
    assert {source.document(i)["meta"]["number"] for i in range(len(TEXTS))} == set(range(len(TEXTS)))
    for i, ids in enumerate(documents):
        assert ids.dtype == np.uint16 and ids[0] == 256 and ids[-1] == 257
        assert Bytes().decode(ids) == TEXTS[source.document(i)["meta"]["number"]]
    assert np.array_equal(source.offsets, np.cumsum([0, *map(len, documents)]))
    assert source.num_tokens == source.offsets[-1] == sum(map(len, TEXTS)) + 2 * len(TEXTS)
    assert source.num_bytes == sum(map(len, TEXTS))
    assert open_source(folder, "train", "docs").num_bytes == len("é".encode()) + 3  # a lone surrogate is three bytes


def test_reads_in_the_order_asked_across_shards(tmp_path):
    folder = make_shards(tmp_path, {"code": TEXTS}, shard_tokens=200)
    source = open_source(folder, "train", "code")
    everything = source.read(np.arange(len(TEXTS)))
    asked = np.random.default_rng(0).integers(0, len(TEXTS), 500)
    for index, ids in zip(asked, source.read(asked), strict=True):
        assert np.array_equal(ids, everything[index])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_ids_are_as_wide_as_the_vocabulary(tmp_path, vocab_size, dtype):
    tokenizer = Bytes(vocab_size, bos_id=vocab_size - 1)
    source = open_source(make_shards(tmp_path, {"code": ["ab"]}, tokenizer), "train", "code")
    assert source.dtype == dtype
    assert source.read(np.array([0]))[0].tolist() == [vocab_size - 1, 97, 98, 257]


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="leave the vocabulary"):
        make_shards(tmp_path, {"code": ["z"]}, Bytes(100, bos_id=None, eos_id=None))


@pytest.mark.parametrize(("add_bos", "add_eos"), itertools.product([True, False], repeat=2))
def test_special_ids(tmp_path, add_bos, add_eos):
    folder = make_shards(tmp_path, {"code": ["a"]}, Bytes(), add_bos=add_bos, add_eos=add_eos)
    source = open_source(folder, "train", "code")
    assert source.read(np.array([0]))[0].tolist() == [256] * add_bos + [97] + [257] * add_eos
    assert (source.bos_id is None, source.eos_id is None) == (not add_bos, not add_eos)


def test_long_documents_make_large_shards_and_are_never_cut(tmp_path):
    folder = make_shards(tmp_path, {"code": ["x" * 1000, "y" * 1000, "z"]}, shard_tokens=10)
    source = open_source(folder, "train", "code")
    assert sorted(texts_of(source).values()) == ["x" * 1000, "y" * 1000, "z"]
    assert 2 <= len(source.shards) <= 3


def test_damaged_documents_are_refused(tmp_path):
    documents = write_split(tmp_path / "documents", {"train": {"code": TEXTS}})
    path = documents / "train" / "code.jsonl.zst"
    data = path.read_bytes()
    other = write_split(tmp_path / "other", {"train": {"code": TEXTS[:-1]}}) / "train" / "code.jsonl.zst"
    for kept in (data[:-1], data[: len(data) // 2], other.read_bytes()):
        path.write_bytes(kept)
        with pytest.raises(UserError, match=r"train/code.jsonl.zst is"):
            write_shards(documents, BARE, tmp_path / "shards", ShardsConfig())
    path.unlink()
    with pytest.raises(UserError, match=r"train/code.jsonl.zst"):
        write_shards(documents, BARE, tmp_path / "shards", ShardsConfig())
    path.write_bytes(data)
    write_shards(documents, BARE, tmp_path / "shards", ShardsConfig())  # what was left unfinished is made anew
    verify_shards(tmp_path / "shards")


def test_the_order_is_the_seeds(tmp_path):
    def order(name, seed):
        return list(texts_of(open_source(make_shards(tmp_path / name, {"code": TEXTS}, seed=seed), "train", "code")))

    first = order("a", 0)
    assert sorted(first) == sorted(f"code-{i}" for i in range(len(TEXTS)))
    assert first == order("again", 0) != order("other", 1)


def test_a_tokenizer_from_its_folder(tmp_path):
    ByteTokenizer().save(epath.Path(tmp_path) / "tokenizer")
    documents = write_split(tmp_path / "documents", {"train": {"code": TEXTS}})
    manifest, _ = write_shards(documents, tmp_path / "tokenizer", tmp_path / "shards", ShardsConfig())
    source = open_source(tmp_path / "shards", "train", "code")
    assert source.tokenizer == ByteTokenizer().fingerprint() == manifest.inputs["tokenizer"]
    ids = source.read(np.array([7]))[0]
    assert ByteTokenizer().decode(ids) == TEXTS[source.document(7)["meta"]["number"]]


# ----------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("num_workers", [2, 3])
def test_bytes_do_not_depend_on_workers(tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(shards_module, "TASK_BYTES", 700)
    one = make_shards(tmp_path / "one", {"code": TEXTS}, Bytes(), shard_tokens=1000)
    monkeypatch.setattr(shards_module.Encoding, "__call__", None)  # of this process: it encodes nothing now
    several = make_shards(tmp_path / "several", {"code": TEXTS}, Bytes(), shard_tokens=1000, num_workers=num_workers)
    assert data_files(one) == data_files(several)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, several)]
    assert manifests[0] | {"seconds": 0} == manifests[1] | {"seconds": 0}


class Deadly(Bytes):
    def encode_batch(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_loud_and_leaves_no_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "TASK_BYTES", 700)
    with pytest.raises(BrokenProcessPool):
        make_shards(tmp_path, {"code": TEXTS}, Deadly(), num_workers=2)
    assert not (tmp_path / "shards" / "manifest.json").exists()


def test_a_finished_folder_is_skipped_for_the_same_input_only(tmp_path):
    documents = write_split(tmp_path / "documents", {"train": {"code": TEXTS}})
    out = tmp_path / "shards"
    manifest, skipped = write_shards(documents, BARE, out, ShardsConfig(num_workers=0))
    assert not skipped
    assert write_shards(documents, BARE, out, ShardsConfig(num_workers=1)) == (manifest, True)
    for tokenizer, config in [(Bytes(), ShardsConfig()), (BARE, ShardsConfig(seed=1))]:
        with pytest.raises(UserError, match="made from other"):
            write_shards(documents, tokenizer, out, config)


# --------------------------------------------------------------------------------------------------------- empty, unknown


def test_empty_sources(tmp_path):
    documents = write_split(tmp_path / "documents", {"train": {"code": [], "docs": ["", ""]}})
    (documents / "train" / "code.jsonl.zst").unlink()  # as `lmjax split` leaves a source that got nothing
    manifest = json.loads((documents / "manifest.json").read_text())
    del manifest["content"]["files"]["train/code.jsonl.zst"]
    (documents / "manifest.json").write_text(json.dumps(manifest))
    folder = tmp_path / "shards"
    write_shards(documents, BARE, folder, ShardsConfig())
    code, docs = open_sources([folder], "train")
    assert (code.num_documents, code.num_tokens, code.shards, code.read(np.arange(0))) == (0, 0, (), [])
    assert (docs.num_documents, docs.num_tokens) == (2, 0)
    verify_shards(folder)


def test_unknown_names(tmp_path):
    folder = make_shards(tmp_path, {"code": TEXTS})
    with pytest.raises(UserError, match="no split 'trian'; did you mean 'train'"):
        open_sources([folder], "trian")
    with pytest.raises(UserError, match="no split 'trian'"):
        verify_shards(folder, ["trian"])
    with pytest.raises(UserError, match=r"no source 'cod'.*did you mean 'code'"):
        open_source(folder, "train", "cod")
    with pytest.raises(UserError, match=r"set config\.data\.cache_dir"):
        open_sources(["gs://bucket/shards"], "train")


# --------------------------------------------------------------------------------------------------------------- verifying

FILES = ["00001.array_record", "offsets.npy", "documents.array_record"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("whole"), {"code": TEXTS}, shard_tokens=2000)


@pytest.fixture
def damaged(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "damaged")


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_missing_and_truncated_files_are_named(damaged, name, full):
    verify_shards(damaged, full=full)
    path = damaged / "train" / "code" / name
    data = path.read_bytes()
    for kept in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:kept])
        with pytest.raises(UserError, match=f"{name} is truncated: {kept} of {len(data)} bytes"):
            verify_shards(damaged, ["train"], full=full)
    path.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        verify_shards(damaged, full=full)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_found(damaged, name):
    path = damaged / "train" / "code" / name
    data = bytearray(path.read_bytes())
    for at in np.random.default_rng(0).integers(0, len(data), 20):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(UserError, match=f"{name}: content differs"):
            verify_shards(damaged)


def test_the_wrong_shard_under_the_right_name(damaged):
    code = damaged / "train" / "code"
    shutil.copy(code / "00000.array_record", code / "00001.array_record")
    with pytest.raises(UserError, match=r"00001.array_record: content differs"):
        verify_shards(damaged)


def test_a_shard_of_the_right_size_without_its_records(damaged):
    """ArrayRecord itself reports 0 records and no error."""
    path = damaged / "train" / "code" / "00000.array_record"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"00000.array_record holds 0 records, the manifest says \d+"):
        verify_shards(damaged, full=False)


def test_damage_that_nobody_verified_is_loud_when_read(damaged):
    code = damaged / "train" / "code"
    source = open_source(damaged, "train", "code")
    offsets = np.load(code / "offsets.npy")
    offsets[5:] += 1
    np.save(code / "offsets.npy", offsets)
    with pytest.raises(UserError, match=r"offsets.npy does not fit the shards at document 4"):
        source.read(np.arange(10))
    data = (code / "00000.array_record").read_bytes()
    for kept in (0, 1 << 16, len(data) - 1):
        open_reader.cache_clear()
        (code / "00000.array_record").write_bytes(data[:kept])
        with pytest.raises(UserError, match=r"00000.array_record cannot be read"):
            open_source(damaged, "train", "code").read(np.arange(3))


# --------------------------------------------------------------------------------------------------------- several folders


def test_folders_must_share_a_tokenizer_and_no_name(tmp_path):
    a = make_shards(tmp_path / "a", {"code": TEXTS}, Bytes())
    b = make_shards(tmp_path / "b", {"docs": TEXTS}, Bytes())
    assert [source.name for source in open_sources([b, a], "train")] == ["code", "docs"]
    with pytest.raises(UserError, match=r"source 'code' is in .*a/shards.* and in .*a/shards"):
        open_sources([a, b, a], "train")
    other = make_shards(tmp_path / "c", {"news": TEXTS}, Bytes(300))
    with pytest.raises(UserError, match=r"a/shards.* and .*c/shards.* differ in tokenizer"):
        open_sources([a, b, other], "train")
    no_bos = make_shards(tmp_path / "d", {"news": TEXTS}, Bytes(), add_bos=False)
    with pytest.raises(UserError, match="differ in bos_id"):
        open_sources([a, no_bos], "train")


def test_the_fingerprint_is_of_the_content(tmp_path, damaged):
    def fingerprint(folder):
        return open_source(folder, "train", "code").fingerprint

    same = make_shards(tmp_path / "same", {"code": TEXTS}, shard_tokens=2000)
    assert fingerprint(same) == fingerprint(damaged)  # a copy elsewhere
    others = [
        make_shards(tmp_path / "text", {"code": [*TEXTS[:-1], "other"]}, shard_tokens=2000),
        make_shards(tmp_path / "tokenizer", {"code": TEXTS}, Bytes(), shard_tokens=2000),
        make_shards(tmp_path / "seed", {"code": TEXTS}, shard_tokens=2000, seed=1),
    ]
    assert len({fingerprint(folder) for folder in [same, *others]}) == 4


# ------------------------------------------------------------------------------------------------------------------ memory


def test_reading_holds_neither_documents_nor_offsets(tmp_path):
    folder = make_shards(tmp_path, {"code": [str(i) for i in range(20_000)]})
    open_source(folder, "train", "code").read(np.array([1]))  # imports and open files
    tracemalloc.start()
    source = open_source(folder, "train", "code")
    for i in range(0, 20_000, 100):
        source.read(np.array([i]))
    assert tracemalloc.get_traced_memory()[1] < 80_000  # four bytes for each document would be more; offsets are eight
    tracemalloc.stop()


def test_open_files_are_bounded(tmp_path):
    folder = make_shards(tmp_path, {"code": ["abc"] * (MAX_OPEN_SHARDS + 20)}, shard_tokens=1)
    source = open_source(folder, "train", "code")
    open_reader.cache_clear()
    assert len(source.shards) == MAX_OPEN_SHARDS + 20
    assert sum(map(len, source.read(np.arange(source.num_documents)))) == source.num_tokens
    assert open_reader.cache_info().currsize == MAX_OPEN_SHARDS
