"""The decoder: every field does what it says, and no two ways of running it differ."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig, RopeScaling
from lmjax.model.dense import dtypes

FLOAT32 = dtypes("float32", "cpu")
SMALL = ModelConfig(vocab_size=61, num_layers=3, d_model=48, num_heads=6, num_kv_heads=2, max_length=32, init_std=0.3)
VARIANTS = {
    "llama": {},
    "multi-head": {"num_kv_heads": None},
    "gpt2": {
        "norm": "layernorm", "norm_bias": True, "position": "learned", "activation": "gelu", "attention_bias": True,
        "mlp_bias": True, "num_kv_heads": None,
    },
    "untied": {"tie_embeddings": False},
    "geglu, sinusoidal": {"activation": "geglu", "position": "sinusoidal"},
    "relu, no positions": {"activation": "relu", "position": "none"},
    "qk-norm, soft-caps": {"qk_norm": True, "attention_softcap": 4.0, "logit_softcap": 9.0, "scale_embeddings": True},
    "wide heads": {"head_dim": 16, "d_ff": 40, "rope_theta": 500.0},
    "fan-in": {"init": "fan_in"},
    "blockwise": {"attention": "blockwise", "attention_block": 8},
    "windows": {"sliding_window": 5},
    "post-norm, norm over heads": {"block": "post", "qk_norm": True, "qk_norm_heads": True},
    "sandwich, two thetas": {
        "block": "sandwich", "score_dim": 5, "rope_local_theta": 100.0, "sliding_window": 7, "qkv_bias": True,
        "layer_pattern": ("local", "local", "global"), "rope_scaling": RopeScaling("linear", 4.0),
    },
    "llama3 rope": {"rope_scaling": RopeScaling("llama3", 8.0, original_length=16)},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, original_length=64, beta_fast=8.0)},
    "pattern": {"sliding_window": 5, "layer_pattern": ("local", "global"), "dropout": 0.1},  # a period, and one over
    "long pattern": {"sliding_window": 5, "layer_pattern": ("local",) * 4 + ("global",)},  # longer than the layers
}  # fmt: skip


def variant(name):
    return dataclasses.replace(SMALL, **VARIANTS[name])


def rows(length=20, batch=2, seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (batch, length), 0, SMALL.vocab_size)
    return tokens, jnp.broadcast_to(jnp.arange(length), tokens.shape)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens, positions, segments=None, key=None):
    hidden, _ = decoder.forward(config, params, tokens, positions, Mask(segments), FLOAT32, key=key)
    return decoder.unembed(config, params, hidden, FLOAT32)


# ------------------------------------------------------------------------------------------------------------------ oracle


def np_norm(config, x, weights):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * weights["scale"]
    return out + weights["bias"] if config.norm_bias else out


def np_rms(x, scale, epsilon):
    dims = tuple(range(-scale.ndim, 0))
    return x / np.sqrt((x * x).mean(dims, keepdims=True) + epsilon) * scale


def np_slowed(scaling, wavelength, half, theta):
    """Share of the angle that one frequency keeps, by the papers' words."""
    if scaling is None:
        return 1.0
    ratio = scaling.original_length / wavelength  # turns over the rows of pre-training
    if scaling.kind == "linear":
        kept = 0.0
    elif scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = 1.0 if ratio > high else 0.0 if ratio < low else (ratio - low) / (high - low)
    else:
        place = lambda turns: half * np.log(scaling.original_length / (2 * np.pi * turns)) / np.log(theta)  # noqa: E731
        first, last = max(np.floor(place(scaling.beta_fast)), 0), np.ceil(place(scaling.beta_slow))
        pair = half * np.log(wavelength / (2 * np.pi)) / np.log(theta)
        kept = 1 - min(max((pair - first) / (last - first), 0.0), 1.0)
    return kept + (1 - kept) / scaling.factor


def np_rope(config, x, kind):
    """Pairs (i, i + H/2) as complex numbers, turned by position · theta^(-2i/H)."""
    theta, scaling, half = config.rope_theta, config.rope_scaling, x.shape[-1] // 2
    if kind == "local" and config.rope_local_theta:
        theta, scaling = config.rope_local_theta, None
    frequency = theta ** (-np.arange(half) / half)
    frequency *= [np_slowed(scaling, 2 * np.pi / f, half, theta) for f in frequency]
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequency)
    turned = (x[..., :half] + 1j * x[..., half:]) * turn.reshape(len(x), *(1,) * (x.ndim - 2), half)
    length = 0.1 * np.log(scaling.factor) + 1 if scaling and scaling.kind == "yarn" else 1.0
    return length * np.concatenate([turned.real, turned.imag], -1)


def np_attention(config, x, w, kind):
    qkv = np.einsum("td,dkgh->tkgh", x, w["qkv"]) + w.get("qkv_bias", 0)
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if config.qk_norm:
        q, k = np_rms(q, w["q_norm"], config.norm_epsilon), np_rms(k, w["k_norm"], config.norm_epsilon)
    if config.position == "rope":
        q, k = np_rope(config, q, kind), np_rope(config, k, kind)
    scores = np.einsum("tkgh,skh->kgts", q, k) / np.sqrt(config.score_dim or config.dim_head)
    if config.attention_softcap:
        scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
    ones = np.ones(scores.shape[-2:], bool)
    seen = np.tril(ones) & (np.triu(ones, 1 - config.sliding_window) if kind == "local" else ones)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("kgts,skh->tkgh", weights / weights.sum(-1, keepdims=True), v)
    return np.einsum("tkgh,kghd->td", mixed, w["out"]) + w.get("out_bias", 0)


def np_mlp(config, x, w):
    up = np.einsum("td,dmf->mtf", x, w["up"]) + (w["up_bias"][:, None] if config.mlp_bias else 0)
    gelu = lambda a: 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))  # noqa: E731
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    act = {"swiglu": silu, "geglu": gelu, "gelu": gelu, "relu": lambda a: np.maximum(a, 0)}[config.activation](up[0])
    act = act * up[1] if config.gated else act
    return act @ w["down"] + (w["down_bias"] if config.mlp_bias else 0)


def np_logits(config, params, tokens):
    """One row, in float64, from the equations alone."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embed"]["token"][np.asarray(tokens)]
    x = x * np.sqrt(config.d_model) if config.scale_embeddings else x
    places, half = np.arange(len(x))[:, None], config.d_model // 2
    if config.position == "learned":
        x = x + params["embed"]["position"][: len(x)]
    if config.position == "sinusoidal":
        angle = places / 10_000 ** (np.arange(half) / half)
        x = x + np.concatenate([np.sin(angle), np.cos(angle)], -1)
    for layer in range(config.num_layers):
        w = jax.tree.map(lambda a: a[layer], params["layers"])  # noqa: B023
        kind = config.kinds[layer]
        norm = lambda name, x: np_norm(config, x, w[name]) if name in w else x  # noqa: B023, E731
        out = np_attention(config, norm("attention_norm", x), w["attention"], kind)
        x = x + norm("attention_post_norm", out)
        x = x + norm("mlp_post_norm", np_mlp(config, norm("mlp_norm", x), w["mlp"]))
    x = np_norm(config, x, params["final_norm"])
    out = x @ (params["embed"]["token"].T if config.tie_embeddings else params["head"]["kernel"])
    return config.logit_softcap * np.tanh(out / config.logit_softcap) if config.logit_softcap else out


@functools.partial(jax.jit, static_argnums=0)
def disturbed(config):
    """Parameters in which no bias is 0 and no norm is 1."""
    params = decoder.init(config, jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 100))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_equations(name):
    config, (tokens, positions) = variant(name), rows()
    params = disturbed(config)
    ours = logits(config, params, tokens, positions)
    expected = np.stack([np_logits(config, params, row) for row in tokens])
    np.testing.assert_allclose(ours, expected, atol=2e-4 * np.abs(expected).max())


# -------------------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_sees_only_what_came_before(name):
    config, (tokens, positions) = variant(name), rows()
    params = disturbed(config)
    edited = tokens.at[:, 12].set((tokens[:, 12] + 1) % config.vocab_size)
    before, after = logits(config, params, tokens, positions), logits(config, params, edited, positions)
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert not np.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_packed_document_is_as_if_it_were_alone(implementation):
    config = dataclasses.replace(SMALL, attention=implementation, attention_block=8)
    params, (tokens, _) = disturbed(config), rows(24)
    segments = jnp.asarray([[1] * 9 + [2] * 15] * 2, jnp.int32)
    positions = jnp.asarray([[*range(9), *range(15)]] * 2, jnp.int32)
    packed = logits(config, params, tokens, positions, segments)
    edited = logits(config, params, tokens.at[:, :9].set(0), positions, segments)
    np.testing.assert_array_equal(packed[:, 9:], edited[:, 9:])
    alone = logits(config, params, tokens[:, 9:], positions[:, 9:])
    np.testing.assert_allclose(packed[:, 9:], alone, atol=2e-4)


def test_rope_knows_distances_only():
    params, (tokens, positions) = disturbed(SMALL), rows()
    here, there = logits(SMALL, params, tokens, positions), logits(SMALL, params, tokens, positions + 1000)
    np.testing.assert_allclose(here, there, atol=5e-3)
    assert not np.allclose(here, logits(SMALL, params, tokens, positions * 2), atol=5e-3)


def value_and_grad(config):
    (tokens, positions), key = rows(), jax.random.key(3)
    loss = lambda p: jnp.mean(jnp.sin(logits(config, p, tokens, positions, key=key)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(disturbed(dataclasses.replace(config, scan="off", remat="none")))


@pytest.fixture(scope="module")
def unrolled():
    """name → value and gradients of five layers one after the other, all kept."""
    return functools.cache(
        lambda name: value_and_grad(dataclasses.replace(variant(name), num_layers=5, scan="off", remat="none"))
    )


@pytest.mark.parametrize(
    "scan, remat",
    [("on", "none"), *((scan, remat) for scan in ("on", "off") for remat in ("dots", "full", "block_outputs"))],
)
@pytest.mark.parametrize("name", ["llama", "pattern"])
def test_scan_and_remat_change_neither_values_nor_gradients(name, scan, remat, unrolled):
    other = value_and_grad(dataclasses.replace(variant(name), num_layers=5, scan=scan, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), unrolled(name), other)


@pytest.mark.parametrize("remat,kept", [("dots", 0.75), ("full", 0.5)])
def test_remat_keeps_less_for_the_backward_pass(remat, kept):
    tokens, positions = rows(32, batch=8)

    def temporaries(config):
        loss = lambda p: jnp.sum(logits(config, p, tokens, positions))  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    deep = dataclasses.replace(SMALL, num_layers=8, scan="on")
    params = decoder.init(deep, jax.random.key(0))
    assert temporaries(dataclasses.replace(deep, remat=remat)) <= kept * temporaries(deep)


def test_compile_time_of_the_scan_does_not_grow_with_layers():
    """The program of 24 layers is as long as that of 3: one layer is compiled."""

    def size(layers, pattern=()):
        window = 5 if pattern else None
        config = dataclasses.replace(SMALL, num_layers=layers, scan="on", sliding_window=window, layer_pattern=pattern)
        tokens, positions = rows()
        abstract = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
        return len(jax.jit(lambda p: logits(config, p, tokens, positions)).lower(abstract).as_text().splitlines())

    assert size(24) == size(3)
    assert size(24, ("local", "local", "global")) == size(6, ("local", "local", "global"))


def test_dropout_needs_a_key_and_keeps_the_mean():
    config = dataclasses.replace(SMALL, dropout=0.3)
    params, (tokens, positions) = disturbed(config), rows()
    plain = logits(config, params, tokens, positions)
    np.testing.assert_array_equal(plain, logits(SMALL, params, tokens, positions))
    one, same, other = (logits(config, params, tokens, positions, key=jax.random.key(s)) for s in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other) and not np.allclose(one, plain)


def test_every_layer_drops_other_elements():
    """All weights 0 but the MLP's last bias of 1: an element counts the layers that kept it, 0, 1 or 2 of two."""
    config = dataclasses.replace(SMALL, num_layers=2, dropout=0.5, mlp_bias=True)
    params = jax.tree.map(jnp.zeros_like, decoder.init(config, jax.random.key(0)))
    params["layers"]["mlp"]["down_bias"] += 1.0
    params["final_norm"]["scale"] += 1.0
    tokens, positions = rows()
    hidden, _ = decoder.forward(config, params, tokens, positions, Mask(), FLOAT32, key=jax.random.key(0))
    assert len(np.unique(np.asarray(hidden[0, 0]).round(4))) == 3


def test_initial_scales():
    deep = dataclasses.replace(SMALL, d_model=96, num_heads=6, num_layers=8, init_std=0.02)
    std = {}
    for scheme in ("normal", "scaled", "fan_in"):
        params = decoder.init(dataclasses.replace(deep, init=scheme), jax.random.key(0))
        std[scheme] = [float(params["layers"]["mlp"][name].std()) for name in ("up", "down")]
    np.testing.assert_allclose(std["normal"], [0.02, 0.02], rtol=0.05)
    np.testing.assert_allclose(std["scaled"], [0.02, 0.02 / 4], rtol=0.05)
    np.testing.assert_allclose(std["fan_in"], [96**-0.5, deep.hidden**-0.5 / 4], rtol=0.05)


def test_layers_differ_and_a_seed_is_a_model():
    first, second = (decoder.init(SMALL, jax.random.key(0)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    up = first["layers"]["mlp"]["up"]
    assert not np.allclose(up[0], up[1])


def test_half_precision_stays_near_float32():
    params, (tokens, positions) = decoder.init(SMALL, jax.random.key(0)), rows()
    exact = logits(SMALL, params, tokens, positions)
    for platform, activation in (("cpu", jnp.float32), ("tpu", jnp.bfloat16)):
        types = dtypes("bfloat16", platform)
        hidden, _ = decoder.forward(SMALL, params, tokens, positions, Mask(), types)
        assert hidden.dtype == activation
        half = decoder.unembed(SMALL, params, hidden, types)
        assert half.dtype == jnp.float32
        np.testing.assert_allclose(half, exact, atol=0.05 * float(jnp.abs(exact).max()))
