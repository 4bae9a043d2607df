"""The bytes of files as a stream: decompressed over all their gzip members or zstd frames, and cut into lines.

A file that was cut short says so: the libraries' own file objects stop after the first zstd frame, and end quietly where a file
was truncated.
"""

import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import zstandard
from etils import epath

from lmjax.errors import UserError

BLOCK_BYTES = 1 << 16  # read at a time


class Fault(Exception):
    """Why a file cannot be read to its end, or a record cannot become a document; `raw` is the record, or its first part."""

    def __init__(self, why: str, raw: bytes = b""):
        super().__init__(why)
        self.raw = raw


class Compression(NamedTuple):
    """How a compressed file is known and read."""

    magic: tuple[bytes, ...]  # any of which opens a file
    signature: bytes  # a member is looked for by it after damage
    new: Callable[[Any], Any]  # a decompressor of one gzip member or zstd frame, given a zstd dictionary
    error: type[Exception]
    block_bytes: int  # decompressed at a time, and what a damaged file may lose of the bytes before its fault


def new_frame(dictionary: zstandard.ZstdCompressionDict | None) -> Any:
    """A decompressor of a zstd frame; windows as large as `zstd --long=31` writes."""
    return zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=1 << 31).decompressobj()


FRAME = b"\x28\xb5\x2f\xfd"  # opens a zstd frame
DICTIONARY = b"\x5d\x2a\x4d\x18"  # opens the skippable frame that may hold the dictionary of a .warc.zst
DICTIONARY_BYTES = 1 << 24  # at most
COMPRESSION = {
    ".gz": Compression(
        (b"\x1f\x8b",), b"\x1f\x8b\x08", lambda _: zlib.decompressobj(wbits=31), zlib.error, 1 << 12
    ),  # a byte may stand for 1 KiB
    ".zst": Compression(
        (FRAME, *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))),  # and skippable frames
        FRAME,
        new_frame,
        zstandard.ZstdError,
        1 << 9,  # 4 bytes may stand for 128 KiB
    ),
}


def raw_blocks(file: Any) -> Iterator[bytes]:
    """The bytes of an open file, a block at a time."""
    while block := file.read(BLOCK_BYTES):
        yield block


def split_lines(blocks: Iterable[bytes], most: int | None = None) -> Iterator[bytes]:
    r"""Lines end at \n and nowhere else: U+2028 and U+0085 are part of a text. Of a longer line come `most` + 1 bytes or more."""
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        first, *rest = block.split(b"\n")
        if most is None or size <= most:
            parts.append(first)
            size += len(first)
        for piece in rest:
            yield b"".join(parts)
            parts, size = [piece], len(piece)
    if last := b"".join(parts):
        yield last


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
    for block in small_blocks(blocks, kind.block_bytes):
        while block := block if stream else block.lstrip(b"\0"):  # zeros between frames are padding
            if not started and not block.startswith(kind.magic):
                raise UserError(f"{path} is not a {suffix} file, whatever its name says")
            stream, started = stream or kind.new(None), True
            try:
                yield stream.decompress(block)
            except kind.error as error:
                raise Fault(f"the file is damaged ({error})") from error
            if not stream.eof:
                break
            block, stream = stream.unused_data, None
    if stream or not started:
        raise Fault("the file was cut short")


def small_blocks(blocks: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The same bytes in smaller blocks."""
    for block in blocks:
        for start in range(0, len(block), most):
            yield block[start : start + most]


def salvaged(blocks: Iterable[bytes], suffix: str, path: epath.Path, opening: bytes) -> Iterator[bytes | Fault]:
    """The content of an archive, a `Fault` in each place where some is missing; it goes on at the next member that can be read.

    Args:
      opening: a member is known by it, where one is looked for after damage: the signature may stand inside another, too.

    Raises:
      UserError: the file does not begin as its extension says.
    """
    kind, dictionary = COMPRESSION.get(os.path.splitext(suffix)[1]), None
    if kind is None:
        yield from blocks
        return
    if kind.signature == FRAME:
        dictionary, blocks = take_dictionary(iter(blocks))
    stream, seeking, head, first, tail = None, False, b"", True, b""
    for block in small_blocks(blocks, kind.block_bytes):
        block = tail + block if seeking and stream is None else block  # a signature may stand across two blocks
        tail = block[1 - len(kind.signature) :]
        while block := block if stream else next_member(block, kind.signature if seeking else None):
            if first and not block.startswith(kind.magic):
                raise UserError(f"{path} is not a {suffix} file, whatever its name says")
            if stream is None:
                stream, first, head = kind.new(dictionary), False, b""
            try:
                data = stream.decompress(block)
            except kind.error as error:
                if not seeking:
                    yield Fault(f"the file is damaged ({error})")
                stream, seeking, block = None, True, block[1:]
                continue
            if seeking:
                head += data
                if len(head) < len(opening) and not stream.eof:
                    break
                if not head.startswith(opening):
                    stream, block = None, block[1:]
                    continue
                seeking, data = False, head
            yield data
            if not stream.eof:
                break
            block, stream = stream.unused_data, None
    if (stream or first) and not seeking:
        yield Fault("the file was cut short")


def next_member(block: bytes, signature: bytes | None) -> bytes:
    """A block from where a member may begin: at once, or where its signature stands."""
    if signature is None:
        return block.lstrip(b"\0")  # zeros between members are padding
    at = block.find(signature)
    return block[at:] if at >= 0 else b""


def take_dictionary(blocks: Iterator[bytes]) -> tuple[zstandard.ZstdCompressionDict | None, Iterator[bytes]]:
    """The dictionary that a .warc.zst may open with (IIPC: "WARC with Zstandard", plain or compressed), and the blocks.

    One that is damaged is none: then no frame can be read, and each counts.
    """
    head = next(blocks, b"")
    size = int.from_bytes(head[4:8], "little") if head.startswith(DICTIONARY) else 0
    while len(head) < 8 + size <= DICTIONARY_BYTES and (block := next(blocks, b"")):
        head += block
    blocks, content = itertools.chain([head], blocks), head[8 : 8 + size]
    if not content or len(content) < size:
        return None, blocks
    try:
        dictionary = zstandard.ZstdCompressionDict(
            new_frame(None).decompress(content) if content.startswith(FRAME) else content
        )
        new_frame(dictionary)
    except zstandard.ZstdError:
        return None, blocks
    return dictionary, blocks
