"""SentencePiece models (Kudo and Richardson 2018, arXiv:1808.06226): BPE or unigram pieces with byte fallback.

A model that keeps every character (those trained here do) is made lossless for the two kinds that the library itself
cannot hold: U+2581, which is its own mark of a space, and lone surrogates, which are not UTF-8. The text is cut at them, and
they are spelled in byte pieces. Other imported models keep their own normalizer, and lose what it changes.
"""

import os
import re
from collections.abc import Sequence

import numpy as np
import sentencepiece
from etils import epath

from lmjax.data.document import to_bytes
from lmjax.errors import UserError
from lmjax.files import sha256_bytes, sha256_json, write_atomic
from lmjax.tokenizers.base import as_list, write_metadata
from lmjax.tokenizers.byte import decode_bytes

MODEL = "tokenizer.model"
SPACE = "\u2581"  # how pieces spell a space
UNSPEAKABLE = re.compile("([\u2581\ud800-\udfff]+)")  # what the library cannot carry through
SURROGATES = re.compile("[\ud800-\udfff]")
PROBE = (
    " a  b\t\n \u2003\ufb01 e\u0301\u2460\0\U0010fffd\r\n "  # a normalizer, or a missing byte piece, changes some of it
)


class SentencePieceTokenizer:
    """A SentencePiece model and the ids of its special pieces."""

    def __init__(self, model: bytes):
        """`model`: the serialized model; a `RuntimeError` if it is none."""
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor()
        self.processor.LoadFromSerializedProto(model)
        self.vocab_size: int = self.processor.vocab_size()
        self.pad_id, self.bos_id, self.eos_id = (
            id if id >= 0 else None
            for id in (self.processor.pad_id(), self.processor.bos_id(), self.processor.eos_id())
        )
        self.pieces = [self.spell(id) for id in range(self.vocab_size)]
        self.byte_ids = np.array([self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)], np.int32)
        has_bytes = all(self.processor.is_byte(int(id)) for id in self.byte_ids)
        spelled = b"".join(self.pieces[id] for id in self.processor.encode(PROBE))
        self.lossless = has_bytes and spelled == PROBE.encode()

    def spell(self, id: int) -> bytes:
        """The UTF-8 bytes that a piece stands for; none for special ones."""
        piece = self.processor.id_to_piece(id)
        if self.processor.is_byte(id):
            return bytes([int(piece[3:5], 16)])
        if self.processor.is_control(id) or self.processor.is_unknown(id):
            return b""
        return piece.replace(SPACE, " ").encode()

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text; control pieces are never matched in it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        texts = list(texts)
        if not self.lossless:
            texts = [text if text.isascii() else SURROGATES.sub("\ufffd", text) for text in texts]
            return self.encode_plain(texts)
        hard = {i: UNSPEAKABLE.split(text) for i, text in enumerate(texts) if not text.isascii()}
        hard = {i: parts for i, parts in hard.items() if len(parts) > 1}
        for i in hard:
            texts[i] = ""
        ids = self.encode_plain(texts)
        for i, parts in hard.items():
            ids[i] = self.encode_parts(parts)
        return ids

    def encode_plain(self, texts: list[str]) -> list[np.ndarray]:
        """Texts that the library carries through."""
        return self.processor.encode(texts, return_type="numpy")

    def encode_parts(self, parts: list[str]) -> np.ndarray:
        """A text in parts, of which every second one is spelled in byte pieces."""
        ids = self.encode_plain(parts[::2])
        spelled = [self.byte_ids[np.frombuffer(to_bytes(part), np.uint8)] for part in parts[1::2]]
        joined = [array for pair in zip(ids, [*spelled, np.zeros(0, np.int32)], strict=True) for array in pair]
        return np.concatenate(joined)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special ids decode to nothing, bytes that are not UTF-8 to U+FFFD."""
        ids = as_list(ids, self.vocab_size)
        if self.lossless:
            return decode_bytes(b"".join(self.pieces[id] for id in ids))
        return self.processor.decode(ids)

    def save(self, folder: epath.Path) -> None:
        """Writes the model and the metadata."""
        write_atomic(epath.Path(folder) / MODEL, self.model)
        write_metadata(self, "sentencepiece", epath.Path(folder))

    @classmethod
    def load(cls, folder: os.PathLike | str) -> "SentencePieceTokenizer":
        """From a folder that `save` wrote."""
        return cls.read(epath.Path(folder) / MODEL)

    @classmethod
    def read(cls, path: os.PathLike | str) -> "SentencePieceTokenizer":
        """From a `.model` file; a `UserError` if it is missing or none."""
        try:
            return cls(epath.Path(path).read_bytes())
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror or error}") from error
        except RuntimeError as error:
            raise UserError(f"{path} is not a SentencePiece model") from error

    def fingerprint(self) -> str:
        """Hash of the model."""
        return sha256_json({"kind": "sentencepiece", "model": sha256_bytes(self.model)})

    def __reduce__(self):
        return SentencePieceTokenizer, (self.model,)
