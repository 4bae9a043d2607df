"""Attention by blocks equals all scores at once, gradients too; a window is what its time and memory grow with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import RULES, agree, inputs

from lmjax.model import blockwise
from lmjax.model.blockwise import Rule


@pytest.mark.parametrize("length", [40, 50])  # few pairs, which are written out; more, in a loop, the last block a part
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equals_all_scores_at_once(rule, length):
    block = {40: 16, 50: 8}[length]

    def ours(q, k, v, ids):
        return blockwise.attend(q, k, v, ids, rule.softcap, block, rule.window, rule.prefix)

    agree(ours, length, rule, batch=1, group=2)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 40])
@pytest.mark.parametrize("prefix", [0, 1, 4, 9])
def test_pairs_are_those_that_the_mask_touches(window, prefix):
    rule, block, count = Rule(window=window, prefix=prefix), 4, 5
    places = jnp.arange(block * count)
    seen = np.asarray(blockwise.visible(places[:, None], places[None], window, prefix))
    touched = seen.reshape(count, block, count, block).any(axis=(1, 3))
    np.testing.assert_array_equal(blockwise.block_pairs(count, block, rule), np.argwhere(touched))


def test_work_grows_with_the_row_and_the_window():
    def pairs(length, window):
        return len(blockwise.block_pairs(length // 64, 64, Rule(window=window)))

    assert pairs(8192, None) == 128 * 129 // 2
    assert pairs(8192, 512) < 0.14 * pairs(8192, None)
    assert pairs(16384, 512) < 2.1 * pairs(8192, 512) and pairs(8192, 1024) < 2.0 * pairs(8192, 512)


@pytest.mark.parametrize("window", [None, 256])
def test_memory_grows_with_the_row(window):
    def temporaries(length):
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(length, batch=1, kv_heads=1, group=1)]
        loss = jax.jit(jax.grad(lambda *x: jnp.sum(blockwise.attend(*x, None, None, 64, window)), argnums=(0, 1, 2)))
        return loss.lower(*args).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporaries(length) for length in (1024, 2048, 4096)]
    assert sizes[1] < 2.2 * sizes[0] and sizes[2] < 2.2 * sizes[1]
