"""A ring of slots holds what a window can see, whatever was written before and however it came."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.cache import NOWHERE, empty_cache
from lmjax.model.config import ModelConfig
from lmjax.model.dense import dtypes

TYPES = dtypes("float32", "cpu")
CONFIG = ModelConfig(
    vocab_size=40, num_layers=5, d_model=32, num_heads=4, num_kv_heads=2, init_std=0.4, sliding_window=4,
    layer_pattern=("local", "global"),
)  # fmt: skip


def test_local_layers_have_a_slot_for_each_token_of_the_window():
    (local, whole), (last,) = empty_cache(CONFIG, 3, 1000, jnp.dtype("bfloat16"))
    assert local.keys.shape == local.values.shape == (2, 3, 4, 2, 8) and local.places.shape == (2, 3, 4)
    assert whole.keys.shape == (2, 3, 1000, 2, 8) and whole.places is None
    assert last.keys.shape == (1, 3, 4, 2, 8) and last.places.shape == (1, 3, 4)
    (local, _), _ = empty_cache(CONFIG, 3, 4, jnp.dtype("bfloat16"))  # no row is longer than the window
    assert local.keys.shape == (2, 3, 4, 2, 8) and local.places is None


@pytest.mark.parametrize(
    "parts, pattern",
    [
        ([11], ("local",)),
        ([5, 1, 1, 1, 1, 1, 1], ("local", "local", "global")),
        ([3, 1, 6, 1], ("global", "local")),
    ],
)
def test_tokens_may_come_in_any_parts(parts, pattern):
    """Two rows, of which the second is padded at the end of each part by a token."""
    config = dataclasses.replace(CONFIG, layer_pattern=pattern)
    params = decoder.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 0, 40)
    places = jnp.broadcast_to(jnp.arange(11), (2, 11))
    expected, _ = jax.jit(lambda *x: decoder.forward(config, params, *x, Mask(), TYPES))(tokens, places)
    run = jax.jit(lambda *x: decoder.forward(config, params, x[0], x[1], Mask(query_places=x[2]), TYPES, cache=x[3]))
    cache, start = empty_cache(config, 2, 20, TYPES.activation), 0
    for size in parts:
        new, at = (jnp.pad(x[:, start : start + size], [(0, 0), (0, 1)], constant_values=7) for x in (tokens, places))
        hidden, cache = run(new, at, at.at[:, -1].set(NOWHERE), cache)
        np.testing.assert_allclose(hidden[:, :-1], expected[:, start : start + size], atol=2e-5)
        start += size


def test_no_slot_is_written_twice_at_once():
    """Which of two writes wins is the hardware's choice."""
    cache = jax.tree.map(lambda x: x[0], empty_cache(CONFIG, 2, 100, jnp.dtype("float32"))[0][0])
    places = jnp.array([[0, 1, 2, 3, 4, 5, 6], [90, 91, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE]])
    assert cache.slots(places).tolist() == [[4, 4, 4, 3, 0, 1, 2], [2, 3, 4, 4, 4, 4, 4]]  # 4 is past the end
