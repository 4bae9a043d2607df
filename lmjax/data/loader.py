"""The loader: step → batch, by random access, so that stopping, resuming, hosts and workers never change what is read.

Row b of step s is row s B + b of the run; the mixture says which source gives it and which of that source's rows it is, the
epoch's permutation where that begins. Nothing is carried from one step to the next: a resume needs the step, and a
fingerprint to know that the map is still the same. Grain calls the reader ahead of the step, in threads or processes.

Where the row length T changes by step, so does B: the tokens of a step stay. Concatenated sources go on where they were (`pack.py`);
best-fit rows of another length are other rows, so each source begins its next epoch with them.
"""

import bisect
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from lmjax import bucket
from lmjax.batch import Batch
from lmjax.data import bestfit
from lmjax.data.cache import ReadAhead, RemoteFile, ShardCache
from lmjax.data.config import DataConfig
from lmjax.data.features import Features, fingerprints, open_features
from lmjax.data.mixture import Mixture, build_mixture, sizes
from lmjax.data.pack import (
    VERSION,
    Pieces,
    Rows,
    Stretch,
    document_rows,
    document_spans,
    pieces,
    stretch_windows,
)
from lmjax.data.shards import verify_shards
from lmjax.data.source import Source, open_sources
from lmjax.errors import UserError
from lmjax.files import sha256_json


def indices(rows: tuple[int, ...] | None, batch_rows: int) -> Int64[np.ndarray, " W"]:
    """A host's rows of the global batch; none: all."""
    return np.arange(batch_rows) if rows is None else np.array(rows, np.int64)


class Stage(NamedTuple):
    """Steps with rows of one length and one mixture."""

    from_step: int
    batch_rows: int  # B, rows of the global batch
    seq_len: int  # T
    rows: tuple[int, ...] | None  # this host's, as indices into the global batch; none: all


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of a step that one source gives."""

    source: Source
    rows: Int64[np.ndarray, " W"]  # index into the rows of the batch
    epochs: Int64[np.ndarray, " W"]
    starts: Int64[np.ndarray, " P"]  # token of the source at which each window of a row begins
    widths: Int64[np.ndarray, " P"]  # tokens of it that stand in the row
    owner: Int64[np.ndarray, " P"]  # index into `rows`, ascending
    columns: Int64[np.ndarray, " P"]  # where in the row the window begins
    following: Int64[np.ndarray, " P"]  # 1 where the token behind the window is its last target

    def pieces(self, targets: bool) -> Pieces:
        """The parts of documents that stand in the rows; with `targets`, and the tokens behind that they predict."""
        found = pieces(self.source.offsets, self.starts, self.widths + self.following * targets)
        return found._replace(window=self.owner[found.window], column=found.column + self.columns[found.window])


@dataclasses.dataclass(frozen=True)
class StepReader:
    """`reader(step)` is the batch of a step: NumPy arrays of the global batch, or of this host's rows of it."""

    sources: tuple[Source, ...]  # in the mixture's order
    mixture: Mixture
    stages: tuple[Stage, ...]
    seed: int
    packing: str = "concat"
    packing_dir: str | None = None  # of best-fit rows
    features: dict[str, Features] = dataclasses.field(default_factory=dict)  # source → what stands before its documents

    def __call__(self, step: int) -> Batch:
        stage = self.stages[self.stage_at(step)]
        rows = len(indices(stage.rows, stage.batch_rows))
        packed = Rows(rows, stage.seq_len)
        shape = next(iter(self.features.values())).shape if self.features else (0, 0)
        prefix = np.zeros((rows, *shape), np.float32)
        for part in self.parts(step):
            found = part.pieces(targets=True)
            packed.write(part.source, part.rows, found)
            if self.features:
                prefix[part.rows[found.window]] = self.features[part.source.name].of(
                    part.source, found.document.tolist()
                )
        return packed.batch()._replace(prefix=prefix if self.features else None)

    def stage_at(self, step: int) -> int:
        """The number of a step's stage."""
        return bisect.bisect_right([stage.from_step for stage in self.stages], step) - 1

    def batch_rows(self, step: int) -> int:
        """B of a step."""
        return self.stages[self.stage_at(step)].batch_rows

    def parts(self, step: int) -> Iterator[Part]:
        """The step's rows by source."""
        number = self.stage_at(step)
        stage, from_row = self.stages[number], self.mixture.from_row[number]
        in_batch = indices(stage.rows, stage.batch_rows)
        rows = from_row + (int(step) - stage.from_step) * stage.batch_rows + in_batch
        owners, counters = self.mixture.locate(rows)
        counters = counters - self.mixture.taken[number][owners]  # of the stage
        for source in np.unique(owners).tolist():
            (here,) = np.nonzero(owners == source)
            make = {"concat": self.concat_part, "best_fit": self.best_fit_part, "document": self.document_part}
            yield make[self.packing](number, source, here, counters[here])

    def concat_part(
        self, stage: int, source: int, rows: Int64[np.ndarray, " W"], counters: Int64[np.ndarray, " W"]
    ) -> Part:
        """Rows that are windows over the source's stream."""
        stretch = self.stretch(stage, source)
        windows = stretch_windows(self.sources[source], stretch, self.seed, counters)
        ones = np.ones_like(rows)
        return Part(
            self.sources[source], rows, windows.epochs, windows.starts, ones * stretch.seq_len, np.arange(len(rows)),
            ones * 0, ones,
        )  # fmt: skip

    def stretch(self, stage: int, source: int) -> Stretch:
        """Where on its tape a source goes on in a stage."""
        unit, place = max(stage.seq_len for stage in self.stages), 0
        for number, (_, _, length, _) in enumerate(self.stages[: stage + 1]):
            start = -(-place // length) * length  # to the next whole window
            place = start + (self.given(number, source) or 0) * length
        stop = None if self.given(stage, source) is None else place
        return Stretch(self.stages[stage].seq_len, unit, start, stop, stage)

    def given(self, stage: int, source: int) -> int | None:
        """Rows that a source gives in a stage; none: the last one does not end."""
        taken = self.mixture.taken
        return int(taken[stage + 1][source] - taken[stage][source]) if stage + 1 < len(taken) else None

    def best_fit_part(
        self, stage: int, source: int, rows: Int64[np.ndarray, " W"], counters: Int64[np.ndarray, " W"]
    ) -> Part:
        """Rows of the source's prepared index for the stage's T."""
        epoch, before = self.place(stage, source)
        index = self.index(source, self.stages[stage].seq_len)
        found = index.windows(self.sources[source], self.seed, epoch, before + counters)
        return Part(
            self.sources[source], rows, found.epochs, found.starts, found.widths, found.owner, found.columns, found.following
        )  # fmt: skip

    def document_part(
        self, stage: int, source: int, rows: Int64[np.ndarray, " W"], counters: Int64[np.ndarray, " W"]
    ) -> Part:
        """Rows that are documents, whatever the stage's T; a longer one is cut."""
        total, own = counters + self.mixture.taken[stage][source], self.sources[source]
        epochs, documents = document_rows(own, self.seed, total)
        starts, widths, following = document_spans(own, self.stages[stage].seq_len, documents)
        return Part(own, rows, epochs, starts, widths, np.arange(len(rows)), np.zeros_like(rows), following)

    def place(self, stage: int, source: int) -> tuple[int, int]:
        """(epoch, rows read since it began) where a source goes on in a stage: another T begins the next epoch."""
        epoch, before = 0, 0
        for number in range(stage):
            before += self.given(number, source) or 0
            length = self.stages[number].seq_len
            if self.stages[number + 1].seq_len != length:
                epoch, before = epoch - (-before // self.index(source, length).num_rows), 0
        return epoch, before

    def index(self, source: int, seq_len: int) -> bestfit.Index:
        """The prepared rows of a source for a row length."""
        return bestfit.index_of(self.sources[source], seq_len, self.packing_dir or "")

    def prepare(self, full: bool = True) -> list[str]:
        """Makes or verifies the indexes of best-fit rows, once before the first step; returns what to tell."""
        notes = self.describe_remote()
        for source in self.sources if full and self.features else ():
            self.features[source.name].check(source)
        for length in dict.fromkeys(stage.seq_len for stage in self.stages) if self.packing_dir is not None else ():
            for number, source in enumerate(self.sources):
                if any(weights[number] for weights in self.mixture.weights):
                    made = bestfit.prepare_index(source, self.index(number, length), full)
                    notes.append(bestfit.describe(source.name, length, made))
        return notes

    def describe_remote(self) -> list[str]:
        """What there is to fetch from buckets, and whether it fits."""
        files = self.remote_files()
        if not files:
            return []
        cache, total = self.shard_cache(), sum(file.file_bytes for file in files)
        note = f"shards of {total:,} bytes in a bucket, fetched to {cache.folder} (at most {cache.max_bytes:,} bytes)"
        more = (
            "; they do not all fit and are fetched again and again: raise config.data.cache_bytes, or mount the bucket"
        )
        return [note + (more if total > cache.max_bytes else "")]

    def remote_files(self) -> list[RemoteFile]:
        """All shards of sources in buckets."""
        remotes = [(source, source.remote) for source in self.sources if source.remote is not None]
        return [remote.files[name] for source, remote in remotes for name in source.shards]

    def shard_cache(self) -> ShardCache:
        """Where the shards in buckets are fetched to."""
        return next(source.remote.cache for source in self.sources if source.remote is not None)

    def needed(self, step: int) -> list[RemoteFile]:
        """The shards in buckets that a step reads."""
        found = []
        for part in self.parts(step):
            if part.source.remote is not None:
                shards = np.unique(part.source.shard_of(part.pieces(targets=True).document)).tolist()
                found += [part.source.remote.files[part.source.shards[shard]] for shard in shards]
        return found

    def identity(self) -> dict[str, Any]:
        """All that decides the batches, as JSON; not the host's rows, nor where the shards lie."""
        packing = {"concat": VERSION, "best_fit": f"best_fit {bestfit.VERSION}", "document": f"document {VERSION}"}[
            self.packing
        ]
        return {
            **({"features": fingerprints(self.features)} if self.features else {}),
            "packing": packing,
            "sources": {source.name: source.fingerprint for source in self.sources},
            "tokenizer": self.sources[0].tokenizer,
            "split": self.sources[0].split,
            "seq_len": [stage.seq_len for stage in self.stages],
            "batch_rows": [stage.batch_rows for stage in self.stages],
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
        with fetching_ahead(reader, start, stop) as at:
            for step, batch in zip(range(start, stop), iterator, strict=True):
                at(step)
                yield step, batch
    finally:
        iterator.close()


@contextlib.contextmanager
def fetching_ahead(reader: Callable[[int], Batch], start: int, stop: int) -> Iterator[Callable[[int], None]]:
    """Fetches what coming steps read from buckets, if anything; yields what is to be told of each step that begins."""
    files = reader.remote_files() if isinstance(reader, StepReader) else []
    if not files:
        yield lambda step: None
        return
    with ReadAhead(reader.shard_cache(), reader.needed, len(files)).over(start, stop) as ahead:
        yield ahead.at


def parse_flags() -> None:
    """Grain's workers read absl flags, which nobody parses outside an absl app."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def build_train_reader(
    config: DataConfig,
    batch_size: int,
    seed: int,
    rows: Sequence[int] | Callable[[int], Sequence[int]] | None = None,
    steps: int | None = None,
    packing_dir: os.PathLike | str | None = None,
) -> StepReader:
    """The reader of a run, from its config; verifies the shards first. Call its `prepare` before the first step.

    Args:
      config: names the shard folders, T and the mixture.
      batch_size: rows of the global batch, where they have `config.seq_len` tokens.
      seed: of the run; decides shifts and permutations.
      rows: this host's indices into the global batch, or a function of its rows that gives them; none: all.
      steps: of the run; needed where sources are capped.
      packing_dir: holds the prepared rows of best_fit, unless the config names another.

    Raises:
      UserError: shards are missing, damaged, or of different tokenizers; an unknown source; an empty corpus.
    """
    best_fit = config.packing == "best_fit"
    packing_dir = config.packing_dir or packing_dir
    if best_fit and (packing_dir is None or "://" in os.fspath(packing_dir)):
        raise UserError("config.data.packing='best_fit' keeps its rows in local files: set config.data.packing_dir")
    sources = verified_sources(config, config.train_split)
    mixture = build_mixture(sizes(sources, config), config, batch_size, steps)
    stages = tuple(
        Stage(step, count, length, host_rows(rows, count))
        for step, count, length in zip(config.from_steps, config.stage_rows(batch_size), config.seq_lens)
    )
    folder = os.fspath(packing_dir) if best_fit else None
    return StepReader(sources, mixture, stages, seed, config.packing, folder, open_features(config.features, sources))


def host_rows(rows: Sequence[int] | Callable[[int], Sequence[int]] | None, batch_rows: int) -> tuple[int, ...] | None:
    """A host's rows of a global batch of `batch_rows`; none: all."""
    if rows is None:
        return None
    chosen = tuple(rows(batch_rows) if callable(rows) else rows)
    if not all(0 <= row < batch_rows for row in chosen):
        raise UserError(f"rows {chosen} are outside the batch of {batch_rows}")
    return chosen


def verified_sources(config: DataConfig, split: str) -> tuple[Source, ...]:
    """Opens a split of all shard folders."""
    if not config.shards:
        raise UserError("config.data.shards names no folder made by `lmjax tokenize`")
    for folder in config.shards:
        bucket.check(folder)
        verify_shards(folder, [split], full=config.verify == "full")
    cache = None if config.cache_dir is None else ShardCache(os.path.abspath(config.cache_dir), config.cache_bytes)
    return open_sources(config.shards, split, cache)
