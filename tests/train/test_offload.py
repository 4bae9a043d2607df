"""The optimizer's state in the host's memory: the same numbers to the bit, and none of it on devices between steps."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.checkpoint.restore import restore
from lmjax.checkpoint.save import Saver
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig
from lmjax.optim.config import OptimConfig
from lmjax.parts import build_parts
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import CheckpointConfig, RunConfig, TrainConfig
from lmjax.train.state import init_state
from lmjax.train.step import build_step

CONFIG = RunConfig(
    model=ModelConfig(vocab_size=32, num_layers=1, d_model=16, num_heads=2, d_ff=32),
    mesh=MeshConfig(data=1, fsdp=8),
    optim=OptimConfig(learning_rate=0.01, warmup_steps=0),
    train=TrainConfig(steps=4, batch_size=8, precision="float32"),
)


def run(offload, folder):
    """The state after two steps, saved, restored, and one more."""
    parts = build_parts(dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, offload=offload)))
    step = build_step(parts.config, parts.loss, parts.optimizer, parts.schedule, parts.mesh, parts.shardings)
    ids, ones = np.arange(8 * 8, dtype=np.int32).reshape(8, 8) % 32, np.ones((8, 8), np.int32)
    rows = Batch(ids, (ids + 1) % 32, ones.astype(np.float32), ones, np.cumsum(ones, axis=1) - 1)
    with meshes.use(parts.mesh):
        start = jax.jit(lambda: init_state(parts.config, parts.optimizer), out_shardings=parts.shardings.state)
        state, _ = step(step(start(), rows)[0], rows)
        with Saver(folder, CheckpointConfig(), {}) as saver:
            saver.save(2, state)
        state, _ = step(restore(folder, parts.abstract_state()).state, rows)
    assert step._cache_size() == 1
    return state


def test_it_changes_no_bit_and_lies_on_the_host(tmp_path):
    kept, away = run(False, tmp_path / "kept"), run(True, tmp_path / "away")
    jax.tree.map(np.testing.assert_array_equal, away.params, kept.params)
    jax.tree.map(np.testing.assert_array_equal, away.opt_state, kept.opt_state)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(away.opt_state) if leaf.ndim}
    assert kinds == {meshes.HOST}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves((away.params, kept.opt_state))} == {"device"}


def test_a_device_without_such_memory_is_the_users_mistake():
    memories = [types.SimpleNamespace(kind="device")]
    device = types.SimpleNamespace(device_kind="abacus", addressable_memories=lambda: memories)
    with pytest.raises(UserError, match="abacus knows no memory of kind 'pinned_host'"):
        meshes.check_offload(device)
