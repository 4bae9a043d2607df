"""FLOPs a token against independent counts: the weights of the tree, the pairs of a causal mask, published formulas, and the compiler's."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.model import decoder
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.plan import params
from lmjax.plan.flops import flops_per_token, keys_seen
from lmjax.train.loss import next_token_loss

MODELS = {
    "gated, grouped, tied": ModelConfig(num_heads=6, num_kv_heads=2, d_model=96, vocab_size=500, num_layers=3),
    "gelu, untied, biases": ModelConfig(
        activation="gelu", norm="layernorm", norm_bias=True, position="learned", attention_bias=True, mlp_bias=True,
        tie_embeddings=False, vocab_size=300,
    ),
    "wide heads": ModelConfig(d_model=64, num_heads=4, num_kv_heads=1, head_dim=48, d_ff=100, qk_norm=True),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_weight_products_are_two_flops_for_each_weight(model):
    """Every weight of a product multiplies each token once; the head's weights do, even where they are the embedding's."""
    shapes = params.parameter_shapes(model)
    weights = [name for name in shapes if name.endswith(("attention/qkv", "attention/out", "mlp/up", "mlp/down"))]
    expected = 2 * sum(math.prod(shapes[name]) for name in weights) + 2 * model.d_model * model.vocab_size
    flops = flops_per_token(model, 64)
    assert flops.forward - flops.attention == expected


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("seq_len", [2, 7, 64])
def test_attention_counts_the_causal_pairs_once(model, seq_len):
    pairs = sum(1 for query in range(seq_len) for key in range(seq_len) if key <= query)
    row = model.num_layers * model.num_heads * pairs * (2 * model.dim_head + 2 * model.dim_head)
    assert seq_len * flops_per_token(model, seq_len).attention == row


def test_training_is_three_forwards_and_near_six_flops_for_each_weight():
    """Llama 3 8B: 8.03e9 parameters, of which the untied embedding (0.53e9) multiplies nothing."""
    llama = ModelConfig(
        vocab_size=128_256, num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14_336,
        rope_theta=500_000.0, tie_embeddings=False,
    )  # fmt: skip
    assert params.total(llama) == 8_030_261_248
    flops = flops_per_token(llama, 8192)
    products = params.total(llama) - 128_256 * 4096 - params.count_by_group(llama)["norm"]
    assert flops.training == 3 * flops.forward
    assert flops.training == 6 * products + 3 * flops.attention
    assert flops.training == pytest.approx(6 * products + 6 * 32 * 8193 * 4096)


def test_gpt2_agrees_with_nanogpts_estimate_of_full_attention():
    """nanoGPT counts 6 N + 12 L H Q T with the whole square of attention: here the half, and no norms or positions in N."""
    gpt2 = ModelConfig(
        vocab_size=50_257, num_layers=12, d_model=768, num_heads=12, activation="gelu", norm="layernorm", norm_bias=True,
        position="learned", max_length=1024, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    assert params.total(gpt2) == 124_439_808
    nano = 6 * (params.total(gpt2) - 1024 * 768) + 12 * 12 * 768 * 1024
    flops = flops_per_token(gpt2, 1024)
    assert flops.training + 3 * flops.attention * 1023 / 1025 == pytest.approx(nano, rel=2e-3)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_remat_adds_hardware_flops_and_no_model_flops(model):
    runs = {
        remat: flops_per_token(dataclasses.replace(model, remat=remat), 64)
        for remat in ("none", "dots", "block_outputs", "full")
    }
    assert len({flops.training for flops in runs.values()}) == 1
    assert runs["none"].hardware == runs["none"].training
    down = 2 * model.num_layers * model.d_model * model.hidden
    assert runs["full"].recomputed == pytest.approx(runs["full"].forward - runs["full"].head - down)
    order = [runs[remat].hardware for remat in ("none", "dots", "block_outputs", "full")]
    assert order == sorted(order) and len(set(order)) == 4


def compiled_flops(model: ModelConfig, rows: int, length: int, training: bool) -> float:
    """FLOPs of a token that XLA counts in the compiled loss or its gradient: unrolled, its loss in one chunk, attention whole."""
    ints, floats = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.float32))

    def loss(weights, batch):
        return next_token_loss(model, weights, batch, None, 0.0, rows * length, dtypes("float32", "cpu")).total

    shapes = jax.eval_shape(lambda: decoder.init(model, jax.random.key(0)))
    function = jax.jit(jax.grad(loss) if training else loss)
    compiled = function.lower(shapes, Batch(ints, ints, floats, ints, ints)).compile()
    return compiled.cost_analysis()["flops"] / (rows * length)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "block_outputs", "full"])
def test_the_compiler_counts_the_same(remat):
    """Within what elementwise operations add. The reference attention multiplies the whole square: twice the causal half."""
    length = 64
    model = ModelConfig(
        num_layers=3, d_model=512, num_heads=8, num_kv_heads=2, d_ff=1024, vocab_size=2048, tie_embeddings=False,
        scan="off", attention="reference", remat=remat,
    )  # fmt: skip
    flops = flops_per_token(model, length)
    whole = {"none": 3, "dots": 4, "block_outputs": 4, "full": 4}[remat] * flops.attention * (length - 1) / (length + 1)
    assert compiled_flops(model, 4, length, training=True) == pytest.approx(flops.hardware + whole, rel=0.03)
    if remat == "none":
        whole = flops.attention * (length - 1) / (length + 1)
        assert compiled_flops(model, 4, length, training=False) == pytest.approx(flops.forward + whole, rel=0.03)


@pytest.mark.parametrize("seq_len", [3, 4, 33])
def test_a_window_counts_the_keys_that_it_shows(seq_len):
    model = ModelConfig(num_layers=5, sliding_window=4, layer_pattern=("local", "local", "global"))
    local, whole = (sum(min(t, window) for t in range(1, seq_len + 1)) for window in (4, seq_len))
    pairs = 4 * local + whole  # layers 0, 1, 3, 4 are local
    flops = flops_per_token(model, seq_len)
    assert seq_len * flops.attention == pytest.approx(4 * model.num_heads * model.dim_head * pairs)


@pytest.mark.parametrize("every", [1, 2])
def test_experts_are_two_flops_for_each_active_weight(every):
    """Of the layers' products and the gate of the shared MLP; norms, the bias and embeddings multiply nothing."""
    moe = MoeConfig(num_experts=6, top_k=2, shared_d_ff=40, shared_gate=True, bias_rate=0.1)
    moe = dataclasses.replace(moe, every=every, dense_d_ff=50)
    model = ModelConfig(moe=moe, d_ff=72, tie_embeddings=False)
    counts = params.count_by_group(model)
    idle = counts["embedding"] + counts["norm"] + model.num_layers // every * 6
    flops = flops_per_token(model, 64)
    assert flops.forward - flops.attention == 2 * (params.active(model) - idle)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "block_outputs", "full"])
@pytest.mark.parametrize("every", [1, 2])
def test_the_compiler_counts_the_same_for_experts(remat, every):
    """With a capacity of exactly an even share, whose products have sizes that the compiler knows."""
    length, moe = 64, MoeConfig(4, 2, capacity_factor=1.0, shared_d_ff=256, every=every, dense_d_ff=768)
    model = ModelConfig(
        num_layers=2 + every % 2, d_model=512, num_heads=8, num_kv_heads=2, d_ff=512, vocab_size=2048, tie_embeddings=False,
        scan="off", attention="reference", remat=remat, moe=moe,
    )  # fmt: skip
    flops = flops_per_token(model, length)
    whole = {"none": 3, "dots": 4, "block_outputs": 4, "full": 4}[remat] * flops.attention * (length - 1) / (length + 1)
    assert compiled_flops(model, 4, length, training=True) == pytest.approx(flops.hardware + whole, rel=0.03)


@pytest.mark.parametrize("remat, passes", [("none", 3), ("full", 4)])
def test_a_capacity_multiplies_rows_that_are_empty(remat, passes):
    """By a half more of the experts' products, and no more model FLOPs."""
    even, wide = (
        flops_per_token(ModelConfig(moe=MoeConfig(capacity_factor=factor), remat=remat), 64) for factor in (1.0, 1.5)
    )
    model = ModelConfig()
    experts = 2 * model.num_layers * 3 * 2 * model.d_model * model.hidden  # two of a token, three products each
    assert wide.training == even.training
    assert wide.hardware - even.hardware == pytest.approx(0.5 * passes * experts)


@pytest.mark.parametrize("window", [None, 1, 4, 7])
@pytest.mark.parametrize("prefix", [0, 3, 7])
def test_a_prefix_sees_all_of_itself(window, prefix):
    i, j = np.ogrid[:12, :12]
    seen = (j <= i) & (i - j < (window or 12)) | (i < prefix) & (j < prefix)
    assert keys_seen(12, window, prefix) == pytest.approx(seen.sum() / 12)


def test_features_run_through_the_layers_and_not_through_the_head():
    model = ModelConfig(vocab_size=512, num_layers=2, d_model=64, num_heads=4, d_ff=128, prefix_dim=12)
    text, row, found = flops_per_token(model, 24), flops_per_token(model, 32), flops_per_token(model, 24, prefix=8)
    assert found.head == text.head and found.mlp == pytest.approx(text.mlp * 32 / 24)
    assert found.prefix == 2 * 12 * 64 * 8 / 24
    pairs = 8 * 7 / 2  # that the causal mask hides
    assert found.attention * 24 == pytest.approx(row.attention * 32 + 2 * 2 * 2 * 64 * pairs)
