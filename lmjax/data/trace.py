"""From a step back to its documents: what `lmjax trace --workdir DIR --step N` prints."""

from typing import Any

from lmjax.data.loader import Part, StepReader, indices


def trace(reader: StepReader, step: int) -> list[dict[str, Any]]:
    """The rows of a step's batch, in order: {row, source, epoch, documents: [{id, start_token, stop_token, meta}]}.

    Tokens [start_token, stop_token) of a document, special ids included, stand in the row one after another.
    """
    stage = reader.stages[reader.stage_at(step)]
    in_batch = indices(stage.rows, stage.batch_rows)
    rows = [row for part in reader.parts(step) for row in trace_part(part, in_batch[part.rows].tolist())]
    return sorted(rows, key=lambda row: row["row"])


def trace_part(part: Part, in_batch: list[int]) -> list[dict[str, Any]]:
    """The rows of a step that one source gives, numbered `in_batch`."""
    found = part.pieces(targets=False)
    rows: list[dict[str, Any]] = [
        {"row": row, "source": part.source.name, "epoch": epoch, "documents": []}
        for row, epoch in zip(in_batch, part.epochs.tolist())
    ]
    for window, document, start, length in zip(
        found.window.tolist(), found.document.tolist(), found.start.tolist(), found.length.tolist()
    ):
        known = part.source.document(document)
        span = {"id": known["id"], "start_token": start, "stop_token": start + length, "meta": known["meta"]}
        rows[window]["documents"].append(span)
    return rows
