"""What is asked of a run where its training would not fit: the machine that reads it has other devices than the one that trained it."""

import json

import pytest

from lmjax import cli, files, run
from lmjax import config as configs
from lmjax.errors import UserError
from lmjax.monitor.write import read_metrics
from lmjax.parts import build_parts
from lmjax.train.config import RunConfig
from lmjax.workdir import RUN, open_run

MESH = ["mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1"]  # one replica, whose rows lie over 8 devices
HERE = [f"--config.{override}" for override in MESH]
CONFIG = {
    "model": {"vocab_size": 264, "num_layers": 1, "d_model": 32, "num_heads": 4, "max_length": 64},
    "data": {"seq_len": 32, "weights": {"prose": 0.4, "lists": 0.6}},
    "mesh": {"data": 2, "tensor": 4},
    "optim": {"learning_rate": 0.01, "warmup_steps": 0},
    "compress": {"kind": "int8"},
    "train": {"steps": 2, "batch_size": 8, "accumulation": 4, "precision": "fp8_emulated"},
    "eval": {"rows": None},
    "monitor": {"tensorboard": False, "peak_flops": 1e12},
}


@pytest.fixture(scope="module")
def elsewhere(line, tmp_path_factory):
    """A run of a chip with units for eight bits, whose replicas send compressed gradients of micro-batches of two rows."""
    values = json.loads(json.dumps(CONFIG))
    for override in line.overrides():
        configs.set_override(values, override)
    workdir = tmp_path_factory.mktemp("trained") / "run"
    assert run.train(configs.build(RunConfig, values), workdir) == 2
    record = files.read_json(workdir / RUN)
    record["config"]["train"]["precision"] = "fp8"  # which computes the same numbers
    files.write_json(workdir / RUN, record)
    return workdir


def test_it_evaluates_as_it_did_where_it_was_trained(elsewhere, capsys):
    (row,) = (row for row in read_metrics(elsewhere) if "eval/loss" in row)
    assert cli.main(["eval", "--workdir", str(elsewhere), "--json", *HERE]) == 0
    assert json.loads(capsys.readouterr().out)["eval/loss"] == pytest.approx(row["eval/loss"], rel=1e-4)


def test_it_generates(elsewhere, capsys):
    words = ["--workdir", str(elsewhere), "--prompt", "the model", "--max-tokens", "3", *HERE]
    assert cli.main(["generate", *words]) == 0
    assert capsys.readouterr().out.startswith("the model")


def test_it_is_exported(elsewhere, tmp_path, capsys):
    words = ["hf-export", "--workdir", str(elsewhere), "--out", str(tmp_path / "hf")]
    assert cli.main([*words, *HERE, "--config.mesh.fsdp=4"]) == 2
    assert "does not match 8 device(s)" in capsys.readouterr().err
    assert cli.main([*words, *HERE]) == 0
    assert (tmp_path / "hf" / "config.json").exists()


def test_each_of_it_is_refused_to_a_training(elsewhere):
    """Else the tests above would show nothing."""
    config, _ = open_run(elsewhere, MESH)
    for mend, message in (
        ([], "2 rows of a micro-batch do not divide"),
        (["train.accumulation=1"], "has no units for it"),
        (["train.accumulation=1", "train.precision=float32"], "compresses gradients between replicas"),
    ):
        values = configs.to_dict(config)
        for override in mend:
            configs.set_override(values, override)
        with pytest.raises(UserError, match=message):
            build_parts(configs.build(RunConfig, values))


def test_what_does_not_divide_is_still_named(elsewhere, capsys):
    words = ["--workdir", str(elsewhere), "--config.mesh.data=1"]
    assert cli.main(["generate", *words, "--config.mesh.tensor=8"]) == 2
    assert "does not divide by config.mesh.tensor=8" in capsys.readouterr().err
    assert cli.main(["eval", *words, *HERE[1:], "--config.eval.batch_size=12"]) == 2
    assert "config.eval.batch_size=12 does not divide over 8 devices" in capsys.readouterr().err
