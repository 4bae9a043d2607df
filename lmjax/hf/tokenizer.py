"""Our tokenizers as a `tokenizer.json` with its config: the same ids, and <bos> before each text once. No jax."""

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, processors

from lmjax.errors import UserError
from lmjax.files import write_json
from lmjax.tokenizers.base import SPECIAL_TOKENS, Tokenizer
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.tokenizers.hf import CONFIG, MODEL, HfTokenizer
from lmjax.tokenizers.sentencepiece import MODEL as SENTENCEPIECE_MODEL
from lmjax.tokenizers.sentencepiece import SPACE, SentencePieceTokenizer

# What must come out alike: spaces at every place, digits, bytes, letters that normalizers change.
PROBES = (
    "the model reads",
    " a  b\n\tc ",
    "def f(x):\n    return 12345",
    "naïve 🎉 Ünï",
    "\ufb01 e\u0301\u2460",
    "ab" * 40,
)


def write_tokenizer(
    folder: epath.Path, tokenizer: Tokenizer, max_length: int, chat_template: str | list[dict[str, str]] | None = None
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, which holds the chat template: there every version reads it.

    Raises:
      UserError: a SentencePiece model that does something which a `tokenizer.json` cannot say.
    """
    (writer,) = [write for cls, write in WRITERS.items() if isinstance(tokenizer, cls)]
    model = writer(folder, tokenizer)
    (folder / MODEL).write_text(model)
    library = tokenizers.Tokenizer.from_str(model)
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    spelled = {name: library.id_to_token(id) for name, id in ids.items() if id is not None}
    own = (tokenizer.named or {}) if isinstance(tokenizer, HfTokenizer) else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **spelled, **own, "model_max_length": max_length}
    config |= {} if chat_template is None else {"chat_template": chat_template}
    write_json(folder / CONFIG, {**config, "clean_up_tokenization_spaces": False})


def from_hf(folder: epath.Path, tokenizer: HfTokenizer) -> str:
    """As it came; where ours begins texts with a <bos> that the file does not put there, with it put there."""
    library = tokenizers.Tokenizer.from_str(tokenizer.model)
    if tokenizer.bos_id is None or library.encode("").ids[:1] == [tokenizer.bos_id]:
        return tokenizer.model
    bos = library.id_to_token(tokenizer.bos_id)
    values = json.loads(tokenizer.model)
    before = values.get("post_processor") or {"type": "Sequence", "processors": []}
    steps = before["processors"] if before["type"] == "Sequence" else [before]
    # A second template after one that adds tokens takes these for a second text: the one that is there begins with <bos>.
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:
        text, other = ({"Sequence": {"id": id, "type_id": type_id}} for type_id, id in enumerate("AB"))
        template = {"type": "TemplateProcessing", "single": [text], "pair": [text, other], "special_tokens": {}}
        steps = [*steps, template]
    for name in ("single", "pair"):
        template[name] = [{"SpecialToken": {"id": bos, "type_id": 0}}, *template[name]]
    template["special_tokens"][bos] = {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}
    values["post_processor"] = {"type": "Sequence", "processors": steps}
    return json.dumps(values, ensure_ascii=False)


def from_bytes(folder: epath.Path, tokenizer: ByteTokenizer) -> str:
    """A BPE without merges, over GPT-2's letters for bytes."""
    own = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)]
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]
    vocab = {name: id for id, name in enumerate([*SPECIAL_TOKENS, *letters])}
    library = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return finished(library, list(SPECIAL_TOKENS), tokenizer.bos_id)


def from_sentencepiece(folder: epath.Path, tokenizer: SentencePieceTokenizer) -> str:
    """BPE or unigram with byte fallback, as the `tokenizers` library has it; the model itself is written beside it."""
    (folder / SENTENCEPIECE_MODEL).write_bytes(tokenizer.model)
    processor, count = tokenizer.processor, tokenizer.vocab_size
    pieces = [(processor.id_to_piece(id), processor.get_score(id)) for id in range(count)]
    special = [pieces[id][0] for id in range(count) if processor.is_control(id) or processor.is_unknown(id)]
    plain = [
        (score, id) for id, (_, score) in enumerate(pieces)
        if not (processor.is_control(id) or processor.is_unknown(id) or processor.is_byte(id))
    ]  # fmt: skip
    unknown = processor.unk_id()
    # The scores of a BPE are its ranks: 0, -1, -2 …; those of a unigram model log-probabilities.
    if all(float(score).is_integer() for score, _ in plain):
        vocab = {piece: id for id, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocab, merges(vocab, plain, pieces), unk_token=pieces[unknown][0], fuse_unk=True, byte_fallback=True
        )
    else:
        model = models.Unigram(pieces, unk_id=unknown, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    prefix = processor.encode("a", out_type=str)[0].startswith(SPACE)
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first" if prefix else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for text in PROBES:
        if library.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
            raise UserError(f"this SentencePiece model cannot be written as a {MODEL}: {text!r} would have other ids")
    return finished(library, special, tokenizer.bos_id)


def merges(
    vocab: dict[str, int], plain: list[tuple[float, int]], pieces: list[tuple[str, float]]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two, the best pieces first."""
    ordered = []
    for score, id in plain:
        piece = pieces[id][0]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ordered.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ordered)]


def finished(library: tokenizers.Tokenizer, special: list[str], bos_id: int | None) -> str:
    """The JSON, with the special tokens named and <bos> put before each text."""
    library.add_special_tokens(special)
    if bos_id is not None:
        bos = library.id_to_token(bos_id)
        library.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return library.to_str()


WRITERS: dict[type, Callable[[epath.Path, Any], str]] = {
    HfTokenizer: from_hf,
    ByteTokenizer: from_bytes,
    SentencePieceTokenizer: from_sentencepiece,
}
