"""One small tokenizer of every kind, trained on this library's own source."""

import io
import pathlib

import pytest
import sentencepiece
import tokenizers as hf_library

from lmjax.data.config import TokenizerConfig
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.tokenizers.hf import HfTokenizer
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer
from lmjax.tokenizers.train import train_model

ROOT = pathlib.Path(__file__).parent.parent.parent


def source_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "lmjax").rglob("*.py"))]


def train_imported(texts: list[str], **options) -> bytes:
    """A model as others train it: NFKC, a space put before the text, spaces in a row joined, no bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line),
        model_writer=model, vocab_size=500, model_type="bpe", minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    return model.getvalue()


def train_hf(texts: list[str]) -> str:
    """A byte-level BPE that pads, truncates, and puts <s> before each text: all of that must be switched off."""
    tokenizer = hf_library.Tokenizer(hf_library.models.BPE())
    tokenizer.pre_tokenizer = hf_library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf_library.decoders.ByteLevel()
    alphabet = hf_library.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf_library.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = hf_library.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_id=2, pad_token="<pad>", length=8)
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def tokenizers():
    """Name → tokenizer; `imported` and `llama` (which has bytes) keep a normalizer, the others lose nothing."""
    texts = source_texts()
    return {
        "byte": ByteTokenizer(),
        "bpe": SentencePieceTokenizer(train_model(texts, TokenizerConfig(vocab_size=600))),
        "unigram": SentencePieceTokenizer(train_model(texts, TokenizerConfig(vocab_size=600, algorithm="unigram"))),
        "imported": SentencePieceTokenizer(train_imported(texts)),
        "llama": SentencePieceTokenizer(train_imported(texts, byte_fallback=True)),
        "hf": HfTokenizer(train_hf(texts)),
    }
