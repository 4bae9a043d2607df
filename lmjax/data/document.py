"""The unit of data: one document. A data stage is `Iterable[Document] → Iterator[Document]`.

On disk, documents are JSON lines, zstd-compressed: `FOLDER/<source>.jsonl.zst`, or `FOLDER/<split>/<source>.jsonl.zst`
after the split, beside a `manifest.json`.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    id: str  # unique within its source, stable over runs: a path, a URL, a hash
    text: str  # may hold lone surrogates: nothing is lost on the way
    source: str  # names the part of a mixture: "code", "docs" …
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)  # path, url, date, license …; JSON values
