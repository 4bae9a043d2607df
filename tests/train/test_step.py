"""One step: sums over micro-batches, skipped when not finite, equal on every mesh; and it learns."""

import dataclasses

import jax
import numpy as np
import pytest

from lmjax.batch import Batch
from lmjax.errors import UserError
from lmjax.model import decoder
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.model.dense import dtypes
from lmjax.optim.build import OPTIMIZERS, build_optimizer
from lmjax.optim.config import OptimConfig
from lmjax.optim.schedule import build_schedule
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig
from lmjax.train import step as steps
from lmjax.train.config import RunConfig, TrainConfig
from lmjax.train.objective import build_objective
from lmjax.train.state import init_state, state_shardings

MODEL = ModelConfig(vocab_size=64, num_layers=2, d_model=32, num_heads=8, d_ff=64)
CONFIG = RunConfig(
    model=MODEL,
    mesh=MeshConfig(data=1),
    optim=OptimConfig(learning_rate=0.01, warmup_steps=2, schedule="constant", weight_decay=0.0),
    train=TrainConfig(steps=20, batch_size=8, precision="float32", z_loss=1e-3, loss_chunk=50),
)


def batch(rows=8, length=16, seed=0, packed=True, vocab=64):
    """Rows of two documents each, and weights that differ between rows."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    segments = np.ones((rows, length), np.int32) + (np.arange(length) >= 6) * packed
    weights = (rng.random((rows, length)) < np.linspace(0.05, 1.0, rows)[:, None]).astype(np.float32)
    positions = np.where((np.arange(length) >= 6) & packed, np.arange(length) - 6, np.arange(length))
    return Batch(
        ids[:, :-1], ids[:, 1:], weights, segments, np.broadcast_to(positions, ids[:, 1:].shape).astype(np.int32)
    )


class Run:
    """A state and its step on the first devices."""

    def __init__(self, config):
        self.config = config
        self.mesh = meshes.make_mesh(config.mesh, jax.devices()[: config.mesh.fewest_devices])
        optimizer = build_optimizer(config.optim)
        self.shardings = state_shardings(config, self.mesh, optimizer)
        self.loss = build_objective(config, dtypes(config.train.precision, "cpu"))
        with meshes.use(self.mesh):
            self.state = jax.jit(lambda: init_state(config, optimizer), out_shardings=self.shardings.state)()
        schedule = build_schedule(config.optim, config.train.steps)
        self.step = steps.build_step(config, self.loss, optimizer, schedule, self.mesh, self.shardings)

    def __call__(self, rows):
        with meshes.use(self.mesh):
            self.state, metrics = self.step(self.state, rows)
        return {name: float(value) for name, value in metrics.items()}

    def gradients(self, rows, count):
        def summed(state, rows):
            return steps.summed_gradients(self.loss, state, rows, count, False, self.shardings.grads)

        with meshes.use(self.mesh):
            sums, grads = jax.jit(summed)(self.state, rows)
        return jax.tree.map(lambda g: np.asarray(g) / float(sums.weight), grads), sums


def changed(config, section, **fields):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


def test_accumulation_weighs_every_token_alike():
    """Micro-batches with very different numbers of trained tokens: the mean of their means would be another gradient."""
    run, rows = Run(CONFIG), batch()
    per_micro = steps.micro_batches(rows, 4).loss_weights.sum(axis=(1, 2))
    assert max(per_micro) > 1.3 * min(per_micro)
    whole, sums = run.gradients(rows, 1)
    for count in (2, 4, 8):
        parts, part_sums = run.gradients(rows, count)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts, whole)
        np.testing.assert_allclose(part_sums.z, sums.z, rtol=1e-5)  # the auxiliary loss, too


def test_one_trained_token_against_nine():
    rows = batch(rows=2, length=10)
    weights = np.zeros((2, 10), np.float32)
    weights[0, 0], weights[1, :9] = 1.0, 1.0
    rows = rows._replace(loss_weights=weights)
    run = Run(CONFIG)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run.gradients(rows, 2)[0], run.gradients(rows, 1)[0]
    )


def test_a_batch_without_trained_tokens_changes_nothing():
    run, rows = Run(CONFIG), batch()
    run(rows)
    before = jax.tree.map(np.asarray, run.state.params)
    metrics = run(rows._replace(loss_weights=np.zeros_like(rows.loss_weights)))
    assert metrics["train/loss"] == 0.0 and metrics["train/grad_norm"] == 0.0 and metrics["train/target_tokens"] == 0.0
    assert (
        all(np.isfinite(x).all() for x in jax.tree.leaves(run.state.params))
        and before.keys() == run.state.params.keys()
    )


def test_the_reported_loss_is_pure_likelihood():
    with_z, without = (Run(changed(CONFIG, "train", z_loss=z)) for z in (0.1, 0.0))
    first, second = with_z(batch()), without(batch())
    np.testing.assert_allclose(first["train/loss"], second["train/loss"], rtol=1e-6)
    assert first["train/z_loss"] > 0.0 == second["train/z_loss"]
    assert first["train/grad_norm"] != second["train/grad_norm"]


def test_clipping_bounds_the_norm_of_the_update():
    """SGD-like view: with lion the update is a sign, with clipping the moments shrink; so look at Adam's first moment."""
    free, clipped = (Run(changed(CONFIG, "optim", clip_norm=clip)) for clip in (None, 0.01))
    norm = free(batch())["train/grad_norm"]
    assert clipped(batch())["train/grad_norm"] == pytest.approx(norm)
    ratio = jax.tree.leaves(clipped.state.opt_state[0].mu)[0] / jax.tree.leaves(free.state.opt_state[0].mu)[0]
    np.testing.assert_allclose(np.nanmedian(ratio), 0.01 / norm, rtol=1e-4)


def test_a_step_that_is_not_finite_changes_no_parameter():
    run = Run(changed(CONFIG, "optim", warmup_steps=0))
    run(batch())
    poisoned = run.state.params["embed"]["token"].at[3, 0].set(np.inf)
    run.state = run.state._replace(params={**run.state.params, "embed": {"token": poisoned}})
    before = jax.tree.map(np.asarray, (run.state.params, run.state.opt_state))
    metrics = run(batch())
    assert metrics["train/skipped"] == 1.0 and not np.isfinite(metrics["train/loss"])
    jax.tree.map(np.testing.assert_array_equal, before, (run.state.params, run.state.opt_state))
    assert int(run.state.step) == 2


def test_float16_finds_its_loss_scale():
    config = changed(changed(CONFIG, "train", precision="float16"), "optim", warmup_steps=0)
    run = Run(config)
    run.state = run.state._replace(loss_scale=run.state.loss_scale._replace(scale=run.state.loss_scale.scale * 2.0**12))
    skipped = [run(batch())["train/skipped"] for _ in range(16)]
    assert skipped[0] == 1.0 and skipped[-1] == 0.0  # the first overflows, later ones do not
    assert sorted(skipped, reverse=True) == skipped
    exact = Run(changed(CONFIG, "optim", warmup_steps=0))
    assert Run(config)(batch())["train/loss"] == pytest.approx(exact(batch())["train/loss"], abs=0.01)


def test_the_loss_scale_grows_after_a_long_run_without_overflow(monkeypatch):
    monkeypatch.setattr(steps, "SCALE_UP_AFTER", 2)
    run = Run(changed(CONFIG, "train", precision="float16"))
    run.state = run.state._replace(loss_scale=run.state.loss_scale._replace(scale=jax.device_put(np.float32(4.0))))
    scales = [run(batch())["train/loss_scale"] for _ in range(5)]
    assert scales == [4.0, 4.0, 8.0, 8.0, 16.0]


def test_dropout_is_a_function_of_the_step():
    run = Run(changed(CONFIG, "model", dropout=0.5))
    start = jax.tree.map(lambda x: x.copy(), run.state)
    first = run(batch())["train/loss"]
    run.state = jax.tree.map(lambda x: x.copy(), start)
    assert run(batch())["train/loss"] == first
    run.state = start._replace(step=start.step + 1)
    assert run(batch())["train/loss"] != first


def test_a_small_set_is_learned_by_heart():
    config = changed(
        changed(CONFIG, "train", steps=150), "optim", learning_rate=0.01, schedule="cosine", warmup_steps=10
    )
    run, rows = Run(config), batch(rows=8, packed=False)
    rows = rows._replace(loss_weights=np.ones_like(rows.loss_weights))
    losses = [run(rows)["train/loss"] for _ in range(150)]
    assert losses[0] > 4.0 and losses[-1] < 0.05
    assert run.step._cache_size() == 1


# ------------------------------------------------------------------------------------------------------------------ meshes


def losses_on(mesh, **fields):
    run = Run(dataclasses.replace(changed(CONFIG, "train", accumulation=2, batch_size=16), mesh=mesh, **fields))
    return [run(batch(rows=16, seed=seed))["train/loss"] for seed in range(20)]


@pytest.fixture(scope="module")
def one_device():
    return losses_on(MeshConfig(1, 1, 1))


@pytest.mark.parametrize("window", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_gradients_of_split_rows_are_those_of_whole_ones(window):
    config = changed(CONFIG, "model", sliding_window=window, qk_norm=True, attention_softcap=9.0, attention_block=2)
    whole, sums = Run(config).gradients(batch(), 1)
    split, split_sums = Run(dataclasses.replace(config, mesh=MeshConfig(data=2, context=4))).gradients(batch(), 2)
    np.testing.assert_allclose(*(np.array(jax.tree.leaves(tree)) for tree in (split_sums, sums)), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), split, whole)


def test_a_row_that_cannot_be_split_is_the_users_mistake():
    run = Run(dataclasses.replace(CONFIG, mesh=MeshConfig(data=1, context=4)))
    with pytest.raises(UserError, match=r"seq_len=20 does not divide by 2 × config.mesh.context=4"):
        run(batch(length=20))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_every_stage_of_zero_trains_the_same(zero, one_device):
    np.testing.assert_allclose(losses_on(MeshConfig(2, 4, 1, zero)), one_device, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_trains_the_same_on_a_mesh(name):
    optim = dataclasses.replace(CONFIG.optim, name=name, learning_rate=0.003)
    split, whole = losses_on(MeshConfig(2, 2, 2), optim=optim), losses_on(MeshConfig(1), optim=optim)
    # SOAP orders eigenvalues that are almost equal at each refresh: rounding decides, and other bases follow.
    np.testing.assert_allclose(split, whole, atol=1e-3 if name == "soap" else 1e-4)


@pytest.mark.parametrize("zero,split", [(1, (False, False, True)), (2, (False, True, True)), (3, (True, True, True))])
def test_zero_says_what_fsdp_shards(zero, split):
    run = Run(dataclasses.replace(CONFIG, mesh=MeshConfig(2, 4, 1, zero)))
    state = run.shardings.state
    moments = state.opt_state[0].mu
    for tree, sharded in zip((state.params, run.shardings.grads, moments), split):
        assert ("fsdp" in str(tree["layers"]["mlp"]["up"].spec)) == sharded
    shards = run.state.params["layers"]["mlp"]["up"].addressable_shards
    assert shards[0].data.size * (4 if zero == 3 else 1) == run.state.params["layers"]["mlp"]["up"].size


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("count", [1, 4])
def test_the_embedding_gradient_is_that_of_a_one_hot_product(sizes, count, monkeypatch):
    """A scatter under accumulation and sharding is where compilers have been wrong."""
    run, rows = (
        Run(dataclasses.replace(changed(CONFIG, "model", tie_embeddings=False), mesh=MeshConfig(*sizes))),
        batch(rows=16),
    )
    constrain = decoder.constrain
    ours = run.gradients(rows, count)[0]["embed"]["token"]
    one_hot = Run(changed(CONFIG, "model", tie_embeddings=False))
    monkeypatch.setattr(
        decoder, "constrain", lambda x, *axes: OneHot(x) if axes == ("vocab", None) else constrain(x, *axes)
    )
    np.testing.assert_allclose(ours, one_hot.gradients(rows, 1)[0]["embed"]["token"], atol=1e-6)


class OneHot:
    """A table whose lookup is a product: its gradient has no scatter."""

    def __init__(self, table):
        self.table = table

    def __getitem__(self, ids):
        return jax.nn.one_hot(ids, self.table.shape[0]) @ self.table


# ----------------------------------------------------------------------------------------------------------------- experts

EXPERTS = changed(CONFIG, "model", moe=MoeConfig(num_experts=8, balance_loss=0.5, z_loss=0.1, bias_rate=0.01), d_ff=32)


def test_accumulation_changes_nothing_of_the_routers():
    """Losses are by row and the load is a count: one micro-batch or four."""
    run, rows = Run(EXPERTS), batch()
    rows = rows._replace(segment_ids=np.where(np.arange(16) < 12, rows.segment_ids, 0).astype(np.int32))
    whole, sums = run.gradients(rows, 1)
    parts, part_sums = run.gradients(rows, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), parts, whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), part_sums, sums)
    np.testing.assert_array_equal(part_sums.router.load, sums.router.load)
    assert sums.router.load.sum() == 2 * 2 * 8 * 12  # layers, choices, rows, tokens that are no padding


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_experts_balance_and_drop_over_whole_rows_where_a_context_splits_them(capacity):
    moe = dataclasses.replace(EXPERTS.model.moe, num_experts=4, capacity_factor=capacity)
    config, rows = changed(EXPERTS, "model", moe=moe), batch()
    rows = rows._replace(segment_ids=np.where(np.arange(16) < 14, rows.segment_ids, 0).astype(np.int32))
    whole, sums = Run(config).gradients(rows, 1)
    assert (sums.router.dropped > 0) == (capacity is not None)
    for mesh in (MeshConfig(data=2, context=4), MeshConfig(data=1, context=2, expert=2, fsdp=2)):
        parts, part_sums = Run(dataclasses.replace(config, mesh=mesh)).gradients(rows, 1)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), parts, whole)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), part_sums, sums)


def test_losses_of_routers_are_minimized_and_reported_apart():
    with_losses = Run(EXPERTS)
    without = Run(changed(EXPERTS, "model", moe=dataclasses.replace(EXPERTS.model.moe, balance_loss=0.0, z_loss=0.0)))
    first, second = with_losses(batch()), without(batch())
    np.testing.assert_allclose(first["train/loss"], second["train/loss"], rtol=1e-6)
    assert first["train/balance_loss"] > 0.0 == second["train/balance_loss"]
    assert first["train/router_z_loss"] > 0.0 == second["train/router_z_loss"]
    assert first["train/grad_norm"] != second["train/grad_norm"]
    assert first["moe/load_max"] >= 1.0 >= first["moe/load_min"] and 0.0 < first["moe/router_entropy"] <= np.log(8)
    sums = with_losses.gradients(batch(), 1)[1]
    np.testing.assert_allclose(
        sums.total, sums.nll + 1e-3 * sums.z + 0.5 * sums.router.balance + 0.1 * sums.router.z, rtol=1e-6
    )


def test_an_objective_that_forgets_the_routers_is_an_error():
    run = Run(EXPERTS)

    def forgets(params, batch, key):
        return run.loss(params, batch, key=key)._replace(router=None)

    schedule, optimizer = build_schedule(EXPERTS.optim, 20), build_optimizer(EXPERTS.optim)
    step = steps.build_step(EXPERTS, forgets, optimizer, schedule, run.mesh, run.shardings)
    with pytest.raises(ValueError, match="hold none of the routers'"), meshes.use(run.mesh):
        step(run.state, batch())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_bias_moves_by_the_sign_of_the_load_alone(name):
    """No gradient, no decay and no clipping reaches it; a step that is skipped leaves it."""
    config = changed(EXPERTS, "optim", name=name, weight_decay=0.5, clip_norm=1e-3, warmup_steps=0)
    run = Run(config)
    load = run.gradients(batch(), 1)[1].router.load
    run(batch())
    bias = np.asarray(run.state.params["layers"]["moe"]["router_bias"])
    np.testing.assert_allclose(bias, 0.01 * np.sign(load.mean(1, keepdims=True) - load), atol=1e-8)
    poisoned = run.state.params["embed"]["token"].at[3, 0].set(np.inf)
    run.state = run.state._replace(params={**run.state.params, "embed": {"token": poisoned}})
    assert run(batch())["train/skipped"] == 1.0
    np.testing.assert_array_equal(run.state.params["layers"]["moe"]["router_bias"], bias)


def test_the_bias_balances_a_router_that_prefers_an_expert():
    moe = MoeConfig(num_experts=4, top_k=1, bias_rate=0.004, balance_loss=0.0, z_loss=0.0)
    run = Run(changed(changed(EXPERTS, "model", moe=moe), "optim", learning_rate=1e-6))
    run.state.params["layers"]["moe"]["router_bias"] += np.array([0.1, 0.0, 0.0, 0.0], np.float32)
    load = [run(batch(seed=seed))["moe/load_max"] for seed in range(40)]
    assert load[0] > 3.5 and np.mean(load[-5:]) < 2.0
