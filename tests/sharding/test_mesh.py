"""The table of rules, and the mesh over whatever devices there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lmjax.errors import UserError
from lmjax.model import decoder
from lmjax.model.config import ModelConfig
from lmjax.sharding import mesh as meshes
from lmjax.sharding import multihost, rules
from lmjax.sharding.config import MeshConfig


def test_one_axis_takes_what_is_left():
    assert MeshConfig(data=-1, fsdp=2, tensor=2).sizes(8) == (2, 1, 2, 1, 1, 2)
    assert MeshConfig(data=1, fsdp=-1).sizes(8) == (1, 1, 8, 1, 1, 1)
    assert MeshConfig(expert=4).sizes(8) == (2, 1, 1, 4, 1, 1)


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (16, 1, 1), (2, 2, 1)])
def test_a_mesh_that_does_not_match_the_devices(sizes):
    with pytest.raises(UserError, match="does not match 8 device"):
        meshes.make_mesh(MeshConfig(*sizes))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (-2, 1, 1), (-1, -1, 1)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(UserError):
        MeshConfig(*sizes)


def test_rules():
    assert rules.spec(("embed", "kv_heads", None, None)) == ("fsdp", "tensor", None, None)
    assert rules.spec(("embed", "kv_heads"), fsdp=False) == (None, "tensor")
    assert rules.spec(("layers", "norm")) == ("stage", None)
    assert rules.num_shards(("data", "fsdp"), {"data": 2, "fsdp": 4, "tensor": 1}) == 8
    assert rules.spec(("experts", "embed", None, "mlp")) == ("expert", "fsdp", None, "tensor")


def test_every_weight_is_sharded_over_fsdp_and_tensor():
    """Norms and biases apart, no parameter is whole on a device."""
    config = ModelConfig(tie_embeddings=False, attention_bias=True, mlp_bias=True, position="learned")
    flat, _ = jax.tree_util.tree_flatten_with_path(decoder.logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
    for path, axes in flat:
        name, placed = path[-1].key, rules.spec(axes)
        if name in ("scale", "out_bias", "down_bias"):
            assert set(placed) <= {None, "stage"}
        elif name in ("qkv_bias", "up_bias"):
            assert "tensor" in placed
        else:
            assert "fsdp" in placed and ("tensor" in placed or name == "position"), name


def test_constrain_needs_no_mesh():
    x = jnp.ones((8, 4))
    assert meshes.constrain(x, "batch", None) is x and meshes.batch_shards() == 1
    with meshes.use(meshes.make_mesh(MeshConfig(2, 2, 2))):
        assert meshes.batch_shards() == 4
        placed = jax.jit(lambda x: meshes.constrain(x, "batch", None))(x)
    assert placed.sharding.spec == PartitionSpec(("data", "fsdp"))


def test_rows_of_a_process_and_the_batch_they_make():
    mesh = meshes.make_mesh(MeshConfig(2, 2, 2))
    sharding = meshes.sharding(mesh, ("batch", None))
    assert multihost.local_rows(sharding, 8) == tuple(range(8))
    rows = np.arange(24).reshape(8, 3)
    np.testing.assert_array_equal(multihost.global_array(sharding, rows, 8), rows)


def test_a_process_of_a_cluster_needs_all_three_names(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    with pytest.raises(UserError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID"):
        multihost.initialize(False)
