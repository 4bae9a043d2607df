"""Muon (Jordan et al., 2024): steps of orthogonalized momentum for the layers' matrices.

    m ← β m + (1 - β) g,   n = β m̂ + (1 - β) ĝ,   θ ← θ - η (√max(1, out / in) · U Vᵀ + λ θ)   with n = U S Vᵀ

U Vᵀ comes from five steps of a Newton-Schulz iteration (it leaves singular values in about 0.7 … 1.2). The equations of a matrix
are optax's (`optax.contrib.scale_by_muon`); here are the true matrices of stacked and fused weights, and their dealing over a mesh:
each matrix is gathered on one device, orthogonalized and sent back, so that no device holds or computes all layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from lmjax.optim import matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class MuonState(NamedTuple):
    """Of the layers' matrices."""

    count: Int[Array, ""]
    mu: optax.Updates


def orthogonalize(stack: Float[Array, "n I O"], epsilon: float) -> Float[Array, "n I O"]:
    """Each matrix of a stack with its singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = jnp.swapaxes(stack, 1, 2) if tall else stack
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + epsilon)
    for _ in range(STEPS):
        gram = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, 1, 2) if tall else x


def direction(name: str, momentum: Array, epsilon: float, deal: matrices.Dealer) -> Array:
    """The orthogonalized momentum of one weight, each of its matrices scaled by its shape."""
    stacks = []
    for stack in matrices.split(name, momentum):
        scale = max(1.0, stack.shape[2] / stack.shape[1]) ** 0.5
        stacks.append(scale * deal(lambda x: orthogonalize(x, epsilon), stack))
    return matrices.join(name, stacks, momentum)


def scale_by_muon(beta: float, epsilon: float) -> optax.GradientTransformation:
    """Momentum → direction; parameters that are no layers' matrices must be masked."""

    def init(params):
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(mu, beta, count + 1),
            optax.tree.bias_correction(grads, beta, count),
        )
        deal = matrices.Dealer()
        updates = jax.tree_util.tree_map_with_path(
            lambda path, x: direction(matrices.leaf_name(path), x, epsilon, deal), ahead
        )
        return updates, MuonState(count, mu)

    return optax.GradientTransformation(init, update)
