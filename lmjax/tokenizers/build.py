"""Tokenizers by their kind."""

import os

from etils import epath

from lmjax.config import did_you_mean
from lmjax.errors import UserError
from lmjax.files import read_json
from lmjax.tokenizers.base import METADATA, Tokenizer
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.tokenizers.hf import HfTokenizer
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer

KINDS = {"byte": ByteTokenizer, "sentencepiece": SentencePieceTokenizer, "hf": HfTokenizer}


def load(folder: os.PathLike | str) -> Tokenizer:
    """The tokenizer that `save` or `lmjax tokenizer` wrote into a folder.

    Raises:
      UserError: the folder holds none, or one that is not what was saved.
    """
    folder = epath.Path(folder)
    if not (folder / METADATA).exists():
        raise UserError(f"{folder} holds no tokenizer: make one with `lmjax tokenizer --out {folder}`")
    metadata = read_json(folder / METADATA)
    kind = metadata.get("kind")
    if kind not in KINDS:
        raise UserError(f"{folder / METADATA}: kind {kind!r}{did_you_mean(str(kind), KINDS)}")
    tokenizer = KINDS[kind].load(folder)
    if tokenizer.fingerprint() != metadata["fingerprint"]:
        raise UserError(f"{folder}: the tokenizer is not the one that was saved there (fingerprints differ)")
    return tokenizer
