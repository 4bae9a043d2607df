"""The TPU's kernel, interpreted: outputs and gradients are the oracle's; what it cannot do it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import agree, inputs, segments

from lmjax.errors import UserError
from lmjax.model import splash
from lmjax.model.attention import Mask, by_splash
from lmjax.model.blockwise import Rule
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule(), Rule(5.0, 40)], ids=str)
def test_equals_all_scores_at_once(rule):
    ids = segments(256, 1, rate=0.01)  # documents longer than the window
    agree(lambda *x: splash.attend(*x, rule, interpret=True), 256, rule, ids, batch=1, kv_heads=2, group=2, dim=16)


def test_each_device_runs_its_rows_and_heads():
    q, k, v = inputs(128, batch=4, group=1)
    ids = jnp.asarray(segments(128, 4))
    expected = splash.attend(q, k, v, ids, Rule(window=50), interpret=True)
    mesh = meshes.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with meshes.use(mesh):
        run = jax.jit(lambda *x: splash.attend(*x, Rule(window=50), interpret=True)).lower(q, k, v, ids).compile()
        out = run(q, k, v, ids)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 128, 1, 1, 8)}
    assert not any(kind in run.as_text() for kind in ("all-gather", "all-reduce", "all-to-all"))


@pytest.mark.parametrize(
    "length, mask, message", [(128, Mask(prefix=3), "a prefix"), (130, Mask(), "rows of 130 tokens")]
)
def test_what_it_cannot_do_is_refused_by_name(length, mask, message):
    with pytest.raises(UserError, match=f"'splash' cannot do {message}"):
        by_splash(*inputs(length), mask)
