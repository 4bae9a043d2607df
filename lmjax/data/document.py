"""The unit of data: one document. A data stage is `Iterable[Document] → Iterator[Document]`.

On disk, documents are JSON lines, zstd-compressed: `FOLDER/<source>.jsonl.zst`, or `FOLDER/<split>/<source>.jsonl.zst`
after the split, beside a `manifest.json`.
"""

import dataclasses
import hashlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    id: str  # unique within its source, stable over runs: a path, a URL, a hash
    text: str  # may hold lone surrogates: nothing is lost on the way
    source: str  # names the part of a mixture: "code", "docs" …
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)  # path, url, date, license …; JSON values


def grouped(document: Document) -> Document:
    """The document with a `meta["group"]`, its own or the hash of its text: `lmjax split` divides none.

    What a stage makes of a document takes its group from here, and so does the document: else its text, which its children may
    hold word for word, could fall on the other side of a split.
    """
    if document.meta.get("group") is not None:
        return document
    group = hashlib.blake2b(to_bytes(document.text), digest_size=16).hexdigest()
    return dataclasses.replace(document, meta={**document.meta, "group": group})


def to_bytes(text: str) -> bytes:
    """UTF-8 of any text, lone surrogates included: what sizes, hashes and byte tokens are made of."""
    return text.encode("utf-8", "surrogatepass")


def draw(text: str, purpose: str, seed: int) -> float:
    """A uniform number in [0, 1) for a text: copies draw alike, other documents do not matter, purposes are independent."""
    digest = hashlib.blake2b(to_bytes(text), digest_size=8, key=f"{purpose}/{seed}".encode()).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
