"""The batches of an evaluation: the rows of a source in stored order, the same whatever the number of hosts."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, Integer

from lmjax.batch import Batch
from lmjax.data.config import DataConfig
from lmjax.data.features import Features
from lmjax.data.loader import indices, verified_sources
from lmjax.data.pack import Rows, document_spans
from lmjax.data.source import Source
from lmjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class EvalBatches(Sequence):
    """The batches of an evaluation: every host has as many, all full, the last ones padded with rows of weight 0."""

    source: Source
    seq_len: int
    batch_rows: int
    max_rows: int | None = None  # that many rows only, spread evenly over the source
    rows: tuple[int, ...] | None = None  # this host's indices into the global batch; none: all
    features: Features | None = None  # before documents, each of which is a row; none: rows are windows

    def __len__(self) -> int:
        if self.features is not None:
            return -(-min(self.source.num_documents, self.max_rows or self.source.num_documents) // self.batch_rows)
        return -(-num_eval_rows(self.source, self.seq_len, self.max_rows) // self.batch_rows)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = index * self.batch_rows + indices(self.rows, self.batch_rows)
        if self.features is not None:
            return self.featured(eval_documents(self.source, rows, self.max_rows), self.features)
        return eval_rows(self.source, self.seq_len, rows, self.max_rows)

    def featured(self, documents: Int64[np.ndarray, " B"], features: Features) -> Batch:
        """Rows that are documents behind their features; padding where the number is negative."""
        (real,) = np.nonzero(documents >= 0)
        starts, widths, following = document_spans(self.source, self.seq_len, documents[real])
        packed = Rows(len(documents), self.seq_len)
        packed.fill(self.source, real, starts, widths + following)
        prefix = np.zeros((len(documents), *features.shape), np.float32)
        prefix[real] = features.of(self.source, documents[real].tolist())
        return packed.batch()._replace(prefix=prefix)


def eval_sources(config: DataConfig, split: str | None = None) -> dict[str, Source]:
    """The sources to evaluate on, by name; one that has no document in the split has nothing to predict and is left out.

    Raises:
      UserError: none has a document.
    """
    split = split or config.eval_split
    sources = {source.name: source for source in verified_sources(config, split) if source.num_tokens}
    if not sources:
        raise UserError(f"empty corpus: no source holds a token in split {split!r}")
    return sources


def num_eval_rows(source: Source, seq_len: int, max_rows: int | None = None) -> int:
    """Rows that predict each token of a source once, except each document's first; at most `max_rows`."""
    rows = -(-max(0, source.num_tokens - 1) // seq_len)
    return rows if max_rows is None else min(rows, max_rows)


def eval_rows(source: Source, seq_len: int, rows: Integer[np.ndarray, " B"], max_rows: int | None = None) -> Batch:
    """Rows of a source in stored order, without shift and without wrap; those past the last are padding of weight 0.

    With `max_rows` they are spread evenly over the source: its first rows may all be of one long document.
    """
    total, count = num_eval_rows(source, seq_len), num_eval_rows(source, seq_len, max_rows)
    past = rows >= count
    starts = rows.astype(np.int64) * total // max(count, 1) * seq_len
    widths = np.where(past, 0, np.minimum(source.num_tokens - starts, seq_len + 1))
    packed = Rows(len(rows), seq_len)
    packed.fill(source, np.arange(len(rows)), starts, widths)
    return packed.batch()


def eval_documents(
    source: Source, rows: Integer[np.ndarray, " B"], max_rows: int | None = None
) -> Int64[np.ndarray, " B"]:
    """The document of each row where rows are documents, spread evenly; -1 for those past the last."""
    count = source.num_documents if max_rows is None else min(source.num_documents, max_rows)
    return np.where(rows < count, rows.astype(np.int64) * source.num_documents // max(count, 1), -1)
