"""Features beside text: what is read, what a row holds, and that a model learns to name what it was shown."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmjax.data.document import Document
from lmjax.data.features import prefixed_rows, read_features
from lmjax.errors import UserError
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig
from lmjax.model.dense import dtypes
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.train.loss import next_token_loss

BYTES, TYPES = ByteTokenizer(), dtypes("float32", "cpu")
NAMES = ("cat", "dog", "cow", "hen", "fox", "owl", "bee", "ant", "eel", "yak")
PLACES, WIDTH, LENGTH = 4, 16, 6
MODEL = ModelConfig(vocab_size=BYTES.vocab_size, num_layers=2, d_model=64, num_heads=4, d_ff=128, prefix_dim=WIDTH)


def shown(count, seed):
    """Documents that name one of ten patterns, and the patterns, with noise."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).normal(size=(10, PLACES, WIDTH))
    kinds = rng.integers(10, size=count)
    features = {str(n): patterns[kind] + 0.5 * rng.normal(size=(PLACES, WIDTH)) for n, kind in enumerate(kinds)}
    return [Document(str(n), NAMES[kind], "zoo") for n, kind in enumerate(kinds)], features


def on_device(data):
    """Rows and features as arrays of JAX."""
    batch, prefix = prefixed_rows(*data, BYTES, LENGTH)
    return jax.tree.map(jnp.asarray, batch), jnp.asarray(prefix, jnp.float32)


def test_features_come_back_as_they_were_saved(tmp_path):
    _, features = shown(3, 1)
    np.savez(tmp_path / "zoo.npz", **features)
    read = read_features(tmp_path / "zoo.npz")
    assert list(read) == ["0", "1", "2"] and read["1"].dtype == np.float32
    np.testing.assert_allclose(read["1"], features["1"], rtol=1e-6)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"a": np.ones((2, 3)), "b": np.ones((2, 4))}, r"'b' has shape \(2, 4\)"),
        ({"a": np.full((2, 3), np.nan)}, "'a' holds numbers that are not finite"),
        ({}, "holds no features"),
        ({"a": np.array([["x"]])}, "is no .npz of numbers"),
    ],
)
def test_damaged_features_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "zoo.npz", **arrays)
    with pytest.raises(UserError, match=message):
        read_features(tmp_path / "zoo.npz")


def test_a_row_is_a_document_and_all_of_its_text_is_learned():
    documents = [Document("0", "cat", "zoo"), Document("1", "a long one", "zoo")]
    batch, prefix = prefixed_rows(documents, {"0": np.zeros((4, 16)), "1": np.ones((4, 16))}, BYTES, LENGTH)
    assert prefix.shape == (2, 4, 16) and prefix[1].all()
    assert batch.tokens[0].tolist() == [BYTES.bos_id, *BYTES.encode("cat"), 0, 0]
    assert batch.targets[0].tolist() == [*BYTES.encode("cat"), BYTES.eos_id, 0, 0]
    assert batch.loss_weights.tolist() == batch.segment_ids.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    with pytest.raises(UserError, match="document '1' of 'zoo' has no features"):
        prefixed_rows(documents, {"0": np.zeros((4, 16))}, BYTES, LENGTH)


def test_features_see_one_another_and_text_sees_them_and_no_later_text():
    params = decoder.init(MODEL, jax.random.key(0))
    batch, prefix = on_device(shown(2, 1))

    @jax.jit
    def hidden(tokens, prefix):
        mask = Mask(segments=batch.segment_ids)
        return decoder.forward_routed(MODEL, params, tokens, batch.positions, mask, TYPES, prefix=prefix)[0]

    before = hidden(batch.tokens, prefix)
    assert before.shape == (2, LENGTH, MODEL.d_model)
    later = hidden(jnp.where(jnp.arange(LENGTH) == 2, 9, batch.tokens), prefix)
    np.testing.assert_array_equal(before[:, :2], later[:, :2])
    for place in range(PLACES):  # the first text token reads all of them, so each changes it
        assert np.abs(hidden(batch.tokens, prefix + jnp.eye(PLACES)[place][:, None])[:, 0] - before[:, 0]).max() > 1e-3
    mask = Mask(segments=batch.segment_ids)
    x, positions, mask = decoder.merge(MODEL, params).enter_prefix(before, prefix, batch.positions, mask, TYPES)
    assert x.shape[1] == PLACES + LENGTH and mask.prefix == PLACES
    assert mask.segments[0].tolist() == [1] * PLACES + batch.segment_ids[0].tolist()
    assert positions[0, : PLACES + 3].tolist() == list(range(PLACES + 3))


def test_a_model_learns_to_name_what_it_was_shown():
    params, optimizer = decoder.init(MODEL, jax.random.key(0)), optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch, prefix):
        def loss(params):
            sums = next_token_loss(MODEL, params, batch, None, 0.0, 1024, TYPES, prefix=prefix)
            return sums.total / sums.weight

        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    for seed in range(60):
        params, state = step(params, state, *prefixed_rows(*shown(32, seed), BYTES, LENGTH))
    batch, prefix = on_device(shown(50, 1000))
    run = functools.partial(decoder.forward_routed, MODEL, params, batch.tokens, batch.positions)
    hidden = run(Mask(segments=batch.segment_ids), TYPES, prefix=prefix)[0]
    said = np.asarray(decoder.unembed(MODEL, params, hidden, TYPES).argmax(-1))
    named = (said == batch.targets)[:, :3].all(axis=1)
    assert named.mean() >= 0.95  # of ten, unseen and with noise
