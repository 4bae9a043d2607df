"""One contract for all optimizers; each row of `RATES` is held to all of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.checkpoint.restore import restore
from lmjax.checkpoint.save import Saver
from lmjax.errors import UserError
from lmjax.model import decoder
from lmjax.model.config import ModelConfig
from lmjax.optim.build import OPTIMIZERS, build_optimizer
from lmjax.optim.config import OptimConfig
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import CheckpointConfig, RunConfig
from lmjax.train.state import init_state, state_shardings

MODEL = ModelConfig(
    vocab_size=64, num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, tie_embeddings=False, attention_bias=True
)
RATES = {"adamw": 0.05, "lion": 0.02, "adafactor": 0.05, "muon": 0.02, "soap": 0.01, "adamw_8bit": 0.05}
STEPS = 30
# a step of 8-bit Adam takes long where XLA does not optimize
WITH_SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == "adamw_8bit" else name for name in OPTIMIZERS]


def optim(name, **fields):
    """Small blocks and frequent refreshes, so that all of an optimizer runs; an epsilon above the rounding of gradients, which SOAP
    else blows up: in the eigenbasis of a gradient most of it is zero."""
    small = {
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "epsilon": 1e-4,
        "soap_block": 16,
        "soap_every": 2,
        "quantize_block": 24,
    }
    return OptimConfig(name=name, **small | fields)


def tree(seed=0):
    return decoder.init(MODEL, jax.random.key(seed))


def distance(params):
    """The problem: the squared distance to other parameters."""
    return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(tree(1)), strict=True))


@functools.cache
def on_mesh(name, fsdp):
    """(config, mesh, shardings, first state, jitted step), the step keeping the state where it lies."""
    config = RunConfig(model=MODEL, mesh=MeshConfig(data=1, fsdp=fsdp), optim=optim(name))
    mesh, optimizer = meshes.make_mesh(config.mesh, jax.devices()[:fsdp]), build_optimizer(config.optim)
    place = state_shardings(config, mesh, optimizer).state
    place = place.params, place.opt_state

    def step(carry, rate):
        params, state = carry
        loss, grads = jax.value_and_grad(distance)(params)
        updates, state = optimizer.update(grads, state, params)
        return (jax.tree.map(lambda p, u: p + rate * u, params, updates), state), loss

    whole = meshes.replicated(mesh)
    with meshes.use(mesh):
        start = jax.jit(lambda: init_state(config, optimizer)[1:3], out_shardings=place)()
        return mesh, start, jax.jit(step, in_shardings=(place, whole), out_shardings=(place, whole))


def train(name, fsdp, steps, carry=None, begin=0):
    """The carry after those steps, and their losses."""
    mesh, start, step = on_mesh(name, fsdp)
    carry, losses = start if carry is None else carry, []
    with meshes.use(mesh):
        for i in range(begin, begin + steps):
            carry, loss = step(carry, jnp.float32(RATES[name] * (1 - i / STEPS)))
            losses.append(float(loss))
    return carry, losses


@pytest.mark.parametrize("name", WITH_SLOW)
def test_converges_and_compiles_once(name):
    _, losses = train(name, 1, STEPS)
    assert losses[-1] < 0.1 * losses[0]
    assert on_mesh(name, 1)[2]._cache_size() == 1


@pytest.mark.parametrize("name", WITH_SLOW)
def test_a_mesh_changes_nothing_and_a_resume_not_a_bit(name, tmp_path):
    carry, losses = train(name, 8, 3)
    with meshes.use(on_mesh(name, 8)[0]), Saver(tmp_path, CheckpointConfig(), {}) as saver:
        saver.save(3, carry)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), carry)
    (resumed, more), (straight, _) = (
        train(name, 8, 4, restore(tmp_path, abstract).state, 3),
        train(name, 8, 4, carry, 3),
    )
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    expected = train(name, 1, 7)[1]
    np.testing.assert_allclose((losses + more)[:4], expected[:4], rtol=3e-5 if name == "soap" else 1e-5)
    # SOAP's second refresh (step 4) orders eigenvalues that are almost equal: rounding decides, and other bases follow.
    np.testing.assert_allclose(more, expected[3:], rtol=1e-3 if name == "soap" else 1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_cut_like_its_parameters(name):
    """On 8 shards no device holds more than an eighth of anything that is not small; so does what comes out of a step."""
    model = dataclasses.replace(MODEL, d_model=256, num_heads=8, d_ff=512, vocab_size=512)
    config = RunConfig(model=model, mesh=MeshConfig(data=1, fsdp=8), optim=OptimConfig(name=name))
    optimizer = build_optimizer(config.optim)
    place = state_shardings(config, meshes.make_mesh(config.mesh), optimizer).state.opt_state
    shapes = jax.eval_shape(lambda: init_state(config, optimizer)).opt_state
    vectors = 4 * model.num_layers * model.d_model
    for (path, leaf), where in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(place), strict=True):
        if leaf.size > vectors:
            assert 8 * np.prod(where.shard_shape(leaf.shape)) == leaf.size, jax.tree_util.keystr(path)


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_pulls_what_the_mask_says_and_is_times_the_learning_rate(name, embeddings):
    params = jax.tree.map(jnp.ones_like, tree())
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = build_optimizer(optim(name, weight_decay=0.25, decay_embeddings=embeddings))
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    attention, mlp, token = updates["layers"]["attention"], updates["layers"]["mlp"], updates["embed"]["token"]
    for matrix in (attention["qkv"], attention["out"], mlp["up"], mlp["down"], updates["head"]["kernel"]):
        np.testing.assert_allclose(matrix, -0.25, atol=1e-6)
    for other in (attention["qkv_bias"], updates["final_norm"]["scale"], *([] if embeddings else [token])):
        np.testing.assert_allclose(other, 0.0, atol=1e-6)
    assert not embeddings or np.allclose(token, -0.25)


@pytest.mark.parametrize("rate,ratio", [(None, 1.0), (0.005, 0.5), (0.0, 0.0)])
def test_what_is_no_matrix_of_a_layer_has_a_rate_of_its_own(rate, ratio):
    """At a rate of 0 it stays as it is. The decay shows the rate: the gradient is zero."""
    params = jax.tree.map(jnp.ones_like, tree())
    optimizer = build_optimizer(optim("muon", weight_decay=0.25, learning_rate=0.01, adam_learning_rate=rate))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda: optimizer.update(zeros, optimizer.init(params), params)[0])()
    np.testing.assert_allclose(updates["head"]["kernel"], -0.25 * ratio, atol=1e-6)
    np.testing.assert_allclose(updates["layers"]["mlp"]["up"], -0.25, atol=1e-6)


@pytest.mark.parametrize(
    "field,value",
    [("learning_rate", 0.0), ("learning_rate", float("nan")), ("adam_learning_rate", -1e-4), ("weight_decay", -1.0),
     ("warmup_steps", -1), ("decay_steps", -3), ("epsilon", 0.0), ("clip_norm", 0.0), ("final_ratio", 1.5),
     ("b1", 1.0), ("b1", -0.1), ("b2", 1.0), ("momentum", 1.0), ("soap_every", 0)],
)  # fmt: skip
def test_what_no_optimizer_can_do_is_named(field, value):
    with pytest.raises(UserError, match=rf"config\.optim\.{field}=\S+ must"):
        OptimConfig(**{field: value})


def test_adamw_is_the_equation():
    params = {"down": jnp.asarray([[1.0, -2.0]])}
    optimizer = build_optimizer(OptimConfig(name="adamw", b1=0.9, b2=0.99, epsilon=1e-8, weight_decay=0.1))
    state, m, v, p = optimizer.init(params), 0.0, 0.0, np.asarray(params["down"], np.float64)
    for t in range(1, 5):
        g = np.asarray([[0.3 * t, -0.1]])
        updates, state = optimizer.update(
            {"down": jnp.asarray(g, jnp.float32)}, state, {"down": jnp.asarray(p, jnp.float32)}
        )
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        expected = -(m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + 0.1 * p)
        np.testing.assert_allclose(updates["down"], expected, rtol=1e-5)
        p = p + 0.01 * expected
