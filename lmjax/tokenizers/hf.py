"""A `tokenizer.json` of the Hugging Face `tokenizers` library, read by that library.

What it loses, it loses by its own rules; lone surrogates, which it cannot take, become U+FFFD. A `tokenizer_config.json` beside it
says which special tokens begin, end and pad; then <bos> is what the tokenizer itself puts first, if it puts anything.
"""

import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
import tokenizers
from etils import epath

from lmjax.config import need
from lmjax.errors import UserError
from lmjax.files import read_json, sha256_bytes, sha256_json, write_atomic, write_json
from lmjax.tokenizers.base import as_list, write_metadata

MODEL = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SURROGATES = re.compile("[\ud800-\udfff]")
# The usual names; the first one that is a special token counts.
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>")
BOS_NAMES = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]")
EOS_NAMES = ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]", "<|im_end|>")


class HfTokenizer:
    """A `tokenizers.Tokenizer` without truncation, padding, added ids, or special tokens read from a text."""

    def __init__(self, model: str, named: Mapping[str, str | None] | None = None):
        """
        Args:
          model: the JSON text.
          named: "bos_token", "eos_token", "pad_token" → text, as far as a tokenizer_config.json has them; none: there is none.
        """
        self.model, self.named = model, named
        self.tokenizer = tokenizers.Tokenizer.from_str(model)
        first = self.tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # their names in a text are text
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = self.tokenizer.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        self.pad_id, self.bos_id, self.eos_id = (
            next((special[name] for name in names if name in special), None)
            for names in (PAD_NAMES, BOS_NAMES, EOS_NAMES)
        )
        if named is not None:
            ids = {name: None if text is None else self.tokenizer.token_to_id(text) for name, text in named.items()}
            self.pad_id, self.eos_id = ids.get("pad_token", self.pad_id), ids.get("eos_token", self.eos_id)
            self.bos_id = ids.get("bos_token", self.bos_id)
            # A token that the tokenizer does not put first, the model has not seen there.
            self.bos_id = self.bos_id if first == [self.bos_id] else None

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        texts = [text if text.isascii() else SURROGATES.sub("\ufffd", text) for text in texts]
        batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in batch]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special ids decode to nothing."""
        return self.tokenizer.decode(as_list(ids, self.vocab_size), skip_special_tokens=True)

    def save(self, folder: epath.Path) -> None:
        """Writes the JSON as it was read, and the metadata."""
        write_atomic(epath.Path(folder) / MODEL, self.model)
        if self.named is not None:
            write_json(epath.Path(folder) / CONFIG, dict(self.named))
        write_metadata(self, "hf", epath.Path(folder))

    @classmethod
    def load(cls, folder: os.PathLike | str) -> "HfTokenizer":
        """From a folder that `save` wrote."""
        return cls.read(epath.Path(folder) / MODEL)

    @classmethod
    def read(cls, path: os.PathLike | str) -> "HfTokenizer":
        """From a `tokenizer.json`; a `UserError` if it is missing or none."""
        try:
            return cls(epath.Path(path).read_bytes().decode(), read_named(epath.Path(path).parent / CONFIG))
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror or error}") from error
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path} is not a tokenizer.json: {error}") from error

    def fingerprint(self) -> str:
        """Hash of the JSON."""
        named = {} if self.named is None else {"named": dict(self.named)}
        return sha256_json({"kind": "hf", "model": sha256_bytes(self.model.encode()), **named})

    def __reduce__(self):
        return HfTokenizer, (self.model, self.named)


def read_named(path: epath.Path) -> dict[str, str | None] | None:
    """The special tokens of a `tokenizer_config.json`; none where there is no such file."""
    if not path.exists():
        return None
    config = read_json(path)
    need(isinstance(config, dict), f"{path} must hold a JSON object")
    values = {name: config[name] for name in ("bos_token", "eos_token", "pad_token") if name in config}
    named = {name: value.get("content", value) if isinstance(value, dict) else value for name, value in values.items()}
    for name, value in named.items():
        need(value is None or isinstance(value, str), f"{path}: {name} is {value!r}, which is no token's text")
    return named
