"""Small corpora for the tests of the data path: documents as `lmjax split` leaves them, a byte tokenizer, shards."""

import dataclasses
import hashlib
import random

import numpy as np

from lmjax.data.config import ShardsConfig
from lmjax.data.document import Document
from lmjax.data.shards import write_shards
from lmjax.data.written import write_documents
from lmjax.files import Manifest, sha256_file, write_manifest


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes as ids, then bos and eos; a larger vocabulary has ids that nothing uses."""

    vocab_size: int = 258
    pad_id: int | None = None
    bos_id: int | None = 256
    eos_id: int | None = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return bytes(i for i in np.asarray(ids).tolist() if i < 256).decode("utf-8", "replace")

    def save(self, folder) -> None:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


BARE = Bytes(256, bos_id=None, eos_id=None)  # an empty text has no token


def random_texts(count: int, seed: int, longest: int = 60) -> list[str]:
    """Texts of ASCII letters; some are empty, some of one letter, a few long."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, rng.randint(2, longest), rng.randint(2, longest)]) for _ in range(count)]
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for length in lengths]


def write_split(folder, splits):
    """{split: {source: texts}} as documents; the id of text i is `<source>-i`."""
    files, counts = {}, {split: {} for split in splits}
    for split, sources in splits.items():
        for source, texts in sources.items():
            name = f"{split}/{source}.jsonl.zst"
            documents = (Document(f"{source}-{i}", text, source, {"number": i}) for i, text in enumerate(texts))
            counts[split][source] = write_documents(folder / name, documents)
            files[name] = sha256_file(folder / name)
    size = sum(source["bytes"] for sources in counts.values() for source in sources.values())
    write_manifest(folder, Manifest("split", {}, {}, {"bytes": size, "splits": counts}, {"files": files}, "", 0.0))
    return folder


def make_shards(folder, sources, tokenizer=BARE, split="train", **config):
    """Documents and shards of one split under a folder; returns the shard folder."""
    documents = write_split(folder / "documents", {split: sources})
    write_shards(documents, tokenizer, folder / "shards", ShardsConfig(**({"num_workers": 0} | config)))
    return folder / "shards"


def stream(source) -> list[tuple[int, int, int]]:
    """Every token of a source in stored order: (document, position in it, id)."""
    documents = source.read(np.arange(source.num_documents))
    return [(d, i, int(token)) for d, ids in enumerate(documents) for i, token in enumerate(ids)]


def traced_tokens(row: dict, texts: dict[str, str]) -> list[int]:
    """The ids that a traced row says it holds, from the texts themselves: bytes between <bos> and <eos>."""
    tokens: list[int] = []
    for span in row["documents"]:
        tokens += [256, *texts[span["id"]].encode(), 257][span["start_token"] : span["stop_token"]]
    return tokens
