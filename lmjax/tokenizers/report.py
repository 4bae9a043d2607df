"""What a tokenizer makes of text: bytes a token by source, strings that break tokenizers, pieces that nothing uses."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lmjax.data.document import Document, to_bytes
from lmjax.tokenizers.base import Tokenizer

BATCH_DOCUMENTS = 64

HARD_STRINGS = {
    "Hindi": "नमस्ते दुनिया, यह एक वाक्य है।",
    "Chinese": "天地玄黃，宇宙洪荒。",
    "Arabic": "مرحبا بالعالم",
    "SQL": "SELECT `a`, COUNT(*) FROM t WHERE b <> 'x''y' GROUP BY 1; -- 100%\n",
    "indentation": "def f(x):\n    if x:\n            return  [ 1,2 ]\n\n\n\tpass\n",
    "tabs": "a\tb\t\tc\n\t\t\td",
    "spaces at both ends": "   text   ",
    "emoji with joiners": "👩‍👩‍👧‍👦 👍🏽 🇫🇷",
    "combining characters": "e\u0301 \u1e69 s\u0323\u0307",
    "compatibility characters": "ﬁ ① Å ㌔ ｱ",
    "lone surrogate": "a\ud800b \udfff",
    "U+2028 and U+0085": "line\u2028separator\u0085next",
    "CR LF": "one\r\ntwo\rthree\n\r",
    "NUL": "a\0b\0",
    "byte-order mark": "\ufefftext\ufeff",
    "U+FFFD": "bad \ufffd byte",
    "U+2581": "a\u2581b \u2581 \u2581\u2581",
    "unassigned characters": "\U0010ffff \ufffe \U000e0001",
    "one character 10,000 times": "a" * 10_000,
    "10,000 spaces": " " * 10_000,
    "10,000 line ends": "\n" * 10_000,
    "special strings": "<pad><unk><bos><eos><mask><sep></s><|endoftext|>[CLS]<0x41>",
    "empty": "",
}


def make_report(tokenizer: Tokenizer, documents: Mapping[str, Iterable[Document]]) -> dict[str, Any]:
    """Encodes held-out documents and the hard strings; JSON values.

    Args:
      tokenizer: any.
      documents: by source; streamed once. Pieces that none of them uses are counted as unused.

    Returns:
      `bytes_per_token` (UTF-8 bytes; of all documents, none without any), `sources`, `unused_pieces`, `hard_strings` with
      their tokens and whether they come back equal, and `lossy_strings`, the number that do not.
    """
    used = np.zeros(tokenizer.vocab_size, bool)
    sources = {source: measure(tokenizer, texts, used) for source, texts in documents.items()}
    num_bytes, num_tokens = (sum(source[key] for source in sources.values()) for key in ("bytes", "tokens"))
    hard = {name: try_string(tokenizer, text) for name, text in HARD_STRINGS.items()}
    return {
        "bytes_per_token": ratio(num_bytes, num_tokens),
        "sources": sources,
        "vocab_size": tokenizer.vocab_size,
        "unused_pieces": int((~used).sum()) if sources else None,
        "hard_strings": hard,
        "lossy_strings": sum(not string["lossless"] for string in hard.values()),
    }


def measure(tokenizer: Tokenizer, documents: Iterable[Document], used: np.ndarray) -> dict[str, Any]:
    """Bytes and tokens of a source; marks the pieces that it uses."""
    num_documents = num_bytes = num_tokens = 0
    for texts in batches(documents):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            used[ids] = True
            num_bytes += len(to_bytes(text))
            num_tokens += len(ids)
        num_documents += len(texts)
    per_token = ratio(num_bytes, num_tokens)
    return {"documents": num_documents, "bytes": num_bytes, "tokens": num_tokens, "bytes_per_token": per_token}


def batches(documents: Iterable[Document]) -> Iterable[list[str]]:
    """Texts, a few documents at a time."""
    texts: list[str] = []
    for document in documents:
        texts.append(document.text)
        if len(texts) == BATCH_DOCUMENTS:
            yield texts
            texts = []
    if texts:
        yield texts


def ratio(num_bytes: int, num_tokens: int) -> float | None:
    """Bytes a token, rounded so that a report is readable; none without tokens."""
    return round(num_bytes / num_tokens, 4) if num_tokens else None


def try_string(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """Whether a string comes back, and whether a special id came out of its text."""
    ids = tokenizer.encode(text)
    special = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
    return {"tokens": len(ids), "lossless": tokenizer.decode(ids) == text, "special_ids": bool(special)}


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The report as two tables."""
    console = console or Console()
    sources = Table("source", "documents", "bytes", "tokens", "bytes/token", title="held-out documents")
    for name, row in report["sources"].items():
        numbers = [f"{row[key]:,}" for key in ("documents", "bytes", "tokens")]
        sources.add_row(name, *numbers, "–" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.3f}")
    strings = Table("string", "tokens", "comes back", "read as special", title="hard strings")
    for name, row in report["hard_strings"].items():
        strings.add_row(
            name, f"{row['tokens']:,}", *("yes" if row[key] else "no" for key in ("lossless", "special_ids"))
        )
    if report["sources"]:
        console.print(sources)
        console.print(f"{report['unused_pieces']:,} of {report['vocab_size']:,} pieces are not used in them")
    console.print(strings)
