"""The tree that `plan` computes from a config is the one that the decoder makes."""

import dataclasses
import math
import pathlib

import jax
import pytest

from lmjax.config import load
from lmjax.model import decoder
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.optim import masks
from lmjax.plan import params
from lmjax.train.config import RunConfig

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs" / "pretrain").glob("*.py"))
ODD = {
    "default": ModelConfig(),
    "untied": ModelConfig(tie_embeddings=False, vocab_size=777),
    "grouped, wide heads": ModelConfig(d_model=96, num_heads=6, num_kv_heads=2, head_dim=40, qk_norm=True),
    "one key-value head": ModelConfig(d_model=64, num_heads=8, num_kv_heads=1, activation="geglu", d_ff=100),
    "gpt2": ModelConfig(
        activation="gelu", norm="layernorm", norm_bias=True, position="learned", max_length=33, attention_bias=True,
        mlp_bias=True, num_layers=2,
    ),
    "plain": ModelConfig(activation="relu", norm="layernorm", position="none", num_layers=1, tie_embeddings=False),
    "sinusoidal": ModelConfig(position="sinusoidal", mlp_bias=True),
    "features": ModelConfig(prefix_dim=12, position="learned"),
    "post": ModelConfig(block="post", qk_norm=True, qk_norm_heads=True, num_kv_heads=2),
    "sandwich": ModelConfig(block="sandwich", qkv_bias=True, norm="layernorm", norm_bias=True),
    "experts": ModelConfig(moe=MoeConfig(), num_layers=2, d_ff=80),
    "experts in some layers": ModelConfig(
        moe=MoeConfig(every=2, dense_layers=(3,), dense_d_ff=40, bias_rate=0.01), num_layers=7, d_ff=80
    ),
    "shared expert, bias": ModelConfig(
        moe=MoeConfig(num_experts=6, top_k=3, shared_d_ff=72, shared_gate=True, bias_rate=0.01), activation="gelu",
    ),
}  # fmt: skip


def slash_paths(tree, is_leaf=None):
    return {
        "/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    }


def check(model: ModelConfig):
    shapes = slash_paths(jax.eval_shape(lambda: decoder.init(model, jax.random.key(0))))
    assert params.parameter_shapes(model) == {path: leaf.shape for path, leaf in shapes.items()}
    assert all(leaf.dtype == "float32" for leaf in shapes.values())
    assert params.logical_axes(model) == slash_paths(decoder.logical_axes(model), lambda x: isinstance(x, tuple))
    assert params.total(model) == sum(leaf.size for leaf in shapes.values())


@pytest.mark.parametrize("model", ODD.values(), ids=ODD)
def test_the_decoder_has_these_parameters(model):
    check(model)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_config_has_these_parameters(path):
    check(load(RunConfig, str(path)).model)


@pytest.mark.parametrize("model", ODD.values(), ids=ODD)
def test_muon_takes_the_matrices_that_plan_takes_for_its(model):
    shapes = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    matrices = slash_paths(masks.layer_matrices(shapes))
    assert {path for path, is_one in matrices.items() if is_one} == set(filter(params.is_layer_matrix, matrices))


def test_groups_by_hand():
    """V 10, D 4, two layers of one key-value head with two query heads of 3, F 5, untied, GPT-2's norms and biases."""
    model = ModelConfig(
        vocab_size=10, d_model=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=3, d_ff=5, activation="gelu",
        norm="layernorm", norm_bias=True, position="learned", max_length=7, attention_bias=True, mlp_bias=True,
        tie_embeddings=False,
    )  # fmt: skip
    assert params.count_by_group(model) == {
        "embedding": 10 * 4 + 7 * 4,
        "attention": 2 * (4 * 12 + 12 + 6 * 4 + 4),
        "mlp": 2 * (4 * 5 + 5 + 5 * 4 + 4),
        "norm": 2 * 2 * (4 + 4) + (4 + 4),
        "head": 4 * 10,
    }
    assert params.non_embedding(model) == params.total(model) - 68 - 40


def test_of_the_experts_a_token_runs_through_k():
    """D 4, F 5, gated: an expert has 60 weights in each of 2 layers."""
    model = ModelConfig(
        vocab_size=10, d_model=4, num_layers=2, num_heads=2, d_ff=5, moe=MoeConfig(num_experts=6, top_k=2)
    )
    assert params.count_by_group(model)["mlp"] == 2 * (4 * 6 + 6 * 60)
    assert params.active(model) == params.total(model) - 2 * (6 - 2) * 60
    dense = dataclasses.replace(model, moe=None)
    assert params.active(dense) == params.total(dense)


def test_groups_are_a_partition():
    for model in ODD.values():
        assert sum(params.count_by_group(model).values()) == sum(
            map(math.prod, params.parameter_shapes(model).values())
        )
