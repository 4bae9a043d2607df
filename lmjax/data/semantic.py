"""Semantic deduplication (SemDeDup: Abbas et al., 2023, 2303.09540): of documents that mean the same, one stays.

    embed      each document → a vector of length 1                                         a task a shard
    cluster    spherical k-means on a sample: similar vectors meet in one cluster           one task
    assign     each shard's vectors, in the order of their clusters                         a task a shard
    compare    within a cluster, from the best document down: one whose cosine with
               a survivor exceeds the threshold is dropped, every other survives            a task a range of clusters
    decide     what was dropped, by shard                                                   a task a shard

A document is dropped for a survivor only, never for another dropped one: chains of likeness swallow nothing. Pairs that
k-means parts are not found; exact copies always meet. Memory holds a range of clusters, the sample and the centroids, never the
corpus. What is alike is what the model says: see `threshold`.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lmjax.config import need
from lmjax.data.clustering import k_means, nearest, sample, shared_part, without
from lmjax.data.dedup import score
from lmjax.data.document import Document, to_bytes
from lmjax.data.embedding import common_directions, load_encoder, model_folder
from lmjax.data.engine import Engine, Task
from lmjax.data.stage import Drop, GlobalStage, Shard, Tally, Verdict
from lmjax.data.survivors import Pairs, Rows, merge, survive
from lmjax.data.vectors import (
    read_table,
    vector_column,
    vector_schema,
    vectors_of,
    write_array,
    write_table,
)
from lmjax.data.words import split_words
from lmjax.data.written import read_written
from lmjax.errors import UserError
from lmjax.files import read_json, write_atomic, write_json

BATCH = 256  # documents that are embedded at a time
CLUSTER_ROWS = (
    2000  # of a cluster on average, where the config names no number: below it, comparing costs less than clustering
)
SAMPLE_ROWS = 50_000  # for k-means, or SAMPLE_EACH a cluster
SAMPLE_EACH = 20
COMMON_ROWS = 200  # from which it is known what all documents share
RANGE_ROWS = 100_000  # of the clusters of one task
HEAD_CHARACTERS = 200  # of a text, for the report


@dataclasses.dataclass(frozen=True)
class SemanticDedup(GlobalStage):
    """Drops documents whose meaning another one has, as an embedding model sees it."""

    name: ClassVar[str] = "semantic_dedup"

    model: str = "minilm"  # "minilm": bundled, English, 7 documents/s a core; "static": coarse, 250/s; or a folder
    max_tokens: int = 128  # of a passage; what the bundled model was trained on
    pieces: int = 4  # passages of a long document, from its beginning to its end; 1 sees only how it begins
    threshold: float = 0.9  # of the cosine, above -1, below 1. SemDeDup chooses it by the model: the bundled one puts
    # a manual's different pages below 0.9 (one pair above 0.85), half of the copies in another markup above 0.85, a third
    # above 0.9
    common: int | None = None  # directions that all documents share, which are removed; none: as the model needs
    clusters: int | None = None  # none: by the number of documents
    keep: Literal["first", "longest", "best"] = "first"  # the survivor: by place, by characters, by `score`
    score: str = "quality"  # the field of meta that `best` reads: a number, the larger the better; without one: worst
    min_words: int = 20  # shorter documents have too little meaning to be compared, and are kept
    seed: int = 0  # of the sample and of the first centroids

    def __post_init__(self) -> None:
        need(-1 < self.threshold < 1, f"semantic_dedup.threshold={self.threshold} must be between -1 and 1")
        need(self.max_tokens >= 4, f"semantic_dedup.max_tokens={self.max_tokens} must be at least 4")
        need(self.pieces >= 1, f"semantic_dedup.pieces={self.pieces} must be at least 1")
        need(self.common is None or self.common >= 0, f"semantic_dedup.common={self.common} must not be negative")
        need(self.clusters is None or self.clusters >= 1, f"semantic_dedup.clusters={self.clusters} must be at least 1")
        need(
            self.min_words >= 1,
            f"semantic_dedup.min_words={self.min_words} must be at least 1: empty texts are all alike",
        )

    def files(self) -> Sequence[str]:
        """The model's folder."""
        for package in ("safetensors", "tokenizers", "threadpoolctl"):
            try:
                __import__(package)
            except ImportError as error:
                raise UserError(f"semantic_dedup needs {package}: pip install {package}") from error
        return [str(model_folder(self.model))]

    def decide(self, shards: Sequence[Shard], folder: Path, engine: Engine) -> dict[str, Path]:
        """See the module."""
        embedded = [folder / "embed" / f"{shard.key}.arrow" for shard in shards]
        tasks = [
            Task(f"embed/{shard.key}", embed, (self, shard.path, path))
            for shard, path in zip(shards, embedded, strict=True)
        ]
        rows = list(engine.run(tasks, folder, "embedding"))
        centroids = folder / "centroids.npy"
        count = self.clusters or cluster_count(sum(rows))
        common = common_directions(self.model) if self.common is None else self.common
        few = 0 < sum(rows) < COMMON_ROWS and common
        need(
            not few,
            f"semantic_dedup: what all documents share is not known from {sum(rows)}: model={self.model!r} needs"
            f" {COMMON_ROWS}; take model='minilm'",
        )
        arguments = (self, embedded, rows, count, common, centroids)
        engine.run([Task("cluster", cluster, arguments)], folder, "clustering")
        assigned = [folder / "assign" / f"{shard.key}.arrow" for shard in shards]
        tasks = [
            Task(f"assign/{shard.key}", assign, (path, centroids, to))
            for shard, path, to in zip(shards, embedded, assigned, strict=True)
        ]
        engine.run(tasks, folder, "assigning")
        ranges = list(cluster_ranges(assigned))
        compared = [folder / "compare" / f"{number:06d}.arrow" for number in range(len(ranges))]
        tasks = [
            Task(f"compare/{number:06d}", compare, (self, assigned, bounds, path))
            for number, (bounds, path) in enumerate(zip(ranges, compared, strict=True))
        ]
        results = engine.run(tasks, folder, "comparing")
        summary = {"documents": sum(shard.documents for shard in shards), "embedded": sum(rows), "clusters": count}
        write_json(folder / "summary.json", summary | merge(results))
        decided = {shard.key: folder / "decide" / f"{shard.key}.jsonl" for shard in shards}
        tasks = [
            Task(f"decide/{key}", gather, (compared, number, path))
            for number, (key, path) in enumerate(decided.items())
        ]
        engine.run(tasks, folder, "deciding")
        return decided

    def carry_out(self, document: Document, decision: Any, tally: Tally) -> Verdict:
        """Drops it, with the id of its survivor and their cosine."""
        return Drop("semantic_duplicate", decision)

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """Counts, the largest groups, and pairs that a person can judge."""
        return read_json(folder / "summary.json")


def cluster_count(rows: int) -> int:
    """Clusters such that comparing within them costs no more than assigning to them."""
    return max(1, min(-(-rows // CLUSTER_ROWS), math.isqrt(rows)))


# ------------------------------------------------------------------------------------------------------------------- tasks


def one_thread(function: Callable) -> Callable:
    """Tasks fill the cores; the matrix library's own threads would stand in one another's way, and change its rounding."""

    def limited(*arguments: Any) -> Any:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1):
            return function(*arguments)

    limited.__name__ = limited.__qualname__ = function.__name__  # as it is found in the module, to be sent
    return limited


@one_thread
def embed(stage: SemanticDedup, source: Path, target: Path) -> int:
    """The vectors of a shard's documents, with what ranks them; returns how many are long enough."""
    encoder = load_encoder(stage.model, stage.max_tokens, stage.pieces)
    documents = ((row, document) for row, document in enumerate(read_written(source)))
    long_enough = (pair for pair in documents if len(split_words(pair[1].text)) >= stage.min_words)
    tables = (described(batch, encoder, stage) for batch in batched(long_enough, BATCH))
    return write_table(target, tables, vector_schema(encoder.width))


@one_thread
def cluster(
    stage: SemanticDedup, paths: Sequence[Path], rows: Sequence[int], count: int, common: int, target: Path
) -> int:
    """On a sample: what all vectors share, and k-means on the rest."""
    vectors = sample(paths, rows, max(SAMPLE_ROWS, SAMPLE_EACH * count), stage.seed)
    shared = shared_part(vectors, common)
    write_array(target.with_suffix(".shared.npy"), shared)
    vectors = without(vectors, shared)
    write_array(target, k_means(vectors, min(count, max(1, len(vectors))), stage.seed))
    return len(vectors)


@one_thread
def assign(source: Path, centroids: Path, target: Path) -> int:
    """A shard's rows in the order of their clusters, and beside them where each cluster begins."""
    import pyarrow as pa

    table, middles = read_table(source), np.load(centroids)
    vectors = without(vectors_of(table).astype(np.float32), np.load(centroids.with_suffix(".shared.npy")))
    labels = nearest(vectors, middles)
    place = table.schema.get_field_index("vector")
    table = table.set_column(place, table.schema.field("vector"), vector_column(vectors.astype(np.float16)))
    order = np.argsort(labels, kind="stable")
    write_array(target.with_suffix(".npy"), np.searchsorted(labels[order], np.arange(len(middles) + 1)))
    return write_table(target, [table.take(pa.array(order))], table.schema)


def cluster_ranges(paths: Sequence[Path]) -> Iterator[tuple[int, int]]:
    """Neighbouring clusters, at most RANGE_ROWS rows together, or one."""
    sizes = np.zeros(1, np.int64)
    for path in paths:
        sizes = sizes + np.diff(np.load(path.with_suffix(".npy")))
    start = rows = 0
    for number, size in enumerate(sizes.tolist()):
        if rows and rows + size > RANGE_ROWS:
            yield start, number
            start, rows = number, 0
        rows += size
    if rows:
        yield start, len(sizes)


@one_thread
def compare(stage: SemanticDedup, paths: Sequence[Path], bounds: tuple[int, int], target: Path) -> dict[str, Any]:
    """Who survives in each of the clusters; writes those that do not, in the order of the corpus."""
    rows = Rows(paths, bounds)
    dropped, survivors, cosines = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for members in rows.clusters(stage.keep):
        survivor, cosine = survive(rows.vectors[members], stage.threshold)
        gone = np.flatnonzero(survivor >= 0)
        dropped.append(members[gone])
        survivors.append(members[survivor[gone]])
        cosines.append(cosine[gone])
    pairs = Pairs(rows, np.concatenate(dropped), np.concatenate(survivors), np.concatenate(cosines))
    pairs.write(target, len(paths))
    return pairs.summary(stage.threshold)


def gather(paths: Sequence[Path], number: int, target: Path) -> int:
    """A shard's decisions, from all ranges of clusters."""
    lines = []
    for path in paths:
        low, high = np.load(path.with_suffix(".npy"))[number : number + 2].tolist()
        if high > low:
            part = read_table(path, low, high).to_pydict()
            lines += zip(part["row"], part["of"], part["cosine"], strict=True)
    text = [json.dumps([row, {"of": from_bytes(of), "cosine": round(cosine, 4)}]) for row, of, cosine in sorted(lines)]
    write_atomic(target, "".join(line + "\n" for line in text))
    return len(lines)


# --------------------------------------------------------------------------------------------------------------- one shard


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size`, the last one shorter."""
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


def described(batch: list[tuple[int, Document]], encoder: Any, stage: SemanticDedup) -> Any:
    """The rows of documents in the table of their shard."""
    import pyarrow as pa

    documents = [document for _, document in batch]
    vectors = encoder.encode([document.text for document in documents]).astype(np.float16)
    columns = [
        pa.array([row for row, _ in batch], pa.int32()),
        pa.array([len(document.text) for document in documents], pa.int64()),
        pa.array([score(document.meta.get(stage.score)) for document in documents], pa.float64()),
        pa.array([to_bytes(document.id) for document in documents], pa.binary()),
        pa.array([to_bytes(document.text[:HEAD_CHARACTERS]) for document in documents], pa.binary()),
        vector_column(vectors),
    ]
    return pa.Table.from_arrays(columns, schema=vector_schema(encoder.width))


def from_bytes(data: bytes) -> str:
    """The opposite of `to_bytes`."""
    return data.decode("utf-8", "surrogatepass")
