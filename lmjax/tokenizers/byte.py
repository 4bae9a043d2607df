"""Bytes as tokens: id = 6 + byte, after the six special ids. Lossless for every string, lone surrogates included."""

import os
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

from lmjax.data.document import to_bytes
from lmjax.files import sha256_json
from lmjax.tokenizers.base import SPECIAL_TOKENS, as_list, write_metadata

FIRST_BYTE = len(SPECIAL_TOKENS)
SURROGATE_BYTES = re.compile(rb"((?:\xed[\xa0-\xbf][\x80-\xbf])+)")


def decode_bytes(data: bytes) -> str:
    """The inverse of `to_bytes` for every text; bytes that are not UTF-8 become U+FFFD."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        parts = SURROGATE_BYTES.split(data)  # every second one is a run of lone surrogates
        return "".join(part.decode("utf-8", "surrogatepass" if i % 2 else "replace") for i, part in enumerate(parts))


class ByteTokenizer:
    """262 ids: nothing to train, nothing to lose."""

    vocab_size = FIRST_BYTE + 256
    pad_id = SPECIAL_TOKENS.index("<pad>")
    bos_id = SPECIAL_TOKENS.index("<bos>")
    eos_id = SPECIAL_TOKENS.index("<eos>")

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text."""
        return np.frombuffer(to_bytes(text), np.uint8).astype(np.int32) + FIRST_BYTE

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special ids decode to nothing."""
        return decode_bytes(bytes(id - FIRST_BYTE for id in as_list(ids, self.vocab_size) if id >= FIRST_BYTE))

    def save(self, folder: epath.Path) -> None:
        """Writes the metadata: there is nothing else."""
        write_metadata(self, "byte", epath.Path(folder))

    @classmethod
    def load(cls, folder: os.PathLike | str) -> "ByteTokenizer":
        """From a folder that `save` wrote."""
        return cls()

    def fingerprint(self) -> str:
        """Hash of the ids of bytes and special tokens."""
        return sha256_json({"kind": "byte", "special": SPECIAL_TOKENS})
