"""Decoding with a cache against the whole forward pass, for unequal prompts, on one device and on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.errors import UserError
from lmjax.generate.decode import FINISHED, generate, stream_text
from lmjax.generate.sample import Sampling
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.tokenizers.byte import ByteTokenizer

TYPES = dtypes("float32", "cpu")
CONFIG = ModelConfig(vocab_size=40, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, max_length=96, init_std=0.4)
VARIANTS = {
    "rope": {},
    "learned, blockwise prefill": {"position": "learned", "attention": "blockwise", "attention_block": 8},
    "experts": {"moe": MoeConfig(num_experts=4, shared_d_ff=32, bias_rate=0.01)},
    "experts in some layers": {"moe": MoeConfig(num_experts=4, dense_layers=(0, 1), dense_d_ff=24), "num_layers": 4},
    "qk-norm, soft-cap": {"qk_norm": True, "attention_softcap": 3.0},
    "a window": {"sliding_window": 4},
    "a pattern that ends early": {"sliding_window": 3, "num_layers": 5, "layer_pattern": ("local", "local", "global")},
}
PROMPTS = [np.array([5]), np.array([1, 2, 3, 4, 5, 6, 7]), np.array([9] * 35)]
GREEDY = Sampling(temperature=0.0)


def decode(config, params, prompts, count, sampling=GREEDY, eos_id=None, num_ids=40):
    return np.stack(list(generate(config, params, prompts, count, sampling, TYPES, num_ids, eos_id)), axis=1)


@functools.partial(jax.jit, static_argnums=0)
def row_logits(config, params, row):
    hidden, _ = decoder.forward(config, params, row[None], jnp.arange(64)[None], Mask(), TYPES)
    return decoder.unembed(config, params, hidden, TYPES)[0]


def without_cache(config, params, prompt, count):
    """Every token by a whole forward pass over the row; what stands after its end is not seen by it."""
    row, length = np.zeros(64, np.int32), len(prompt)
    row[:length] = prompt
    for place in range(length, length + count):
        row[place] = row_logits(config, params, row)[place - 1].argmax()
    return row[length : length + count].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_equals_the_forward_pass_without_a_cache(name):
    config = dataclasses.replace(CONFIG, **VARIANTS[name])
    params = decoder.init(config, jax.random.key(0))
    together = decode(config, params, PROMPTS, 6)
    assert together.tolist() == [without_cache(config, params, prompt, 6) for prompt in PROMPTS]


def test_sampling_does_not_depend_on_padding():
    params, sampling = decoder.init(CONFIG, jax.random.key(0)), Sampling(top_k=10, seed=3)
    together = decode(CONFIG, params, PROMPTS, 8, sampling)
    np.testing.assert_array_equal(together[:1], decode(CONFIG, params, PROMPTS[:1], 8, sampling))
    assert not np.array_equal(together, decode(CONFIG, params, PROMPTS, 8, Sampling(top_k=10, seed=4)))


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 2, 2), (1, 2, 2, 3, 1, 2)])
def test_the_same_on_a_mesh_with_a_sharded_cache(sizes):
    """The last has a `context` axis, over which generation is repeated."""
    params = decoder.init(CONFIG, jax.random.key(0))
    expected = decode(CONFIG, params, PROMPTS, 6)
    mesh = meshes.make_mesh(MeshConfig(*sizes))
    with meshes.use(mesh):
        placed = jax.device_put(params, meshes.tree_shardings(mesh, decoder.logical_axes(CONFIG)))
        np.testing.assert_array_equal(decode(CONFIG, placed, PROMPTS, 6), expected)


def test_a_row_stops_at_its_end_and_all_stop_when_all_have():
    params = decoder.init(CONFIG, jax.random.key(0))
    free = decode(CONFIG, params, PROMPTS[:2], 12)
    eos = int(free[0, 4])
    first = [row.tolist().index(eos) if eos in row else 12 for row in free]
    stopped = decode(CONFIG, params, PROMPTS[:2], 12, eos_id=eos)
    assert stopped.shape[1] == min(12, max(first) + 1)
    for row, plain, end in zip(stopped, free, first):
        np.testing.assert_array_equal(row[: end + 1], plain[: end + 1][: len(row)])
        assert (row[end + 1 :] == FINISHED).all()


def test_padding_ids_of_the_vocabulary_are_never_drawn():
    params = decoder.init(CONFIG, jax.random.key(0))
    assert decode(CONFIG, params, PROMPTS, 20, Sampling(temperature=5.0), num_ids=7).max() < 7


def test_mistakes_are_named():
    params = decoder.init(CONFIG, jax.random.key(0))
    learned = dataclasses.replace(CONFIG, position="learned", max_length=40)
    for config, prompts, message in [
        (CONFIG, [np.array([], np.int32)], "a prompt is empty"),
        (CONFIG, [np.array([40])], "outside config.model.vocab_size"),
        (learned, PROMPTS, "exceed config.model.max_length=40"),
    ]:
        with pytest.raises(UserError, match=message):
            decode(config, params, prompts, 6)
    with pytest.raises(UserError, match="max_tokens=-1 must not be negative"):
        decode(CONFIG, params, PROMPTS, -1)


def test_streamed_text_is_the_text_and_characters_come_whole():
    tokenizer = ByteTokenizer()
    texts = ["naïve 🎉 end", "ab"]
    ids = [tokenizer.encode(text) for text in texts]
    steps = [
        np.array([row[i] if i < len(row) else FINISHED for row in ids]) for i in range(max(map(len, ids)))
    ]  # fmt: skip
    gained = list(stream_text(iter(steps), tokenizer, 2))
    assert ["".join(parts) for parts in zip(*gained)] == texts
    assert not any("\N{REPLACEMENT CHARACTER}" in part for parts in gained for part in parts)
