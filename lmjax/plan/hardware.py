"""Accelerators, data centres and grids: the figures that MFU, memory, time, cost and emissions are computed from, each with its source.

A row describes what JAX calls a device. That is a chip, except where a chip is two devices (TPU7x): there each figure is
half the chip's. Peaks are of dense matrix products (no sparsity). HBM is counted in GiB, whatever the vendor's page calls
them: an "80 GB" card reports 80 × 2³⁰ bytes, within a percent. A runtime keeps a little of it for itself.
"""

import dataclasses
from typing import Literal

from lmjax.config import did_you_mean
from lmjax.errors import UserError

GiB = 2**30
Precision = Literal["float32", "bfloat16", "float16", "fp8", "fp8_emulated"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that is not ours, with where it stands; none: no source that we trust tells it, and it is printed as unknown."""

    value: float | None
    source: str = ""  # and the year it was read, or is of


UNKNOWN = Figure(None, "not published")


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device."""

    name: str  # as `--hardware` takes it
    platform: Literal["tpu", "gpu"]
    kinds: tuple[str, ...]  # `jax.Device.device_kind`, exactly
    bfloat16_flops: float  # FLOP/s; float16 runs at the same rate
    float32_flops: float  # FLOP/s of a float32 product at JAX's default precision, see `peak_flops`
    hbm_bytes: int
    hbm_bytes_per_s: float
    interconnect_bytes_per_s: float  # sent over all links together, one direction
    torus_dims: int  # over which the links are spread evenly; 0: a switch, all links for any peer
    devices_per_host: int  # of the largest usual host
    source: str  # where the figures stand, and the year they were read
    watts: Figure = UNKNOWN  # of the device alone, at its limit: hosts and network come on top
    usd_per_hour: Figure = UNKNOWN  # list price on demand, its share of the host in it
    devices_per_chip: int = 1
    network_bytes_per_s: Figure = UNKNOWN  # its share of the host's links to other slices or nodes, one direction

    def peak_flops(self, precision: Precision) -> float:
        """FLOP/s that products at this precision could reach.

        At JAX's default precision a TPU multiplies float32 operands in one bfloat16 pass, and a GPU in TF32. Eight bits count
        against bfloat16's peak, so that MFU tells what they gain.
        """
        return self.float32_flops if precision == "float32" else self.bfloat16_flops


# List prices move: `--usd-per-hour` states yours.
GOOGLE = "SkyPilot's catalog of Google Cloud, on demand, {}, read 2026"
LAMBDA = "SkyPilot's catalog of Lambda, eight of a host, read 2026"
NEBIUS = "SkyPilot's catalog of Nebius, eight of a host, read 2026"

ACCELERATORS = (
    Accelerator(
        "v4", "tpu", ("TPU v4",), 275e12, 275e12, 32 * GiB, 1200e9, 300e9, 3, 4,
        "docs.cloud.google.com/tpu/docs/v4, 2026; links: arXiv 2304.01433 (six of 50 GB/s)",
        Figure(192.0, "arXiv 2304.01433, the most that was measured, 2023"), Figure(3.22, GOOGLE.format("us-central2")),
    ),
    Accelerator(
        "v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 197e12, 197e12, 16 * GiB, 819e9, 200e9, 2, 8,
        "docs.cloud.google.com/tpu/docs/v5e, 2026 (400 GB/s both ways)",
        UNKNOWN, Figure(1.20, GOOGLE.format("us-central1")),
        network_bytes_per_s=Figure(25e9 / 8, "docs.cloud.google.com/tpu/docs/v5e, 2026 (6.4 Tbps for 256 chips)"),
    ),
    Accelerator(
        "v5p", "tpu", ("TPU v5", "TPU v5p"), 459e12, 459e12, 95 * GiB, 2765e9, 600e9, 3, 4,
        "docs.cloud.google.com/tpu/docs/v5p, 2026 (1200 GB/s both ways)",
        UNKNOWN, Figure(4.20, GOOGLE.format("us-central1")),
        network_bytes_per_s=Figure(50e9 / 8, "docs.cloud.google.com/tpu/docs/v5p, 2026 (50 Gbps)"),
    ),
    Accelerator(
        "v6e", "tpu", ("TPU v6 lite", "TPU v6e"), 918e12, 918e12, 32 * GiB, 1638e9, 400e9, 2, 8,
        "docs.cloud.google.com/tpu/docs/v6e, 2026 (800 GB/s both ways)",
        UNKNOWN, Figure(2.70, GOOGLE.format("us-central1")),
        network_bytes_per_s=Figure(100e9 / 8, "docs.cloud.google.com/tpu/docs/v6e, 2026 (25.6 Tbps for 256 chips)"),
    ),
    Accelerator(
        "tpu7x", "tpu", ("TPU7x",), 2307e12 / 2, 2307e12 / 2, 96 * GiB, 7380e9 / 2, 300e9, 3, 8,
        "docs.cloud.google.com/tpu/docs/tpu7x, 2026 (Ironwood; a chip: 192 GiB, 1200 GB/s both ways)", devices_per_chip=2,
    ),
    Accelerator(
        "a100-40gb", "gpu", ("NVIDIA A100-SXM4-40GB",), 312e12, 156e12, 40 * GiB, 1555e9, 300e9, 0, 8,
        "NVIDIA A100 datasheet, 2021 (NVLink 600 GB/s both ways)",
        Figure(400.0, "NVIDIA A100 datasheet, 2021"), Figure(1.99, "SkyPilot's catalog of Lambda, one of a host, read 2026"),
        network_bytes_per_s=Figure(25e9, "NVIDIA DGX A100 datasheet, 2021 (eight of 200 Gb/s)"),
    ),
    Accelerator(
        "a100", "gpu", ("NVIDIA A100-SXM4-80GB",), 312e12, 156e12, 80 * GiB, 2039e9, 300e9, 0, 8,
        "NVIDIA A100 datasheet, 2021 (NVLink 600 GB/s both ways)",
        Figure(400.0, "NVIDIA A100 datasheet, 2021"), Figure(2.79, LAMBDA),
        network_bytes_per_s=Figure(25e9, "NVIDIA DGX A100 datasheet, 2021 (eight of 200 Gb/s)"),
    ),
    Accelerator(
        "h100-pcie", "gpu", ("NVIDIA H100 PCIe",), 756e12, 378e12, 80 * GiB, 2000e9, 300e9, 0, 8,
        "NVIDIA H100 datasheet, 2023 (NVLink bridge 600 GB/s both ways)",
        Figure(350.0, "NVIDIA H100 datasheet, 2023"),
    ),
    Accelerator(
        "h100", "gpu", ("NVIDIA H100 80GB HBM3",), 989.4e12, 494.7e12, 80 * GiB, 3350e9, 450e9, 0, 8,
        "NVIDIA H100 architecture white paper, 2023 (SXM5; NVLink 900 GB/s both ways)",
        Figure(700.0, "NVIDIA H100 datasheet, 2023"), Figure(3.99, LAMBDA),
        network_bytes_per_s=Figure(50e9, "NVIDIA DGX H100 datasheet, 2024 (eight of 400 Gb/s)"),
    ),
    Accelerator(
        "h200", "gpu", ("NVIDIA H200",), 989.4e12, 494.7e12, 141 * GiB, 4800e9, 450e9, 0, 8,
        "NVIDIA H200 datasheet, 2024 (SXM; the H100's chip with more memory)",
        Figure(700.0, "NVIDIA H200 datasheet, 2024"), Figure(3.50, NEBIUS),
        network_bytes_per_s=Figure(50e9, "NVIDIA DGX H200 datasheet, 2024 (eight of 400 Gb/s)"),
    ),
    Accelerator(
        "b200", "gpu", ("NVIDIA B200",), 2250e12, 1100e12, 180 * GiB, 8000e9, 900e9, 0, 8,
        "NVIDIA Blackwell architecture brief, 2024 (HGX at 1,000 W; NVLink 1.8 TB/s both ways)",
        Figure(1000.0, "NVIDIA Blackwell architecture brief, 2024"), Figure(6.69, LAMBDA),
        network_bytes_per_s=Figure(50e9, "NVIDIA DGX B200 datasheet, 2024 (eight of 400 Gb/s)"),
    ),
)  # fmt: skip

# Energy of a data centre over that of its machines (PUE).
PUE = {
    "tpu": Figure(1.10, "Google's fleet, its environmental report of 2025"),
    "gpu": Figure(1.58, "data centres of the industry, as Google's environmental report of 2025 compares itself to"),
}

# kg of CO2e that a grid emits for a kWh on average over a year, whatever its user bought. `--grid` names one, or states the number.
_GOOGLE_REGIONS = "github.com/GoogleCloudPlatform/region-carbon-info, data/yearly/2025.csv"
GRIDS = {
    "us": Figure(0.348, "US EPA eGRID2023, revision 2, total output (CO2 alone)"),
    **{
        region: Figure(grams / 1000, _GOOGLE_REGIONS)
        for region, grams in {
            "us-central1": 431.95, "us-central2": 417.39, "us-east1": 579.44, "us-east4": 343.48, "us-east5": 343.48,
            "us-south1": 299.13, "us-west1": 97.85, "us-west4": 360.0, "europe-north1": 29.84, "europe-west1": 126.43,
            "europe-west4": 194.35, "asia-east1": 427.95, "asia-northeast1": 449.23, "asia-southeast1": 365.66,
        }.items()
    },
}  # fmt: skip


def find(device_kind: str) -> Accelerator | None:
    """The row of a device by `jax.Device.device_kind`; none for a CPU or a device that the table lacks.

    The match is exact: a near name ("NVIDIA H100 NVL") is another card with other figures.
    """
    for row in ACCELERATORS:
        if device_kind in row.kinds:
            return row
    return None


def by_name(name: str) -> Accelerator:
    """The row that `--hardware` names; a `UserError` lists the known ones."""
    rows = {row.name: row for row in ACCELERATORS}
    if name not in rows:
        raise UserError(f"--hardware {name!r} is not in the table{did_you_mean(name, rows)}")
    return rows[name]


def by_topology(name: str) -> Accelerator:
    """The row of a slice by its name, "v5p:4x4x4" or "h200:8"."""
    return by_name(name.partition(":")[0])
