"""GPUs as XLA's compiler needs to know them, to compile for one that is not here. No jax.

Figures of the chips are those of XLA's own descriptions (github.com/openxla/xla, xla/backends/gpu/target_config/specs, read 2026).
"""

import dataclasses

from lmjax.errors import UserError

CUDNN = "major: 9 minor: 10"


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of chip."""

    description: str
    capability: str  # of CUDA, with the instructions that only this chip has
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    shared_per_core: int  # bytes
    shared_optin: int  # bytes of a block that asks for more

    def text(self) -> str:
        """As a `GpuTargetConfigProto`."""
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ {self.capability} }}
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_per_core}
              shared_memory_per_block_optin: {self.shared_optin}
              core_count: {self.cores} fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              device_memory_size: {self.memory_bytes} memory_bandwidth: {self.memory_bytes_per_s}
              l2_cache_size: {self.l2_bytes}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ {CUDNN} }}
            device_description_str: "{self.description}"
        """


HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES"
TARGETS = {  # by the names of `lmjax.plan.hardware`
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", "major: 8", 108, 64, 1.41, 85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936, 166_912
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", HOPPER, 132, 128, 1.98, 84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472, 232_448
    ),
    "h200": Target(
        "NVIDIA H200 141GB HBM3e", HOPPER, 132, 128, 1.98, 151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472, 232_448
    ),
    "b200": Target(
        "NVIDIA B200", "major: 10 feature_extension: ACCELERATED_FEATURES", 148, 128, 1.965, 191_514_411_008,
        7_672_320_000_000, 132_644_864, 233_472, 232_448,
    ),
}  # fmt: skip


def shape(topology: str, per_host: int) -> tuple[int, int]:
    """(hosts, GPUs of each) of "h200:8" or "h200:32"; a `UserError` for a count that fills no hosts or an unknown chip."""
    name, _, size = topology.partition(":")
    if name not in TARGETS:
        raise UserError(f"--topology {topology!r}: of GPUs the compiler knows {', '.join(TARGETS)}")
    count = int(size) if size.isdecimal() else 0
    if count < 1 or (count > per_host and count % per_host):
        raise UserError(
            f"--topology {topology!r}: say how many GPUs, up to {per_host} or a multiple, as {name}:{per_host}"
        )
    return max(count // per_host, 1), min(count, per_host)
