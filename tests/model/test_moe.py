"""Mixture of experts against the equations, one token at a time; and no two ways of running it differ."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lmjax.errors import UserError
from lmjax.model import decoder, router
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.model.initialize import Initializer
from lmjax.model.moe import Moe
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig

FLOAT32 = dtypes("float32", "cpu")
route = jax.jit(router.route, static_argnums=0)
SMALL = ModelConfig(vocab_size=61, num_layers=2, d_model=32, num_heads=4, d_ff=24, max_length=32, init_std=0.3)
VARIANTS = {
    "Mixtral": MoeConfig(num_experts=4, top_k=2),
    "Qwen2": MoeConfig(num_experts=6, top_k=3, renormalize=False, shared_d_ff=40, shared_gate=True),
    "DeepSeek": MoeConfig(num_experts=8, top_k=2, scores="sigmoid", shared_d_ff=16, bias_rate=0.01, balance_loss=0.0),
    "Switch": MoeConfig(num_experts=4, top_k=1, renormalize=False),
    "all": MoeConfig(num_experts=3, top_k=3),
}


def config(name="Mixtral", **changes):
    return dataclasses.replace(SMALL, moe=dataclasses.replace(VARIANTS[name], **changes))


@functools.cache
def compiled(config):
    """A layer's parameters, no bias of which is 0, and its call, which all tests of the config share: compiling is what they wait for."""
    graph, state = nnx.split(Moe(config, Initializer(config, nnx.Rngs(params=0))), nnx.Param)
    params = nnx.to_pure_dict(state)
    if "router_bias" in params:
        params["router_bias"] = 0.3 * jax.random.normal(jax.random.key(9), params["router_bias"].shape)

    @functools.partial(jax.jit, static_argnums=3)
    def call(params, x, segments=None, dropless=False):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x, segments, FLOAT32, dropless)

    return params, call


def layer(config, scale=1.0):
    """Parameters to change, and the call `(params, x, segments, dropless) → (out, stats)`."""
    params, call = compiled(config)
    return jax.tree.map(lambda x: x, params) | {"router": params["router"] * scale}, call


def rows(batch=2, length=12, seed=3, width=32):
    return jax.random.normal(jax.random.key(seed), (batch, length, width))


def np_mlp(x, up, down):
    gate, up = np.einsum("d,dmf->mf", x, up)
    return (gate / (1 + np.exp(-gate)) * up) @ down


def np_moe(config, params, x, segments=None):
    """Each token by itself, in float64, from the equations; and what was chosen."""
    moe, params = config.moe, jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x, out, chosen = np.asarray(x, np.float64), np.zeros(x.shape), np.zeros((*x.shape[:2], moe.top_k), int)
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ params["router"]
        scores = 1 / (1 + np.exp(-logits)) if moe.scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        chosen[place] = np.argsort(-(scores + params.get("router_bias", 0.0)))[: moe.top_k]
        total = scores[chosen[place]].sum() if moe.renormalize else 1.0
        for expert in chosen[place] if segments is None or segments[place] else ():
            out[place] += (
                scores[expert] / total * np_mlp(x[place], params["expert_up"][expert], params["expert_down"][expert])
            )
        if moe.shared_d_ff:
            shared = np_mlp(x[place], params["shared"]["up"], params["shared"]["down"])
            out[place] += shared / (1 + np.exp(-x[place] @ params["shared_gate"])) if moe.shared_gate else shared
    return out, chosen


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("capacity", [None, 100.0])
def test_a_layer_equals_the_equations(name, capacity):
    cfg = config(name, capacity_factor=capacity)
    params, call = layer(cfg)
    out, stats = call(params, rows())
    expected, chosen = np_moe(cfg, params, rows())
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    loads = np.stack([np.bincount(row.ravel(), minlength=cfg.moe.num_experts) for row in chosen])
    np.testing.assert_array_equal(stats.load, loads)
    assert not stats.dropped.any()


# -------------------------------------------------------------------------------------------------------------- invariances


@functools.cache
def differentiated(call):
    """Value and gradients of a loss that the output and both auxiliary losses enter."""

    def loss(params, x, segments):
        out, stats = call(params, x, segments)
        return jnp.sum(jnp.sin(out)) + jnp.sum(stats.balance) + 0.1 * jnp.sum(stats.z)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def value_and_grads(call, params, x, segments=None):
    return differentiated(call)(params, x, segments)


def assert_near(one, other, atol=1e-5):
    """Within `atol`, of the largest where that exceeds 1."""

    def near(a, b):
        np.testing.assert_allclose(a, b, atol=atol * max(1.0, np.abs(b).max()))

    jax.tree.map(near, one, other)


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek"])
def test_both_dispatches_agree_where_nothing_overflows(name):
    free, roomy = config(name), config(name, capacity_factor=100.0)
    params, call = layer(free)
    assert_near(value_and_grads(call, params, rows()), value_and_grads(layer(roomy)[1], params, rows()))


def test_an_expert_takes_its_capacity_of_a_row_and_drops_the_rest():
    """Of 12 tokens that all want one expert, ⌈1.2 · 12 / 4⌉ = 4 get it: the first of each row; the others pass by."""
    cfg = config("Switch", capacity_factor=1.2)
    params, call = layer(cfg)
    params["router"] = jnp.zeros_like(params["router"]).at[0, 2].set(50.0)
    x = rows().at[..., 0].set(1.0)
    out, stats = call(params, x)
    expected = np_moe(cfg, params, x)[0]
    np.testing.assert_allclose(out[:, :4], expected[:, :4], atol=1e-5 * np.abs(expected).max())
    assert not out[:, 4:].any()
    np.testing.assert_array_equal(stats.dropped, [8, 8])
    dropless, stats = call(params, x, None, True)
    np.testing.assert_allclose(dropless, expected, atol=1e-5 * np.abs(expected).max())
    assert not stats.dropped.any()


def test_a_drop_depends_on_nothing_later_and_on_no_other_row():
    cfg = config("Mixtral", capacity_factor=0.6)
    params, call = layer(cfg)
    out, stats = call(params, rows())
    assert stats.dropped.sum() > 4
    later = call(params, rows().at[:, 7:].set(1.0))[0]
    np.testing.assert_allclose(later[:, :7], out[:, :7], atol=1e-6)
    np.testing.assert_allclose(call(params, rows()[1:])[0], out[1:], atol=1e-6)


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_padding_takes_no_capacity_and_counts_nowhere(capacity):
    """Five tokens of padding before the others, at which each row would have filled its experts."""
    cfg = config("Mixtral", capacity_factor=capacity)
    params, call = layer(cfg)
    x, segments = rows(), jnp.ones((2, 12), jnp.int32).at[:, :5].set(0)
    out, stats = call(params, x, segments)
    other, same = call(params, x.at[:, :5].set(jax.random.normal(jax.random.key(8), (2, 5, 32))), segments)
    np.testing.assert_array_equal(out[:, 5:], other[:, 5:])
    jax.tree.map(np.testing.assert_array_equal, stats, same)
    assert not out[:, :5].any() and stats.load.sum() == 2 * 7 * 2
    if capacity is None:
        alone, expected = call(params, x[:, 5:])
        np.testing.assert_allclose(out[:, 5:], alone, atol=1e-6)
        assert_near(stats, expected)


def test_rows_of_padding_alone_are_finite():
    params, call = layer(config())
    value, grads = value_and_grads(call, params, rows(), jnp.zeros((2, 12), jnp.int32))
    assert value == 0.0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_the_router_is_computed_in_float32_whatever_the_products_are():
    cfg = config("Mixtral")
    weights = jax.random.normal(jax.random.key(0), (32, 4))
    x = rows().astype(jnp.bfloat16)
    routes, _ = route(cfg.moe, x, weights, None, jnp.ones((2, 12), bool))
    exact = jax.nn.softmax(np.asarray(x, np.float64) @ np.asarray(weights, np.float64))
    top = np.sort(np.asarray(exact), axis=-1)[..., ::-1][..., :2]
    np.testing.assert_allclose(routes.gates, top / top.sum(-1, keepdims=True), atol=1e-6)


def test_losses_by_closed_form():
    """Even: balance 1, log² E, entropy log E. All on one: E. Sigmoid scores of even logits share alike."""
    moe = MoeConfig(num_experts=4, top_k=1)
    x, valid = jnp.ones((1, 8, 2)), jnp.ones((1, 8), bool)
    flat = route(moe, x, jnp.zeros((2, 4)), None, valid)[1]
    assert_near((flat.balance, flat.z, flat.entropy), ([1.0], [np.log(4.0) ** 2], [8 * np.log(4.0)]))
    peaked = route(moe, x, jnp.zeros((2, 4)).at[:, 1].set(20.0), None, valid)[1]
    assert_near((peaked.balance, peaked.entropy), ([4.0], [0.0]), atol=1e-4)
    sigmoid = dataclasses.replace(moe, scores="sigmoid")
    assert_near(route(sigmoid, x, jnp.zeros((2, 4)), None, valid)[1].balance, [1.0])


def test_the_bias_chooses_and_does_not_weigh():
    moe = MoeConfig(num_experts=4, top_k=2, renormalize=False)
    weights, valid = jax.random.normal(jax.random.key(0), (32, 4)), jnp.ones((2, 12), bool)
    routes, _ = route(moe, rows(), weights, jnp.array([0.0, 0.0, 9.0, 0.0]), valid)
    assert (routes.experts == 2).any(-1).all()
    scores = jax.nn.softmax(rows() @ weights)
    np.testing.assert_allclose(routes.gates, jnp.take_along_axis(scores, routes.experts, -1), atol=1e-6)
    load = jnp.array([[2.0, 5.0, 5.0, 8.0]])
    moved = router.moved_bias(dataclasses.replace(moe, bias_rate=0.1), jnp.zeros((1, 4)), load)
    np.testing.assert_allclose(moved, [[0.1, 0.0, 0.0, -0.1]], atol=1e-7)


def test_half_precision_stays_near_float32():
    cfg = config("Mixtral")
    params = decoder.init(cfg, jax.random.key(0))
    tokens, positions = jnp.arange(40).reshape(2, 20), jnp.broadcast_to(jnp.arange(20), (2, 20))
    exact, half = (
        jax.jit(lambda p, n=name: decoder.forward(cfg, p, tokens, positions, Mask(), dtypes(n, "cpu"))[0])(params)
        for name in ("float32", "bfloat16")
    )
    assert np.median(np.abs(exact - half)) < 0.02 * float(jnp.abs(exact).max())  # a few tokens change their expert


def decoder_gradients(cfg):
    tokens, positions = jnp.arange(40).reshape(2, 20), jnp.broadcast_to(jnp.arange(20), (2, 20))

    def loss(params):
        hidden, _, stats = decoder.forward_routed(cfg, params, tokens, positions, Mask(), FLOAT32)
        return jnp.mean(jnp.sin(hidden)) + jnp.mean(stats.balance)

    return jax.jit(jax.value_and_grad(loss))(decoder.init(config(), jax.random.key(0)))


@pytest.fixture(scope="module")
def plain():
    return decoder_gradients(config())


@pytest.mark.parametrize(
    "remat", ["full", *(pytest.param(r, marks=pytest.mark.slow) for r in ("dots", "block_outputs"))]
)
def test_scan_and_remat_change_neither_values_nor_gradients(remat, plain):
    assert_near(decoder_gradients(dataclasses.replace(config(), scan="on", remat=remat)), plain, 1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"top_k": 9}, "top_k=9 must be 1 to num_experts=8"),
        ({"top_k": 0}, "top_k=0"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be positive"),
        ({"balance_loss": -1.0}, "balance_loss=-1.0 must not be negative"),
        ({"shared_gate": True}, "shared_gate needs shared_d_ff"),
    ],
)
def test_what_cannot_be_is_the_users_mistake(fields, message):
    with pytest.raises(UserError, match=message):
        MoeConfig(**fields)
    with pytest.raises(UserError, match="experts have no biases"):
        ModelConfig(moe=MoeConfig(), mlp_bias=True)


# ------------------------------------------------------------------------------------------------------------------ meshes


def on_mesh(cfg, sizes):
    """Value and gradients on a mesh; rows of unlike loads, with padding."""
    params, call = layer(cfg)
    x, segments = rows(batch=8), jnp.ones((8, 12), jnp.int32).at[3:5, 4:].set(0)
    mesh = meshes.make_mesh(MeshConfig(**{"data": 1} | sizes))
    with meshes.use(mesh):
        return jax.jit(lambda p, x: value_and_grads(call, p, x, segments))(params, x)


MESHES = [{"expert": 8}, {"expert": 2, "fsdp": 2, "tensor": 2}]
MORE = [pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({"data": 8}, {"expert": 4, "fsdp": 2}, {"tensor": 8})]


@pytest.mark.parametrize("sizes", [*MESHES, *MORE], ids=str)
@pytest.mark.parametrize("capacity", [None, 0.6])
def test_every_mesh_computes_the_same(sizes, capacity):
    cfg = config("DeepSeek", capacity_factor=capacity)
    params, call = layer(cfg)
    x, segments = rows(batch=8), jnp.ones((8, 12), jnp.int32).at[3:5, 4:].set(0)
    assert_near(on_mesh(cfg, sizes), value_and_grads(call, params, x, segments))


def test_all_tokens_to_one_device_are_none_too_many():
    """The worst case of a dropless bucket: expert 5 and 4 for every token."""
    cfg = config("DeepSeek")
    params, call = layer(cfg)
    params["router_bias"] = jnp.zeros(8).at[4].set(50.0).at[5].set(99.0)
    x = rows(batch=8)
    expected = call(params, x)[0]
    with meshes.use(meshes.make_mesh(MeshConfig(data=2, expert=4))):
        out, stats = jax.jit(call)(params, x)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_array_equal(stats.load.sum(0), [0, 0, 0, 0, 96, 96, 0, 0])


# ------------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_a_block_equals_that_of_transformers(kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = {"mixtral": "Mixtral", "qwen3_moe": "Mixtral", "qwen2_moe": "Qwen2"}[kind]
    cfg = config(name, num_experts=6, top_k=3)
    params, call = layer(cfg, scale=3.0)
    common = {"hidden_size": 32, "num_experts_per_tok": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    if kind == "mixtral":
        theirs = transformers.MixtralConfig(**common, num_local_experts=6, intermediate_size=24)
        block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(theirs)
    elif kind == "qwen3_moe":
        theirs = transformers.Qwen3MoeConfig(**common, num_experts=6, moe_intermediate_size=24, norm_topk_prob=True)
        block = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(theirs)
    else:
        theirs = transformers.Qwen2MoeConfig(
            **common, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40, norm_topk_prob=False
        )
        block = transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(theirs)
    weights = {name: np.asarray(value) for name, value in hugging_face(params).items()}
    block.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    with torch.no_grad():
        expected = block(torch.from_numpy(np.asarray(rows(length=64)).copy()))
    expected = expected[0] if isinstance(expected, tuple) else expected
    np.testing.assert_allclose(call(params, rows(length=64))[0], expected.numpy(), atol=1e-5)


def hugging_face(params):
    """Names and layouts of transformers 5: products act from the left, gate and up lie one after the other."""
    up = jnp.swapaxes(params["expert_up"], 1, 3)  # E F M D
    weights = {
        "gate.weight": params["router"].T,
        "experts.gate_up_proj": jnp.concatenate([up[:, :, 0], up[:, :, 1]], axis=1),
        "experts.down_proj": jnp.swapaxes(params["expert_down"], 1, 2),
    }
    if "shared" in params:
        gate, up = jnp.moveaxis(params["shared"]["up"], 1, 0)
        weights |= {
            "shared_expert.gate_proj.weight": gate.T,
            "shared_expert.up_proj.weight": up.T,
            "shared_expert.down_proj.weight": params["shared"]["down"].T,
            "shared_expert_gate.weight": params["shared_gate"][None],
        }
    return weights
