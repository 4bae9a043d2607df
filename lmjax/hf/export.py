"""Export: parameters, config and tokenizer as a folder that transformers 4 and 5 load.

The vocabulary ends where the tokenizer's does: rows that only pad it over devices are left out. Tied embeddings are stored
once. Weights are cut into files of `shard_bytes` at most, each written when it is full.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tokenizers
from etils import epath
from safetensors.numpy import save_file

from lmjax.errors import UserError
from lmjax.files import write_json
from lmjax.hf import families, names
from lmjax.hf.load import CONFIG, INDEX, WEIGHTS
from lmjax.model.config import ModelConfig
from lmjax.model.decoder import Params
from lmjax.plan.params import parameter_dims
from lmjax.tokenizers.base import SPECIAL_TOKENS, Tokenizer
from lmjax.tokenizers.byte import ByteTokenizer
from lmjax.tokenizers.hf import HfTokenizer
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHARD_BYTES = 5_000_000_000  # as transformers cuts them


def write_folder(
    folder: os.PathLike | str,
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes all files; returns the family.

    Args:
      folder: an empty one.
      model, params: the decoder.
      tokenizer: whose vocabulary the model's is cut to.
      dtype: of the weights, "float32" or "bfloat16".
      shard_bytes: of a file, at most; one tensor always fits.

    Raises:
      UserError: no family has such a model.
    """
    folder = epath.Path(folder)
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    kind, config = families.write(model)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, tokenizer, model.max_length)
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    family = families.FAMILIES[kind]
    arrays = stored_arrays(model, params, family, DTYPES[dtype])
    write_shards(folder, arrays, shard_bytes)
    # Version 4 reads torch_dtype, version 5 dtype. Last, so that a folder without it is not finished.
    write_json(folder / CONFIG, {**config, **ids, "torch_dtype": dtype, "dtype": dtype})
    return kind


def stored_arrays(
    model: ModelConfig, params: Params, family: families.Family, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of each tensor, made when it is asked for."""
    sizes, dims = names.sizes(model), parameter_dims(model)
    for tensor in names.tensors(model, family.scheme, family.norm_shift):
        whole = params
        for part in tensor.path.split("/"):
            whole = whole[part]
        origin = np.array(tensor.origin(dims[tensor.path]), np.int32)
        part = np.asarray(cut(whole, origin, tensor.part_shape(sizes)))
        yield tensor.name, np.ascontiguousarray(tensor.to_theirs(part, sizes).astype(dtype))


@functools.partial(jax.jit, static_argnames=("shape",))
def cut(whole: jax.Array, origin: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A part of a parameter, one program for all layers."""
    return jax.lax.dynamic_slice(whole, list(origin), shape)


def write_shards(folder: epath.Path, arrays: Iterator[tuple[str, np.ndarray]], shard_bytes: int) -> None:
    """One file, or several and their index."""
    written: list[dict[str, int]] = []  # name → bytes, of each file
    held: dict[str, np.ndarray] = {}

    def flush() -> None:
        save_file(held, os.fspath(folder / f"{len(written)}.unnamed"), metadata={"format": "pt"})
        written.append({name: array.nbytes for name, array in held.items()})
        held.clear()

    for name, array in arrays:
        if held and sum(each.nbytes for each in held.values()) + array.nbytes > shard_bytes:
            flush()
        held[name] = array
    flush()
    count = len(written)
    final = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for number, file in enumerate(final):
        (folder / f"{number}.unnamed").rename(folder / file)
    if count > 1:
        place = {name: file for file, sizes in zip(final, written, strict=True) for name in sizes}
        total = sum(sum(sizes.values()) for sizes in written)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place})


# --------------------------------------------------------------------------------------------------------------- tokenizer


def write_tokenizer(folder: epath.Path, tokenizer: Tokenizer, max_length: int) -> None:
    """The tokenizer's files; a `UserError` for a kind that transformers does not know."""
    for cls, write in TOKENIZERS.items():
        if isinstance(tokenizer, cls):
            config = {**write(folder, tokenizer), "model_max_length": max_length}
            write_json(folder / "tokenizer_config.json", config)
            return
    raise UserError(f"transformers has no such tokenizer: {type(tokenizer).__name__}")


def write_hf(folder: epath.Path, tokenizer: HfTokenizer) -> dict[str, Any]:
    """`tokenizer.json` as it came."""
    (folder / "tokenizer.json").write_text(tokenizer.model)
    spelled = {
        f"{name}_token": tokenizer.tokenizer.id_to_token(id)
        for name, id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id))
        if id is not None
    }
    return {"tokenizer_class": "PreTrainedTokenizerFast", **spelled, **(tokenizer.named or {})}


def write_sentencepiece(folder: epath.Path, tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """The SentencePiece model as it is; transformers reads it as Llama's."""
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    spelled = {
        f"{name}_token": tokenizer.processor.id_to_piece(id)
        for name, id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id))
        if id is not None
    }
    unknown = tokenizer.processor.id_to_piece(tokenizer.processor.unk_id())
    flags = {"add_bos_token": tokenizer.bos_id is not None, "add_eos_token": False, "legacy": False}
    return {"tokenizer_class": "LlamaTokenizer", "unk_token": unknown, **flags, **spelled}


def write_bytes(folder: epath.Path, tokenizer: ByteTokenizer) -> dict[str, Any]:
    """The same ids by a BPE without merges, over GPT-2's letters for bytes."""
    own = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)]
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]
    vocab = {name: id for id, name in enumerate([*SPECIAL_TOKENS, *letters])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(list(SPECIAL_TOKENS))
    bos = SPECIAL_TOKENS[tokenizer.bos_id]
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)]
    )
    return write_hf(folder, HfTokenizer(model.to_str()))


TOKENIZERS: dict[type, Callable[[epath.Path, Any], dict[str, Any]]] = {
    HfTokenizer: write_hf,
    SentencePieceTokenizer: write_sentencepiece,
    ByteTokenizer: write_bytes,
}
