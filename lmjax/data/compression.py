"""Compressed files, streamed over all their gzip members or zstd frames; a file that was cut short says so.

The libraries' own file objects stop after the first zstd frame, and end quietly where a file was truncated.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import zstandard
from etils import epath

from lmjax.errors import UserError

BLOCK_BYTES = 1 << 16  # read at a time, and what a damaged file may lose of the bytes before its fault


class Fault(Exception):
    """Why a file cannot be read to its end, or a record cannot become a document."""


class Compression(NamedTuple):
    """How a compressed file is known and read."""

    magic: tuple[bytes, ...]  # any of which opens a file
    new: Callable[[], Any]  # a decompressor of one gzip member or zstd frame
    error: type[Exception]


COMPRESSION = {
    ".gz": Compression((b"\x1f\x8b",), lambda: zlib.decompressobj(wbits=31), zlib.error),
    ".zst": Compression(
        (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))),  # and skippable frames
        lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),  # as `zstd --long=31` writes
        zstandard.ZstdError,
    ),
}


def raw_blocks(file: Any) -> Iterator[bytes]:
    """The bytes of an open file, a block at a time."""
    while block := file.read(BLOCK_BYTES):
        yield block


def decompressed(blocks: Iterable[bytes], suffix: str, path: epath.Path) -> Iterator[bytes]:
    """The content of a file over all its gzip members or zstd frames.

    Raises:
      UserError: the file does not begin as its extension says.
      Fault: it is damaged or ends early; all that could be read was yielded before.
    """
    kind = COMPRESSION.get(os.path.splitext(suffix)[1])
    if kind is None:
        yield from blocks
        return
    stream, started = None, False
    for block in blocks:
        while block := block if stream else block.lstrip(b"\0"):  # zeros between frames are padding
            if not started and not block.startswith(kind.magic):
                raise UserError(f"{path} is not a {suffix} file, whatever its name says")
            stream, started = stream or kind.new(), True
            try:
                yield stream.decompress(block)
            except kind.error as error:
                raise Fault(f"the file is damaged ({error})") from error
            if not stream.eof:
                break
            block, stream = stream.unused_data, None
    if stream or not started:
        raise Fault("the file was cut short")
