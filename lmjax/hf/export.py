"""Export: parameters, config and tokenizer as a folder that transformers 4 and 5 load.

The vocabulary ends where the tokenizer's does: rows that only pad it over devices are left out. Tied embeddings are stored
once. Weights are cut into files of `shard_bytes` at most, each written when it is full.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
from etils import epath
from safetensors.numpy import save_file

from lmjax.files import write_json
from lmjax.hf import config_write, families, names
from lmjax.hf.chat import GENERATION, NO_CHAT, Chat
from lmjax.hf.load import CONFIG, INDEX, WEIGHTS
from lmjax.hf.tokenizer import write_tokenizer
from lmjax.model.config import ModelConfig
from lmjax.model.decoder import Params
from lmjax.model.transfer import folded
from lmjax.plan.params import parameter_dims
from lmjax.tokenizers.base import Tokenizer

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHARD_BYTES = 5_000_000_000  # as transformers cuts them


def write_folder(
    folder: os.PathLike | str,
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    chat: Chat = NO_CHAT,
) -> str:
    """Writes all files; returns the family.

    Args:
      folder: an empty one.
      model, params: the decoder.
      tokenizer: whose vocabulary the model's is cut to.
      dtype: of the weights, "float32" or "bfloat16".
      shard_bytes: of a file, at most; one tensor always fits.
      chat: of the import that the model comes from.

    Raises:
      UserError: no family has such a model.
    """
    folder = epath.Path(folder)
    model, params = folded(dataclasses.replace(model, vocab_size=tokenizer.vocab_size), params)
    kind, config = config_write.write(model)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": all_ends(tokenizer, chat),
        "pad_token_id": tokenizer.pad_id,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, tokenizer, model.max_length, chat.template)
    write_json(folder / GENERATION, {"_from_model_config": True, **ids})
    family = families.FAMILIES[kind]
    arrays = stored_arrays(model, params, family, DTYPES[dtype])
    write_shards(folder, arrays, shard_bytes)
    # Version 4 reads torch_dtype, version 5 dtype. Last, so that a folder without it is not finished.
    write_json(folder / CONFIG, {**config, **ids, "torch_dtype": dtype, "dtype": dtype})
    return kind


def all_ends(tokenizer: Tokenizer, chat: Chat) -> int | list[int] | None:
    """The ends of chats and the tokenizer's, by which our documents end."""
    if not chat.ends:
        return tokenizer.eos_id
    return chat.ends if tokenizer.eos_id in (None, *chat.ends) else [*chat.ends, tokenizer.eos_id]


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
