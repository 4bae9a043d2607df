"""The loader: step → batch, by random access, so that stopping, resuming, hosts and workers never change what is read.

Row b of step s is row s B + b of the run; the mixture says which source gives it and which of that source's rows it is, the
epoch's permutation where that begins. Nothing is carried from one step to the next: a resume needs the step, and a
fingerprint to know that the map is still the same. Grain calls the reader ahead of the step, in threads or processes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from lmjax.batch import Batch
from lmjax.data.config import DataConfig
from lmjax.data.mixture import Mixture, build_mixture
from lmjax.data.pack import VERSION, Rows, eval_rows, num_eval_rows, train_windows
from lmjax.data.shards import verify_shards
from lmjax.data.source import Source, open_sources
from lmjax.errors import UserError
from lmjax.files import sha256_json


def indices(rows: tuple[int, ...] | None, batch_rows: int) -> Int64[np.ndarray, " W"]:
    """A host's rows of the global batch; none: all."""
    return np.arange(batch_rows) if rows is None else np.array(rows, np.int64)


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a step that one source gives."""

    source: Source
    rows: Int64[np.ndarray, " W"]  # index into the rows of the batch
    epochs: Int64[np.ndarray, " W"]
    starts: Int64[np.ndarray, " W"]  # token of the source at which the row begins


@dataclasses.dataclass(frozen=True)
class StepReader:
    """`reader(step)` is the batch of a step: NumPy arrays of the global batch, or of this host's rows of it."""

    sources: tuple[Source, ...]  # in the mixture's order
    mixture: Mixture
    seq_len: int  # T
    batch_rows: int  # B, rows of the global batch
    seed: int
    rows: tuple[int, ...] | None = None  # indices into the global batch; none: all

    def __call__(self, step: int) -> Batch:
        packed = Rows(len(indices(self.rows, self.batch_rows)), self.seq_len)
        for part in self.parts(step):
            widths = np.full(len(part.rows), self.seq_len + 1, np.int64)
            packed.fill(part.source, part.rows, part.starts, widths)
        return packed.batch()

    def parts(self, step: int) -> Iterator[Part]:
        """The step's rows by source."""
        rows = int(step) * self.batch_rows + indices(self.rows, self.batch_rows)
        sources, counters = self.mixture.locate(rows)
        for number in np.unique(sources).tolist():
            (here,) = np.nonzero(sources == number)
            windows = train_windows(self.sources[number], self.seq_len, self.seed, counters[here])
            yield Part(self.sources[number], here, windows.epochs, windows.starts)

    def identity(self) -> dict[str, Any]:
        """All that decides the batches, as JSON; not the host's rows, nor where the shards lie."""
        return {
            "packing": VERSION,
            "sources": {source.name: source.fingerprint for source in self.sources},
            "tokenizer": self.sources[0].tokenizer,
            "split": self.sources[0].split,
            "seq_len": self.seq_len,
            "batch_rows": self.batch_rows,
            "seed": self.seed,
            "weights": [list(weights) for weights in self.mixture.weights],
            "from_row": list(self.mixture.from_row),
        }

    def fingerprint(self) -> str:
        """Hash of `identity`: kept in a checkpoint and compared on resume."""
        return sha256_json(self.identity())


def batches(
    reader: Callable[[int], Batch], start: int, stop: int, num_workers: int = 0, prefetch: int = 4
) -> Iterator[tuple[int, Batch]]:
    """(step, batch) for start ≤ step < stop, read ahead of the step.

    Args:
      reader: step → batch; pure, and pickled to worker processes.
      num_workers: reading processes; 0: threads of this one. The batches are the same.
      prefetch: steps read ahead, for each worker; 0 with no workers: read when asked.

    Raises:
      RuntimeError: a worker died. What a worker raises is raised here.
    """
    import grain.python as grain  # brings jax, which the library's data code must not

    dataset = grain.MapDataset.range(start, stop).map(reader)
    threads = min(2, prefetch)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch if threads else 0)
    if num_workers:
        parse_flags()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    ahead = dataset.to_iter_dataset(options)
    if num_workers:
        workers = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=max(1, prefetch))
        ahead = ahead.mp_prefetch(workers)
    iterator = iter(ahead)
    try:
        yield from zip(range(start, stop), iterator, strict=True)
    finally:
        iterator.close()


def parse_flags() -> None:
    """Grain's workers read absl flags, which nobody parses outside an absl app."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


@dataclasses.dataclass(frozen=True)
class EvalBatches(Sequence):
    """The batches of an evaluation: every host has as many, all full, the last ones padded with rows of weight 0."""

    source: Source
    seq_len: int
    batch_rows: int
    max_rows: int | None = None  # that many rows only, spread evenly over the source
    rows: tuple[int, ...] | None = None  # this host's indices into the global batch; none: all

    def __len__(self) -> int:
        return -(-num_eval_rows(self.source, self.seq_len, self.max_rows) // self.batch_rows)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = index * self.batch_rows + indices(self.rows, self.batch_rows)
        return eval_rows(self.source, self.seq_len, rows, self.max_rows)


def build_train_reader(config: DataConfig, batch_rows: int, seed: int, rows: Sequence[int] | None = None) -> StepReader:
    """The reader of a run, from its config; verifies the shards first.

    Args:
      config: names the shard folders, T and the mixture.
      batch_rows: rows of the global batch.
      seed: of the run; decides shifts and permutations.
      rows: this host's indices into the global batch; none: all.

    Raises:
      UserError: shards are missing, damaged, or of different tokenizers; an unknown source; an empty corpus.
    """
    rows = None if rows is None else tuple(rows)
    if rows is not None and not all(0 <= row < batch_rows for row in rows):
        raise UserError(f"rows {rows} are outside the batch of {batch_rows}")
    sources = verified_sources(config, config.train_split)
    tokens = {source.name: source.num_tokens for source in sources}
    mixture = build_mixture(tokens, config.weights, config.stages, batch_rows)
    return StepReader(sources, mixture, config.seq_len, batch_rows, seed, rows)


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


def verified_sources(config: DataConfig, split: str) -> tuple[Source, ...]:
    """Opens a split of all shard folders."""
    if not config.shards:
        raise UserError("config.data.shards names no folder made by `lmjax tokenize`")
    for folder in config.shards:
        verify_shards(folder, [split], full=config.verify == "full")
    return open_sources(config.shards, split)
