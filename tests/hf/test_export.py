"""HF → lmjax → a step → HF, for each family; exports that transformers loads; what cannot be exported."""

import json

import jax
import numpy as np
import peer
import pytest
from test_load import TOLERANCE, imported, logits

from lmjax.errors import UserError
from lmjax.generate.decode import generate
from lmjax.generate.sample import Sampling
from lmjax.hf import config_read, config_write, export
from lmjax.model import decoder
from lmjax.model.config import ModelConfig, MoeConfig, MupConfig, RopeScaling
from lmjax.model.dense import dtypes
from lmjax.tokenizers.hf import HfTokenizer

FLOAT32 = dtypes("float32", "cpu")


def words(count=96):
    """A tokenizer.json of `count` words, which begins each text with <bos>."""
    tokenizer = peer.word_tokenizer(count)
    return HfTokenizer(tokenizer.to_str())


def trained(model, params):
    """Parameters a step of SGD away, by the gradient of the mean log-likelihood."""
    tokens = np.random.default_rng(1).integers(0, 96, (2, 24))

    def loss(params):
        logp = jax.nn.log_softmax(logits(model, params, tokens[:, :-1]))
        return -jax.numpy.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    return jax.tree.map(lambda p, g: p - 0.05 * g, params, jax.jit(jax.grad(loss))(params))


@pytest.mark.slow
@pytest.mark.parametrize("name", peer.MODELS)
def test_a_step_and_back(name, tmp_path):
    theirs = peer.model(name)
    theirs.save_pretrained(tmp_path / "in")
    model, params = imported(tmp_path / "in")
    before = peer.logits(theirs, np.arange(70)[None])
    params = trained(model, params)
    kind = export.write_folder(tmp_path / "out", model, params, words(), shard_bytes=40_000)
    assert kind == theirs.config.model_type
    back, info = peer.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    assert back.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    tokens = np.random.default_rng(0).integers(0, 96, (2, 80))
    np.testing.assert_allclose(logits(model, params, tokens), peer.logits(back.eval(), tokens), atol=TOLERANCE)
    assert np.abs(peer.logits(back, np.arange(70)[None]) - before).max() > 0.01  # the step is in it
    again, params_again = imported(tmp_path / "out")
    assert not again.differences(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, params_again)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama", "mistral", "qwen2, yarn, tied", "qwen3", "gemma2", "gemma3", "olmo2", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe",
        "qwen2_moe, dense between", "qwen3_moe, dense layers",
    ],
)  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    theirs = peer.model(name, seed=3)
    theirs.save_pretrained(tmp_path)
    model, params = imported(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, length).astype(np.int32) for length in (3, 17, 30)]
    ours = np.stack(list(generate(model, params, prompts, 64, Sampling(temperature=0.0), FLOAT32, 96)), axis=1)
    for row, prompt in zip(ours, prompts):
        theirs_row = theirs.generate(
            peer.torch.tensor(prompt)[None].long(), max_new_tokens=64, do_sample=False, eos_token_id=-1
        )
        assert row.tolist() == theirs_row[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "fields,kind",
    [
        ({}, "llama"),
        ({"tie_embeddings": False, "attention_bias": True, "mlp_bias": True}, "llama"),
        ({"rope_scaling": RopeScaling("llama3", 8.0, original_length=64)}, "llama"),
        ({"sliding_window": 9}, "mistral"),
        ({"qkv_bias": True, "sliding_window": 9, "layer_pattern": ("global", "local", "local")}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"moe": MoeConfig(4, 2)}, "mixtral"),
        ({"moe": MoeConfig(4, 2, renormalize=False), "qk_norm": True}, "qwen3_moe"),
        ({"moe": MoeConfig(4, 2, every=2, dense_layers=(3,), dense_d_ff=72), "qk_norm": True}, "qwen3_moe"),
        ({"block": "post", "qk_norm": True, "qk_norm_heads": True}, "olmo2"),
    ],
)
def test_the_family_is_chosen_by_the_fields(fields, kind):
    model = ModelConfig(num_kv_heads=2, **fields)
    found, config = config_write.write(model)
    assert (found, config_read.read(json.loads(json.dumps(config)))[1].differences(model)) == (kind, [])


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"activation": "relu"}, "activation='relu', not 'swiglu'"),
        ({"position": "none"}, "position='none'"),
        ({"logit_softcap": 9.0}, "nearest is llama.*logit_softcap=9.0"),
        ({"norm": "layernorm"}, "norm='layernorm'"),
        ({"moe": MoeConfig(4, 2, scores="sigmoid")}, "moe="),
        ({"moe": MoeConfig(4, 2, capacity_factor=1.5)}, "moe="),
        ({"moe": MoeConfig(4, 2, every=2, shared_d_ff=8)}, "moe="),
        ({"position": "none", "d_model": 64, "head_dim": 11}, "no family.*llama: rope needs an even head_dim, not 11"),
    ],
)
def test_what_no_family_has_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        config_write.write(ModelConfig(**fields))


def test_factors_of_a_base_model_are_in_the_weights(tmp_path):
    mup = MupConfig(base_width=8, base_layers=1, base_head_dim=4)
    model = ModelConfig(vocab_size=96, num_layers=2, d_model=32, num_heads=4, init_std=0.2, mup=mup)
    params = jax.jit(lambda: decoder.init(model, jax.random.key(0)))()
    export.write_folder(tmp_path / "out", model, params, words())
    again, params_again = imported(tmp_path / "out")
    tokens = np.arange(48).reshape(2, 24)
    assert again.mup is None
    np.testing.assert_allclose(logits(again, params_again, tokens), logits(model, params, tokens), atol=TOLERANCE)
