"""Products with operands of eight bits: e4m3 forward, e5m2 for gradients (Micikevicius et al., 2022, 2209.05433).

    q(a) = round(a / s),   s = max |a| / largest of the format           (current scaling: no history, nothing to save)

    y  = s_x s_w · q(x) q(w)         s_x for each token, s_w for the weight
    dx = s_g s_w · q(g) q(w)ᵀ        s_g for each token
    dw = s_f · q(x)ᵀ q(f),           f = s_x g: a token's scale cannot leave a sum over tokens, so it goes with the gradient

A scale for each token, and none over several, keeps the promise that a document does not see its neighbours: not even by rounding.
Sums are float32, rounded to the result's dtype before the scales; q(x), q(w) and the scales are what the backward pass keeps.
Where hardware has no such units the numbers are the same, by casting.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmjax.config import need

FORWARD, BACKWARD = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
CAPABILITY = (8, 9)  # of the first NVIDIA chips with such units
TPUS = ("TPU7x",)


def has_units(device: Any) -> bool:
    """Whether a `jax.Device` multiplies numbers of eight bits itself."""
    if device.platform == "gpu":
        return tuple(map(int, str(device.compute_capability).split("."))) >= CAPABILITY
    return device.device_kind in TPUS


def check_platform(precision: str, device: Any) -> None:
    """A `UserError` for `train.precision="fp8"` on a `jax.Device` without units for it."""
    need(
        precision != "fp8" or has_units(device),
        f"config.train.precision='fp8': this {device.device_kind} has no units for it; bfloat16 is faster, and "
        "'fp8_emulated' computes the same numbers by casting",
    )


def quantize(x: Float[Array, "*dims"], dtype: jnp.dtype, dims: tuple[int, ...]) -> tuple[Array, Float[Array, "*_"]]:
    """x over its scale in `dtype`, and the scale, float32: one for each place outside `dims`, which stay with size 1."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / float(jnp.finfo(dtype).max))
    return (x / scale).astype(dtype), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: Float[Array, "M K"], w: Float[Array, "K *N"], out: jnp.dtype) -> Float[Array, "M *N"]:
    """x · w in dtype `out`; the gradients come in the operands' dtypes."""
    return _forward(x, w, out)[0]


def _dot(a: Array, b: Array, contract: tuple, out: jnp.dtype) -> Array:
    # In the dtype that is asked for, before the scales: a float32 copy on its way there would be the larger part of the traffic.
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=out)


def _all(x: Array) -> tuple[int, ...]:
    return tuple(range(x.ndim))


def _forward(x, w, out):
    (x8, x_scale), (w8, w_scale) = quantize(x, FORWARD, (1,)), quantize(w, FORWARD, _all(w))
    scales = x_scale.reshape(-1, *(1,) * (w.ndim - 1)) * w_scale.reshape(())
    y = _dot(x8, w8, ((1,), (0,)), out) * scales
    dtypes = jnp.zeros((), x.dtype), jnp.zeros((), w.dtype)
    return y.astype(out), (x8, x_scale, w8, w_scale, dtypes)


def _backward(out, saved, g):
    x8, x_scale, w8, w_scale, (like_x, like_w) = saved
    outer = _all(g)[1:]
    g8, g_scale = quantize(g, BACKWARD, outer)
    dx = _dot(g8, w8, (outer, outer), like_x.dtype) * (g_scale.reshape(-1, 1) * w_scale.reshape(()))
    f8, f_scale = quantize(g * x_scale.reshape(g_scale.shape), BACKWARD, _all(g))
    dw = _dot(x8, f8, ((0,), (0,)), jnp.dtype("float32")) * f_scale.reshape(())
    return dx.astype(like_x.dtype), dw.astype(like_w.dtype)


product.defvjp(_forward, _backward)
