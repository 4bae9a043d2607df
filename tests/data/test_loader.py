"""A batch is a function of the step: not of workers, hosts, or of where the run was stopped."""

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tiny_shards import Bytes, make_shards, random_texts, traced_tokens

from lmjax.config import build
from lmjax.data.config import DataConfig, StageConfig
from lmjax.data.eval_batches import eval_sources
from lmjax.data.loader import StepReader, batches, build_train_reader
from lmjax.data.mixture import budget, sizes
from lmjax.data.pack import rows_per_epoch
from lmjax.data.source import open_source
from lmjax.data.trace import trace
from lmjax.errors import UserError

B, T, SEED = 8, 16, 3
SOURCES = {"code": random_texts(100, 1), "docs": random_texts(30, 2), "short": ["abc"]}
WEIGHTS = {"code": 0.6, "docs": 0.35, "short": 0.05}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("loader"), SOURCES, Bytes(), shard_tokens=1000)


def reader_of(shards, rows=None, **fields) -> StepReader:
    config = build(DataConfig, {"shards": (str(shards),), "seq_len": T, "weights": WEIGHTS} | fields)
    return build_train_reader(config, B, SEED, rows)


@pytest.fixture(scope="module")
def reader(shards):
    return reader_of(shards)


def assert_same(a, b):
    a, b = ([array for array in arrays if array is not None] for arrays in (a, b))
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype and np.array_equal(left, right)


def test_a_batch_is_well_formed(reader):
    for step in (0, 1, 10**9):
        batch = reader(step)
        assert all(array.shape == (B, T) and array.flags.c_contiguous for array in batch.arrays())
        assert (batch.segment_ids >= 1).all() and batch.segment_ids[:, 0].max() == 1
        assert ((batch.targets == 0) | (batch.loss_weights == 1)).all()
        predicted = batch.loss_weights[:, :-1] == 1
        assert (batch.targets[:, :-1] == batch.tokens[:, 1:])[predicted].all()
        assert (predicted == (batch.segment_ids[:, :-1] == batch.segment_ids[:, 1:])).all()
        assert ((batch.tokens[:, :-1] == 257) <= ~predicted).all()  # nothing follows a document's end


def test_an_epoch_of_one_source_is_every_row_once(shards):
    reader = reader_of(shards, weights={"code": 1, "docs": 0, "short": 0})
    code = open_source(shards, "train", "code")
    per_epoch = rows_per_epoch(code.num_tokens, T)
    starts, epochs = [], []
    for step in range(2 * per_epoch // B + 1):
        for part in reader.parts(step):
            starts += part.starts.tolist()
            epochs += part.epochs.tolist()
    first, second = starts[:per_epoch], starts[per_epoch : 2 * per_epoch]
    assert epochs[: 2 * per_epoch] == [0] * per_epoch + [1] * per_epoch
    assert len(set(first)) == len(set(second)) == per_epoch
    assert first != second and set(first) != set(second)


# -------------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_share_the_same_global_batch(shards, reader, hosts):
    for step in (0, 7):
        whole = reader(step)
        per_host = B // hosts
        for host in range(hosts):
            rows = range(host * per_host, (host + 1) * per_host)
            assert_same(reader_of(shards, rows)(step), [array[list(rows)] for array in whole.arrays()])
    assert_same(reader_of(shards, [6, 1])(5), [array[[6, 1]] for array in reader(5).arrays()])


def test_stopping_and_starting_anywhere_gives_the_same_batches(reader):
    straight = dict(batches(reader, 0, 30))
    assert list(straight) == list(range(30))
    for start in (0, 1, 13, 29):
        for step, batch in batches(reader, start, 30):
            assert_same(batch, straight[step])
    for prefetch in (0, 1, 7):
        assert [step for step, _ in batches(reader, 5, 9, prefetch=prefetch)] == [5, 6, 7, 8]


def test_no_steps_and_far_steps(reader):
    assert list(batches(reader, 5, 5)) == []
    (step, batch), *_ = batches(reader, 10**12, 10**12 + 1)
    assert step == 10**12
    assert_same(batch, reader(10**12))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_give_the_same_batches(reader, num_workers):
    for step, batch in batches(reader, 3, 20, num_workers=num_workers, prefetch=2):
        assert_same(batch, reader(step))
    assert step == 19


def test_the_reader_pickles_small_and_without_open_files(shards, reader):
    reader(0)  # opens files, maps offsets, builds tables
    data = pickle.dumps(reader)
    assert len(data) == len(pickle.dumps(reader_of(shards))) < 5000
    assert_same(pickle.loads(data)(11), reader(11))


def test_import_needs_neither_jax_nor_grain():
    code = "import sys, lmjax.data.loader, lmjax.data.trace; print([m for m in ('jax', 'grain') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------- row lengths by step

LENGTHS = [(0, 8), (9, 32), (20, 16), (27, 32)]  # (from step, T): B = 16, 4, 8, 4


def curriculum(shards, rows=None, lengths=LENGTHS, **fields):
    stages = [{"from_step": step, "seq_len": length} for step, length in lengths]
    return reader_of(shards, rows, stages=stages, **fields)


def test_a_step_holds_the_same_tokens_in_rows_of_its_stage(shards):
    reader = curriculum(shards)
    for step, shape in [(0, (16, 8)), (8, (16, 8)), (9, (4, 32)), (20, (8, 16)), (26, (8, 16)), (27, (4, 32))]:
        assert {array.shape for array in reader(step).arrays()} == {shape}
        assert reader.batch_rows(step) == shape[0]
        assert [row["row"] for row in trace(reader, step)] == list(range(shape[0]))


@pytest.mark.parametrize("weights", [{"code": 1, "docs": 0, "short": 0}, {"code": 0.47, "docs": 0.5, "short": 0.03}])
def test_a_source_goes_on_where_it_was_across_a_change_of_length(shards, weights):
    """No token twice in an epoch; over whole epochs fewer than U tokens are left out at each change and each end."""
    lengths = [*LENGTHS, (31, 8), (33, 32), (34, 16)]
    reader, unit = curriculum(shards, weights=weights, lengths=lengths), 32
    read: dict = {}
    for step in range(100):
        for part in reader.parts(step):
            tokens = (part.starts[:, None] + np.arange(part.widths[0])) % part.source.num_tokens
            for epoch, row in zip(part.epochs.tolist(), tokens.tolist()):
                read.setdefault(part.source, {}).setdefault(epoch, []).extend(row)
    for source in (source for source in read if source.num_tokens >= unit):
        whole = list(range(max(read[source])))  # the last one has not ended
        assert len(whole) >= 2
        for epoch in whole:
            assert len(set(read[source][epoch])) == len(read[source][epoch])
        left_out = sum(unit * rows_per_epoch(source.num_tokens, unit) - len(read[source][epoch]) for epoch in whole)
        assert 0 <= left_out < unit * (len(lengths) - 1)


def test_rows_of_one_length_are_those_without_stages(shards):
    """A stage that does not change T leaves a source its order."""
    only = {"code": 1, "docs": 0, "short": 0}
    reader, same = reader_of(shards, weights=only), curriculum(shards, weights=only, lengths=[(0, T), (7, T)])
    for step in (0, 6, 7, 8, 1000):
        assert_same(same(step), reader(step))


def test_neighbours_do_not_meet_in_a_batch(shards):
    """Rows that are parts of one longer window are spread over the stage."""
    reader = curriculum(shards, weights={"code": 1, "docs": 0, "short": 0}, lengths=[(0, 2), (12, 32)])
    orders = [np.diff(part.starts) for step in range(12) for part in reader.parts(step)]
    assert np.mean(np.concatenate(orders) == 2) < 0.05


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_hosts_stops_and_workers_do_not_matter_to_a_curriculum(shards, tmp_path, packing):
    fields = {"packing": packing, "packing_dir": str(tmp_path)}
    reader = curriculum(shards, **fields)
    reader.prepare()
    straight = dict(batches(reader, 0, 40))
    for start in (8, 9, 10, 27, 35):
        for step, batch in batches(curriculum(shards, **fields), start, 40, prefetch=2):
            assert_same(batch, straight[step])
    halves = [
        curriculum(shards, lambda count, half=half: range(half * count // 2, (half + 1) * count // 2), **fields)
        for half in (0, 1)
    ]
    for step in (0, 9, 20, 39):
        for whole, *parts in zip(straight[step].arrays(), *(half(step).arrays() for half in halves)):
            assert np.array_equal(whole, np.concatenate(parts))


def test_best_fit_begins_the_next_epoch_with_another_length_and_goes_on_with_the_same(shards, tmp_path):
    fields = {"packing": "best_fit", "packing_dir": str(tmp_path), "weights": {"code": 1, "docs": 0, "short": 0}}
    reader = curriculum(shards, lengths=[(0, 8), (3, 8), (5, 32), (9, 8)], **fields)
    reader.prepare()
    short, long = (reader.index(0, length).num_rows for length in (8, 32))
    epochs = [epoch for step in range(200) for part in reader.parts(step) for epoch in part.epochs.tolist()]
    a, b = 5 * 16, 4 * 4
    assert epochs[:a] == [row // short for row in range(a)]
    first = -(-a // short)
    assert epochs[a : a + b] == [first + row // long for row in range(b)]
    second = first - (-b // long)
    assert epochs[a + b :] == [second + row // short for row in range(len(epochs) - a - b)]
    seen = [tuple(p.starts.tolist()) for step in range(5) for p in reader.parts(step)]
    assert len(set(seen)) == 5  # the second stage does not read the first one's rows again


def test_impossible_lengths(shards):
    with pytest.raises(UserError, match="8 × 16 tokens of a step are no whole rows of 48"):
        curriculum(shards, lengths=[(0, 48)])
    reader, other = curriculum(shards), curriculum(shards, lengths=[*LENGTHS[:-1], (27, 16)])
    assert reader.fingerprint() != other.fingerprint()


# ------------------------------------------------------------------------------------------------------------------ faults


def read_ahead_threads():
    return [thread for thread in threading.enumerate() if "grain-prefetch" in thread.name]


def test_leaving_early_stops_the_threads(reader):
    for step, _ in batches(reader, 0, 10**9):
        if step == 3:
            break
    deadline = time.monotonic() + 5
    while read_ahead_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not read_ahead_threads()


@dataclasses.dataclass(frozen=True)
class Faulty:
    """Reads until a step, then meets a fault."""

    reader: StepReader
    fault_step: int
    kill: bool = False

    def __call__(self, step):
        if step == self.fault_step and self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.fault_step:
            raise UserError("shard 7 is gone")
        return self.reader(step)


def test_a_fault_is_raised_at_its_step(reader):
    seen = []
    with pytest.raises(UserError, match="shard 7 is gone"):
        for step, _ in batches(Faulty(reader, 4), 0, 10):
            seen.append(step)
    assert seen == [0, 1, 2, 3]


@pytest.mark.slow
def test_faults_of_workers_are_loud_and_none_is_left_behind(reader):
    import multiprocessing

    with pytest.raises(UserError, match="shard 7 is gone"):
        list(batches(Faulty(reader, 4), 0, 10, num_workers=2))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="terminated unexpectedly"):
        list(batches(Faulty(reader, 4, kill=True), 0, 10**6, num_workers=2))
    assert time.monotonic() - start < 60
    for step, _ in batches(reader, 0, 10**6, num_workers=2):
        if step == 3:
            break
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not multiprocessing.active_children()


# ------------------------------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_is_of_what_decides_the_batches(shards, reader, tmp_path):
    copy = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", str(shards), str(copy)], check=True)
    assert reader_of(copy, num_workers=3, prefetch=1).fingerprint() == reader.fingerprint()
    assert reader_of(shards, rows=[1, 2]).fingerprint() == reader.fingerprint()
    assert (
        reader_of(shards, weights={name: 10 * w for name, w in WEIGHTS.items()}).fingerprint() == reader.fingerprint()
    )
    other = make_shards(tmp_path / "other", SOURCES | {"short": ["abd"]}, Bytes(), shard_tokens=1000)
    stages = [(StageConfig(0, WEIGHTS), StageConfig(step, WEIGHTS)) for step in (5, 6)]
    config = DataConfig(shards=(str(shards),), seq_len=T, weights=WEIGHTS)
    changed = [
        reader_of(other),
        reader_of(shards, seq_len=T + 1),
        reader_of(shards, weights={}),
        *(reader_of(shards, weights={}, stages=both) for both in stages),
        build_train_reader(config, B + 1, SEED),
        build_train_reader(config, B, SEED + 1),
    ]
    assert len({other.fingerprint() for other in [reader, *changed]}) == 8


# ---------------------------------------------------------------------------------------------------------------- wiring


def test_damaged_shards_are_found_before_the_first_step(tmp_path):
    shards = make_shards(tmp_path, SOURCES)
    path = shards / "train" / "docs" / "00000.array_record"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"train/docs/00000.array_record: content differs"):
        reader_of(shards)
    reader_of(shards, verify="size")
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"train/docs/00000.array_record is truncated"):
        reader_of(shards, verify="size")


def test_wrong_configs(shards):
    with pytest.raises(UserError, match="no source 'cdoe' in the shards; did you mean 'code'"):
        reader_of(shards, weights={"cdoe": 1, "docs": 1, "short": 1})
    with pytest.raises(UserError, match=r"config\.data\.shards names no folder"):
        build_train_reader(DataConfig(), B, SEED)
    with pytest.raises(UserError, match="no split 'validation'"):
        eval_sources(DataConfig(shards=(str(shards),)))
    with pytest.raises(UserError, match=r"rows .* outside"):
        reader_of(shards, rows=[0, B])


def test_where_a_row_is_a_document_they_are_weighed_and_capped_by_documents(tmp_path):
    """Whatever their lengths: 8 long ones are read once, as is said; 40 short ones are five times as many rows."""
    shards = make_shards(tmp_path, {"long": ["long " * 100] * 8, "short": ["x"] * 40})
    config = DataConfig(shards=(str(shards),), seq_len=T, packing="document")
    assert build_train_reader(config, B, SEED).mixture.weights[0] == pytest.approx((1 / 6, 5 / 6))
    config = dataclasses.replace(config, weights={"long": 1.0, "short": 1.0}, max_epochs={"long": 1.0})
    reader = build_train_reader(config, B, SEED, steps=10)
    read = [row for step in range(10) for row in trace(reader, step)]
    long = [row["documents"][0]["id"] for row in read if row["source"] == "long"]
    assert len(read) == 10 * B and 6 <= len(long) == len(set(long)) <= 8
    (row, other) = budget(sizes(reader.sources, config), config, 10 * B * T, 10)
    assert 0.9 <= row.epochs <= 1 and other.epochs == pytest.approx((10 * B - 8 * row.epochs) / 40)


def test_empty_corpora(tmp_path):
    shards = make_shards(tmp_path, {"code": ["abc"], "docs": []})
    with pytest.raises(UserError, match="empty corpus: source 'docs'"):
        reader_of(shards, weights={"code": 1, "docs": 1})
    assert (reader_of(shards, weights={})(0).loss_weights.sum(1) > 0).all()  # of code alone
    config = DataConfig(shards=(str(shards),))
    assert list(eval_sources(config, "train")) == ["code"]
    nothing = make_shards(tmp_path / "nothing", {"docs": [""]})
    with pytest.raises(UserError, match="empty corpus: no source holds a token"):
        eval_sources(DataConfig(shards=(str(nothing),)), "train")


# ------------------------------------------------------------------------------------------------------------------- trace


def test_traced_spans_are_the_batch(shards, reader):
    texts = {f"{name}-{i}": text for name, sources in SOURCES.items() for i, text in enumerate(sources)}
    for step in (0, 5, 12345):
        batch, traced = reader(step), trace(reader, step)
        assert [row["row"] for row in traced] == list(range(B))
        for row in traced:
            for span in row["documents"]:
                assert span["meta"] == {"number": int(span["id"].split("-")[1])}
                assert span["id"].startswith(row["source"])
            assert traced_tokens(row, texts) == batch.tokens[row["row"]].tolist()
            assert len(row["documents"]) == batch.segment_ids[row["row"]].max()
    assert {row["epoch"] for row in trace(reader, 12345)} != {0}
    assert [row["row"] for row in trace(reader_of(shards, [6, 1]), 5)] == [1, 6]
    assert trace(reader_of(shards, [6, 1]), 5)[1] == trace(reader, 5)[6]
