"""Imports of every family against transformers, and every way a folder can be wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from lmjax.hf import load
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.dense import dtypes
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from tests.hf import peer

FLOAT32 = dtypes("float32", "cpu")
TOLERANCE = 1e-4  # on logits of about 10


def imported(folder, sizes=(8, 1, 1)):
    kind, model = load.read_config(folder)
    mesh = meshes.make_mesh(MeshConfig(*sizes))
    return model, load.load_params(folder, kind, model, meshes.tree_shardings(mesh, decoder.logical_axes(model)))


def logits(model, params, tokens):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder.forward(model, params, tokens, positions, Mask(), FLOAT32)
    return decoder.unembed(model, params, hidden, FLOAT32)


@pytest.mark.parametrize("name", peer.MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = peer.model(name)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    model, params = imported(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 80))
    expected, ours = peer.logits(theirs, tokens), logits(model, params, tokens)
    worst = float(np.abs(ours - expected).max())
    print(f"{name}: max |difference| {worst:.1e} on logits up to {np.abs(expected).max():.1f}")
    assert worst <= TOLERANCE and 5 < np.abs(expected).max() < 15
