"""Next-token cross-entropy, in chunks.

    nll = Σ w (log Z - logit[target]),   log Z = log Σ_v exp logit[v],   z = Σ w log² Z

Every loss here is a sum with its denominator; they are divided once, after accumulation and over all devices. The logits of a
chunk of tokens exist at one time, never the batch's: the gradients with respect to the hidden states and the output weights
are computed in the forward pass, chunk by chunk, and only scaled by the cotangent in the backward pass.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from lmjax.axes import FSDP, TENSOR
from lmjax.batch import Batch
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.blockwise import soft_cap
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes, dense
from lmjax.model.router import RouterSums, auxiliary, summed
from lmjax.sharding.mesh import batch_shards, constrain, is_inside, is_manual, size


class Sums(NamedTuple):
    """A loss before its division."""

    total: Float[Array, ""]  # what is differentiated: nll + z_loss · z + the routers' losses
    weight: Float[Array, ""]  # the denominator: the sum of the loss weights
    nll: Float[Array, ""]  # pure negative log-likelihood, nats: what is reported
    z: Float[Array, ""]  # Σ w log² Z, without its coefficient
    router: RouterSums | None = None  # of a mixture of experts


class HeadConfig(NamedTuple):
    """The static part of the loss head."""

    z_loss: float  # coefficient of log² Z
    softcap: float | None  # of the logits
    chunk: int  # tokens of one device whose logits exist at one time
    types: Dtypes


def _logits(x: Float[Array, "B T D"], w: Float[Array, "D V"], types: Dtypes) -> Float[Array, "B T V"]:
    return constrain(dense(x, w, types._replace(activation=jnp.dtype("float32"))), "batch", None, "vocab")


def _chosen(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Each target's logit."""
    if is_inside() and (size(TENSOR) > 1 or not is_manual(FSDP)):
        # A gather from a split vocabulary, inside a `shard_map` over another axis, is more than XLA's partitioner can.
        ids = jnp.arange(logits.shape[-1])
        return jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1)
    return _taken(logits, targets)


@jax.custom_vjp
def _taken(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """A gather whose gradient is a comparison: a scatter would write the logits' gradient out before it can be cast."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


_taken.defvjp(
    lambda logits, targets: (_taken(logits, targets), (targets, logits.shape[-1])),
    lambda saved, d_chosen: (jnp.where(jnp.arange(saved[1]) == saved[0][..., None], d_chosen[..., None], 0.0), None),
)


def _chunk_sums(logits, targets, weights, head: HeadConfig):
    """(total, (nll, z)) of one chunk."""
    logits = soft_cap(logits, head.softcap)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = _chosen(logits, targets)
    nll = jnp.sum(weights * (log_z - chosen))
    z = jnp.sum(weights * log_z**2)
    return nll + head.z_loss * z, (nll, z)


def _chunks(chunk: int, *arrays: Array) -> list[Array]:
    """Each [B, T, …] → [count, B, T / count, …], padded with zeros (weight 0): every device keeps its rows in each chunk."""
    rows, length = arrays[0].shape[:2]
    count = min(length, -(-rows * length // (chunk * batch_shards())))
    padding = [(0, 0), (0, -length % count)]
    padded = [jnp.pad(x, padding + [(0, 0)] * (x.ndim - 2)) if length % count else x for x in arrays]
    return [jnp.moveaxis(x.reshape(rows, count, -1, *x.shape[2:]), 1, 0) for x in padded]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_loss(
    x: Float[Array, "B T D"],
    w: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    head: HeadConfig,
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
    """(total, (nll, z)) over all tokens; gradients flow through `total` alone."""
    inputs = _chunks(head.chunk, x, targets, weights)

    def body(sums, chunk):
        total, (nll, z) = _chunk_sums(_logits(chunk[0], w, head.types), chunk[1], chunk[2], head)
        return (sums[0] + total, sums[1] + nll, sums[2] + z), None

    (total, nll, z), _ = jax.lax.scan(body, (jnp.zeros(()),) * 3, inputs)
    return total, (nll, z)


def _d_product(
    x: Float[Array, "B T D"], w: Float[Array, "D V"], d_logits: Float[Array, "B T V"], types: Dtypes
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"]]:
    """A chunk's gradients of x, and of w in the dtype of its sum: another copy of D × V would not fit. Both products read one cast copy."""
    flat, d_logits = (a.astype(types.matmul).reshape(-1, a.shape[-1]) for a in (x, d_logits))
    dx = jnp.matmul(d_logits, w.astype(types.matmul).T, preferred_element_type=types.activation)
    return dx.reshape(x.shape).astype(x.dtype), jnp.matmul(flat.T, d_logits, preferred_element_type=jnp.float32)


def _head_forward(x, w, targets, weights, head):
    inputs = _chunks(head.chunk, x, targets, weights)
    grad = jax.value_and_grad(_chunk_sums, has_aux=True)

    def body(carry, chunk):
        sums, dw = carry
        (total, (nll, z)), d_logits = grad(_logits(chunk[0], w, head.types), chunk[1], chunk[2], head)
        dx, d_chunk = _d_product(chunk[0], w, d_logits, head.types)
        return ((sums[0] + total, sums[1] + nll, sums[2] + z), dw + d_chunk), dx

    start = ((jnp.zeros(()),) * 3, jnp.zeros(w.shape, jnp.float32))
    ((total, nll, z), dw), dx = jax.lax.scan(body, start, inputs)
    dx = jnp.moveaxis(dx, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    return (total, (nll, z)), (dx, dw.astype(w.dtype))


def _head_backward(head, saved, cotangents):
    scale = cotangents[0]  # of `total`; nll and z are reported, not differentiated
    dx, dw = saved
    return (dx * scale).astype(dx.dtype), (dw * scale).astype(dw.dtype), None, None


head_loss.defvjp(_head_forward, _head_backward)


def next_token_loss(
    model: ModelConfig,
    params: decoder.Params,
    batch: Batch,
    key: PRNGKeyArray | None,
    z_loss: float,
    chunk: int,
    types: Dtypes,
) -> Sums:
    """The sums of a micro-batch; `key` turns dropout on."""
    mask = Mask(segments=batch.segment_ids)
    hidden, _, routed = decoder.forward_routed(
        model, params, batch.tokens, batch.positions, mask, types, key=key, prefix=batch.prefix
    )
    head = HeadConfig(z_loss, model.logit_softcap, chunk, types)
    hidden, weights = decoder.output_weights(model, params, hidden, types)
    total, (nll, z) = head_loss(hidden, weights, batch.targets, batch.loss_weights, head)
    router = None if routed is None else summed(routed, jnp.sum(batch.loss_weights, axis=1))
    total = total if router is None else total + auxiliary(model.moe, router)
    return Sums(total, jnp.sum(batch.loss_weights), nll, z, router)
