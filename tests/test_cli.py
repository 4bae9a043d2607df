"""The command line as a user meets it: exit codes, one-line mistakes, kills, a full disk, several processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from lmjax import cli
from lmjax.checkpoint import layout
from lmjax.monitor.write import read_metrics

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(
        model=dict(vocab_size=264, num_layers=1, d_model=32, num_heads=4, max_length=64, dropout=0.1),
        data=dict(seq_len=32),
        optim=dict(learning_rate=0.01, warmup_steps=4),
        train=dict(steps=40, batch_size=8, precision="float32"),
        eval=dict(every=20, rows=8),
        checkpoint=dict(every=5),
        monitor=dict(log_every=1, tensorboard=False, peak_flops=1e12),
    ))
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG)
    return str(path)


def train_words(line, config, workdir, *more):
    return ["train", "--config", config, "--workdir", str(workdir), *(f"--config.{o}" for o in line.overrides()), *more]


def start(words, code="", devices=1, **environment):
    """`lmjax` in a process of its own; `code` runs in it first."""
    program = f"import sys; {code}\nfrom lmjax.cli import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    flags = os.environ.get("LMJAX_TESTS_XLA_FLAGS", os.environ["XLA_FLAGS"]).replace(
        "device_count=8", f"device_count={devices}"
    )
    environment = os.environ | {"XLA_FLAGS": flags} | environment
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def losses(workdir):
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


@pytest.fixture(scope="module")
def straight(line, config, tmp_path_factory):
    """A run that nothing disturbs."""
    workdir = tmp_path_factory.mktemp("cli") / "straight"
    process = start(train_words(line, config, workdir))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return workdir


# ---------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "more,message",
    [
        (["--config.optim.lerning_rate=1"], "did you mean 'learning_rate'"),
        (["--config.train.steps=many"], "config.train.steps='many' must be an integer"),
        (["--config.model.num_heads=5"], "d_model=32 does not divide by num_heads=5"),
        (["--config.model.num_heads=6", "--config.model.head_dim=8", "--config.model.num_kv_heads=4"], "num_heads=6 does not divide"),
        (["--config.model.activation=swiglue"], "did you mean 'swiglu'"),
        (["--config.mesh.data=3"], "does not match 8 device"),
        (["--config.model.vocab_size=100"], "smaller than the tokenizer's 262"),
        (["--config.tokenizer=/nowhere"], "/nowhere"),
        (["--config.data.shards=/nowhere"], "no such folder: /nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(line, config, tmp_path, capsys, more, message):
    assert cli.main(train_words(line, config, tmp_path / "run", *more)) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "Traceback" not in err
    assert not layout.steps(tmp_path / "run")


@pytest.mark.parametrize(
    "more,message",
    [
        (["--documents", "none"], "no such file or folder: none"),
        (["--documents", "empty"], "empty holds no file with a known extension"),
        (["--documents", "empty.jsonl"], "the inputs hold no document"),
        (["--documents", "notes.doc"], "notes.doc has no known extension"),
        (["--documents", "gs://bucket/x"], "gs://bucket/x: preparation reads and writes files of a disk"),
        (["--out", "gs://bucket/x"], "gs://bucket/x: preparation reads and writes files of a disk"),
        (["--out", "notes.doc"], "notes.doc is a file; choose another --out"),
        (["--out", "notes.doc/x"], "cannot write to notes.doc/x: Not a directory"),
        (["--out", "in"], "--out in is, or holds, the input in, which it would delete"),
        (["--out", "in/out"], "--out in/out lies in the input in, which would then hold its output"),
        (["--out", "empty"], "empty is not empty and is not the output of a stage"),
        (["--source", "a/b"], "--source 'a/b' names files"),
        (["--config.stages=exact_dedop"], "no stage 'exact_dedop'; did you mean 'exact_dedup'?"),
        (["--config.near_dedup.treshold=1"], "config.near_dedup.treshold: no such field; did you mean 'threshold'?"),
        (["--config.near_dedup.threshold=1.5"], "near_dedup.threshold=1.5 must be in (0, 1]"),
        (["--config.exact_dedup.earlier=none"], "no such folder: none"),
        (["--config.tokenizer=nowhere"], "nowhere holds no tokenizer"),
        (["--explain", "42"], "no such folder: out"),
    ],
)  # fmt: skip
def test_a_mistake_in_preparing_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, more, message):
    config = os.path.abspath("configs/data/quickstart.py")
    monkeypatch.chdir(tmp_path)
    for name, text in (("in/a.jsonl", '{"text": "a"}\n'), ("empty/x", ""), ("empty.jsonl", ""), ("notes.doc", "x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    words = {"--config": config, "--documents": "in", "--source": "s", "--out": "out"}
    words |= dict(zip(more[::2], more[1::2], strict=True)) if len(more) > 1 else {}
    said = [part for pair in words.items() for part in pair] + (more if len(more) == 1 else [])
    assert cli.main(["prepare", *said]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_missing_config_file_names_the_nearest(line, capsys):
    assert cli.main(["train", "--config", "configs/pretrain/tinny.py", "--workdir", "x"]) == 2
    assert "did you mean 'configs/pretrain/tiny.py'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_workdir_that_is_none(verb, tmp_path, capsys):
    assert cli.main([verb, "--workdir", str(tmp_path)]) == 2
    assert "not the workdir of a run" in capsys.readouterr().err


def test_arguments_that_no_verb_takes():
    for words in (
        ["trane"],
        ["train"],
        ["corpus", "--out", "x", "--config.a=1"],
        ["eval", "--workdir", "x", "--stepp", "1"],
    ):
        with pytest.raises(SystemExit) as exit:
            cli.main(words)
        assert exit.value.code == 2


def test_damaged_shards_are_found_before_training_starts(line, config, tmp_path, capsys):
    import shutil

    copy = tmp_path / "shards"
    shutil.copytree(line.shards[0], copy)
    (shard,) = (copy / "train" / "prose").glob("0*.array_record")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert cli.main(train_words(line, config, tmp_path / "run", f"--config.data.shards={copy}")) == 2
    assert str(shard) in capsys.readouterr().err
    os.truncate(shard, len(data) // 2)
    assert cli.main(train_words(line, config, tmp_path / "run", f"--config.data.shards={copy}")) == 2
    assert str(shard) in capsys.readouterr().err


def test_an_empty_corpus(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    assert (
        cli.main(["split", "--documents", str(tmp_path / "texts"), "--source", "mine", "--out", str(tmp_path / "out")])
        == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


def test_a_fault_of_the_program_is_loud_and_exits_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lmjax.data.corpus.make_corpus", lambda *_, **__: 1 / 0)
    assert cli.main(["corpus", "--out", str(tmp_path / "out")]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_help_and_plan_import_no_jax():
    for words in (["--help"], ["plan", "--config", "configs/pretrain/llama3_8b.py"]):
        code = (
            f"from lmjax.cli import main\ntry: main({words})\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", f"import sys\n{code}"], check=True, stdout=subprocess.DEVNULL)


def test_eval_and_trace_speak_json(straight, capsys):
    assert cli.main(["trace", "--workdir", str(straight), "--step", "3", "--json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == list(range(8))
    assert cli.main(["eval", "--workdir", str(straight), "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 40


# ------------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
def test_kills_at_any_moment_change_no_bit(line, config, tmp_path, straight):
    workdir, words = tmp_path / "run", train_words(line, config, tmp_path / "run")
    for wait in (
        0.0,
        0.15,
        0.6,
        1.5,
    ):  # after the first new row: while steps run, a checkpoint is written, another one …
        seen = len(losses(workdir)) if (workdir / "metrics.jsonl").exists() else 0
        process = start(words)
        while process.poll() is None and (not (workdir / "metrics.jsonl").exists() or len(losses(workdir)) <= seen):
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start(words)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert losses(workdir) == losses(straight)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(line, config, tmp_path, straight):
    workdir = tmp_path / "run"
    first = start(train_words(line, config, workdir, "--config.train.stop_at=5"))
    assert first.wait(timeout=300) == 0
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    process = start(train_words(line, config, workdir), full)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "could not be written" in err and "checkpoint 5 is intact" in err, out + err
    last = start(train_words(line, config, workdir))
    out, err = last.communicate(timeout=300)
    assert last.returncode == 0 and "going on from checkpoint 5" in out, out + err
    assert losses(workdir) == losses(straight)


@pytest.mark.slow
def test_sigterm_exits_0(line, config, tmp_path):
    workdir = tmp_path / "run"
    process = start(
        train_words(line, config, workdir, "--config.train.steps=100000", "--config.checkpoint.every=100000")
    )
    while not (workdir / "metrics.jsonl").exists() or len(losses(workdir)) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "asked to end" in out, out + err
    assert len(layout.steps(workdir)) == 1


# --------------------------------------------------------------------------------------------------------------- processes


def cluster(words, count, devices=4, code=""):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    return [start(words, code, devices, JAX_PROCESS_ID=str(index), **environment) for index in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_train_as_one_and_one_goes_on(line, config, tmp_path, straight, count):
    words = train_words(line, config, tmp_path / "run", "--config.mesh.fsdp=4", "--config.mesh.data=2")
    for stop in (15, 25):
        processes = cluster([*words, f"--config.train.stop_at={stop}"], count, devices=8 // count)
        ends = [(process.communicate(timeout=300), process.returncode) for process in processes]
        assert [code for _, code in ends] == [0] * count, ends
    alone = start(words, devices=8)
    out, err = alone.communicate(timeout=300)
    assert alone.returncode == 0, out + err
    ours, theirs = losses(tmp_path / "run"), losses(straight)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose([ours[s] for s in range(1, 21)], [theirs[s] for s in range(1, 21)], atol=2e-5)
    np.testing.assert_allclose(
        [ours[s] for s in ours], [theirs[s] for s in ours], atol=2e-4
    )  # rounding has grown by then
    rows = [(row["step"], "eval/loss" in row) for row in read_metrics(tmp_path / "run")]
    assert len(rows) == len(set(rows))  # one process writes
    assert layout.steps(tmp_path / "run")[-1] == 40


@pytest.mark.slow
@pytest.mark.parametrize("number,to", [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1])])  # of a host; of a terminal
def test_a_signal_ends_all_processes_at_the_same_step(line, config, tmp_path, number, to):
    workdir = tmp_path / "run"
    processes = cluster(
        train_words(line, config, workdir, "--config.train.steps=100000", "--config.checkpoint.every=100000"), 2
    )
    while not (workdir / "metrics.jsonl").exists() or len(losses(workdir)) < 3:
        time.sleep(0.05)
        assert all(process.poll() is None for process in processes)
    for index in to:
        processes[index].send_signal(number)
    ends = [(process.communicate(timeout=120), process.returncode) for process in processes]
    assert [code for _, code in ends] == [0, 0], ends
    assert len(layout.steps(workdir)) == 1


@pytest.mark.slow
def test_a_mistake_on_several_processes_ends_them_all(line, config, tmp_path):
    processes = cluster(train_words(line, config, tmp_path / "run", "--config.model.vocab_size=100"), 2)
    assert [process.wait(timeout=120) for process in processes] == [2, 2]


def test_train_starts_again_on_huge_pages_once(monkeypatch):
    started = []
    monkeypatch.setattr(cli.sys, "platform", "linux")
    monkeypatch.setattr(cli.sys, "orig_argv", ["python", "-m", "lmjax.cli", "train"])
    monkeypatch.setattr(cli.os, "execv", lambda path, words: started.append(words))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")
    cli.use_huge_pages()
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"
    cli.use_huge_pages()
    assert started == [[sys.executable, "-m", "lmjax.cli", "train"]]
