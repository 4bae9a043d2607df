"""Shuffling documents of any number in bounded memory: their order is that of a keyed hash of their ids.

Documents are dealt, as JSON lines, to temporary buckets by the first bits of the hash; then each bucket is sorted in memory.
The order depends on the key and the ids alone, not on the order of the input or the number of buckets; a document that joins
later moves no other.
"""

import contextlib
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from lmjax.data.document import Document, to_bytes
from lmjax.errors import UserError

HASH_CHARACTERS = 32  # in hex, before each line
MAX_BUCKETS = 512  # open files at one time


def deal(
    documents: Iterable[Document], key: str, scratch: pathlib.Path, num_buckets: int
) -> tuple[list[pathlib.Path], int]:
    """Writes the documents to buckets in a folder; returns the buckets in the order of their hashes, and the count."""
    secret = hashlib.sha256(to_bytes(key)).digest()
    num_buckets = min(num_buckets, MAX_BUCKETS)
    paths, count = [scratch / f"{number:03d}" for number in range(num_buckets)], 0
    with contextlib.ExitStack() as stack:
        buckets = [stack.enter_context(path.open("wb")) for path in paths]
        for document in documents:
            digest = hashlib.blake2b(to_bytes(document.id), key=secret, digest_size=HASH_CHARACTERS // 2).hexdigest()
            bucket = int(digest[:8], 16) * num_buckets >> 32
            buckets[bucket].write(f"{digest}{json.dumps(vars(document))}\n".encode())
            count += 1
    return paths, count


def collect(buckets: Sequence[pathlib.Path], name: str) -> Iterator[bytes]:
    """The documents' JSON lines in the order of their hashes; removes each bucket when it has been read.

    Raises:
      UserError: two documents have one id.
    """
    for path in buckets:
        with path.open("rb") as file:
            lines = sorted(file)
        path.unlink()
        for line, following in itertools.pairwise(lines):
            if line[:HASH_CHARACTERS] == following[:HASH_CHARACTERS]:
                id = json.loads(line[HASH_CHARACTERS:])["id"]
                raw = "id_field=none numbers those of raw files"
                made = "folders that were made apart want a source name each, or one preparation of all their raw files"
                raise UserError(f"two documents of {name} have the id {id!r}: {raw}; {made}")
        yield from (line[HASH_CHARACTERS:] for line in lines)
