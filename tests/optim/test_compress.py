"""Compressed gradients: nothing is lost, the bytes on the slow axis fall, and a run learns as beside the exact one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lmjax.axes import DATA, FSDP
from lmjax.errors import UserError
from lmjax.optim import compress
from lmjax.optim.config import CompressConfig
from lmjax.plan import hlo
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig

MESH = MeshConfig(data=4, fsdp=2)
SPECS = {"cut": PartitionSpec(None, FSDP), "whole": PartitionSpec()}
SHAPES = {"cut": (40, 50), "whole": (33,)}
KINDS = {
    "bfloat16": CompressConfig("bfloat16"),
    "int8": CompressConfig("int8", block=64),
    "topk": CompressConfig("topk", share=0.05),
}


def placed(mesh, tree):
    """Trees of [R, …] on the mesh."""
    return {
        name: jax.device_put(x, NamedSharding(mesh, compress.with_replicas(SPECS[name]))) for name, x in tree.items()
    }


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(4, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def reducer(config):
    """(mesh, jitted reduce)."""
    mesh = meshes.make_mesh(MESH)
    return mesh, jax.jit(lambda g, r: compress.reduce(config, g, r, SPECS))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_sent_is_kept(kind):
    """Over steps, what arrived and what is left are all that was there; without feedback only rounding is lost."""
    mesh, step = reducer(KINDS[kind])
    with meshes.use(mesh):
        left = compress.initial(KINDS[kind], {name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        left = None if left is None else placed(mesh, left)
        arrived, sent = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
        for seed in range(3):
            grads = gradients(seed)
            total, left = step(placed(mesh, grads), left)
            for name in SHAPES:
                for shard in total[name].addressable_shards:  # equal wherever it is held
                    np.testing.assert_array_equal(shard.data, np.asarray(total[name])[shard.index])
                arrived[name], sent[name] = arrived[name] + np.asarray(total[name]), sent[name] + grads[name].sum(0)
    for name in SHAPES:
        rest = 0.0 if left is None else np.asarray(left[name]).sum(0)
        np.testing.assert_allclose(arrived[name] + rest, sent[name], atol=0.2 if kind == "bfloat16" else 1e-4)
        assert np.abs(arrived[name] - sent[name]).max() > 1e-3  # it is compressed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_arrives(kind, bad):
    mesh, step = reducer(KINDS[kind])
    grads = gradients(0)
    grads["cut"][2, 7, 9] = bad
    with meshes.use(mesh):
        total, _ = step(placed(mesh, grads), placed(mesh, jax.tree.map(np.zeros_like, grads)))
    assert not np.isfinite(np.asarray(total["cut"])).all()


@pytest.mark.parametrize("kind, share", [("bfloat16", 0.5), ("int8", 0.3), ("topk", 0.2)])
def test_bytes_on_the_slow_axis(kind, share):
    """Of the compiled program, against an exact all-reduce of float32: 2 (R - 1) / R of a device's shard."""
    mesh, step = reducer(KINDS[kind])
    with meshes.use(mesh):
        tree = placed(mesh, gradients(0))
        text = step.lower(tree, tree).compile().as_text()
    found = hlo.collectives(text)
    assert {one.axes(dict(mesh.shape)) for one in found} == {(DATA,)}
    exact = 2 * (3 / 4) * 4 * (40 * 50 / 2 + 33)
    assert 0.5 * share * exact < sum(one.sent_bytes for one in found) <= 1.25 * share * exact


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"data": 1, "stage": 1, "expert": 1}, r"config\.mesh\.data=1 has one"),
        ({"data": 2, "stage": 2, "expert": 1}, r"does not go with config\.mesh\.stage=2"),
    ],
)
def test_what_cannot_be_compressed_is_the_users_mistake(sizes, message):
    with pytest.raises(UserError, match=message):
        compress.check(KINDS["int8"], sizes)
    compress.check(CompressConfig(), sizes)
