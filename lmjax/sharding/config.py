"""How a run is laid over devices."""

import dataclasses
from typing import Literal

from lmjax.config import need


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. Their product is the number of devices; one of them may be -1: all that is left."""

    data: int = -1  # replicas of the parameters
    fsdp: int = 1  # shards of parameters and optimizer state; the batch is split over data × fsdp
    tensor: int = 1  # shards of heads, MLP hidden and vocabulary
    zero: Literal[1, 2, 3] = 3  # what fsdp shards: optimizer state; with gradients; with parameters

    def __post_init__(self):
        sizes = (self.data, self.fsdp, self.tensor)
        need(all(size == -1 or size >= 1 for size in sizes), f"config.mesh sizes must be positive or -1: {sizes}")
        need(sizes.count(-1) <= 1, f"config.mesh: only one axis may be -1: {sizes}")

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """(data, fsdp, tensor) with -1 resolved; a `UserError` if they do not multiply to the devices."""
        fixed = 1
        for size in (self.data, self.fsdp, self.tensor):
            fixed *= size if size != -1 else 1
        sizes = tuple(num_devices // fixed if size == -1 else size for size in (self.data, self.fsdp, self.tensor))
        need(
            sizes[0] * sizes[1] * sizes[2] == num_devices,
            f"config.mesh: data={self.data} × fsdp={self.fsdp} × tensor={self.tensor} does not match {num_devices} device(s)",
        )
        return sizes
