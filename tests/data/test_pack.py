"""Rows against an independent packer in plain Python, permutations against their definition."""

import itertools
import math
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from tiny_shards import make_shards, random_texts, stream

from lmjax.batch import Batch
from lmjax.data.pack import (
    Rows,
    Stretch,
    Windows,
    epoch_keys,
    permute,
    pieces,
    rows_per_epoch,
    stretch_windows,
)
from lmjax.data.source import open_source


def train_windows(source, seq_len, seed, counters) -> Windows:
    """Those of a run whose rows have one length."""
    return stretch_windows(source, Stretch(seq_len, seq_len, 0, None, 0), seed, counters)


def keys(epoch=0):
    return epoch_keys(0, "code", epoch)[0]


# -------------------------------------------------------------------------------------------------------------- permutation


@pytest.mark.parametrize("size", [*range(1, 18), 31, 32, 33, 64, 97, 1000, 4096, 4097, 65537])
def test_permute_is_a_permutation(size):
    for epoch in range(3):
        assert np.array_equal(np.sort(permute(np.arange(size), size, keys(epoch))), np.arange(size))


@pytest.mark.parametrize("size", [10**12, 2**40 + 1, 2**62])
def test_permute_of_a_large_range(size):
    rng = np.random.default_rng(0)
    index = np.unique(np.concatenate([np.arange(50_000), size - 1 - np.arange(1000), rng.integers(0, size, 50_000)]))
    out = permute(index, size, keys())
    assert len(np.unique(out)) == len(index)
    assert out.min() >= 0 and out.max() < size
    assert abs(out.mean() / size - 0.5) < 0.01


def test_permute_does_not_depend_on_its_company():
    together = permute(np.arange(1000), 1000, keys())
    assert together.tolist() == [int(permute(np.array([i]), 1000, keys())[0]) for i in range(1000)]


def test_permute_is_pinned():
    """Other values would silently give every run other data."""
    assert permute(np.arange(10), 10, keys()).tolist() == [1, 5, 9, 8, 7, 6, 0, 3, 4, 2]
    assert permute(np.arange(3), 10**12, keys()).tolist() == [333157012791, 905421145733, 385600365190]
    assert epoch_keys(0, "code", 0)[1] % 10**9 == 907071786


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_rows_comes_up(size):
    orders = Counter(tuple(permute(np.arange(size), size, keys(epoch)).tolist()) for epoch in range(2400))
    expected = 2400 / math.factorial(size)
    chi2 = sum((orders[order] - expected) ** 2 / expected for order in itertools.permutations(range(size)))
    freedom = math.factorial(size) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_permutations_look_random():
    """Each place is taken equally often over many epochs; neighbours are not kept together."""
    size, epochs = 12, 6000
    table = np.stack([permute(np.arange(size), size, keys(epoch)) for epoch in range(epochs)])
    counts = np.stack([np.bincount(table[:, i], minlength=size) for i in range(size)])
    chi2 = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    assert chi2 < 121 + 5 * np.sqrt(2 * 121)  # (size - 1)² degrees of freedom
    neighbours = (np.diff(table, axis=1) == 1).mean()
    assert abs(neighbours - 1 / size) < 0.01


# ------------------------------------------------------------------------------------------------------------------- epochs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = make_shards(tmp_path_factory.mktemp("pack"), {"code": random_texts(60, seed=1)}, shard_tokens=300)
    return open_source(folder, "train", "code")


@pytest.mark.parametrize("seq_len", [2, 7, 64])
def test_each_epoch_reads_every_row_once_in_a_new_order(source, seq_len):
    per_epoch = rows_per_epoch(source.num_tokens, seq_len)
    windows = train_windows(source, seq_len, 0, np.arange(5 * per_epoch))
    assert np.array_equal(windows.epochs, np.repeat(np.arange(5), per_epoch))
    orders, jumps = [], set()
    for epoch in range(5):
        starts = windows.starts[epoch * per_epoch :][:per_epoch]
        inputs = (starts[:, None] + np.arange(seq_len)) % source.num_tokens
        assert len(np.unique(inputs)) == per_epoch * seq_len  # no token twice
        assert per_epoch * seq_len > source.num_tokens - seq_len  # and fewer than T are left out
        orders.append(tuple(starts.tolist()))
        jumps.add(tuple((np.diff(starts) % source.num_tokens).tolist()))
    assert len({tuple(sorted(order)) for order in orders}) == 5  # other windows
    assert len(jumps) == 5  # in another order, not only turned
    other = train_windows(source, seq_len, 1, np.arange(per_epoch)).starts
    assert other.tolist() not in [list(order) for order in orders]


def test_windows_of_any_rows_in_any_order(source):
    counters = np.random.default_rng(0).integers(0, 10**9, 100)
    together = train_windows(source, 16, 0, counters)
    for i, counter in enumerate(counters):
        alone = train_windows(source, 16, 0, np.array([counter]))
        assert (alone.epochs[0], alone.starts[0]) == (together.epochs[i], together.starts[i])


# ------------------------------------------------------------------------------------------------------------------ packing


def slow_pack(tokens: list[tuple[int, int, int]], start: int, width: int, seq_len: int) -> list[tuple]:
    """Columns (token, target, weight, segment, position) of one row, walking the circle token by token."""
    window = []
    for column in range(width):
        at = (start + column) % len(tokens)
        document, _, token = tokens[at]
        fresh = column == 0 or at == 0 or tokens[at - 1][0] != document
        segment = 1 if column == 0 else window[-1][1] + fresh
        position = 0 if fresh else window[-1][2] + 1
        window.append((token, segment, position))
    columns = []
    for column in range(seq_len):
        if column >= width:
            columns.append((0, 0, 0.0, 0, 0))
            continue
        token, segment, position = window[column]
        predicted = column + 1 < width and window[column + 1][1] == segment
        columns.append((token, window[column + 1][0] if predicted else 0, float(predicted), segment, position))
    return columns


def fast_pack(source, starts, widths, seq_len) -> Batch:
    rows = Rows(len(starts), seq_len)
    rows.fill(source, np.arange(len(starts)), np.array(starts, np.int64), np.array(widths, np.int64))
    return rows.batch()


def assert_rows_equal(batch: Batch, expected: list[list[tuple]]):
    for array, wanted in zip(batch.arrays(), np.moveaxis(np.array(expected), -1, 0), strict=True):
        assert np.array_equal(array, wanted)
    assert [array.dtype for array in batch.arrays()] == [np.int32, np.int32, np.float32, np.int32, np.int32]


@pytest.mark.parametrize("seed", range(25))
def test_packing_equals_the_slow_packer(tmp_path, seed):
    rng = random.Random(seed)
    texts = random_texts(rng.choice([1, 2, 3, 10, 40]), seed, longest=rng.choice([2, 10, 80]))
    texts.append("a" * rng.choice([1, 2, 50]))  # never without a token
    folder = make_shards(tmp_path, {"code": texts}, shard_tokens=rng.choice([1, 30, 10**6]))
    source = open_source(folder, "train", "code")
    tokens = stream(source)
    assert len(tokens) == source.num_tokens
    for seq_len in (1, 2, 5, 16, 33):
        starts = [rng.randrange(len(tokens)) for _ in range(8)] + [0, len(tokens) - 1]
        widths = [seq_len + 1] * 6 + [rng.randrange(seq_len + 2) for _ in range(4)]
        expected = [slow_pack(tokens, start, width, seq_len) for start, width in zip(starts, widths)]
        assert_rows_equal(fast_pack(source, starts, widths, seq_len), expected)


def test_rows_go_where_they_are_asked(source):
    rows = Rows(4, 8)
    rows.fill(source, np.array([3, 1]), np.array([5, 20]), np.array([9, 9]))
    expected = fast_pack(source, [5, 20], [9, 9], 8)
    batch = rows.batch()
    for got, want in zip(batch.arrays(), expected):
        assert np.array_equal(got[[3, 1]], want) and not got[[0, 2]].any()


def test_a_window_that_laps_repeats_documents_as_new_segments(tmp_path):
    source = open_source(make_shards(tmp_path, {"code": ["abc"]}), "train", "code")
    batch = fast_pack(source, [1], [9], 8)
    a, b, c = map(ord, "abc")
    assert batch.tokens.tolist() == [[b, c, a, b, c, a, b, c]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch.targets.tolist() == [[c, 0, b, c, 0, b, c, 0]]
    assert batch.loss_weights.tolist() == [[1, 0, 1, 1, 0, 1, 1, 0]]


def test_pieces_over_many_empty_documents():
    offsets = np.array([0, 0, 0, 2, 2, 2, 5, 5], np.uint64)
    found = pieces(offsets, np.array([1, 4]), np.array([3, 3]))
    assert list(zip(*(column.tolist() for column in found))) == [
        (0, 0, 2, 1, 1), (0, 1, 5, 0, 2), (1, 0, 5, 2, 1), (1, 1, 2, 0, 2),
    ]  # fmt: skip


def test_offsets_of_a_large_corpus_are_never_read_whole(tmp_path):
    """A type that differs from the offsets' would make NumPy convert the whole map: seconds and gigabytes."""
    count = 50_000_000
    path = tmp_path / "offsets.npy"
    offsets = np.lib.format.open_memmap(path, mode="w+", dtype="<u8", shape=(count + 1,))  # sparse: all documents empty
    offsets[-1] = 1 << 40
    tracemalloc.start()
    found = pieces(np.load(path, mmap_mode="r"), np.arange(0, 1 << 40, 1 << 30), np.full(1024, 2049))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert len(found.document) == 1024 and set(found.document.tolist()) == {count - 1}
