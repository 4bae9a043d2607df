"""What to change so that a run fits, or is faster: a search over meshes, remat and micro-batches.

The model, the tokens of a step and the devices stay. Each candidate is a whole config that `plan` and `train` take: it is ranked by the
roofline of its step (`lmjax/plan/time.py`), and fits if its estimated memory leaves `HEADROOM` of the HBM free.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from lmjax.axes import MESH_AXES
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig
from lmjax.plan import memory
from lmjax.plan.hardware import Accelerator
from lmjax.plan.time import Roofline, count_slices, roofline
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig

HEADROOM = 0.1  # of HBM: the error that the estimate of memory is held to
REMAT = ("none", "dots", "block_outputs", "full")  # keeps less and less
MOST_TENSOR = 16  # shards of a product: beyond, its parts are too small for the hardware's units
MOST_STAGES = 16  # of a pipeline: beyond, few runs have the micro-batches to fill it
KEPT = 5  # candidates told
FREE = ("data", "stage", "fsdp", "expert", "tensor")  # axes whose sizes are searched
CUTS = ("dcn_data", "dcn_stage")  # what lies between slices


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config for the same run, with what it takes."""

    config: RunConfig
    memory_bytes: int  # of a device
    roofline: Roofline
    slices: int = 1  # over which it is laid

    @property
    def overrides(self) -> tuple[str, ...]:
        """What makes it out of any config of this run, as on the command line."""
        axes = (*MESH_AXES, *(CUTS if self.slices > 1 else ()))
        mesh = (f"--config.mesh.{axis}={getattr(self.config.mesh, axis)}" for axis in axes)
        return (
            *mesh,
            f"--config.model.remat={self.config.model.remat}",
            f"--config.train.accumulation={self.config.train.accumulation}",
        )


def search(config: RunConfig, num_devices: int, accelerator: Accelerator, slices: int = 1) -> list[Candidate]:
    """The candidates that fit, fastest first; with the same time that which takes less memory."""
    found = fitting(config, num_devices, accelerator, slices)
    return sorted(found, key=lambda one: (round(one.roofline.step_s, 4), one.memory_bytes))[:KEPT]


def fewest_devices(config: RunConfig, accelerator: Accelerator, most: int = 1 << 14) -> int | None:
    """The fewest devices, a power of two, on which something fits; none: not even on `most`."""
    for count in (1 << power for power in range(most.bit_length())):
        if any(True for _ in fitting(config, count, accelerator, count_slices(accelerator, count, None))):
            return count
    return None


def fitting(config: RunConfig, num_devices: int, accelerator: Accelerator, slices: int = 1) -> Iterator[Candidate]:
    """For each mesh and remat, the one of fewest micro-batches that fits: more of them only add communication."""
    room = accelerator.hbm_bytes * (1 - HEADROOM)
    models = [dataclasses.replace(config.model, remat=remat) for remat in REMAT]
    for mesh in meshes(config, num_devices, slices):
        counts = accumulations(config, mesh, num_devices)
        for model in models:
            for accumulation in counts:
                changed = variant(config, mesh, model, accumulation)
                used = memory.memory(changed, num_devices).total
                if used <= room:
                    yield Candidate(changed, used, roofline(changed, num_devices, accelerator, slices), slices)
                    break


def variant(config: RunConfig, mesh: MeshConfig, model: ModelConfig, accumulation: int) -> RunConfig:
    """The config with these three changed."""
    train = dataclasses.replace(config.train, accumulation=accumulation)
    return dataclasses.replace(config, mesh=mesh, model=model, train=train)


def accumulations(config: RunConfig, mesh: MeshConfig, num_devices: int) -> list[int]:
    """Counts of micro-batches whose rows divide over the mesh, ascending; none where a parameter does not."""
    possible = []
    for count in divisors(config.train.batch_size):
        try:
            memory.layout(variant(config, mesh, config.model, count), num_devices)
        except UserError:
            break
        possible.append(count)
    return possible


def meshes(config: RunConfig, num_devices: int, slices: int = 1) -> Iterator[MeshConfig]:
    """Every data × stage × fsdp × tensor (× expert, with experts), over several slices with every cut of data and stage between
    them; what else the config splits stays split."""
    model, exact = config.model, config.compress.kind == "none"  # compressed gradients are those of whole replicas
    fixed = {
        axis: size for axis, size in zip(MESH_AXES, config.mesh.given, strict=True) if axis not in FREE and size > 1
    }
    left, rest = divmod(num_devices, math.prod(fixed.values()))
    if rest:
        return
    layers = model.num_layers // model.stage_repeats
    counts = {
        "tensor": [n for n in divisors(left) if n <= MOST_TENSOR],
        "stage": [n for n in divisors(layers) if n == 1 or (exact and n <= MOST_STAGES)],
        "expert": divisors(model.moe.num_experts) if model.moe and exact else [1],
        "fsdp": divisors(left),
    }
    for chosen in itertools.product(*counts.values()):
        data, rest = divmod(left, math.prod(chosen))
        sizes = dict(zip(counts, chosen, strict=True)) | {"data": data}
        if rest or (data == 1 and not exact):
            continue
        mesh = dataclasses.replace(config.mesh, **sizes)
        if slices == 1:
            yield mesh
            continue
        for cut in divisors(math.gcd(slices, sizes["stage"])):
            mesh = dataclasses.replace(mesh, dcn_stage=cut, dcn_data=-1)
            if fits(mesh, num_devices, slices):
                yield mesh


def fits(mesh: MeshConfig, num_devices: int, slices: int) -> bool:
    """Whether its axes divide over the slices."""
    try:
        mesh.slice_sizes(mesh.sizes(num_devices), slices)
    except UserError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
