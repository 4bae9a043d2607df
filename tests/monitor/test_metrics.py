"""The table of metrics knows what the parts report."""

import jax
import jax.numpy as jnp
import pytest

from lmjax.batch import Batch
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.monitor import metrics
from lmjax.monitor.progress import SHOWN
from lmjax.monitor.speed import Peak, Speed
from lmjax.optim.build import build_optimizer
from lmjax.optim.schedule import build_schedule
from lmjax.sharding.config import MeshConfig
from lmjax.sharding.mesh import make_mesh, use
from lmjax.train.config import RunConfig
from lmjax.train.objective import build_objective
from lmjax.train.state import init_state, state_shardings
from lmjax.train.step import build_step


@pytest.mark.parametrize("name", ["eval/loss", "eval/code/loss", "eval/a/b c/loss"])
def test_a_sources_evaluation_means_what_the_whole_ones_does(name):
    assert metrics.find(name) is metrics.METRICS["eval/loss"]


@pytest.mark.parametrize("name", ["loss", "train/code/loss", "eval", "eval/code/accuracy", ""])
def test_unknown_names_are_none(name):
    assert metrics.find(name) is None


def test_what_the_line_shows_is_in_the_table():
    assert set(SHOWN) <= set(metrics.METRICS)


@pytest.mark.parametrize("moe", [None, MoeConfig()], ids=["dense", "experts"])
def test_the_table_knows_what_a_step_and_the_speed_report(moe):
    """The names of a real step's metrics, without running it."""
    config = RunConfig(model=ModelConfig(num_layers=1, d_model=32, num_heads=2, moe=moe), mesh=MeshConfig(data=8))
    optimizer, mesh = build_optimizer(config.optim), make_mesh(config.mesh)
    loss = build_objective(config, dtypes("float32", "cpu"))
    schedule = build_schedule(config.optim, config.train.steps)
    step = build_step(config, loss, optimizer, schedule, mesh, state_shardings(config, mesh, optimizer))
    ints, floats = (jax.ShapeDtypeStruct((8, 16), dtype) for dtype in (jnp.int32, jnp.float32))
    state = jax.eval_shape(lambda: init_state(config, optimizer))
    with use(mesh):
        _, names = jax.eval_shape(step, state, Batch(ints, ints, floats, ints, ints))
    speed = Speed(1.0, Peak(1.0, ""))
    speed.step(1)
    unknown = [name for name in (*names, *speed.read()) if metrics.find(name) is None]
    assert len(names) >= 3 and not unknown
