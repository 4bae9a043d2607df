"""What every tokenizer is: one protocol."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from etils import epath

from lmjax.files import write_json

SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>", "<sep>")  # ids 0 … 5 of the tokenizers made here
METADATA = "tokenizer_kind.json"  # what a folder's tokenizer is; the kind's own file stands beside it


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


def write_metadata(tokenizer: Tokenizer, kind: str, folder: epath.Path) -> None:
    """Ends a `save`: says which kind reads the folder, and the fingerprint that must come out."""
    ids = {name: getattr(tokenizer, name) for name in ("vocab_size", "pad_id", "bos_id", "eos_id")}
    write_json(folder / METADATA, {"kind": kind, **ids, "fingerprint": tokenizer.fingerprint()})


def as_list(ids: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    """Ids as Python integers; one outside the vocabulary is a `ValueError`, never another token."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"ids from {ids.min()} to {ids.max()} leave the vocabulary of {vocab_size}")
    return ids.tolist()
