"""Attention over split rows equals that of one device, gradients too; and so does a whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import RULES, agree, inputs
from jax.sharding import PartitionSpec

from lmjax.axes import CONTEXT
from lmjax.errors import UserError
from lmjax.model import ring
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.sharding.context import zigzag

TOKENS = PartitionSpec(None, CONTEXT)


def ringed(rule, shards, block):
    """Attention of whole rows, split over the ambient mesh; the result in the order of the devices."""

    def ours(*arrays):
        local = jax.shard_map(
            lambda *x: ring.attend(*x, rule, block),
            in_specs=TOKENS,
            out_specs=TOKENS,
            axis_names={CONTEXT},
            check_vma=False,
        )
        return local(*(zigzag(x, shards) for x in arrays))

    return ours


QUICK = ("causal", "window", "prefix", "all")  # of the rules; the others take a path of one of these


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RULES]
)
def test_equals_all_scores_at_once(name):
    """Chunks of 8 tokens in blocks of 4; rows of a batch and heads are split as well."""
    rule = RULES[name]._replace(prefix=min(RULES[name].prefix, 7))
    with meshes.use(meshes.make_mesh(MeshConfig(data=1, tensor=2, context=4))):
        agree(ringed(rule, 4, 4), 64, rule, arrange=lambda x: zigzag(x, 4), group=2)


@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.slow), 5, 6, 100])
def test_blocks_need_not_divide_the_chunk(block):
    with meshes.use(meshes.make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])):
        agree(ringed(RULES["causal"], 2, block), 24, RULES["causal"], arrange=lambda x: zigzag(x, 2), batch=1)


def test_each_device_holds_an_early_and_a_late_chunk():
    places = zigzag(jnp.arange(16)[None], 4)[0].reshape(4, 4)
    np.testing.assert_array_equal(places, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]])


@pytest.mark.parametrize("device", range(4))
def test_every_device_has_the_same_work_at_every_turn(device):
    blocks, mesh = 6, meshes.make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    for source in set(range(4)) - {device}:
        pairs = np.asarray(ring._later_pairs(blocks, source, device))
        assert len(pairs) == blocks**2 // 2
        with meshes.use(mesh):
            first_queries, first_keys = (np.asarray(ring._starts(blocks, 5, d)) for d in (device, source))
        wanted = {(i, j) for i in range(blocks) for j in range(blocks) if first_keys[j] < first_queries[i]}
        assert set(map(tuple, pairs.tolist())) == wanted


def test_a_prefix_longer_than_a_chunk_is_refused():
    ids, message = jnp.ones((2, 64), jnp.int32), "a prefix of 21 tokens exceeds the 8 of a chunk"
    mesh = meshes.make_mesh(MeshConfig(data=2, context=4))
    with meshes.use(mesh), pytest.raises(UserError, match=message):
        jax.jit(ringed(RULES["prefix"], 4, 4))(*inputs(64), ids)
