"""Runs from and to folders of Hugging Face."""

import math
import os
from typing import Any

import jax
import numpy as np
from etils import epath

from lmjax import config as configs
from lmjax import files
from lmjax.checkpoint import save
from lmjax.hf import export, load
from lmjax.hf.chat import NO_CHAT, Chat, read_chat
from lmjax.parts import build_parts
from lmjax.sharding import mesh as meshes
from lmjax.tokenizers import build as tokenizers
from lmjax.train.config import RunConfig
from lmjax.train.state import Weights
from lmjax.trained import load_model
from lmjax.workdir import RUN, TOKENIZER, absolute_paths, announce, check_tokenizer

IMPORT_SEQ_LEN = 2048  # tokens of a row when an import is evaluated, at most


def import_hf(
    folder: os.PathLike | str, workdir: os.PathLike | str, tokenizer: str | None, overrides: list[str]
) -> tuple[str, RunConfig]:
    """Makes a folder of Hugging Face a workdir that evaluates, generates and is begun from; the family and the config.

    Args:
      folder: holds config.json, safetensors and the tokenizer.
      workdir: a new folder.
      tokenizer: a folder made by `lmjax tokenizer`, where the other holds none.
      overrides: of all but what the model is.
    """
    kind, model = load.read_config(folder)
    own = load.read_tokenizer(folder) if tokenizer is None else tokenizers.load(tokenizer)
    # Of another tokenizer the template may have no words, and the ids other meanings.
    chat = read_chat(folder) if tokenizer is None else NO_CHAT
    path = epath.Path(workdir)
    rows = math.lcm(RunConfig().train.batch_size, jax.device_count())
    values: dict[str, Any] = {
        "model": configs.to_dict(model),
        "tokenizer": os.fspath(path / TOKENIZER),
        "data": {"seq_len": min(model.max_length, IMPORT_SEQ_LEN)},
        "train": {"batch_size": rows},
    }
    for override in overrides:
        configs.set_override(values, override)
    config = configs.build(RunConfig, values)
    changed = config.model.differences(model)
    configs.need(not changed, f"an import keeps the model that config.json describes: {'; '.join(changed)}")
    check_tokenizer(config, own, own.fingerprint())
    parts = build_parts(config)
    record = {
        "config": configs.to_dict(absolute_paths(config)),
        "tokenizer": own.fingerprint(),
        "data": None,
        "code": files.code_version(),
        "imported": {"family": kind, "from": os.fspath(folder), "chat": chat._asdict()},
    }
    files.claim(path, "hf-import")
    files.empty(path)
    with meshes.use(parts.mesh):
        params = load.load_params(folder, kind, model, parts.shardings.state.params)
        step = jax.device_put(np.zeros((), np.int32), meshes.replicated(parts.mesh))
        own.save(path / TOKENIZER)
        with save.Saver(path, config.checkpoint, record) as saver:
            saver.save(0, Weights(step, params))
    files.write_json(path / RUN, record)
    (path / files.UNFINISHED).unlink()
    return kind, config


def export_hf(
    workdir: os.PathLike | str, out: os.PathLike | str, step: int | None, dtype: str, overrides: list[str] | None = None
) -> tuple[str, int, int]:
    """Writes a checkpoint as a folder of Hugging Face; its family, step and vocabulary."""
    path = epath.Path(out)
    model = load_model(workdir, step, overrides or [])
    config = model.parts.config.model
    files.claim(path, "hf-export")
    files.empty(path)
    kind = export.write_folder(path, config, model.params, model.tokenizer, dtype, chat=find_chat(workdir))
    (path / files.UNFINISHED).unlink()
    return kind, model.step, model.tokenizer.vocab_size


def find_chat(workdir: os.PathLike | str) -> Chat:
    """What the import keeps that a run goes back to by `config.init_from`, whose tokenizer it must have; nothing without one."""
    path, seen = epath.Path(workdir), set()
    while path not in seen:
        seen.add(path)
        if not (path / RUN).exists():
            announce(
                [f"{path} is gone: if it went back to an import, the export lacks that one's chat template and ends"]
            )
            break
        record = files.read_json(path / RUN)
        if "imported" in record:
            return Chat(**record["imported"].get("chat", {}))
        if record["config"].get("init_from") is None:
            break
        path = epath.Path(record["config"]["init_from"])
    return NO_CHAT
