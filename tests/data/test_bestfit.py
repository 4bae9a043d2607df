"""Rows of whole documents: the bins against a slow best-fit decreasing, the rows against every token of every document."""

import dataclasses
import os
import random
import shutil
import time
import tracemalloc
from collections import Counter, defaultdict

import numpy as np
import pytest
from tiny_shards import Bytes, make_shards, random_texts, stream, traced_tokens

from lmjax.config import build
from lmjax.data import bestfit
from lmjax.data.bestfit import best_fit, groups, index_of, pack_group, prepare_index
from lmjax.data.config import DataConfig
from lmjax.data.loader import StepReader, batches, build_train_reader
from lmjax.data.source import open_source
from lmjax.data.trace import trace
from lmjax.errors import UserError

B, T, SEED = 8, 16, 3
SOURCES = {"code": random_texts(100, 1), "docs": [*random_texts(25, 2), "x" * 14, "y" * 15, "z" * 90, "A" * 30]}


# ------------------------------------------------------------------------------------------------------------------ packing


def slow_best_fit(lengths, capacity):
    """What is in each bin: every item, the longest first, into the fullest bin that holds it."""
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, used in enumerate(bins) if used + length <= capacity]
        best = max(fitting, key=bins.__getitem__, default=None)
        if best is None:
            bins.append(length)
        else:
            bins[best] += length
    return sorted(bins)


@pytest.mark.parametrize("seed", range(60))
def test_bins_are_those_of_best_fit_decreasing(seed):
    """Which of two bins with the same room takes an item changes no bin's room, so all that is left is how full bins are."""
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([1, 2, 7, 16, 50, 100]))
    draws = [rng.random(250), rng.random(250) ** 4, rng.random(250) ** 0.2, rng.choice([0.11, 0.3, 0.34, 0.6], 250)]
    lengths = np.minimum(1 + (draws[seed % 4] * capacity).astype(int), capacity)
    bins = best_fit(lengths, capacity)
    assert sorted(np.unique(bins)) == list(range(bins.max() + 1))
    assert sorted(np.bincount(bins, lengths).tolist()) == slow_best_fit(lengths.tolist(), capacity)


@pytest.mark.parametrize(
    "lengths, rows",
    [
        ([], 0),
        ([9] * 10, 10),  # two never meet
        ([4] * 10, 3),
        ([5] * 10, 4),  # three in a row of 16, one token is left
        ([12, 4] * 7, 7),
        ([16] * 3 + [1] * 16, 4),
        ([10, 10, 6, 5, 1], 2),
        ([1] * 17, 2),
        ([40], 3),  # 16 + 16 + 8
        ([40, 8], 3),  # its rest has company
        ([32, 0, 0], 2),
    ],
)
def test_rows_in_closed_form(lengths, rows):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    packed = pack_group(offsets, T)
    assert len(packed.counts) == rows
    assert packed.documents == sum(n > 0 for n in lengths) and packed.cut == sum(n > T for n in lengths)
    assert packed.cut_concat == pytest.approx(sum(min(T, max(0, n - 1)) / T for n in lengths))


@pytest.mark.parametrize("seed", range(4))
def test_what_concatenation_cuts_is_the_mean_over_its_shifts(seed):
    lengths = np.random.default_rng(seed).integers(0, 40, 50)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    cuts = [
        sum((a - s) // T < (b - 1 - s) // T for a, b in zip(offsets.tolist(), offsets[1:].tolist()) if b > a)
        for s in range(T)
    ]
    assert pack_group(offsets, T).cut_concat == pytest.approx(np.mean(cuts))


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_groups_tile_the_documents(size):
    lengths = np.array([0, 5, 0, 700, 1, 1, 1, 0, 64, *[3] * 50, 0])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<u8")
    made = list(groups(offsets, T, size))
    assert np.concatenate([made[0], *(group[1:] for group in made[1:])]).tolist() == offsets.tolist()
    assert all(len(group) - 1 <= size for group in made)
    assert all(group[-1] - group[0] <= size * T or len(group) == 2 for group in made)


def test_real_lengths_are_padded_little_and_packed_fast():
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(6, 1.2, 300_000)).astype(np.int64)
    begun = time.perf_counter()
    packed = pack_group(np.concatenate([[0], np.cumsum(lengths)]), 2048)
    assert time.perf_counter() - begun < 10
    assert 1 - lengths.sum() / (len(packed.counts) * 2048) < 0.001
    assert packed.cut / packed.documents < 0.2 < packed.cut_concat / packed.documents


def test_time_is_near_linear_whatever_the_lengths():
    """Every length once and again: no two items are alike, so nothing is placed at once."""

    def seconds(capacity):
        lengths = np.tile(np.arange(1, capacity + 1), 4)
        begun = time.perf_counter()
        best_fit(lengths, capacity)
        return time.perf_counter() - begun

    seconds(1 << 10)
    assert seconds(1 << 14) < 50 * max(seconds(1 << 11), 0.005)  # 8 times as much


# ------------------------------------------------------------------------------------------------------------------- index


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("bestfit"), SOURCES, Bytes(), shard_tokens=1000)


@pytest.fixture(scope="module")
def packing(tmp_path_factory):
    return tmp_path_factory.mktemp("packing")


def reader_of(shards, folder, rows=None, batch=B, **fields) -> StepReader:
    values = {"shards": (str(shards),), "seq_len": T, "packing": "best_fit", "packing_dir": str(folder)} | fields
    reader = build_train_reader(build(DataConfig, values), batch, SEED, rows)
    reader.prepare()
    return reader


def assert_same(a, b):
    a, b = ([array for array in arrays if array is not None] for arrays in (a, b))
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("seq_len", [pytest.param(2, marks=pytest.mark.slow), 5, 16, 64, 512])
@pytest.mark.parametrize("group", [1 << 20, 7])
def test_an_epoch_is_every_token_once_and_no_document_that_fits_is_cut(shards, tmp_path, monkeypatch, seq_len, group):
    monkeypatch.setattr(bestfit, "GROUP", group)
    only = {"code": 0, "docs": 1}
    reader = reader_of(shards, tmp_path, batch=1, seq_len=seq_len, weights=only)
    source = open_source(shards, "train", "docs")
    lengths = np.diff(source.offsets.astype(np.int64))
    num_rows = reader.index(1, seq_len).num_rows
    token = {(document, place): id for document, place, id in stream(source)}
    rows_of, orders = defaultdict(set), []
    for epoch in range(2):
        read, predicted, order = Counter(), Counter(), []
        for row in range(num_rows):
            step = epoch * num_rows + row
            batch, (part,) = reader(step), reader.parts(step)
            assert part.epochs.tolist() == [epoch]
            order.append(int(part.starts[0]))
            found = part.pieces(targets=False)
            column = 0
            for segment, (at, document, start, length) in enumerate(
                zip(found.column.tolist(), found.document.tolist(), found.start.tolist(), found.length.tolist()), 1
            ):
                assert at == column
                column += length
                rows_of[document].add((epoch, row))
                here = slice(at, column)
                assert batch.tokens[0, here].tolist() == [token[document, start + i] for i in range(length)]
                assert set(batch.segment_ids[0, here].tolist()) == {segment}
                assert batch.positions[0, here].tolist() == list(range(length))
                read.update((document, start + i) for i in range(length))
                for i in np.flatnonzero(batch.loss_weights[0, here]).tolist():
                    predicted[document, start + i + 1] += 1
                    assert batch.targets[0, at + i] == token[document, start + i + 1]
            assert not any(array[0, column:].any() for array in batch.arrays())  # padding
        assert set(read) == set(token) and set(read.values()) == {1}
        assert set(predicted.values()) <= {1}
        assert set(predicted) == {key for key in token if key[1]}
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) and (num_rows < 4 or orders[0] != orders[1])
    for document, length in enumerate(lengths.tolist()):
        assert len(rows_of[document]) == 2 * -(-length // seq_len)


def test_the_report_counts_what_is_there(shards, packing):
    reader = reader_of(shards, packing, batch=1, weights={"code": 0, "docs": 1})
    source = open_source(shards, "train", "docs")
    counts = prepare_index(source, reader.index(1, T)).counts
    weights = [reader(step) for step in range(counts["rows"])]
    assert sum((batch.segment_ids == 0).sum() for batch in weights) == counts["padding_tokens"]
    assert counts["padding_share"] == counts["padding_tokens"] / (counts["rows"] * T)
    lengths = np.diff(source.offsets.astype(np.int64))
    assert counts["cut_documents"] == (lengths > T).sum() and counts["documents"] == (lengths > 0).sum()
    assert counts["cut_share"] < counts["cut_share_concat"]
    assert counts["rows"] <= 1.1 * source.num_tokens / T
    (line,) = reader.prepare()
    assert line.startswith(f"best_fit: docs, {counts['rows']:,} rows of 16, ") and "documents are cut (concat" in line


def test_an_index_is_made_once_to_the_byte_and_found_again(shards, tmp_path):
    source = open_source(shards, "train", "code")
    one, two = (index_of(source, T, tmp_path / place) for place in ("one", "two"))
    prepare_index(source, one)
    prepare_index(source, two)
    files = {name: (tmp_path / "one" / os.path.basename(one.folder) / name) for name in (bestfit.PIECES, bestfit.ROWS)}
    for name, path in files.items():
        assert path.read_bytes() == (tmp_path / "two" / os.path.basename(two.folder) / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in files.values()}
    prepare_index(source, one)
    assert before == {path: path.stat().st_mtime_ns for path in files.values()}
    assert os.listdir(tmp_path / "one") == [os.path.basename(one.folder)]  # nothing unfinished
    others = [index_of(source, T + 1, tmp_path), index_of(dataclasses.replace(source, fingerprint="x"), T, tmp_path)]
    assert len({os.path.basename(index.folder) for index in [one, two, *others]}) == 3
    assert np.load(files[bestfit.PIECES]).dtype == np.load(files[bestfit.ROWS]).dtype == np.uint64


def test_a_damaged_index_is_named(shards, tmp_path):
    source = open_source(shards, "train", "docs")
    index = index_of(source, T, tmp_path)
    prepare_index(source, index)
    path = tmp_path / os.path.basename(index.folder) / bestfit.PIECES
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"pieces\.npy: content differs"):
        prepare_index(source, index)
    prepare_index(source, index, full=False)
    path.write_bytes(data[:-8])
    with pytest.raises(UserError, match=r"pieces\.npy is truncated"):
        prepare_index(source, index, full=False)
    shutil.rmtree(index.folder)
    with pytest.raises(UserError, match=r"rows\.npy cannot be read"):
        index_of(source, T, tmp_path / "elsewhere").windows(source, 0, 0, np.arange(1))


def test_a_kill_while_it_is_made_leaves_nothing_that_is_trusted(shards, tmp_path, monkeypatch):
    source = open_source(shards, "train", "docs")
    index = index_of(source, T, tmp_path)
    name = os.path.basename(index.folder)
    for age, stays in ((2 * bestfit.STALE_S, False), (0, True)):
        left = tmp_path / f".{name}.{age}.tmp"
        left.mkdir()
        (left / bestfit.PIECES).write_bytes(b"half")
        os.utime(left, (time.time() - age,) * 2)
        prepare_index(source, index)
        assert left.exists() == stays
        shutil.rmtree(index.folder)
    monkeypatch.setattr(bestfit, "sealed", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_index(source, index)
    assert not (tmp_path / name).exists()


def test_another_process_may_be_faster(shards, tmp_path, monkeypatch):
    source = open_source(shards, "train", "docs")
    index, elsewhere = index_of(source, T, tmp_path / "a"), index_of(source, T, tmp_path / "b")
    prepare_index(source, elsewhere)
    real = bestfit.write_rows

    def slow(*arguments):
        shutil.copytree(elsewhere.folder, index.folder)
        return real(*arguments)

    monkeypatch.setattr(bestfit, "write_rows", slow)
    prepare_index(source, index)
    assert os.listdir(tmp_path / "a") == [os.path.basename(index.folder)]


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(bestfit, "GROUP", 2000)

    def peak(documents):
        folder = tmp_path / str(documents)
        folder.mkdir()
        lengths = np.random.default_rng(0).integers(1, 60, documents)
        np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype("<u8"))
        source = dataclasses.replace(SOURCE, folder=str(folder), num_tokens=int(lengths.sum()))
        tracemalloc.start()
        bestfit.write_rows(source, 32, folder)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(2000)
    assert peak(40_000) < 1.2 * peak(4000)


SOURCE = bestfit.Source(
    "", "code", "train", 0, 0, 0, (), (), "<u2", 258, "", None, None, "", ""
)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_share_the_same_global_batch(shards, packing, hosts):
    reader = reader_of(shards, packing)
    for step in (0, 7, 1000):
        whole, per_host = reader(step), B // hosts
        for host in range(hosts):
            rows = list(range(host * per_host, (host + 1) * per_host))
            assert_same(reader_of(shards, packing, rows)(step), [array[rows] for array in whole.arrays()])


def test_stopping_and_starting_anywhere_gives_the_same_batches(shards, packing):
    reader = reader_of(shards, packing)
    straight = dict(batches(reader, 0, 30))
    for start in (1, 13, 29):
        for step, batch in batches(reader_of(shards, packing), start, 30):
            assert_same(batch, straight[step])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 4])
def test_workers_give_the_same_batches(shards, packing, num_workers):
    reader = reader_of(shards, packing)
    for step, batch in batches(reader, 3, 12, num_workers=num_workers, prefetch=2):
        assert_same(batch, reader(step))
    assert step == 11


def test_sources_are_mixed_as_they_are_without_it(shards, packing):
    weights = {"code": 0.25, "docs": 0.75}
    packed, plain = (reader_of(shards, packing, weights=weights, packing=kind) for kind in ("best_fit", "concat"))
    for step in (0, 3, 10**6):
        for a, b in zip(packed.parts(step), plain.parts(step), strict=True):
            assert a.source == b.source and np.array_equal(a.rows, b.rows)
    assert packed.fingerprint() != plain.fingerprint()


def test_traced_spans_are_the_batch(shards, packing):
    texts = {f"{name}-{i}": text for name, sources in SOURCES.items() for i, text in enumerate(sources)}
    reader = reader_of(shards, packing)
    for step in (0, 5, 12345):
        batch, traced = reader(step), trace(reader, step)
        assert [row["row"] for row in traced] == list(range(B))
        for row in traced:
            tokens = traced_tokens(row, texts)
            assert tokens + [0] * (T - len(tokens)) == batch.tokens[row["row"]].tolist()
            assert len(row["documents"]) == batch.segment_ids[row["row"]].max()


def test_rows_need_a_local_folder(shards):
    for place in (None, "gs://bucket/packing"):
        with pytest.raises(UserError, match=r"config\.data\.packing_dir"):
            build_train_reader(DataConfig((str(shards),), seq_len=T, packing="best_fit", packing_dir=place), B, SEED)


def test_random_documents_of_one_letter_and_none(tmp_path):
    rng = random.Random(5)
    for number in range(6):
        texts = ["a" * rng.choice([0, 0, 1, 1, 2, 15, 16, 17, 33]) for _ in range(rng.choice([1, 2, 9]))] + ["a"]
        source = open_source(make_shards(tmp_path / str(number), {"code": texts}), "train", "code")
        index = index_of(source, T, tmp_path / "packing")
        counts = prepare_index(source, index).counts
        found = index.windows(source, 0, 0, np.arange(counts["rows"]))
        assert found.widths.sum() == source.num_tokens == sum(map(len, texts))
        assert (np.bincount(found.owner, found.widths) <= T).all() and found.widths.min() >= 1
