"""Files of a bucket on a local disk: verified, bounded, fetched once and ahead. Any file system stands in for a bucket."""

import concurrent.futures
import os
import pathlib
import threading
import time

import pytest

from lmjax.data import cache as module
from lmjax.data.cache import ReadAhead, RemoteFile, ShardCache
from lmjax.errors import UserError
from lmjax.files import sha256_bytes

SIZE = 100


def remote(folder, number, keep=False):
    path, data = folder / f"{number:05}.array_record", bytes([number]) * SIZE
    path.write_bytes(data)
    return RemoteFile(str(path), SIZE, sha256_bytes(data), keep)


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def fetched(monkeypatch):
    """The files that were downloaded, in order."""
    names, real = [], module.download

    def download(file, part):
        names.append(int(os.path.basename(file.path)[:5]))
        real(file, part)

    monkeypatch.setattr(module, "download", download)
    return names


def test_a_file_is_fetched_once_and_stays(tmp_path, bucket, fetched):
    cache, file = ShardCache(str(tmp_path / "cache"), 1000), remote(bucket, 1)
    path = cache.fetch(file)
    assert pathlib.Path(path).read_bytes() == bytes([1]) * SIZE
    os.unlink(file.path)
    assert cache.fetch(file) == path and fetched == [1]


def test_what_is_damaged_or_missing_is_named_and_never_read(tmp_path, bucket):
    cache, file = ShardCache(str(tmp_path / "cache"), 1000), remote(bucket, 1)
    for data in (b"x" * SIZE, b"x" * (SIZE - 1)):
        with open(file.path, "wb") as out:
            out.write(data)
        with pytest.raises(UserError, match=r"00001\.array_record: content differs from the manifest"):
            cache.fetch(file)
    os.unlink(file.path)
    with pytest.raises(UserError, match=r"00001\.array_record is missing"):
        cache.fetch(file)
    assert not os.path.exists(os.path.join(cache.folder, file.sha256))
    remote(bucket, 1)
    cache.fetch(file)  # what was left of the failures is in nobody's way


def test_the_least_recently_read_make_room(tmp_path, bucket, fetched):
    cache = ShardCache(str(tmp_path / "cache"), 3 * SIZE + SIZE // 2)
    kept, *files = [remote(bucket, number, keep=number == 0) for number in range(5)]
    for file in (kept, files[0], files[1], files[0]):
        cache.fetch(file)
        time.sleep(0.01)  # times of files are coarse
    cache.fetch(files[2])
    assert fetched == [0, 1, 2, 3]
    cache.fetch(files[0])  # was read after 2, so it stayed
    cache.fetch(kept)  # never makes room
    assert fetched == [0, 1, 2, 3]
    cache.fetch(files[1])
    assert fetched == [0, 1, 2, 3, 2]
    held = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert held <= cache.max_bytes
    with pytest.raises(UserError, match=r"config\.data\.cache_bytes=150 has no room for .* \(100 bytes, beside 100"):
        small = ShardCache(str(tmp_path / "small"), 150)
        small.fetch(kept)
        small.fetch(files[0])


def test_many_at_once_fetch_it_once(tmp_path, bucket, fetched):
    cache, files = ShardCache(str(tmp_path / "cache"), 10_000), [remote(bucket, number) for number in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(cache.fetch, files * 8))
    assert sorted(fetched) == [0, 1, 2, 3]


def test_what_a_killed_process_left_takes_no_room(tmp_path, bucket):
    cache, file = ShardCache(str(tmp_path / "cache"), SIZE + 10), remote(bucket, 1)
    (tmp_path / "cache").mkdir()
    for sha256 in (file.sha256, "f" * 64):
        (tmp_path / "cache" / f"{sha256}.{SIZE}.part").write_bytes(b"half")
        (tmp_path / "cache" / f"{sha256}.lock").touch()
    cache.fetch(file)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock", file.sha256]


def test_files_on_their_way_are_waited_for(tmp_path, bucket, fetched, monkeypatch):
    """Where the cache has room for one at a time, as many as are asked for come one after another."""
    files, slow = [remote(bucket, number) for number in range(4)], module.download
    monkeypatch.setattr(module, "download", lambda file, part: (time.sleep(0.05), slow(file, part)))
    cache = ShardCache(str(tmp_path / "cache"), SIZE + 10)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(cache.fetch, files))
    assert sorted(fetched) == [0, 1, 2, 3]
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) == SIZE


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_it_reads_ahead_as_far_as_half_the_cache_holds(tmp_path, bucket, fetched):
    files = [remote(bucket, number) for number in range(20)]
    cache = ShardCache(str(tmp_path / "cache"), 8 * SIZE)
    with ReadAhead(cache, lambda step: [files[step]], total=20).over(0, 20) as ahead:
        assert wait_until(lambda: fetched == [0, 1, 2, 3])
        time.sleep(0.1)
        assert fetched == [0, 1, 2, 3]  # and no further, before the step moves
        ahead.at(2)
        assert wait_until(lambda: fetched == [0, 1, 2, 3, 4, 5])
        cache.fetch(files[5])
        ahead.at(10)
        assert wait_until(lambda: 13 in fetched) and fetched == list(range(14))
    assert not ahead.thread.is_alive()


def test_reading_ahead_ends_when_all_is_there_or_something_is_wrong(tmp_path, bucket, fetched):
    files = [remote(bucket, number) for number in range(3)]
    with ReadAhead(ShardCache(str(tmp_path / "a"), 1000), lambda step: files, total=3).over(0, 10**9) as ahead:
        assert wait_until(lambda: not ahead.thread.is_alive()) and sorted(fetched) == [0, 1, 2]
    os.unlink(files[1].path)
    with ReadAhead(ShardCache(str(tmp_path / "b"), 1000), lambda step: files, total=3).over(0, 10**9) as ahead:
        assert wait_until(lambda: not ahead.thread.is_alive())
    assert threading.active_count() < 50
