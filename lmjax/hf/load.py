"""Import: a folder of Hugging Face → a config, a tokenizer, and parameters on the mesh, tensor by tensor.

The host never holds more than one tensor beside what is on its devices: each parameter is made on the mesh, empty, and the
tensors are written into it one after another, the largest first. Every tensor is looked at before the first one is read: names
that are missing or that nobody uses, shapes and dtypes that do not fit are one error that lists them.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from lmjax.errors import UserError
from lmjax.files import read_json
from lmjax.hf import config_read, families, names
from lmjax.hf.names import Tensor
from lmjax.model import decoder
from lmjax.model.config import ModelConfig
from lmjax.plan.params import parameter_dims, parameter_shapes
from lmjax.tokenizers.base import Tokenizer
from lmjax.tokenizers.hf import MODEL as TOKENIZER_JSON
from lmjax.tokenizers.hf import HfTokenizer
from lmjax.tokenizers.sentencepiece import MODEL as SENTENCEPIECE_MODEL
from lmjax.tokenizers.sentencepiece import SentencePieceTokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")  # what safetensors calls plain floats; all others are quantized
SHOWN = 20  # names in one message


def read_config(folder: os.PathLike | str) -> tuple[str, ModelConfig]:
    """The family and the fields of a folder's `config.json`."""
    path = epath.Path(folder) / CONFIG
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not an object of JSON")
    return config_read.read(values, str(path))


def read_tokenizer(folder: os.PathLike | str) -> Tokenizer:
    """The folder's `tokenizer.json`, or its SentencePiece model."""
    folder = epath.Path(folder)
    if (folder / TOKENIZER_JSON).exists():
        return HfTokenizer.read(folder / TOKENIZER_JSON)
    if (folder / SENTENCEPIECE_MODEL).exists():
        return SentencePieceTokenizer.read(folder / SENTENCEPIECE_MODEL)
    raise UserError(
        f"{folder} holds neither {TOKENIZER_JSON} nor {SENTENCEPIECE_MODEL}; name a folder made by `lmjax tokenizer` by --tokenizer"
    )


# ------------------------------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def opened(path: epath.Path) -> Iterator[Any]:
    """A safetensors file; a `UserError` if it is damaged."""
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); was it cut short?") from error


def find_tensors(folder: os.PathLike | str) -> dict[str, epath.Path]:
    """Name of each tensor → the file that holds it."""
    folder = epath.Path(folder)
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise UserError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: only safetensors are read")
        shards, listed = [WEIGHTS], None
    else:
        listed = read_index(folder / INDEX)
        shards = sorted(set(listed.values()))
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        raise UserError(f"{folder} lacks {show(absent)}, which {INDEX} names")
    found = {}
    for shard in shards:
        with opened(folder / shard) as file:
            found |= dict.fromkeys(file.keys(), folder / shard)
    if listed is not None and listed.keys() - found.keys():
        raise UserError(
            f"{folder / INDEX} names tensors that are in no file: {show(sorted(listed.keys() - found.keys()))}"
        )
    return found


def read_index(path: epath.Path) -> dict[str, str]:
    """Name of each tensor → the name of its file, by the index."""
    index = read_json(path)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{path} has no weight_map from the names of tensors to those of files")
    return listed


def show(items: Iterable[str]) -> str:
    """The first of many, and how many there are."""
    items = list(items)
    more = f" … and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def match(wanted: list[Tensor], found: dict[str, epath.Path], scheme: str, tied: bool) -> dict[str, str]:
    """Our name of each tensor → the file's, which lacks the prefix where the bare model was saved.

    Raises:
      UserError: names that are missing, or that nobody uses.
    """
    prefix = names.PREFIXES[scheme]
    bare = not any(name.startswith(prefix) for name in found)
    stored = {tensor.name: tensor.name.removeprefix(prefix) if bare else tensor.name for tensor in wanted}
    missing = [name for name in stored.values() if name not in found]
    unused = [name for name in sorted(found.keys() - set(stored.values())) if not names.BUFFERS.search(name)]
    if tied and names.HEAD in unused:
        unused.remove(names.HEAD)  # compared with the embeddings by `check_head`
    if missing or unused:
        parts = [f"{len(missing)} missing: {show(missing)}"] if missing else []
        parts += [f"{len(unused)} that nothing uses: {show(unused)}"] if unused else []
        raise UserError("the tensors are not those of this config: " + "; ".join(parts))
    return stored


def check_arrays(
    wanted: list[Tensor], stored: dict[str, str], found: dict[str, epath.Path], model: ModelConfig
) -> None:
    """Every tensor has the shape that the config says, and a plain dtype."""
    sizes, wrong = names.sizes(model), []
    by_file: dict[epath.Path, list[Tensor]] = {}
    for tensor in wanted:
        by_file.setdefault(found[stored[tensor.name]], []).append(tensor)
    for path, tensors in by_file.items():
        with opened(path) as file:
            for tensor in tensors:
                part = file.get_slice(stored[tensor.name])
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if shape != tensor.shape(sizes):
                    wrong.append(f"{stored[tensor.name]} is {list(shape)}, not {list(tensor.shape(sizes))}")
                if dtype not in DTYPES:
                    wrong.append(f"{stored[tensor.name]} is {dtype}, not one of {', '.join(DTYPES)}")
    if wrong:
        raise UserError("the tensors are not those of this config: " + show(wrong))


def check_head(found: dict[str, epath.Path], token: str) -> None:
    """A tied model that stores its head all the same stores the embeddings."""
    if names.HEAD not in found:
        return
    head, embeddings = read_tensor(found, names.HEAD), read_tensor(found, token)
    if head.shape != embeddings.shape or head.tobytes() != embeddings.tobytes():
        raise UserError(f"tie_word_embeddings is true, but {names.HEAD} is not {token}")


def read_tensor(found: dict[str, epath.Path], name: str) -> np.ndarray:
    """One tensor. The file is opened for it alone: what is mapped of it counts as memory of this process."""
    with opened(found[name]) as file:
        return file.get_tensor(name)


# -------------------------------------------------------------------------------------------------------------- parameters


def load_params(folder: os.PathLike | str, kind: str, model: ModelConfig, shardings: decoder.Params) -> decoder.Params:
    """Parameters from a folder's safetensors, float32, laid out as `shardings`."""
    family, found = families.FAMILIES[kind], find_tensors(folder)
    wanted = list(names.tensors(model, family.scheme, family.norm_shift))
    stored = match(wanted, found, family.scheme, model.tie_embeddings)
    check_arrays(wanted, stored, found, model)
    if model.tie_embeddings:
        check_head(found, stored[wanted[0].name])
    sizes, dims, shapes = names.sizes(model), parameter_dims(model), parameter_shapes(model)
    parts: dict[str, list[Tensor]] = {}
    for tensor in wanted:
        parts.setdefault(tensor.path, []).append(tensor)
    params: decoder.Params = {}
    for path in sorted(parts, key=lambda path: -max(np.prod(tensor.shape(sizes)) for tensor in parts[path])):
        *sections, leaf = path.split("/")
        place = shardings
        for section in path.split("/"):
            place = place[section]
        whole = jax.jit(functools.partial(jnp.zeros, shapes[path], jnp.float32), out_shardings=place)()
        for tensor in parts[path]:
            fill = writer(place, dataclasses.replace(tensor, name="", at=()), tuple(sizes.items()))
            array, origin = read_tensor(found, stored[tensor.name]), np.array(tensor.origin(dims[path]), np.int32)
            whole.block_until_ready()  # while one is written the next is read, and no further
            whole = fill(whole, array.astype(np.float32) if array.dtype == np.float64 else array, origin)
        node = params
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = whole
    return params


@functools.cache
def writer(place: jax.sharding.Sharding, layout: Tensor, sizes: tuple[tuple[str, int], ...]) -> Callable:
    """Writes a tensor of the file into a parameter where it lies; one program for all tensors of a layout."""

    def write(whole: jax.Array, array: jax.Array, origin: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, layout.to_ours(array, dict(sizes)), list(origin))

    return jax.jit(write, donate_argnums=(0,), out_shardings=place)
