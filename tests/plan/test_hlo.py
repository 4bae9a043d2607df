"""The reader of collectives: a real program whose counts are known by construction, and the ways in which text writes the rest."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from lmjax.plan import hlo
from lmjax.sharding import mesh as meshes
from lmjax.sharding.config import MeshConfig

SIZES = {"data": 2, "fsdp": 4}

TPU = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%start (p: bf16[16,8]) -> (bf16[16,8], bf16[64,8]) {
  %all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups=mesh['x'=2,'y'=4] {'y'}, frontend_attributes={chain_id="6"}
}

%async_collective_fusion.7 (p: bf16[16,8]) -> bf16[64,8] {
  %all-gather.2 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups=mesh['x'=2,'y'=4] {'y'}, frontend_attributes={chain_id="6"}
}

%cond (t: (s32[], f32[4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %f.1 = (bf16[16,8], bf16[64,8]) fusion(%x), kind=kCustom, calls=%start
  %f.2 = bf16[64,8] fusion(%f.1), kind=kOutput, calls=%async_collective_fusion.7
  %rs = f32[4]{0:T(128)} reduce-scatter(%y), channel_id=4, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body
  %cp = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%z), channel_id=5, source_target_pairs={{0,1},{1,0},{4,5},{5,4}}
  %cpd = f32[4] collective-permute-done(%cp)
}
"""


def test_the_tpu_writes_a_gather_in_parts_and_trip_counts_in_conditions():
    gather, scatter, permute = hlo.collectives(TPU)
    assert (gather.kind, gather.times, gather.asynchronous, gather.whole_bytes) == ("all-gather", 5, True, 64 * 8 * 2)
    assert gather.axes(SIZES) == ("fsdp",) and gather.sent_bytes == 5 * 64 * 8 * 2 * 3 / 4
    assert (scatter.times, scatter.whole_bytes, scatter.axes(SIZES)) == (5, 32, ("data",))
    assert permute.arrays == (("f32", (4,)),) and permute.sent_bytes == 16 and permute.axes(SIZES) == ("fsdp",)


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}", ((0, 1), (2, 3))),
        ("mesh['x'=4] {'x':(1)2}", ((0, 2), (1, 3))),
        ("mesh['x'=4] {'x':(2)2}", ((0, 1), (2, 3))),
    ],
)
def test_groups_are_written_in_several_ways(written, groups):
    assert hlo.groups_of(f"%a = f32[] all-reduce(%b), replica_groups={written}, to_apply=%add") == groups


def test_what_cannot_be_told_is_an_error():
    with pytest.raises(ValueError, match="trip count"):
        hlo.collectives(TPU.replace("direction=LT", "direction=GT"))
    with pytest.raises(ValueError, match="groups"):
        hlo.collectives(TPU.replace("[4,2]<=[2,4]T(1,0)", "somehow"))


def test_an_all_reduce_that_a_tpu_fuses_with_its_slice_is_a_reduce_scatter():
    fused = TPU.replace("%start (", "%all-reduce-scatter.1 (").replace("calls=%start", "calls=%all-reduce-scatter.1")
    fused = fused.replace(
        "%all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(", "%a = bf16[64,8]{1,0} all-reduce("
    )
    first = hlo.collectives(fused.replace(', frontend_attributes={chain_id="6"}', ""))[0]
    assert (first.kind, first.whole_bytes, first.sent_bytes) == ("reduce-scatter", 1024, 5 * 1024 * 3 / 4)


def test_a_program_whose_collectives_are_known():
    """Three turns of a loop over `fsdp`, one sum over both axes after it."""
    mesh = meshes.make_mesh(MeshConfig(data=2, fsdp=4))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec(), check_vma=False
    )
    def program(x):
        def turn(x, _):
            whole = jax.lax.all_gather(jnp.sin(x), "fsdp", tiled=True)
            return jax.lax.psum_scatter(whole * whole, "fsdp", tiled=True), None

        return jax.lax.psum(jnp.sum(jax.lax.scan(turn, x, length=3)[0]), ("data", "fsdp"))

    found = hlo.collectives(jax.jit(program).lower(jnp.ones((64, 8))).compile().as_text())
    sizes = dict(mesh.shape)
    counted = {(one.kind, one.times, one.whole_bytes, one.axes(sizes)) for one in found}
    assert counted >= {("all-gather", 3, 2048, ("fsdp",)), ("all-reduce", 1, 4, ("data", "fsdp"))}
    assert all(one.group_size == 4 for one in found if one.times == 3)
