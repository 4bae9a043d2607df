"""Merged runs against one sort of everything, however small the blocks."""

import itertools

import numpy as np
import pytest

from lmjax.data import sortmerge
from lmjax.data.sortmerge import Packed, Run, RunWriter, merged, open_whole, ranges, write_packed, write_run

RECORD = np.dtype([("hash", "u8"), ("key", "f8"), ("place", "u8")])


def records(rng: np.random.Generator, count: int, hashes: int) -> np.ndarray:
    """Random ones, of few hashes."""
    made = np.empty(count, RECORD)
    made["hash"] = rng.integers(0, hashes, count, np.uint64) * np.uint64(((1 << 64) - 1) // hashes)
    made["key"], made["place"] = rng.choice([-np.inf, -1, 0, np.inf], count), rng.integers(0, 1000, count)
    return made


@pytest.mark.parametrize("block", [1, 50, 1 << 17])
@pytest.mark.parametrize("hashes", [1, 3, 1000])
def test_merged_runs_are_one_sort(tmp_path, monkeypatch, block, hashes):
    monkeypatch.setattr(sortmerge, "BLOCK_RECORDS", block)
    monkeypatch.setattr(sortmerge, "LEAST_BLOCK", 1)
    rng = np.random.default_rng(hashes)
    parts = [records(rng, count, hashes) for count in (0, 1, 90, 200, 7)]
    for i, part in enumerate(parts):
        write_run(tmp_path / str(i), part)
    runs = [Run(tmp_path / str(i), RECORD, base=1000 * i) for i in range(len(parts))]
    for i, part in enumerate(parts):
        part["place"] += np.uint64(1000 * i)
    expected = sorted(np.concatenate(parts).tolist())
    assert [record for part in merged(runs) for record in part.tolist()] == expected
    bounds = sorted({0, 1, 1 << 62, 3 << 62, (1 << 64) - 1, *(record[0] for record in expected[:: len(expected) // 3])})
    for low, high in zip(bounds, [*bounds[1:], None], strict=True):
        found = [record for part in merged(runs, low, high) for record in part.tolist()]
        assert found == [r for r in expected if r[0] >= low and (high is None or r[0] < high)]


def test_a_merge_holds_no_more_than_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sortmerge, "BLOCK_RECORDS", 100)
    for i in range(5):
        write_run(tmp_path / str(i), records(np.random.default_rng(i), 1000, 7))
    assert max(map(len, merged([Run(tmp_path / str(i), RECORD) for i in range(5)]))) <= 100


def test_ranges_part_the_hashes():
    assert ranges(0) == [(0, None)]
    parts = ranges(10 * sortmerge.RANGE_RECORDS)
    assert len(parts) == 10 and parts[0][0] == 0 and parts[-1][1] is None
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(parts))
    assert len(ranges(10 * sortmerge.RANGE_RECORDS + 1)) == 11


def test_what_is_collected_is_written_before_it_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(sortmerge, "RUN_RECORDS", 10)
    writer, made = RunWriter(tmp_path), records(np.random.default_rng(0), 50, 7)
    for start in range(0, 50, 4):
        writer.add(made[start : start + 4])
        assert writer.held < 10
    assert writer.close() == {"records": 50, "runs": 5}
    runs = [Run(tmp_path / f"run{number}", RECORD) for number in range(5)]
    assert [record for part in merged(runs) for record in part.tolist()] == sorted(made.tolist())


def test_packed_items_come_back(tmp_path):
    items = [b"", b"a", b"bc" * 1000, b"", b"d"]
    with write_packed(tmp_path / "ids") as writer:
        for item in items:
            writer.add(item)
    packed = Packed(tmp_path / "ids")
    assert [packed[i] for i in (4, 0, 2, 1, 3)] == [items[i] for i in (4, 0, 2, 1, 3)]
    packed.close()


def test_a_file_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), open_whole(tmp_path / "x") as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
