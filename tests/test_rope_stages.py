"""A rope that changes by step: the same bits as a run of that rope from there on, over resumes, and in what reads the checkpoints."""

import json

import jax
import numpy as np
import pytest

from lmjax import config as configs
from lmjax import run, trained
from lmjax.errors import UserError
from lmjax.interchange import export_hf
from lmjax.model.config import RopeScaling
from lmjax.parts import build_parts, build_reader
from lmjax.sharding import mesh as meshes
from lmjax.sharding import multihost
from lmjax.train import step as steps
from lmjax.train.config import RopeStage, RunConfig

YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16}
BASE = {
    "model": {
        "vocab_size": 264,
        "num_layers": 1,
        "d_model": 16,
        "num_heads": 2,
        "max_length": 64,
        "tie_embeddings": False,
    },
    "data": {"seq_len": 16, "stages": [{"from_step": 0, "seq_len": 16}, {"from_step": 3, "seq_len": 32}]},
    "optim": {"learning_rate": 0.01, "warmup_steps": 0},
    "train": {"steps": 6, "batch_size": 16, "precision": "float32"},
    "eval": {"rows": 8},
    "checkpoint": {"every": 1, "keep": 9},
    "monitor": {"tensorboard": False, "peak_flops": 1e12},
    "rope_stages": [{"from_step": 3, "theta": 500.0, "scaling": YARN}],
}


def make_config(line, **overrides):
    values = json.loads(json.dumps(BASE))
    for override in [*line.overrides(), *(f"{key.replace('__', '.')}={value}" for key, value in overrides.items())]:
        configs.set_override(values, override)
    return configs.build(RunConfig, values)


def by_hand(config, workdir):
    """The parameters, by a program of the first rope for three steps and one of the second for three more."""
    parts = build_parts(config)
    reader = build_reader(config, workdir)
    batches = multihost.on_devices(((n, reader(n)) for n in range(6)), parts.batch_sharding, reader.batch_rows)
    with meshes.use(parts.mesh):
        state = run.first_state(parts)[0]
        for number, batch in batches:
            model = {} if number < 3 else {"rope_theta": 500.0, "rope_scaling": YARN}
            values = {**BASE, "rope_stages": [], "model": {**BASE["model"], **model}}
            own = build_parts(configs.build(RunConfig, values))
            program = steps.build_step(own.config, own.loss, own.optimizer, own.schedule, own.mesh, own.shardings)
            state, _ = program(state, batch)
    return state.params


@pytest.mark.slow
def test_a_rope_from_a_step_on(line, tmp_path, monkeypatch):
    traced, gradients = [], steps.summed_gradients
    monkeypatch.setattr(steps, "summed_gradients", lambda *args: traced.append(args) or gradients(*args))
    config = make_config(line)
    assert run.train(config, tmp_path / "whole") == 6
    assert len(traced) == 2  # one program before the change, one after
    monkeypatch.undo()
    for stop in (2, 3, 5, 6):  # before, at and after the change
        assert run.train(make_config(line, train__stop_at=stop), tmp_path / "parts") == stop
    whole, parts = (trained.load_model(tmp_path / name, None, []).params for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    jax.tree.map(np.testing.assert_array_equal, whole, by_hand(config, tmp_path / "whole"))
    # what reads a checkpoint takes the rope of its last step
    ropes = {n: trained.load_model(tmp_path / "whole", n, []).parts.config.model for n in (1, 3, 4, 6)}
    assert {n: model.rope_theta for n, model in ropes.items()} == {1: 1e4, 3: 1e4, 4: 500.0, 6: 500.0}
    assert [ropes[n].rope_scaling for n in (3, 4)] == [None, RopeScaling(**YARN)]
    export_hf(tmp_path / "whole", tmp_path / "hf", None, "float32")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_parameters"]["rope_theta"] == 500.0


@pytest.mark.parametrize(
    "stages, message",
    [
        ((RopeStage(5), RopeStage(5)), "rope_stages must rise"),
        (
            (RopeStage(1, scaling=RopeScaling("yarn", 1.5, original_length=16)),),
            "32 tokens at step 3 are longer than yarn's",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(stages, message):
    with pytest.raises(UserError, match=message):
        configs.build(RunConfig, {**BASE, "rope_stages": stages})
    with pytest.raises(UserError, match=r"need config\.model\.position"):
        configs.build(RunConfig, {**BASE, "model": {**BASE["model"], "position": "none"}})
