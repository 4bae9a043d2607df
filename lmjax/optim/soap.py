"""SOAP (Vyas et al., 2024, 2409.11321): Adam in the eigenbasis of Shampoo's statistics.

For a block G of a layer's matrix, with bases Q_L, Q_R:

    L ← β₂ L + (1 - β₂) G Gᵀ,   R ← β₂ R + (1 - β₂) Gᵀ G
    M ← β₁ M + (1 - β₁) G,      V ← β₂ V + (1 - β₂) (Q_Lᵀ G Q_R)²
    θ ← θ - η (Q_L [Q_Lᵀ M̂ Q_R / (√V̂ + ε)] Q_Rᵀ + λ θ)

Every `every` steps the bases follow L and R by one step of orthogonal iteration (a product and a QR), after their columns are put
in order of the eigenvalues that they estimate. As in the authors' code the first gradient only makes the bases, by an eigendecomposition.

A matrix is cut into blocks of at most `block` × `block` (as in distributed Shampoo, 2309.06497): statistics cost at most four times its
parameters where its sides divide. Matrices are dealt over the devices, each with the statistics of its blocks, [m, n, b, b].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from lmjax.optim.matrices import Dealer, join, leaf_name, split
from lmjax.optim.shapes import side


class Soap(NamedTuple):
    """What is chosen."""

    b1: float
    b2: float  # of V, L and R
    epsilon: float
    block: int  # largest side of a block
    every: int  # steps between refreshes of the bases


class Statistics(NamedTuple):
    """Of the blocks of one stack of m matrices, n of b × c in each."""

    left: Float[Array, "m n b b"]
    right: Float[Array, "m n c c"]
    left_basis: Float[Array, "m n b b"]
    right_basis: Float[Array, "m n c c"]
    nu: Float[Array, "m n b c"]  # V


class SoapState(NamedTuple):
    """Of the layers' matrices."""

    count: Int[Array, ""]  # gradients seen
    mu: optax.Updates
    statistics: Any  # for each parameter a tuple of `Statistics`, one for each of its stacks


def cut(stack: Float[Array, "m I O"], block: int) -> Float[Array, "m n b c"]:
    """The blocks of each matrix."""
    count, rows, columns = stack.shape
    b, c = side(rows, block), side(columns, block)
    return stack.reshape(count, rows // b, b, columns // c, c).swapaxes(2, 3).reshape(count, -1, b, c)


def paste(blocks: Float[Array, "m n b c"], shape: tuple[int, ...]) -> Float[Array, "m I O"]:
    """The inverse of `cut`; `shape` is [I, O]."""
    count, _, b, c = blocks.shape
    return blocks.reshape(count, shape[0] // b, shape[1] // c, b, c).swapaxes(2, 3).reshape(count, *shape)


def transposed(x: Array) -> Array:
    """Each matrix of a stack."""
    return jnp.swapaxes(x, -1, -2)


def rotate(x: Float[Array, "m n b c"], s: Statistics) -> Float[Array, "m n b c"]:
    """Into the bases."""
    return transposed(s.left_basis) @ x @ s.right_basis


def follow(
    statistic: Float[Array, "m n b b"], basis: Float[Array, "m n b b"]
) -> tuple[Float[Array, "m n b b"], Int[Array, "m n b"]]:
    """The basis after a step of orthogonal iteration, and the order that its columns were put in."""
    values = jnp.einsum("mnij,mnik,mnkj->mnj", basis, statistic, basis)
    order = jnp.argsort(-values, axis=-1)
    basis = jnp.take_along_axis(basis, order[..., None, :], axis=-1)
    return jnp.linalg.qr(statistic @ basis)[0], order


def step(
    both: Float[Array, "m 2 I O"], s: Statistics, count: Int[Array, ""], soap: Soap
) -> tuple[Float[Array, "m I O"], Statistics]:
    """The direction of a stack from its gradients and M, and what is remembered of its blocks."""
    g, m = (cut(x, soap.block) for x in jnp.unstack(both, axis=1))
    power = jnp.maximum(count, 1)  # the first gradient makes no step: the second is Adam's first
    nu = soap.b2 * s.nu + (1 - soap.b2) * rotate(g, s) ** 2
    m_hat, v_hat = m / (1 - soap.b1**power), nu / (1 - soap.b2**power)
    scaled = rotate(m_hat, s) / (jnp.sqrt(v_hat) + soap.epsilon)
    update = s.left_basis @ scaled @ transposed(s.right_basis)
    left = soap.b2 * s.left + (1 - soap.b2) * g @ transposed(g)
    right = soap.b2 * s.right + (1 - soap.b2) * transposed(g) @ g

    def begin():
        bases = [jnp.linalg.eigh(x)[1][..., ::-1] for x in (left, right)]
        return jnp.zeros_like(g), Statistics(left, right, *bases, s.nu)

    def refresh():
        (left_basis, rows), (right_basis, columns) = follow(left, s.left_basis), follow(right, s.right_basis)
        ordered = jnp.take_along_axis(jnp.take_along_axis(nu, rows[..., None], -2), columns[..., None, :], -1)
        return update, Statistics(left, right, left_basis, right_basis, ordered)

    def stay():
        return update, Statistics(left, right, s.left_basis, s.right_basis, nu)

    kind = jnp.where(count == 0, 0, jnp.where(count % soap.every == 0, 1, 2))
    update, s = jax.lax.switch(kind, [begin, refresh, stay])
    return paste(update, both.shape[2:]), s


def scale_by_soap(soap: Soap) -> optax.GradientTransformation:
    """Gradient → direction; parameters that are no layers' matrices must be masked."""

    def init(params):
        def statistics(path, weight):
            stacks = [cut(stack, soap.block) for stack in split(leaf_name(path), weight)]
            squares = [[jnp.zeros((*x.shape[:2], size, size), x.dtype) for size in x.shape[2:]] for x in stacks]
            return tuple(
                Statistics(*pair, *map(jnp.zeros_like, pair), jnp.zeros_like(x))
                for pair, x in zip(squares, stacks, strict=True)
            )

        mu = jax.tree.map(jnp.zeros_like, params)
        return SoapState(jnp.zeros((), jnp.int32), mu, jax.tree_util.tree_map_with_path(statistics, params))

    def update(grads, state, params=None):
        deal = Dealer()
        mu = jax.tree.map(lambda m, g: jnp.where(state.count, soap.b1 * m + (1 - soap.b1) * g, m), state.mu, grads)

        def one(path, g, m, statistics):
            name, done = leaf_name(path), []
            for *stacks, s in zip(split(name, g), split(name, m), statistics, strict=True):
                stack = jnp.stack(stacks, axis=1), s
                done.append(deal(lambda stack, count: step(*stack, count, soap), stack, state.count))
            directions, statistics = zip(*done, strict=True)
            return join(name, directions, g), statistics

        done = jax.tree_util.tree_map_with_path(one, grads, mu, state.statistics)
        updates, statistics = (jax.tree.map(lambda _, new, i=i: new[i], grads, done) for i in range(2))
        return updates, SoapState(state.count + 1, mu, statistics)

    return optax.GradientTransformation(init, update)
