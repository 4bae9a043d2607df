"""Features of images, sounds or anything else that an encoder made, as `.npz` beside text: an array [P, I] for each document's id.

They stand before the document's text in its row; what is learned is the text.
"""

import os
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float

from lmjax.batch import Batch
from lmjax.config import need
from lmjax.data.document import Document
from lmjax.errors import UserError
from lmjax.tokenizers.base import Tokenizer


def read_features(path: os.PathLike | str) -> dict[str, Float[np.ndarray, "P I"]]:
    """Document id → float32 features, all of one shape and finite."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            features = {name: np.asarray(archive[name], np.float32) for name in archive.files}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no .npz of numbers: {error}") from error
    need(len(features) > 0, f"{path} holds no features")
    shape = next(iter(features.values())).shape
    for name, array in features.items():
        need(
            array.ndim == 2 and array.shape == shape,
            f"{path}: {name!r} has shape {array.shape}, others {shape}; [P, I] it is",
        )
        need(bool(np.isfinite(array).all()), f"{path}: {name!r} holds numbers that are not finite")
    return features


def prefixed_rows(
    documents: Iterable[Document], features: Mapping[str, np.ndarray], tokenizer: Tokenizer, seq_len: int
) -> tuple[Batch, Float[np.ndarray, "B P I"]]:
    """One document a row, from its first id to its end of text, and the features of each; a longer text is cut.

    Raises:
      UserError: a document without features, or a tokenizer without <bos>: the first token of a text has something to follow.
    """
    need(tokenizer.bos_id is not None, "text after features begins with <bos>: the tokenizer has none")
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    rows, prefixes = [], []
    for document in documents:
        need(document.id in features, f"document {document.id!r} of {document.source!r} has no features")
        prefixes.append(features[document.id])
        ids = np.array([tokenizer.bos_id, *tokenizer.encode(document.text), *end], np.int32)[: seq_len + 1]
        rows.append((ids, len(ids) - 1))
    tokens, targets = np.zeros((2, len(rows), seq_len), np.int32)
    real = np.arange(seq_len) < np.array([count for _, count in rows])[:, None]
    for row, (ids, count) in enumerate(rows):
        tokens[row, :count], targets[row, :count] = ids[:-1], ids[1:]
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), tokens.shape) * real
    return Batch(tokens, targets, real.astype(np.float32), real.astype(np.int32), positions), np.stack(prefixes)
