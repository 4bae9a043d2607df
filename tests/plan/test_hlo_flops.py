"""FLOPs read from the text of a program: of a product in each form that a compiler writes it in, and of loops around it."""

import jax
import jax.numpy as jnp
import pytest

from lmjax.plan import hlo_flops

LOOP = """HloModule m
%body (p: (u32[], f32[8,16])) -> (u32[], f32[8,16]) {
  %p = (u32[], f32[8,16]) parameter(0)
  %by = u32[] constant(STEP)
  %i = u32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0} constant({...})
  %next = u32[] add(%i, %by)
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (u32[], f32[8,16]) tuple(%next, %y)
}

%cond (q: (u32[], f32[8,16])) -> pred[] {
  %q = (u32[], f32[8,16]) parameter(0)
  %bound = u32[] constant(12)
  %j = u32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%j, %bound), direction=LT
}

ENTRY %main (a: (u32[], f32[8,16])) -> (u32[], f32[8,16]) {
  %a = (u32[], f32[8,16]) parameter(0)
  ROOT %loop = (u32[], f32[8,16]) while(%a), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize("step, times", [(1, 12), (2, 6), (5, 3)])
def test_a_loop_counts_as_often_as_it_runs(step, times):
    """Unrolled loops count by more than one."""
    assert hlo_flops.flops(LOOP.replace("STEP", str(step))) == times * 2 * 8 * 16 * 16


def test_the_compilers_note_of_the_trips_wins():
    text = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo_flops.flops(text) == 7 * 2 * 8 * 16 * 16


def test_a_loop_that_does_not_tell():
    with pytest.raises(ValueError, match="trip count is not told"):
        hlo_flops.flops(LOOP.replace("direction=LT", "direction=NE"))


@pytest.mark.parametrize(
    "out, left, right, rest, expected",
    [
        # a plain product, [8, 16] · [16, 32]
        ((8, 32), (8, 16), (16, 32), "dim_labels=bf_io->bf", 8 * 16 * 32),
        # gate and up, [T, D] · [D, 2, F]: each of the two places of the window meets the one input once
        ((64, 2, 32), (64, 16, 1), (2, 32, 16), "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f", 64 * 16 * 64),
        # a sum over heads, [T, K, H] · [K, H, D]
        ((64, 32, 1), (64, 4, 16), (32, 4, 16), "window={size=4}, dim_labels=b0f_o0i->bf0", 64 * 4 * 16 * 32),
    ],
)  # fmt: skip
def test_convolutions_are_products(out, left, right, rest, expected):
    assert hlo_flops.convolution_flops(out, left, right, rest) == 2 * expected


def test_places_that_meet_nothing_do_not_count():
    """A window of 3 over 5 numbers with padding 1: the ends meet two."""
    assert hlo_flops.meetings(5, 5, 3, {"pad": "1_1"}) == 13
    assert hlo_flops.meetings(2, 4, 2, {"stride": "2"}) == 4
    assert hlo_flops.meetings(3, 2, 1, {"lhs_dilate": "2"}) == 2


def test_a_program_of_this_machine():
    """A scan of products and one after it, forward and backward: three products for each, and none for the first's input."""

    def loss(weights, x, head):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] @ head)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 16, 16), (8, 16), (16, 4))]
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile().as_text()
    products = 3 * 5 * 2 * 8 * 16 * 16 + 2 * 2 * 8 * 16 * 4
    assert hlo_flops.flops(text) == pytest.approx(products, rel=0.02)


def test_kernels_are_counted_by_name():
    call = '%k.3 = f32[8,16]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"'
    text = LOOP.replace("STEP", "1").replace("  %next", f"  {call}\n  %next")
    assert hlo_flops.kernels(text) == [hlo_flops.Kernel("k", ((8, 16),), 12)]
