"""The step: sums over micro-batches, one division, clipping, the update.

    g = Σ_micro ∇ total / Σ_micro weight,   g ← g · min(1, clip / |g|),   θ ← θ + schedule(step) · optimizer(g)

The sum over replicas is the compiler's, exact; with `config.compress` each replica's g is kept apart and summed by `compress.reduce`.

A step whose loss or gradient is not finite changes nothing but the step number and the loss scale, and says so in
`train/skipped`: the state is finite for good. With float16 that is how the scale is found; otherwise the loop stops the run.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from lmjax.axes import DATA
from lmjax.batch import Batch
from lmjax.model import router
from lmjax.model.config import MoeConfig
from lmjax.model.decoder import Params
from lmjax.optim import compress
from lmjax.optim.schedule import Schedule
from lmjax.sharding import mesh as meshes
from lmjax.train.config import RunConfig
from lmjax.train.loss import Sums
from lmjax.train.objective import Loss
from lmjax.train.state import LossScale, StateShardings, TrainState

SCALE_UP_AFTER = 2000  # good steps before the loss scale doubles (Micikevicius et al., 2018, arXiv 1710.03740)

Metrics = dict[str, Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def micro_batches(batch: Batch, count: int) -> Batch:
    """[B, T] → [count, B / count, T], row b in micro-batch b mod count: each device keeps its share of every one."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch)


def summed_gradients(
    loss: Loss, state: TrainState, batch: Batch, count: int, dropout: bool, shardings: Params
) -> tuple[Sums, Params]:
    """Sums and their gradients (of total · loss scale) over the micro-batches, laid out as `shardings`."""
    key = jax.random.fold_in(state.key, state.step) if dropout else None

    def scaled(params, rows, micro):
        sums = loss(params, rows, key=None if key is None else jax.random.fold_in(key, micro))
        return sums.total * state.loss_scale.scale, sums

    def gradients(rows, micro):
        grads, sums = jax.grad(scaled, has_aux=True)(state.params, rows, micro)
        return sums, jax.lax.with_sharding_constraint(grads, shardings)

    if count == 1:
        return gradients(batch, 0)

    def body(carry, item):
        return jax.tree.map(jnp.add, carry, gradients(*item)), None

    rows = micro_batches(batch, count)
    shapes = jax.eval_shape(lambda: loss(state.params, jax.tree.map(lambda x: x[0], rows), key=None))
    zeros = jax.tree.map(jnp.zeros_like, (shapes, state.params))
    return jax.lax.scan(body, zeros, (rows, jnp.arange(count)))[0]


def replica_gradients(
    loss: Loss, state: TrainState, batch: Batch, count: int, dropout: bool, shardings: Params
) -> tuple[Sums, Params]:
    """`summed_gradients` over the rows of each replica by itself, [R, …] of every parameter; the sums are of all rows."""
    specs = jax.tree.map(lambda place: place.spec, shardings)

    def local(state, batch):
        state = state._replace(key=jax.random.fold_in(state.key, jax.lax.axis_index(DATA)))
        return jax.tree.map(lambda x: x[None], summed_gradients(loss, state, batch, count, dropout, specs))

    whole, rows = PartitionSpec(), PartitionSpec(DATA)
    sums, grads = jax.shard_map(local, in_specs=(whole, rows), out_specs=rows, axis_names={DATA}, check_vma=False)(
        state._replace(opt_state=None, residual=None), jax.tree.map(jnp.asarray, batch)
    )
    return jax.tree.map(lambda x: x.sum(axis=0), sums), grads


def next_scale(scale: LossScale, finite: Array, dynamic: bool) -> LossScale:
    """Halves the loss scale after an overflow, doubles it after a long run without one."""
    if not dynamic:
        return scale
    good = jnp.where(finite, scale.good_steps + 1, 0)
    grow = good >= SCALE_UP_AFTER
    factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
    return LossScale(jnp.maximum(scale.scale * factor, 1.0), jnp.where(grow, 0, good))


def balanced(moe: MoeConfig | None, params: Params, sums: Sums) -> Params:
    """The parameters with the routers' selection biases moved by the step's load; no gradient reaches them.

    Raises:
      ValueError: the objective collects no sums of the routers, so that balancing would do nothing without a word.
    """
    if moe is None:
        return params
    if sums.router is None:
        raise ValueError("config.model.moe: the objective's sums hold none of the routers'; see decoder.forward_routed")
    if not moe.bias_rate:
        return params
    bias = router.moved_bias(moe, params["layers"]["moe"]["router_bias"], sums.router.load)
    layers = params["layers"]
    return {**params, "layers": {**layers, "moe": {**layers["moe"], "router_bias": bias}}}


def build_step(
    config: RunConfig,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    mesh: Mesh,
    shardings: StateShardings,
) -> Step:
    """The jitted step; the state that is passed in is donated."""
    dropout, compressed = config.model.dropout > 0, config.compress.kind != "none"
    gradients = replica_gradients if compressed else summed_gradients

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums, grads = gradients(loss, state, batch, config.train.accumulation, dropout, shardings.grads)
        denominator = jnp.maximum(sums.weight, 1.0)
        divide = 1.0 / (denominator * state.loss_scale.scale)
        grads, residual = jax.tree.map(lambda g: g * divide, grads), None
        if compressed:
            specs = jax.tree.map(lambda place: place.spec, shardings.grads)
            grads, residual = compress.reduce(config.compress, grads, state.residual, specs)
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.total)
        if config.optim.clip_norm is not None:
            factor = jnp.minimum(1.0, config.optim.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * factor, grads)
        if config.mesh.offload:
            state = state._replace(opt_state=jax.device_put(state.opt_state, shardings.opt_state))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        learning_rate = schedule(state.step)
        params = jax.tree.map(lambda p, u: p + learning_rate * u, state.params, updates)
        params = balanced(config.model.moe, params, sums)
        params, opt_state, residual = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, residual),
            (state.params, state.opt_state, state.residual),
        )
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            loss_scale=next_scale(state.loss_scale, finite, config.train.precision == "float16"),
            key=state.key,
            residual=residual,
        )
        metrics = {
            "train/loss": sums.nll / denominator,
            "train/z_loss": config.train.z_loss * sums.z / denominator,
            "train/grad_norm": norm,
            "train/learning_rate": learning_rate,
            "train/loss_scale": state.loss_scale.scale,
            "train/target_tokens": sums.weight,
            "train/skipped": 1.0 - finite,
        }
        if config.model.moe is not None:
            metrics |= router.metrics(config.model.moe, sums.router, denominator)
        return new_state, metrics

    whole = meshes.replicated(mesh)
    batch_sharding = meshes.sharding(mesh, ("batch", None))
    return jax.jit(
        step,
        in_shardings=(shardings.state, batch_sharding),
        out_shardings=(shardings.state, whole),
        donate_argnums=(0,),
    )


def build_eval_step(loss: Loss, mesh: Mesh, shardings: StateShardings) -> Callable[[dict, Batch], Sums]:
    """The jitted sums of one evaluation batch: no dropout, nothing is changed."""
    batch_sharding = meshes.sharding(mesh, ("batch", None))
    return jax.jit(
        lambda params, batch: loss(params, batch, key=None),
        in_shardings=(shardings.state.params, batch_sharding),
        out_shardings=meshes.replicated(mesh),
    )
