"""Imports of every family against transformers, and every way a folder can be wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
import safetensors.numpy

from lmjax.errors import UserError
from lmjax.hf import load
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.dense import dtypes
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig

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


# ---------------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def folder(tmp_path):
    """A Llama in several files, which a test then damages."""
    theirs = peer.model("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def edit(path, **changes):
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))


def rewrite(folder, change):
    """All tensors in one file, after `change(dict)`."""
    tensors = {name: load.read_tensor(load.find_tensors(folder), name) for name in load.find_tensors(folder)}
    change(tensors)
    (folder / load.INDEX).unlink()
    safetensors.numpy.save_file(tensors, folder / load.WEIGHTS)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model_type": "bloom"}, "model_type='bloom' is not supported"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures=.*LlamaForCausalLM is"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2 is no known key"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"sliding_window": 8}, "sliding_window=8 is no known key of llama"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "spread": 1}}, "spread"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=False"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks its factor"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "48"}, "hidden_size='48' must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"model_type": []}, "model_type=\\[\\] is not supported"),
        ({"architectures": True}, "architectures=True must be a list of texts"),
        ({"rope_scaling": "x"}, "rope_scaling='x' must be an object"),
        ({"rope_theta": "x", "rope_parameters": None}, "rope_theta='x' must be a number"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention=3 must be an object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type=.* must be a text"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "rope factor='x' must be a number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "factor=0.5 must be at least 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": "a", "mscale_all_dim": 1}},
            "mscale='a' must",
        ),
        ({"num_key_value_heads": 3}, "does not divide"),
    ],
)
def test_a_config_without_our_maths_is_refused_by_its_field(changes, message, folder):
    edit(folder / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        load.read_config(folder)


def test_a_tied_head_that_differs_is_refused_and_a_copy_is_not(tmp_path):
    theirs = peer.model("qwen2, yarn, tied")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / load.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors, path)
    imported(tmp_path)
    tensors["lm_head.weight"][3, 3] += 1
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"tie_word_embeddings is true, but lm_head.weight is not"):
        imported(tmp_path)


@pytest.mark.parametrize(
    "index", [[], {"weight_map": ["model.norm.weight"]}, {"weight_map": {"model.norm.weight": 1}}, {"metadata": {}}]
)
def test_an_index_that_names_no_files_is_refused(index, folder):
    (folder / load.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{load.INDEX} has no weight_map"):
        imported(folder)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 missing: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.0.extra": np.zeros(2, np.float32)}), "1 that nothing uses: .*extra"),
        (lambda t: t.update({"model.norm.weight": np.zeros(7, np.float32)}), r"model.norm.weight is \[7\], not \[32\]"),
        (lambda t: t.update({"model.norm.weight": np.zeros(32, np.int8)}), "model.norm.weight is I8"),
        (lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}), None),
    ],
)
def test_names_shapes_and_dtypes_must_fit(change, message, folder):
    rewrite(folder, change)
    if message is None:
        imported(folder)
        return
    with pytest.raises(UserError, match=message):
        imported(folder)


def test_damaged_files_are_named(folder):
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=f"{shards[1].name} cannot be read.*cut short"):
        imported(folder)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"lacks {shards[1].name}, which {load.INDEX} names"):
        imported(folder)
    (folder / load.INDEX).unlink()
    with pytest.raises(UserError, match=r"holds neither model.safetensors nor"):
        imported(folder)


def test_the_old_form_of_config_and_a_bare_model(tmp_path):
    """transformers 4 wrote rope_theta, rope_scaling and torch_dtype; GPT-2's hub files lack the prefix."""
    for name, rope in (("llama, llama3 rope, tied", peer.LLAMA3), ("qwen2, yarn, tied", peer.YARN)):
        theirs = peer.model(name)
        theirs.save_pretrained(tmp_path / name)
        _, expected = load.read_config(tmp_path / name)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling["type"] = scaling.pop("rope_type")
        old = {
            "rope_parameters": None,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling,
            "torch_dtype": "float32",
        }
        edit(tmp_path / name / "config.json", **old)
        assert load.read_config(tmp_path / name)[1] == expected
    theirs = peer.model("gpt2")
    theirs.save_pretrained(tmp_path / "whole")
    theirs.transformer.save_pretrained(tmp_path / "bare")
    edit(tmp_path / "bare/config.json", architectures=["GPT2LMHeadModel"])
    whole, bare = imported(tmp_path / "whole")[1], imported(tmp_path / "bare")[1]
    jax.tree.map(np.testing.assert_array_equal, whole, bare)


def test_the_same_on_any_mesh(folder):
    whole, split = imported(folder)[1], imported(folder, (2, 2, 2))[1]
    jax.tree.map(np.testing.assert_array_equal, whole, split)
    assert len({str(shard.index) for shard in split["layers"]["mlp"]["up"].addressable_shards}) == 4


def test_queries_of_a_group_stand_with_their_key(folder):
    """HF's head n reads key head n // G: a permutation that an equal number of heads would hide."""
    _, params = imported(folder)
    found = load.find_tensors(folder)
    q = load.read_tensor(found, "model.layers.2.self_attn.q_proj.weight").reshape(4, 8, 32)
    k = load.read_tensor(found, "model.layers.2.self_attn.k_proj.weight").reshape(2, 8, 32)
    qkv = np.asarray(params["layers"]["attention"]["qkv"][2])  # D K P H
    np.testing.assert_array_equal(qkv[:, 1, 0], q[2].T)
    np.testing.assert_array_equal(qkv[:, 1, 2], k[1].T)
