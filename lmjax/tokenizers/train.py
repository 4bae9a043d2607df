"""Makes a tokenizer: trains SentencePiece on a sample of the training split, or imports a model.

    OUT/tokenizer.model | tokenizer.json    the kind's own file
    OUT/tokenizer_kind.json                 what `build.load` reads first
    OUT/report.json                         bytes a token, hard strings, unused pieces (`report.py`)

A sentence, for SentencePiece, is up to SENTENCE_CHARACTERS of a document with its line ends, so that pieces like `):\\n` and
runs of spaces are learned. Nothing is declared as a symbol of its own: what the sample does not hold is spelled in bytes.
"""

import io
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import sentencepiece
from etils import epath

from lmjax.config import is_free, to_dict
from lmjax.data.config import TokenizerConfig
from lmjax.data.document import draw
from lmjax.data.written import SUFFIX, read_written
from lmjax.errors import UserError
from lmjax.files import Manifest, read_manifest, run_stage, sha256_file, sha256_json, write_json
from lmjax.tokenizers import hf
from lmjax.tokenizers.base import SPECIAL_TOKENS, Tokenizer
from lmjax.tokenizers.build import KINDS
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.tokenizers.report import make_report
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer

SENTENCE_CHARACTERS = 10_000  # the trainer of BPE aborts the process on a word of more than 65,535
RESERVED = re.compile(
    "[\u2581\u2585\ud800-\udfff]"
)  # the trainer drops a sentence with one of these, or takes it for a space


def train_tokenizer(
    documents: os.PathLike | str | None, out: os.PathLike | str, config: TokenizerConfig
) -> tuple[Manifest, bool]:
    """Writes a tokenizer's folder; the same documents and config give the same bytes.

    Args:
      documents: a folder made by `lmjax split`. Its training split is learned from, its validation split reported on; None
        where nothing is learned: the report then holds the hard strings only.
      out: the folder.
      config: what to make.

    Returns:
      The manifest, and whether the stage was skipped because the folder already holds it.

    Raises:
      UserError: the model to import is missing or none, or the sample is too small for the vocabulary.
    """
    split = None if documents is None else read_manifest(documents, "split")
    inputs = {} if split is None else {"split": split.fingerprint()}
    if config.path is not None:
        inputs |= hash_model(config)

    def make(folder: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
        files = {} if split is None else written_files(epath.Path(documents), split)
        tokenizer, counts = build(config, files.get("train", {}), split)
        tokenizer.save(folder)
        validation = {source: read_written(*file) for source, file in files.get("validation", {}).items()}
        report = make_report(tokenizer, validation)
        write_json(folder / "report.json", report)
        kept = ("vocab_size", "pad_id", "bos_id", "eos_id")
        content = {
            "kind": config.kind,
            "fingerprint": tokenizer.fingerprint(),
            **{name: getattr(tokenizer, name) for name in kept},
            "files": {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name[0] != "."},
        }
        counts |= {"vocab_size": tokenizer.vocab_size, "unused_pieces": report["unused_pieces"]}
        counts |= {"bytes_per_token": report["bytes_per_token"], "lossy_strings": report["lossy_strings"]}
        return counts, content

    decides = {key: value for key, value in to_dict(config).items() if not is_free(TokenizerConfig, key)}
    return run_stage(out, "tokenizer", inputs, decides, make)


def hash_model(config: TokenizerConfig) -> dict[str, str]:
    """The sha256 of the file to import, and of what is read beside it."""
    try:
        hashes = {"model": sha256_file(config.path)}
    except OSError as error:
        raise UserError(f"config.path={config.path!r} cannot be read: {error.strerror or error}") from error
    named = hf.read_named(epath.Path(config.path).parent / hf.CONFIG) if config.kind == "hf" else None
    return hashes if named is None else hashes | {"special_tokens": sha256_json(named)}


Files = dict[str, tuple[epath.Path, str]]  # source → file of documents, its sha256


def written_files(folder: epath.Path, split: Manifest) -> dict[str, Files]:
    """Split → source → (file, sha256), by the split's manifest."""
    files: dict[str, Files] = {}
    for name, sha256 in split.content["files"].items():
        part, _, file = name.partition("/")
        files.setdefault(part, {})[file.removesuffix(SUFFIX)] = (folder / name, sha256)
    return files


def build(config: TokenizerConfig, train: Files, split: Manifest | None) -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer, and counts of what it learned from."""
    if config.kind == "byte":
        return ByteTokenizer(), {}
    if config.path is not None:
        return KINDS[config.kind].read(epath.Path(config.path)), {}
    if split is None:
        raise UserError("training a tokenizer needs documents: give a folder made by `lmjax split`")
    texts = list(draw_sample(train, split, config))
    counts = {
        "sample_documents": len(texts),
        "sample_bytes": sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
    }
    return SentencePieceTokenizer(train_model(texts, config)), counts


def draw_sample(train: Files, split: Manifest, config: TokenizerConfig) -> Iterator[str]:
    """Texts of the training split, each with the same chance, decided by its hash: sources in proportion to their size."""
    total = sum(source["bytes"] for source in split.counts["splits"]["train"].values())
    share = config.sample_bytes / max(total, 1)
    for path, sha256 in train.values():
        for document in read_written(path, sha256):
            if draw(document.text, "tokenizer", config.seed) < share:
                yield document.text


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """What the trainer takes: no reserved character inside, none too long."""
    for text in texts:
        for part in RESERVED.split(text):
            for start in range(0, len(part), SENTENCE_CHARACTERS):
                yield part[start : start + SENTENCE_CHARACTERS]


def train_model(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """A serialized SentencePiece model that keeps every character; one thread, so that the bytes are always the same."""
    model = io.BytesIO()
    pad, unk, bos, eos, *others = SPECIAL_TOKENS
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=model,
            model_type=config.algorithm,
            vocab_size=config.vocab_size,
            pad_id=0, unk_id=1, bos_id=2, eos_id=3,
            pad_piece=pad, unk_piece=unk, bos_piece=bos, eos_piece=eos,
            control_symbols=others,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            split_digits=config.split_digits,
            shrinking_factor=0.5,  # unigram: with one EM step a round, a third of the time for the same quality
            num_sub_iterations=1,
            max_sentence_length=4 * SENTENCE_CHARACTERS,
            num_threads=1,
            minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise UserError(explain(str(error), config)) from error
    return model.getvalue()


def explain(message: str, config: TokenizerConfig) -> str:
    """What a user can do about a message of the trainer."""
    if most := re.search(r"too high .*<= (\d+)", message):
        return (
            f"config.vocab_size={config.vocab_size} is too large for the sample, which supports {most[1]}: "
            "lower it, or give more text (config.sample_bytes, more documents)"
        )
    if least := re.search(r"smaller than required_chars. (\d+) vs (\d+)", message):
        return f"config.vocab_size={config.vocab_size} is too small for the sample's characters: at least {least[2]}"
    if "sentences_.empty()" in message:
        return (
            f"the sample of config.sample_bytes={config.sample_bytes} holds no text: raise it, or give more documents"
        )
    return f"SentencePiece could not train: {' '.join(message.split())}"
