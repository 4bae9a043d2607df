"""Within clusters of vectors: which documents survive, and the pairs of a dropped document and its survivor."""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16, Float32, Float64, Int

from lmjax.data.document import draw
from lmjax.data.embedding import normalised
from lmjax.data.vectors import pair_schema, read_table, vectors_of, write_array, write_table

BLOCK = 512  # rows that are compared with the survivors at once
SURVIVORS = 8192  # of a block's comparison at once
SHOWN = 20  # pairs and groups in the report
BINS = 20  # of the histogram of cosines


class Rows:
    """The rows of a range of clusters, from all shards."""

    def __init__(self, paths: Sequence[Path], bounds: tuple[int, int]):
        import pyarrow as pa

        tables, shards, labels = [], [], []
        for number, path in enumerate(paths):
            places = np.load(path.with_suffix(".npy"))[bounds[0] : bounds[1] + 1]
            tables.append(read_table(path, int(places[0]), int(places[-1])))
            shards.append(np.full(len(tables[-1]), number))
            labels.append(np.repeat(np.arange(*bounds), np.diff(places)))
        self.table = pa.concat_tables(tables)
        self.vectors = vectors_of(self.table)
        self.shard, self.label = np.concatenate(shards), np.concatenate(labels)
        self.row = self.table["row"].to_numpy().astype(np.int64)

    def clusters(self, keep: str) -> Iterator[Int[np.ndarray, " M"]]:
        """The rows of each cluster, best first."""
        keys: dict[str, Float64[np.ndarray, " N"]] = {
            "first": np.zeros(len(self.row)),
            "longest": -self.table["length"].to_numpy().astype(np.float64),
            "best": -self.table["score"].to_numpy(),
        }
        order = np.lexsort((self.row, self.shard, keys[keep], self.label))
        starts = np.flatnonzero(np.diff(self.label[order], prepend=-1))
        yield from np.split(order, starts[1:]) if len(order) else []


def survive(
    vectors: Float16[np.ndarray, "M D"], threshold: float
) -> tuple[Int[np.ndarray, " M"], Float32[np.ndarray, " M"]]:
    """For each row, best first, the first survivor that it is too similar to, or -1 (it survives); and their cosine."""
    survivor, cosine = np.full(len(vectors), -1), np.zeros(len(vectors), np.float32)
    alive = np.zeros(0, np.int64)
    for start in range(0, len(vectors), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(vectors)))
        values = normalised(vectors[block].astype(np.float32))
        for first in range(0, len(alive), SURVIVORS):
            some = alive[first : first + SURVIVORS]
            mark(survivor, cosine, block, some, values @ normalised(vectors[some].astype(np.float32)).T, threshold)
        among = values @ values.T
        for place, row in enumerate(block.tolist()):
            if survivor[row] < 0:
                later, column = block[place + 1 :], among[place + 1 :, place : place + 1]
                mark(survivor, cosine, later, np.array([row]), column, threshold)
        alive = np.concatenate([alive, block[survivor[block] < 0]])
    return survivor, cosine


def mark(
    survivor: Int[np.ndarray, " M"],
    cosine: Float32[np.ndarray, " M"],
    rows: Int[np.ndarray, " B"],
    alive: Int[np.ndarray, " S"],
    cosines: Float32[np.ndarray, "B S"],
    threshold: float,
) -> None:
    """Notes for rows without a survivor the first that they are too similar to."""
    above = cosines > threshold
    hit = np.flatnonzero(above.any(axis=1) & (survivor[rows] < 0))
    first = np.argmax(above[hit], axis=1)
    survivor[rows[hit]] = alive[first]
    cosine[rows[hit]] = cosines[hit, first]


# ------------------------------------------------------------------------------------------------------------------- pairs


class Pairs:
    """Rows that were dropped, each with its survivor."""

    def __init__(self, rows: Rows, dropped: np.ndarray, survivors: np.ndarray, cosines: np.ndarray):
        order = np.lexsort((rows.row[dropped], rows.shard[dropped]))
        self.rows, self.dropped = rows, dropped[order]
        self.survivors, self.cosines = survivors[order], cosines[order]

    def write(self, path: Path, num_shards: int) -> None:
        """The rows in the order of the corpus, and beside them where each shard begins."""
        import pyarrow as pa

        of = self.rows.table["id"].take(pa.array(self.survivors)).combine_chunks()
        columns = [pa.array(self.rows.row[self.dropped], pa.int32()), of, pa.array(self.cosines, pa.float32())]
        write_table(path, [pa.Table.from_arrays(columns, schema=pair_schema())], pair_schema())
        starts = np.searchsorted(self.rows.shard[self.dropped], np.arange(num_shards + 1))
        write_array(path.with_suffix(".npy"), starts)

    def summary(self, threshold: float) -> dict[str, Any]:
        """What a person wants to see of them."""
        leaders, counts = np.unique(self.survivors, return_counts=True)
        sizes = zip(
            (-counts).tolist(), (self.text("id", row) for row in leaders.tolist()), leaders.tolist(), strict=True
        )
        largest = heapq.nsmallest(SHOWN, sizes)
        lots = [
            (draw(self.text("id", row), "semantic_dedup/pairs", 0), place)
            for place, row in enumerate(self.dropped.tolist())
        ]
        bins = np.linspace(threshold, 1, BINS + 1)
        members = np.bincount(self.rows.label) if len(self.rows.label) else np.zeros(1, np.int64)
        return {
            "dropped": len(self.dropped),
            "largest_cluster": int(members.max()),
            "groups": [{"id": id, "dropped": -n, "text": self.text("head", row)} for n, id, row in largest],
            "pairs": [{"draw": lot, **self.pair(place)} for lot, place in heapq.nsmallest(SHOWN, lots)],
            "cosines": np.histogram(np.clip(self.cosines, bins[0], 1), bins)[0].tolist(),
        }

    def pair(self, place: int) -> dict[str, Any]:
        """A dropped document and its survivor."""
        row, survivor = int(self.dropped[place]), int(self.survivors[place])
        pair = {"id": self.text("id", row), "of": self.text("id", survivor), "cosine": float(self.cosines[place])}
        return pair | {"text": self.text("head", row), "of_text": self.text("head", survivor)}

    def text(self, column: str, row: int) -> str:
        """An id, or how a text begins."""
        return self.rows.table[column][row].as_py().decode("utf-8", "replace")


def merge(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary over all ranges of clusters."""
    groups = [group for result in results for group in result["groups"]]
    pairs = [pair for result in results for pair in result["pairs"]]
    return {
        "dropped": sum(result["dropped"] for result in results),
        "largest_cluster": max((result["largest_cluster"] for result in results), default=0),
        "largest_groups": sorted(groups, key=lambda group: (-group["dropped"], group["id"]))[:SHOWN],
        "pairs": sorted(pairs, key=lambda pair: (pair["draw"], pair["id"]))[:SHOWN],
        "cosines": np.sum([result["cosines"] for result in results], axis=0).tolist() if results else [],
    }
