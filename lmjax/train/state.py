"""The state of a run: all that a step changes, as one pytree, and where each leaf lives on the mesh."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from lmjax.model import decoder
from lmjax.optim import compress
from lmjax.sharding import mesh as meshes
from lmjax.sharding import rules
from lmjax.train.config import RunConfig


class LossScale(NamedTuple):
    """Dynamic loss scaling of float16; with other precisions the scale stays 1."""

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]  # since the scale last changed


class TrainState(NamedTuple):
    """Saved whole in every checkpoint."""

    step: Int[Array, ""]  # optimizer steps done: the next step is this one, and reads the batch of this number
    params: decoder.Params  # float32
    opt_state: Any
    loss_scale: LossScale
    key: PRNGKeyArray  # of dropout: step s uses fold_in(key, s)
    residual: Any = None  # [R, …] of each parameter: gradients that compression has not sent yet; none without it


class Weights(NamedTuple):
    """The part of a state that evaluates and generates; all that a checkpoint of an import holds."""

    step: Int[Array, ""]
    params: decoder.Params


def init_state(
    config: RunConfig, optimizer: optax.GradientTransformation, params: decoder.Params | None = None
) -> TrainState:
    """The state before the first step, a function of the config alone (and of the ambient mesh, where gradients are compressed with
    error feedback); to be jitted with `state_shardings` as output.

    With `params` it begins from these.
    """
    params_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    params = decoder.init(config.model, params_key) if params is None else params
    scale = 2.0**15 if config.train.precision == "float16" else 1.0
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        loss_scale=LossScale(jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32)),
        key=dropout_key,
        residual=compress.initial(config.compress, params),
    )


class StateShardings(NamedTuple):
    """Where the state lives, and in between, the gradients, and the optimizer's state while it is used."""

    state: TrainState
    grads: Any
    opt_state: Any


def state_shardings(config: RunConfig, mesh: Mesh, optimizer: optax.GradientTransformation) -> StateShardings:
    """Shardings by the rules and `config.mesh.zero`.

    A leaf of the optimizer's state with the place and the shape of a parameter lives as that parameter would with fsdp; with its
    place alone (factored statistics, preconditioners), by `rules.statistic_spec`; every other leaf (counters) is replicated. With
    `config.mesh.offload` all but scalars are in the host's memory between steps.
    """
    logical = decoder.logical_axes(config.model)
    with meshes.use(mesh):
        abstract = jax.eval_shape(lambda: init_state(config, optimizer))
    whole = meshes.replicated(mesh)
    sharded = meshes.tree_shardings(mesh, logical, fsdp=True)
    replicas = meshes.tree_shardings(mesh, logical, fsdp=False)
    by_path = {
        tuple(key.key for key in path): (leaf.shape, place)
        for (path, leaf), place in zip(
            jax.tree_util.tree_leaves_with_path(abstract.params), jax.tree.leaves(sharded), strict=True
        )
    }

    def place_of(path, leaf):
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        # The optimizer's own dict keys ("muon", "adam") come before the parameter's.
        for start in range(len(names)):
            shape, place = by_path.get(names[start:], (None, None))
            if shape is not None:
                spec = rules.statistic_spec(leaf.shape, shape, tuple(place.spec), dict(mesh.shape))
                return place if shape == leaf.shape else NamedSharding(mesh, PartitionSpec(*spec))
        return whole

    opt_state = jax.tree_util.tree_map_with_path(place_of, abstract.opt_state)
    at_rest = jax.tree.map(
        lambda place, leaf: meshes.on_host(place) if config.mesh.offload and leaf.ndim else place,
        opt_state,
        abstract.opt_state,
    )
    state = TrainState(
        step=whole,
        params=sharded if config.mesh.zero == 3 else replicas,
        opt_state=at_rest,
        loss_scale=LossScale(whole, whole),
        key=whole,
    )
    grads = sharded if config.mesh.zero >= 2 else replicas
    if abstract.residual is not None:
        apart = jax.tree.map(lambda place: NamedSharding(mesh, compress.with_replicas(place.spec)), grads)
        state = state._replace(residual=apart)
    return StateShardings(state, grads, opt_state)
