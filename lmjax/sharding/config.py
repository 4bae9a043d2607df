"""How a run is laid over devices."""

import dataclasses
import math
from typing import Literal

from lmjax.axes import DATA, MESH_AXES, STAGE
from lmjax.config import need


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. Their product is the number of devices; one of them may be -1: all that is left."""

    data: int = -1  # replicas of the parameters
    fsdp: int = 1  # shards of parameters and optimizer state; the batch is split over data × fsdp × expert
    tensor: int = 1  # shards of heads, MLP hidden and vocabulary
    zero: Literal[1, 2, 3] = 3  # what fsdp shards: optimizer state; with gradients; with parameters
    expert: int = 1  # shards of the experts (config.model.moe)
    stage: int = (
        1  # stages of a pipeline over the layers (config.model.micro_batches, stage_repeats); around them, of rows
    )
    sum_gradients: Literal["computed", "float32"] = "computed"
    # dtype in which gradients of weights are sent and summed over fsdp (zero 3): that of the products, half the bytes; or float32
    context: int = 1  # shards of each row's tokens, two chunks on each; attention is a ring
    # Over the slow network between slices (TPU) or nodes (GPU) go, of data and of stage,
    dcn_data: int = -1  # so many pieces; -1: as many as dcn_stage leaves of the slices
    dcn_stage: int = 1  # so many pieces

    offload: bool = (
        False  # optimizer state lives in the host's memory between its uses: slower, and that much less on devices
    )

    def __post_init__(self):
        sizes = self.given
        need(all(size == -1 or size >= 1 for size in sizes), f"config.mesh sizes must be positive or -1: {sizes}")
        need(sizes.count(-1) <= 1, f"config.mesh: only one axis may be -1: {sizes}")
        between = self.dcn_data, self.dcn_stage
        need(
            self.dcn_stage >= 1 and (self.dcn_data == -1 or self.dcn_data >= 1),
            f"config.mesh: dcn_data and dcn_stage must be positive, or dcn_data -1: {between}",
        )

    @property
    def given(self) -> tuple[int, ...]:
        """The sizes as they are written, in the order of `MESH_AXES`."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    @property
    def fewest_devices(self) -> int:
        """The fewest devices that it takes: an axis of -1 has size 1."""
        return math.prod(size for size in self.given if size != -1)

    def sizes(self, num_devices: int) -> tuple[int, ...]:
        """In the order of `MESH_AXES`, with -1 resolved; a `UserError` if they do not multiply to the devices."""
        sizes = tuple(num_devices // self.fewest_devices if size == -1 else size for size in self.given)
        shown = " × ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, self.given, strict=True) if size != 1)
        need(
            math.prod(sizes) == num_devices,
            f"config.mesh: {shown or 'one device'} does not match {num_devices} device(s)",
        )
        return sizes

    def slice_sizes(self, sizes: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
        """In the order of `MESH_AXES`, into how many slices each axis of these sizes is cut.

        Raises:
          UserError: they do not multiply to the slices, or an axis does not divide.
        """
        data = num_slices // self.dcn_stage if self.dcn_data == -1 else self.dcn_data
        need(
            data * self.dcn_stage == num_slices,
            f"config.mesh: dcn_data={self.dcn_data} × dcn_stage={self.dcn_stage} does not match {num_slices} slices of devices",
        )
        between = {DATA: data, STAGE: self.dcn_stage}
        parts = tuple(between.get(axis, 1) for axis in MESH_AXES)
        need(
            all(size % count == 0 for size, count in zip(sizes, parts, strict=True)),
            f"config.mesh: data={sizes[0]} × stage={sizes[1]} do not divide by dcn_data={parts[0]} × dcn_stage={parts[1]}: of these "
            f"{num_slices} slices each holds as many",
        )
        return parts


def check_tokens_divide(length: int, shards: int) -> None:
    """A `UserError` where rows of `length` tokens cannot be split over `context`."""
    need(
        shards == 1 or length % (2 * shards) == 0,
        f"config.data.seq_len={length} does not divide by 2 × config.mesh.context={shards}: a device holds two chunks of a row",
    )
