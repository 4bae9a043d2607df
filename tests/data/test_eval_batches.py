"""The batches of an evaluation: each token predicted once, spread where they are few, over any number of hosts."""

import itertools

import numpy as np
import pytest
from tiny_shards import Bytes, make_shards, random_texts, stream

from lmjax.data.eval_batches import EvalBatches, eval_rows, num_eval_rows
from lmjax.data.source import open_source

T = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    shards = make_shards(tmp_path_factory.mktemp("eval"), {"docs": random_texts(30, 2)}, Bytes(), shard_tokens=1000)
    return open_source(shards, "train", "docs")


@pytest.mark.parametrize("seq_len", [1, 2, 3, 10, 64, 10**4])
def test_evaluation_predicts_each_token_once(source, seq_len):
    tokens = stream(source)
    count = num_eval_rows(source, seq_len)
    batch = eval_rows(source, seq_len, np.arange(count))
    predicted = []
    for row, column in itertools.product(range(count), range(seq_len)):
        if batch.loss_weights[row, column]:
            document, place, token = tokens[row * seq_len + column + 1]
            assert batch.targets[row, column] == token
            predicted.append((document, place))
    assert sorted(predicted) == [(document, place) for document, place, _ in tokens if place > 0]
    assert batch.loss_weights.sum() == len(predicted)


def test_evaluation_rows_past_the_end_are_padding(source):
    count = num_eval_rows(source, 16)
    batch = eval_rows(source, 16, np.array([count - 1, count, count + 1000]))
    assert batch.segment_ids[0].any() and not any(array[1:].any() for array in batch.arrays())
    assert num_eval_rows(source, 16, max_rows=3) == 3 and num_eval_rows(source, 16, max_rows=10**6) == count
    limited = eval_rows(source, 16, np.arange(5), max_rows=3)
    assert limited.segment_ids[2].any() and not limited.segment_ids[3:].any()


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_limited_evaluation_rows_are_spread_over_the_source(source, limit):
    count = num_eval_rows(source, 16)
    whole = eval_rows(source, 16, np.arange(count))
    limited = eval_rows(source, 16, np.arange(limit), max_rows=limit)
    for row in range(limit):
        np.testing.assert_array_equal(limited.tokens[row], whole.tokens[row * count // limit])


@pytest.mark.parametrize("text", ["a", "ab", "abcd", "abcde"])
def test_evaluation_of_sources_as_long_as_a_row(tmp_path, text):
    source = open_source(make_shards(tmp_path, {"code": [text]}), "train", "code")
    assert num_eval_rows(source, 4) == (text != "a")  # the row's last target lies past its inputs
    batch = eval_rows(source, 4, np.arange(num_eval_rows(source, 4)))
    assert batch.loss_weights.sum() == len(text) - 1


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("max_rows", [None, 5, 10**9])
def test_evaluation_batches(source, hosts, max_rows):
    count = min(num_eval_rows(source, T), max_rows or 10**9)
    expected = eval_rows(source, T, np.arange(count), max_rows)
    per_host = 4 // hosts
    parts = [
        EvalBatches(source, T, 4, max_rows, tuple(range(host * per_host, (host + 1) * per_host)))
        for host in range(hosts)
    ]
    assert {len(part) for part in parts} == {-(-count // 4)}
    for i in range(len(parts[0])):
        whole = [np.concatenate(arrays) for arrays in zip(*(part[i].arrays() for part in parts))]
        for got, want in zip(whole, expected):
            assert len(got) == 4
            assert np.array_equal(got[: count - 4 * i], want[4 * i : 4 * i + 4])
            assert not got[count - 4 * i :].any() if count - 4 * i < 4 else True
    assert sum(batch.loss_weights.sum() for part in parts for batch in part) == expected.loss_weights.sum()
