"""Documents as the project writes them between its stages: zstd-compressed JSON lines, in which every fault is an error."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import zstandard
from etils import epath

from lmjax.data.compression import Fault, decompressed, raw_blocks, split_lines
from lmjax.data.document import Document, to_bytes
from lmjax.errors import UserError

ZSTD_LEVEL = 3
SUFFIX = ".jsonl.zst"  # of the project's own form


class DocumentWriter:
    """Writes documents to `PATH.jsonl.zst`: JSON lines {id, text, source, meta}; equal documents give equal bytes.

    Texts come back as they were, with one exception that JSON has no form for: two lone surrogates side by side that make a
    pair come back as the pair's character. No reader makes such a text.
    """

    def __init__(self, path: os.PathLike | str):
        self.path = epath.Path(path)
        self.documents = 0
        self.bytes = 0  # UTF-8 bytes of the texts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._stream = zstandard.ZstdCompressor(ZSTD_LEVEL, write_checksum=True).stream_writer(self._file)

    def write(self, document: Document) -> None:
        """Appends one document."""
        fields = {"id": document.id, "text": document.text, "source": document.source, "meta": document.meta}
        line = json.dumps(fields, separators=(",", ":"))  # ASCII: lone surrogates stand as escapes
        self._stream.write(line.encode() + b"\n")
        self.documents += 1
        self.bytes += len(to_bytes(document.text))

    def counts(self) -> dict[str, int]:
        """What was written so far."""
        return {"documents": self.documents, "bytes": self.bytes}

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()  # closes the file, too


def write_documents(path: os.PathLike | str, documents: Iterable[Document]) -> dict[str, int]:
    """Writes documents to a `.jsonl.zst` file and returns {"documents", "bytes" (UTF-8, of the texts)}."""
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.write(document)
    return writer.counts()


def read_written(path: os.PathLike | str, sha256: str | None = None) -> Iterator[Document]:
    """The documents of a file that `write_documents` wrote.

    Args:
      path: the file.
      sha256: of the file, as its manifest says; compared when all was read, in the same pass.

    Raises:
      UserError: the file is missing, or is not byte for byte what was written.
    """
    path, digest = epath.Path(path), hashlib.sha256()
    if not path.exists():
        raise UserError(f"no such file: {path}")
    try:
        with path.open("rb") as file:
            blocks = decompressed(hashed(raw_blocks(file), digest), SUFFIX, path)
            for line in split_lines(blocks):
                yield Document(**json.loads(line))
    except (Fault, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged, make its folder again: {error}") from error
    if sha256 not in (None, digest.hexdigest()):
        raise UserError(f"{path} is not what its manifest says (sha256 differs): make its folder again")


def hashed(blocks: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    """The same blocks, after the digest has seen them."""
    for block in blocks:
        digest.update(block)
        yield block
