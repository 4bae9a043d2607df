"""Saving and restoring: on any mesh, all or an error, retention, failures that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lmjax.checkpoint import layout, restore
from lmjax.checkpoint.save import SaveError, Saver
from lmjax.errors import RunError, UserError
from lmjax.train.config import CheckpointConfig


def place(shape, spec=("x",)):
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*spec))


def state(seed=0, shape=(2, 4)):
    values = {"w": np.random.default_rng(seed).normal(size=(8, 6)).astype(np.float32), "n": np.int32(seed)}
    placed = {"w": jax.device_put(values["w"], place(shape)), "n": jax.device_put(values["n"], place(shape, ()))}
    return placed | {"key": jax.device_put(jax.random.key(seed), place(shape, ()))}


def abstract(shape=(2, 4), **changes):
    leaves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(shape=shape))
    return leaves | changes


@pytest.fixture
def workdir(tmp_path):
    with Saver(tmp_path, CheckpointConfig(), {"code": "test"}) as saver:
        for step in (10, 20):
            saver.save(step, state(step))
    return tmp_path


@pytest.mark.parametrize("shape", [(2, 4), (8, 1), (1, 8)])
def test_restores_onto_any_mesh(workdir, shape):
    restored = restore.restore(workdir, abstract(shape))
    assert restored.step == 20 and restored.metadata == {"code": "test"} and restored.unreadable == ()
    np.testing.assert_array_equal(restored.state["w"], state(20)["w"])
    assert restored.state["w"].sharding == place(shape)
    np.testing.assert_array_equal(*(jax.random.key_data(x["key"]) for x in (restored.state, state(20))))
    assert int(restore.restore(workdir, abstract(shape), step=10).state["n"]) == 10


def test_leaves_that_are_not_wanted_are_not_read(workdir):
    part = abstract()
    del part["w"]
    restored = restore.restore(workdir, part, partial=True)
    assert set(restored.state) == set(part) and int(restored.state["n"]) == 20


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"w": jax.ShapeDtypeStruct((8, 7), jnp.float32)}, r"w: stored float32\[8, 6\], expected float32\[8, 7\]"),
        ({"w": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16)}, r"w: stored float32\[8, 6\], expected bfloat16"),
        ({"more": jax.ShapeDtypeStruct((1,), jnp.float32)}, "more: missing"),
    ],
)
def test_every_mismatch_is_named(workdir, changes, message):
    with pytest.raises(UserError, match=message):
        restore.restore(workdir, abstract(**changes))


def test_what_is_stored_and_not_asked_for_is_named(workdir):
    wanted = abstract()
    del wanted["n"]
    with pytest.raises(UserError, match="n: not expected"):
        restore.restore(workdir, wanted)


def damage(path):
    for file in path.rglob("*"):
        if file.is_file() and "d" in file.parent.name:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_falls_back_to_the_one_before_and_says_so(workdir):
    damage(workdir / "checkpoints" / "20")
    restored = restore.restore(workdir, abstract())
    assert (
        restored.step == 10
        and len(restored.unreadable) == 1
        and "checkpoint 20 cannot be read" in restored.unreadable[0]
    )
    restore.set_aside(workdir, restored.step)
    assert layout.steps(workdir) == [10] and (workdir / "checkpoints" / "20.unreadable").exists()


def test_none_that_can_be_read_is_an_error_and_no_fresh_start(workdir):
    for step in (10, 20):
        damage(workdir / "checkpoints" / str(step))
    with pytest.raises(RunError, match="no checkpoint can be read"):
        restore.restore(workdir, abstract())


def test_none_at_all_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint"):
        restore.restore(tmp_path, abstract())


def test_keeps_the_newest_and_every_nth(tmp_path):
    with Saver(tmp_path, CheckpointConfig(keep=2, keep_every=4), {}) as saver:
        for step in range(1, 11):
            saver.save(step, state(step))
    assert layout.steps(tmp_path) == [4, 8, 9, 10]


def test_a_step_that_is_there_is_not_written_again(workdir):
    with Saver(workdir, CheckpointConfig(), {}) as saver:
        saver.save(20, state(99))
    assert int(restore.restore(workdir, abstract()).state["n"]) == 20


def test_a_save_that_failed_does_not_count(workdir, monkeypatch):
    saver = Saver(workdir, CheckpointConfig(), {})
    saver.save(30, state(30))

    class Failed:
        def result(self):
            raise OSError(28, "No space left on device")

    step, response = saver.pending
    response.result()
    saver.pending = (step, Failed())
    with pytest.raises(SaveError, match=r"step 30 could not be written .*No space left.*checkpoint 20 is intact"):
        saver.wait()
    saver.close()


def test_an_unfinished_save_is_not_a_checkpoint(workdir):
    (workdir / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    assert layout.steps(workdir) == [10, 20]
