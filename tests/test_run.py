"""A run as a whole: resumes to the bit, on any mesh; what changes its meaning is refused; it ends as it should."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from lmjax import cli, run, trained
from lmjax import config as configs
from lmjax.checkpoint import layout
from lmjax.errors import RunError, UserError
from lmjax.generate.sample import Sampling
from lmjax.monitor.write import read_metrics
from lmjax.parts import build_parts
from lmjax.train.config import RunConfig
from lmjax.workdir import COMPILE_CACHE, PACKING, RUN

BASE = {
    "model": {"vocab_size": 264, "num_layers": 2, "d_model": 32, "num_heads": 4, "max_length": 64, "dropout": 0.1},
    "data": {"seq_len": 32, "weights": {"prose": 0.4, "lists": 0.6}},
    "mesh": {"data": 1, "fsdp": 4, "tensor": 2},
    "optim": {"learning_rate": 0.01, "warmup_steps": 4, "schedule": "cosine"},
    "train": {"steps": 24, "batch_size": 8, "precision": "float32"},
    "eval": {"every": 12, "rows": 8},
    "checkpoint": {"every": 100, "keep": 3},
    "monitor": {"log_every": 1, "tensorboard": False, "peak_flops": 1e12},
}


def make_config(line, **overrides):
    values = json.loads(json.dumps(BASE))
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    for override in [*line.overrides(), *pairs]:
        configs.set_override(values, override)
    return configs.build(RunConfig, values)


def losses(workdir):
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


def final_state(config, workdir):
    from lmjax.checkpoint import restore

    restored = restore.restore(workdir, build_parts(config).abstract_state())
    return restored.step, jax.tree.map(
        lambda x: np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x), restored.state
    )


@pytest.fixture(scope="module")
def straight(line, tmp_path_factory):
    """24 steps without a stop."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    assert run.train(make_config(line), workdir) == 24
    return workdir


def test_three_resumes_give_the_same_bits_as_none(line, tmp_path, straight):
    """With dropout, across the end of an epoch of the smaller source, and once with worker processes instead of threads."""
    epochs = {row["epoch"] for step in range(24) for row in trained.trace(straight, step) if row["source"] == "lists"}
    assert len(epochs) > 1
    for stop in (5, 11, 17, 24):
        workers = 1 if stop == 11 else 0
        assert run.train(make_config(line, train__stop_at=stop, data__num_workers=workers), tmp_path / "run") == stop
    assert losses(tmp_path / "run") == losses(straight)
    ours, theirs = final_state(make_config(line), tmp_path / "run"), final_state(make_config(line), straight)
    assert ours[0] == theirs[0] == 24
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])


@pytest.mark.slow
def test_experts_and_their_bias_resume_to_the_bit(line, tmp_path):
    experts = {"model__moe__num_experts": 4, "model__moe__bias_rate": 0.01, "train__steps": 6}
    config = make_config(line, **experts, mesh__expert=4, mesh__fsdp=2, mesh__tensor=1)
    assert run.train(config, tmp_path / "whole") == 6
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, stop_at=3))
    assert run.train(half, tmp_path / "halves") == 3
    assert run.train(config, tmp_path / "halves") == 6
    whole, halves = (final_state(config, tmp_path / name)[1] for name in ("whole", "halves"))
    jax.tree.map(np.testing.assert_array_equal, whole, halves)
    assert np.abs(whole.params["layers"]["moe"]["router_bias"]).max() > 0.01
    assert {"train/balance_loss", "moe/load_max", "moe/dropped_share"} <= read_metrics(tmp_path / "whole")[0].keys()


@pytest.mark.slow
def test_experts_begin_as_the_dense_run_they_come_from(line, tmp_path, straight, capsys):
    """At a rate of nothing the upcycled run says what the dense one says, on a mesh over experts; another width is refused."""
    start = {
        "init_from": straight,
        "model__moe__num_experts": 4,
        "train__steps": 1,
        "optim__learning_rate": 1e-30,
        "optim__warmup_steps": 0,
    }
    experts = make_config(line, mesh__fsdp=2, mesh__tensor=1, mesh__expert=4, **start)
    assert run.train(experts, tmp_path / "run") == 1
    assert "each expert begins as its layer's MLP" in capsys.readouterr().out
    dense, upcycled = (trained.evaluate(folder, "validation", None, []) for folder in (straight, tmp_path / "run"))
    assert upcycled["eval/loss"] == pytest.approx(dense["eval/loss"], rel=1e-5)
    with pytest.raises(UserError, match=r"is of another model: .*d_ff"):
        run.train(make_config(line, model__d_ff=64, **start), tmp_path / "wrong")


@pytest.mark.slow
def test_a_needle_is_asked_for(line, tmp_path, straight, capsys):
    """A run of one step knows nothing; rows longer than the model's are refused."""
    config = make_config(line, model__max_length=160, train__steps=1, optim__warmup_steps=0)
    assert run.train(config, tmp_path / "run") == 1
    (tmp_path / "text.txt").write_text("the model reads a row of tokens and learns to say what comes next. " * 20)
    words = [
        "eval",
        "--workdir",
        str(tmp_path / "run"),
        "--needle",
        str(tmp_path / "text.txt"),
        "--lengths",
        "128",
        "160",
    ]
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["length"], cell["exact"]) for cell in cells] == [(128, 0.0)] * 5 + [(160, 0.0)] * 5
    assert cli.main(words) == 0
    assert "said word for word" in capsys.readouterr().out
    assert cli.main([*words[:2], str(straight), *words[3:]]) == 2
    assert "max_length=64" in capsys.readouterr().err


STAGES = "[{'from_step': 0, 'seq_len': 16}, {'from_step': 6, 'seq_len': 32}, {'from_step': 9, 'seq_len': 64}]"
LONG = "[{'from_step': 0, 'seq_len': %d}]"


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_resumes_to_the_bit_across_changes_of_row_length(line, tmp_path, capsys, packing):
    fields = {"data__stages": STAGES, "data__packing": packing, "train__steps": 12, "eval__every": 100}
    run.train(make_config(line, **fields), tmp_path / "straight")
    said = capsys.readouterr().out
    assert "12 steps of 8 × 32 tokens, in rows of 16 → 32 → 64;" in said
    assert "step 6: 8 rows of 32 tokens from here on" in said and "step 9: 4 rows of 64 tokens from here on" in said
    assert (
        said.count("rows of 16, ") == said.count("rows of 64, ") == (2 if packing == "best_fit" else 0)
    )  # two sources
    if packing == "best_fit":  # another process of the run may be ahead of this one
        (tmp_path / "run" / PACKING).mkdir(parents=True)
    for stop in (4, 6, 10, 12):
        assert run.train(make_config(line, train__stop_at=stop, **fields), tmp_path / "run") == stop
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    config = make_config(line, **fields)
    ours, theirs = (final_state(config, tmp_path / name) for name in ("run", "straight"))
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])
    assert all(row["tokens"] == row["step"] * 8 * 32 for row in read_metrics(tmp_path / "run"))
    timed = {row["step"] for row in read_metrics(tmp_path / "straight") if "speed/step_s" in row}
    assert {2, 6, 8, 9, 11} <= timed and not timed & {1, 7, 10}  # compiling is no part of a step's time
    assert len(trained.trace(tmp_path / "run", 0)) == 16 and len(trained.trace(tmp_path / "run", 11)) == 4
    assert (tmp_path / "run" / PACKING).exists() == (packing == "best_fit")


def test_what_is_read_of_each_source_is_told(line, tmp_path, capsys):
    fields = {
        "data__weights": "{}",
        "data__temperature": 2.0,
        "data__max_epochs": "{'lists': 0.25}",
        "train__stop_at": 1,
    }
    run.train(make_config(line, **fields), tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if "of the run: " in line]
    assert [line.split()[0] for line in lines] == ["lists", "prose"] and ", 0.2" in lines[0]


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"mesh__data": 4, "mesh__stage": 2}, marks=pytest.mark.slow), {"mesh__data": 2, "mesh__context": 4}],
)
def test_goes_on_upon_another_mesh(line, tmp_path, straight, sizes):
    run.train(make_config(line, train__stop_at=12), tmp_path / "run")
    run.train(make_config(line, mesh__fsdp=1, mesh__tensor=1, **sizes), tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(straight)
    assert [ours[s] for s in range(1, 13)] == [theirs[s] for s in range(1, 13)]
    np.testing.assert_allclose([ours[s] for s in range(13, 25)], [theirs[s] for s in range(13, 25)], atol=1e-5)


def test_rows_carry_what_they_should(straight):
    rows = read_metrics(straight)
    train = {"step", "tokens", "train/loss", "train/grad_norm", "train/learning_rate", "speed/tokens_per_s", "speed/step_s",
             "speed/data_wait_s", "speed/mfu"}  # fmt: skip
    evaluation = {
        f"eval/{part}{kind}" for part in ("", "prose/", "lists/") for kind in ("loss", "perplexity", "bits_per_byte")
    }
    assert any(train <= row.keys() for row in rows)
    assert [row["step"] for row in rows if evaluation <= row.keys()] == [12, 24]
    assert all(row["tokens"] == row["step"] * 8 * 32 for row in rows)
    assert layout.steps(straight) == [24]


def test_a_finished_run_says_so(line, straight, capsys):
    assert run.train(make_config(line), straight) == 24
    assert "nothing to do" in capsys.readouterr().out


def test_a_stop_before_the_first_step_trains_nothing(line, tmp_path, capsys):
    assert run.train(make_config(line, train__stop_at=0), tmp_path / "run") == 0
    assert "stands at step 0 of 24" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"optim__learning_rate": 0.02}, {"model__dropout": 0.2}, {"data__seq_len": 16}, {"train__steps": 30}],
)
def test_what_changes_the_meaning_of_a_run_is_refused_by_name(line, straight, change):
    (name,) = change
    with pytest.raises(UserError, match=rf"holds another run: .*{name.replace('__', '.')}: .* → "):
        run.train(make_config(line, **change), straight)


def test_other_data_is_refused(line, straight):
    config = make_config(line, data__shards=str(line.shards[0]), data__weights="{}")
    with pytest.raises(UserError, match="data: another fingerprint"):
        run.train(config, straight)


def test_a_folder_that_is_no_run_is_left_alone(line, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not the workdir of a run"):
        run.train(make_config(line), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != COMPILE_CACHE] == ["thesis.tex"]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model__vocab_size": 256}, "smaller than the tokenizer's 262"),
        ({"mesh__fsdp": 3}, "does not match 8 device"),
        ({"mesh__fsdp": 1, "mesh__tensor": 8}, "does not divide by .*tensor=8"),
        ({"train__batch_size": 6}, "do not divide over fsdp"),
        ({"tokenizer": "nowhere"}, "nowhere"),
        ({"data__shards": "nowhere"}, "no such folder: .*nowhere"),
        ({"data__weights": "{'prosa': 1}"}, "did you mean 'prose'"),
        ({"optim__warmup_steps": 50}, "exceed config.train.steps"),
        ({"data__stages": LONG % 128, "data__weights": "{}"}, "seq_len=128 exceeds config.model.max_length=64"),
        ({"data__stages": LONG % 48, "data__weights": "{}"}, "8 × 32 tokens of a step are no whole rows of 48"),
        ({"data__stages": LONG % 64, "train__accumulation": 8}, "4 rows of a step do not divide by .*accumulation=8"),
        ({"data__stages": LONG % 64, "mesh__fsdp": 8, "mesh__tensor": 1}, "4 rows .* do not divide over fsdp = 8"),
        ({"data__max_epochs": "{'*': 0.1}"}, "max_epochs and max_tokens leave .*lists .*prose"),
    ],
)  # fmt: skip
def test_impossible_configs_are_named_before_anything_is_written(line, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        run.train(make_config(line, **change), tmp_path / "run")
    assert not (tmp_path / "run" / RUN).exists()


def test_shards_of_another_tokenizer_are_refused(line, tmp_path):
    from lmjax.data.config import TokenizerConfig
    from lmjax.tokenizers.train import train_tokenizer

    words = tmp_path / "words"
    documents = line.shards[0].parent / "documents"
    train_tokenizer(documents, words, TokenizerConfig(algorithm="unigram", vocab_size=301))
    with pytest.raises(UserError, match="made with another tokenizer"):
        run.train(make_config(line, tokenizer=words, model__vocab_size=304), tmp_path / "run")


def test_sigterm_saves_and_the_run_goes_on(line, tmp_path, straight):
    def ask(_):
        os.kill(os.getpid(), signal.SIGTERM)

    writer_say = run.Writer.write
    try:  # the signal comes while step 7 is written
        run.Writer.write = lambda self, step, values: (writer_say(self, step, values), ask(0) if step == 7 else None)[0]
        done = run.train(make_config(line), tmp_path / "run")
    finally:
        run.Writer.write = writer_say
    assert 7 <= done <= 9 and layout.steps(tmp_path / "run") == [done]
    run.train(make_config(line), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(straight)


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(line, tmp_path):
    config = make_config(line, optim__learning_rate=1e30, optim__warmup_steps=0, checkpoint__every=1)
    with pytest.raises(RunError, match="not finite"):
        run.train(config, tmp_path / "run")
    _, state = final_state(config, tmp_path / "run")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_an_unreadable_checkpoint_is_not_taken_for_none(line, tmp_path, straight, capsys):
    config = make_config(line, train__stop_at=12, checkpoint__every=6)
    run.train(config, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints" / "12").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            os.truncate(path, 100)
    run.train(make_config(line), tmp_path / "run")
    out = capsys.readouterr().out
    assert "checkpoint 12 cannot be read" in out and "going on from checkpoint 6" in out
    assert (tmp_path / "run" / "checkpoints" / "12.unreadable").exists()
    assert losses(tmp_path / "run") == losses(straight)


def test_evaluation_of_the_whole_split_by_source(straight):
    result = trained.evaluate(straight, "test", None, ["mesh.fsdp=1", "mesh.tensor=1", "mesh.data=8"])
    split = trained.evaluate(straight, "test", None, ["mesh.fsdp=1", "mesh.tensor=1", "mesh.data=4", "mesh.context=2"])
    assert split["eval/loss"] == pytest.approx(result["eval/loss"], abs=1e-5)
    assert result["step"] == 24 and {"eval/prose/bits_per_byte", "eval/lists/loss", "eval/perplexity"} <= result.keys()
    with pytest.raises(UserError, match="cannot be changed"):
        trained.evaluate(straight, "test", None, ["model.d_model=64"])


def test_generation_streams_and_does_not_depend_on_the_batch(straight):
    def texts(prompts):
        greedy = Sampling(temperature=0.0)
        stream = trained.generate(
            straight, prompts, 12, greedy, None, ["mesh.fsdp=1", "mesh.tensor=2", "mesh.stage=2", "mesh.data=2"]
        )
        return ["".join(parts) for parts in zip(*stream)]

    together = texts(["the model", "a row of tokens and"])
    assert together == [texts(["the model"])[0], texts(["a row of tokens and"])[0]]


def test_completions_of_a_file_have_their_own_seeds(straight, tmp_path, capsys):
    """A prompt's text does not depend on the prompts beside it, nor on their order; its seed decides."""

    def texts(requests, size):
        lines = [{"prompt": prompt, "seed": seed} for prompt, seed in requests]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ["--workdir", str(straight), "--prompts", str(tmp_path / "prompts.jsonl"), "--batch-size", str(size)]
        words += ["--max-tokens", "8", "--temperature", "1.5", "--config.mesh.fsdp=1", "--config.mesh.tensor=1"]
        assert cli.main(["generate", *words, "--config.mesh.data=8"]) == 0
        return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]

    requests = [("the model", 1), ("a row of tokens and", 2), ("the model", 3), ("", 1), ("the model", 1)]
    together = texts(requests, 8)
    assert together[0] == together[4] and len(set(together)) == 4
    assert texts(requests[::-1], 2) == together[::-1]


def test_prompts_that_are_none(straight, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    for text, message in (
        ("{}", "KeyError"),
        ('{"prompt": 3}', "prompts.jsonl:1"),
        ('{"prompt": "", "seed": -1}', ":1"),
    ):
        path.write_text(text + "\n")
        assert cli.main(["generate", "--workdir", str(straight), "--prompts", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["generate", "--workdir", str(straight), "--prompts", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
