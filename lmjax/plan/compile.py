"""The very train step, compiled for a TPU slice or for GPUs on this machine: its memory, collectives and FLOPs, as the compiler has them.

libtpu compiles for a slice that it does not see (extra `topology`), and XLA for GPUs that are described to it (extra `cuda`); no
accelerator is needed. What comes out is the program that would run: memory is exact, and a step that does not fit is refused here as it
would be there. The only part of `lmjax.plan` that imports jax.
"""

import contextlib
import importlib.util
import math
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from lmjax import xla_flags
from lmjax.axes import MESH_AXES
from lmjax.batch import Batch
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig
from lmjax.parts import build_parts
from lmjax.plan import flops, gpu_target, hardware, hlo, hlo_flops
from lmjax.plan.compiled import Compiled, Traffic
from lmjax.sharding import mesh as meshes
from lmjax.train import step as steps
from lmjax.train.config import RunConfig

MEGACORE = (
    "v4",
)  # of libtpu's chip configurations, that in which the two cores of a chip are one device, as they are on a TPU VM
QUIET = {  # look for no TPU; others here may compile, too
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}  # fmt: skip
LOWERED = {"tpu": "tpu", "gpu": "cuda"}  # platforms as jax's lowering names them
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
ATTENTION_KERNELS = {"fwd": 2, "dkv": 4, "dq": 3}  # products of T × T × H in each of splash's kernels


def devices_of(topology: str) -> list[Any]:
    """The devices of a slice, "v5p:4x4x4", or GPUs, "h200:8"; a `UserError` where the compiler is missing or knows no such slice."""
    row = hardware.by_topology(topology)
    if row.platform == "gpu":
        return gpus(topology, row)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("--topology compiles by libtpu, which is not here: pip install 'lmjax[topology]'")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    variable = xla_flags.VARIABLES["tpu"]  # what the scripts that launch a run pass on
    os.environ[variable] = xla_flags.flags("tpu", os.environ.get(variable, ""))
    options = {"chip_config_name": "megacore"} if row.name in MEGACORE else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology {topology}: {str(error).splitlines()[0]}") from error


def gpus(topology: str, row: hardware.Accelerator) -> list[Any]:
    """The GPUs of "h200:8"."""
    hosts, count = gpu_target.shape(topology, row.devices_per_host)
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise UserError("--topology compiles by JAX's CUDA plugin, which is not here: pip install 'lmjax[cuda]'")
    text = gpu_target.TARGETS[row.name].text()
    described = {"target_config": text, "topology": f"1x{hosts}x{count}"}
    return list(topologies.get_topology_desc(platform="cuda", topology_name=topology, **described).devices)


def compile_step(config: RunConfig, topology: str) -> Compiled:
    """Compiles the step of a run for a slice.

    Raises:
      UserError: libtpu is missing, the slice is unknown, or the run does not divide over it.
    """
    devices, row = devices_of(topology), hardware.by_topology(topology)
    parts = build_parts(config, devices)
    with meshes.use(parts.mesh), dump_folder() as dump:
        step = steps.build_step(config, parts.loss, parts.optimizer, parts.schedule, parts.mesh, parts.shardings)
        length = config.data.longest
        shape = (config.train.batch_size * config.data.seq_len // length, length)
        whole, number = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=parts.batch_sharding) for dtype in (jnp.int32, jnp.float32)
        )
        batch = Batch(tokens=whole, targets=whole, loss_weights=number, segment_ids=whole, positions=whole)
        lowered = step.trace(parts.abstract_state(), batch).lower(lowering_platforms=(LOWERED[row.platform],))
        begun = time.monotonic()
        known = {
            "topology": topology,
            "num_devices": len(devices),
            "mesh": dict(zip(MESH_AXES, config.mesh.sizes(len(devices)), strict=True)),
        }
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            needed, hbm = out_of_memory(error)
            return Compiled(
                **known, hbm_bytes=hbm, fits=False, needed_bytes=needed, argument_bytes=None, temporary_bytes=None,
                code_bytes=None, flops=None, compute_s=None, traffic=(), compile_s=time.monotonic() - begun,
            )  # fmt: skip
        seconds, text = time.monotonic() - begun, program(dump)
    used = compiled.memory_analysis()
    computed = None  # products of a GPU are calls of libraries, into which XLA does not see
    if row.platform == "tpu":
        computed = hlo_flops.flops(text) + kernel_flops(text, config.model, length)
    return Compiled(
        **known,
        hbm_bytes=row.hbm_bytes,
        fits=needed_bytes(used) <= row.hbm_bytes,  # for a TPU it does: else the compiler had refused
        needed_bytes=needed_bytes(used),
        argument_bytes=used.argument_size_in_bytes,
        temporary_bytes=used.temp_size_in_bytes,
        code_bytes=used.generated_code_size_in_bytes,
        flops=computed,
        compute_s=None if computed is None else computed / row.peak_flops(config.train.precision),
        traffic=traffic(text, parts.mesh, row),
        compile_s=seconds,
    )


def needed_bytes(used: Any) -> int:
    """What a program holds at its peak: arguments, outputs that take no argument's place, and temporaries."""
    fresh = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.argument_size_in_bytes + fresh + used.temp_size_in_bytes


@contextlib.contextmanager
def dump_folder() -> Iterator[pathlib.Path]:
    """Where the compiler writes the program: `as_text` of jax 0.10 cannot read all that a newer libtpu makes."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def program(dump: pathlib.Path) -> str:
    """The program as it would run."""
    (path,) = dump.glob("*jit_step*after_optimizations.txt")
    return path.read_text(encoding="utf-8")


def out_of_memory(error: jax.errors.JaxRuntimeError) -> tuple[int, int]:
    """(bytes needed, bytes there) of the compiler's refusal; any other error goes on."""
    found = re.search(r"\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)", str(error))
    found = found or re.search(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm", str(error))
    if found is None or "CompileTimeHbmOom" not in str(error):
        raise error
    needed, unit, there, unit_there = found.groups()
    return round(float(needed) * UNITS[unit]), round(float(there) * UNITS[unit_there])


# ------------------------------------------------------------------------------------------------------- flops and traffic


def kernel_flops(text: str, model: ModelConfig, length: int) -> float:
    """FLOPs of a device in attention's kernels, into which XLA does not see: blocks that a mask hides are not computed."""
    pairs, total = flops.visited_pairs(model, length), 0.0  # pairs of a row, on average over the layers
    for kernel in hlo_flops.kernels(text):
        if kernel.name.startswith("splash_mha_"):
            heads = [shape for shape in kernel.operands if shape[-2:] == (length, model.dim_head)]
            rows_and_heads = max(math.prod(shape[:-2]) for shape in heads)  # of the queries; keys may have fewer
            products = ATTENTION_KERNELS[kernel.name.split("_")[2]]
            total += kernel.times * products * 2 * rows_and_heads * model.dim_head * pairs
    return total


def traffic(text: str, mesh: jax.sharding.Mesh, row: hardware.Accelerator) -> tuple[Traffic, ...]:
    """The collectives by kind and mesh axes, those that send most first."""
    sizes = dict(mesh.shape)
    coordinates = places(mesh, row)
    found: dict[tuple, Traffic] = {}
    for one in hlo.collectives(text):
        key = one.kind, one.axes(sizes)
        last = found.get(key, Traffic(*key, 0, 0.0, 0.0, 0.0))
        found[key] = Traffic(
            *key,
            last.count + one.times,
            last.sent_bytes + one.sent_bytes,
            last.overlapped_bytes + one.sent_bytes * one.asynchronous,
            last.seconds + one.sent_bytes / bandwidth(one.groups, coordinates, row),
        )
    return tuple(sorted(found.values(), key=lambda each: -each.sent_bytes))


def places(mesh: jax.sharding.Mesh, row: hardware.Accelerator) -> np.ndarray:
    """Where each device of the mesh is: its coordinates in the torus, or its host."""
    if row.platform == "tpu":
        return np.array([(*device.coords, device.core_on_chip) for device in mesh.devices.flat])
    return np.array([(device.id // row.devices_per_host,) for device in mesh.devices.flat])


def bandwidth(groups: hlo.Groups, coordinates: np.ndarray, row: hardware.Accelerator) -> float:
    """Bytes a second that a device can send to the others of its group.

    By the links of the torus dims that the group spans; of GPUs by those within a host, or by the network where it spans hosts.
    """
    members = coordinates[np.array(groups)]  # groups, members, dims
    moved = np.any(members != members[:, :1], axis=(0, 1))
    if row.platform == "gpu":
        return row.network_bytes_per_s.value if moved.any() else row.interconnect_bytes_per_s
    spanned = int(moved[: row.torus_dims].sum())
    return row.interconnect_bytes_per_s * max(spanned, 1) / row.torus_dims
