"""`lmjax scaling` over workdirs: what it reads, says and draws, and what it refuses in one line."""

import json
import math
import xml.etree.ElementTree

import numpy as np
import pytest

from lmjax import cli
from lmjax import config as configs
from lmjax.model.config import ModelConfig
from lmjax.plan import ladder, params
from lmjax.plan.scaling import Law
from lmjax.train.config import RunConfig, TrainConfig

PLANTED = Law(*map(np.float64, (1.8, np.log(90.0), 0.35, np.log(400.0), 0.4)))
STEPS = (100, 200, 400)


def make_run(workdir, width, steps, stop=None, tokenizer="t", loss=None):
    """A workdir as a run leaves it: 1024 tokens a step."""
    model = ModelConfig(vocab_size=256, num_layers=2, d_model=width, num_heads=2)
    config = RunConfig(model=model, train=TrainConfig(steps=steps))
    workdir.mkdir(parents=True)
    record = {"config": configs.to_dict(config), "tokenizer": tokenizer}
    (workdir / "run.json").write_text(json.dumps(record))
    last = steps if stop is None else stop
    noise = 1 + 1e-4 * math.sin(width * steps)
    reached = noise * float(PLANTED.loss(float(params.total(model)), 1024.0 * last)) if loss is None else loss
    rows = [{"step": 1, "tokens": 1024, "train/loss": 5.0}, {"step": last, "tokens": 1024 * last, "eval/loss": reached}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workdir


@pytest.fixture
def runs(tmp_path):
    for width in (32, 48, 64):
        for steps in STEPS:
            make_run(tmp_path / "runs" / f"{width}-{steps}", width, steps)
    return tmp_path / "runs"


def lmjax(capsys, *words):
    code = cli.main(["scaling", *map(str, words)])
    return code, capsys.readouterr()


def test_a_larger_run_is_predicted_compared_and_drawn(runs, tmp_path, capsys):
    size = float(params.total(ModelConfig(vocab_size=256, num_layers=2, d_model=128, num_heads=2))), 1024e3
    expected = ladder.answer(runs, size, options=(50, 0.9, 0)).fit.predict(*size)
    larger = make_run(tmp_path / "larger", 128, 1000, loss=expected.value)
    picture = tmp_path / "scaling.svg"
    words = ("--runs", runs, "--against", larger, "--budget", 1e13, "--resamples", 50, "--plot", picture)
    code, said = lmjax(capsys, *words)
    assert code == 0 and "larger reached" in said.out and ": inside" in said.out and "best spent" in said.out
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_json_holds_what_was_asked(runs, capsys):
    words = ("--runs", runs, "--parameters", 1e6, "--tokens", 2e6, "--budget", 1e13, "--resamples", 50, "--json")
    code, said = lmjax(capsys, *words)
    values = json.loads(said.out)
    assert code == 0 and len(values["runs"]) == 9 and values["level"] == 0.9
    assert values["prediction"]["loss"]["value"] == pytest.approx(float(PLANTED.loss(1e6, 2e6)), rel=0.02)
    assert values["optimal"]["parameters"]["value"] == pytest.approx(float(PLANTED.optimal(1e13)[0]), rel=0.2)
    assert values["coefficients"]["alpha"]["value"] == pytest.approx(0.35, rel=0.2)


def test_a_run_outside_the_interval_is_said(runs, tmp_path, capsys):
    worse = make_run(tmp_path / "worse", 128, 1000, loss=9.0)
    code, said = lmjax(capsys, "--runs", runs, "--against", worse, "--resamples", 50)
    assert code == 0 and "worse reached 9.0000: outside" in said.out


def test_a_run_to_compare_with_takes_no_part_wherever_it_lies(runs, tmp_path, monkeypatch):
    outside = make_run(tmp_path / "elsewhere" / "larger", 128, 1000, loss=9.0)
    make_run(runs / "larger", 128, 1000, loss=9.0)
    (tmp_path / "link").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    options = (20, 0.9, 0)
    inside = [ladder.answer(runs, against=path, options=options) for path in ("runs/larger/", "link/larger")]
    (runs / "larger").rename(tmp_path / "moved")
    expected = ladder.answer(runs, against=str(outside), options=options).to_dict()
    assert len(expected["runs"]) == 9 and [found.to_dict() for found in inside] == [expected] * 2


@pytest.mark.parametrize(
    "spoil, words, message",
    [
        (lambda runs: make_run(runs / "cut", 80, 100, stop=50), [], "cut stands at step 50 of 100: resume it"),
        (lambda runs: make_run(runs / "other", 80, 100, tokenizer="u"), [], "other has another tokenizer"),
        (lambda runs: make_run(runs / "nan", 80, 100, loss=float("nan")), [], "its eval/loss is nan"),
        (
            lambda runs: [(runs / f"{w}-{s}" / "run.json").unlink() for w in (48, 64) for s in STEPS],
            [],
            "3 runs of 1 sizes",
        ),
        (lambda runs: None, ["--parameters", "1e6"], "go together"),
        (lambda runs: None, ["--parameters", "0", "--tokens", "1"], "--parameters must be positive"),
        (lambda runs: None, ["--interval", "1.5"], "between 0 and 1"),
        (lambda runs: None, ["--budget", "inf"], "--budget must be positive and finite"),
        (lambda runs: None, ["--seed", "-1"], "--seed -1 must not be negative"),
        (lambda runs: None, ["--plot", "x.gift"], "suffix must be one of"),
        (lambda runs: None, ["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(runs, spoil, words, message, capsys):
    spoil(runs)
    code, said = lmjax(capsys, "--runs", runs, "--resamples", 20, *words)
    assert code == 2 and message in said.err and said.err.count("\n") == 1


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    for folder, message in ((tmp_path, "holds no workdirs"), (tmp_path / "none", "no such folder")):
        code, said = lmjax(capsys, "--runs", folder)
        assert code == 2 and message in said.err


def test_without_matplotlib_the_plot_says_what_to_install(runs, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, said = lmjax(capsys, "--runs", runs, "--resamples", 20, "--plot", "x.png")
    assert code == 2 and "pip install" in said.err


def test_experts_count_as_far_as_a_token_runs_through_them(runs):
    """Parameters are those of the config, embeddings included."""
    first = ladder.read_runs(runs)[0]
    assert first.parameters == params.total(ModelConfig(vocab_size=256, num_layers=2, d_model=32, num_heads=2))
