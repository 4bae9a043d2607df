"""What every tokenizer is: one protocol."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from etils import epath


@runtime_checkable
class Tokenizer(Protocol):
    """Text ↔ token ids. Lossless where the kind allows it: `decode(encode(text)) == text`."""

    vocab_size: int  # ids are 0 … vocab_size - 1
    pad_id: int | None
    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text, without special ids; a special string in the text is text, never a control id."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special ids decode to nothing, bytes that are not UTF-8 to U+FFFD."""

    def save(self, folder: epath.Path) -> None:
        """Writes what `lmjax.tokenizers.build.load` reads back."""

    def fingerprint(self) -> str:
        """Hex sha256 of all that decides the ids."""
