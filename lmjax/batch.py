"""The one contract between data and model: a batch of packed rows."""

from typing import Any, NamedTuple

from jaxtyping import Float, Int


class Batch(NamedTuple):
    """B packed rows of T tokens, as NumPy arrays on the host or JAX arrays on the devices.

    A NamedTuple, so JAX sees a pytree without being imported here.
    """

    tokens: Int[Any, "*A B T"]  # int32; what the model reads. Padding is 0 and is known by segment 0, never by its id.
    targets: Int[Any, "*A B T"]  # int32; the next token of the same document; 0 where loss_weights is 0
    loss_weights: Float[
        Any, "*A B T"
    ]  # float32; 0 where nothing is predicted: a document's last token in the row, padding
    segment_ids: Int[
        Any, "*A B T"
    ]  # int32; 1, 2, … for each document in the row, 0 for padding: attention stays inside one
    positions: Int[Any, "*A B T"]  # int32; 0, 1, … from each document's first token in the row
    prefix: Float[Any, "*A B P I"] | None = None
    # float32; features (image, sound) that stand before the row's text, which is one document; none: text alone

    def arrays(self) -> list[Any]:
        """Those that are there, in order."""
        return [array for array in self if array is not None]
