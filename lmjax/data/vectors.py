"""Vectors of documents on disk: Arrow files of rows, and arrays; written whole or not at all, read a slice at a time."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16

from lmjax.files import whole, write_atomic


def vector_schema(width: int) -> Any:
    """Of the tables of `embed` and `assign`."""
    import pyarrow as pa

    fields = {"row": pa.int32(), "length": pa.int64(), "score": pa.float64(), "id": pa.binary(), "head": pa.binary()}
    return pa.schema([*fields.items(), ("vector", pa.binary(2 * width))])


def pair_schema() -> Any:
    """Of the tables of `compare`: rows that were dropped."""
    import pyarrow as pa

    return pa.schema([("row", pa.int32()), ("of", pa.binary()), ("cosine", pa.float32())])


def write_table(path: Path, tables: Iterable[Any], schema: Any) -> int:
    """Writes an Arrow file whole or not at all; returns its rows."""
    import pyarrow as pa

    rows = 0
    with whole(path) as temporary, pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for table in tables:
            writer.write_table(table.combine_chunks())
            rows += len(table)
    return rows


def read_table(path: Path, low: int = 0, high: int | None = None) -> Any:
    """Rows of an Arrow file; nothing of it stays open."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        high = len(table) if high is None else high
        return table.take(pa.array(np.arange(low, high)))


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a .npy file whole or not at all."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_atomic(path, buffer.getvalue())


def vector_column(vectors: Float16[np.ndarray, "N D"]) -> Any:
    """The opposite of `vectors_of`."""
    import pyarrow as pa

    kind = pa.binary(vectors.itemsize * vectors.shape[1])
    return pa.Array.from_buffers(kind, len(vectors), [None, pa.py_buffer(vectors.tobytes())])


def vectors_of(table: Any) -> Float16[np.ndarray, "N D"]:
    """The vectors of a table."""
    width = table.schema.field("vector").type.byte_width
    data = b"".join(
        chunk.buffers()[1][chunk.offset * width :][: len(chunk) * width] for chunk in table["vector"].chunks
    )
    return np.frombuffer(data, np.float16).reshape(len(table), width // 2)
