"""The folder of a run: claimed by one run for good, opened by whatever reads it. It holds:

run.json                the resolved config, and fingerprints of tokenizer and data: what a resume must agree with
tokenizer/              a copy of the tokenizer, so that the folder generates by itself
checkpoints/<step>/     see lmjax/checkpoint/save.py
packing/                rows of best-fit packing, see lmjax/data/bestfit.py
lock                    held while the run goes on, see lmjax/lock.py
metrics.jsonl, tensorboard/
"""

import dataclasses
import os
from typing import Any

import jax
from etils import epath

from lmjax import bucket, files
from lmjax import config as configs
from lmjax.checkpoint.layout import steps as checkpoint_steps
from lmjax.errors import UserError
from lmjax.lock import LOCK
from lmjax.sharding import multihost
from lmjax.tokenizers import build as tokenizers
from lmjax.tokenizers.base import Tokenizer
from lmjax.train.config import RunConfig

RUN = "run.json"
TOKENIZER = "tokenizer"
COMPILE_CACHE = "compile_cache"
PACKING = "packing"


def use_compile_cache(workdir: epath.Path) -> None:
    """Compiled programs are kept with a local run, so that a resume starts sooner; JAX_COMPILATION_CACHE_DIR wins."""
    if not files.is_remote(workdir) and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(workdir / COMPILE_CACHE))


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """The run's tokenizer."""
    if not config.tokenizer:
        raise UserError("config.tokenizer names no folder made by `lmjax tokenizer`")
    return tokenizers.load(config.tokenizer)


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer, shards: str) -> None:
    """The model has a row for every id, and the shards hold this tokenizer's ids."""
    if config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"config.model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        )
    if shards != tokenizer.fingerprint():
        raise UserError(
            f"the shards {list(config.data.shards)} were made with another tokenizer than {config.tokenizer}; "
            "run `lmjax tokenize` with this one"
        )


def check_init_from(config: RunConfig, workdir: epath.Path, tokenizer: Tokenizer) -> None:
    """The run to begin from has the same model (but for experts, which a dense one may become) and the same tokenizer; each
    difference is named. A run that has begun reads it no more, so that it may have gone on, or away."""
    if config.init_from is None or checkpoint_steps(workdir):
        return
    other, its_tokenizer = open_run(config.init_from)
    wanted = config.model if other.model.moe else dataclasses.replace(config.model, moe=None)
    trained = other.model_after(max(checkpoint_steps(epath.Path(config.init_from)), default=0))
    differences = wanted.differences(trained)
    if its_tokenizer.fingerprint() != tokenizer.fingerprint():
        differences.append("another tokenizer")
    if differences:
        raise UserError(f"config.init_from={config.init_from} is of another model: {'; '.join(differences)}")


def absolute_paths(config: RunConfig) -> RunConfig:
    """The config with local paths made absolute, so that a workdir can be used from anywhere."""

    def absolute(path: str) -> str:
        return path if files.is_remote(path) else os.path.abspath(path)

    folders = {name: getattr(config.data, name) for name in ("packing_dir", "cache_dir")}
    given = {name: absolute(folder) for name, folder in folders.items() if folder is not None}
    features = {name: absolute(path) for name, path in config.data.features.items()}
    data = dataclasses.replace(config.data, shards=tuple(map(absolute, config.data.shards)), features=features, **given)
    start = None if config.init_from is None else absolute(config.init_from)
    return dataclasses.replace(config, data=data, tokenizer=absolute(config.tokenizer), init_from=start)


def check_folder(workdir: epath.Path) -> None:
    """A folder that holds something else than a run is left alone: a `UserError`."""
    early = (COMPILE_CACHE, PACKING, TOKENIZER, LOCK)  # another process of the run may be ahead, or about to write RUN
    if not workdir.exists():
        return
    names = {path.name for path in workdir.iterdir()}
    if RUN in names or (workdir / RUN).exists():
        return
    if any(name not in early and not name.startswith(f".{RUN}") for name in names):
        raise UserError(f"{workdir} is not empty and is not the workdir of a run; choose another --workdir")


def claim_workdir(workdir: epath.Path, record: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Makes the workdir this run's, or checks that it is; returns what to tell.

    Raises:
      UserError: it holds another run: a field that is not free, the tokenizer or the data differ. Each difference is named.
    """
    path = workdir / RUN
    if not path.exists():
        if multihost.is_primary():
            tokenizer.save(workdir / TOKENIZER)
            files.write_json(path, record)
        return []
    before = files.read_json(path)
    if "imported" in before:
        raise UserError(
            f"{workdir} holds an import; begin a run with it in another --workdir by --config.init_from={workdir}"
        )
    changes = configs.diff(RunConfig, before["config"], record["config"])
    refused = [str(change) for change in changes if not change.free]
    refused += [f"{name}: another fingerprint" for name in ("tokenizer", "data") if before[name] != record[name]]
    if refused:
        raise UserError(
            f"{workdir} holds another run: {'; '.join(refused)}. Go on with its config, or choose another --workdir"
        )
    if changes and multihost.is_primary():
        files.write_json(path, record)
    return [f"changed since the run began: {change}" for change in changes]


def open_run(workdir: os.PathLike | str, overrides: list[str] | None = None) -> tuple[RunConfig, Tokenizer]:
    """The config of a run, with overrides of free fields, and its tokenizer."""
    bucket.check(workdir)
    path = epath.Path(workdir) / RUN
    if not path.exists():
        raise UserError(f"{workdir} holds no {RUN}: it is not the workdir of a run")
    values = files.read_json(path)["config"]
    for override in overrides or []:
        key = override.partition("=")[0]
        if not configs.is_free(RunConfig, key):
            raise UserError(f"config.{key} belongs to the run and cannot be changed after training")
        configs.set_override(values, override)
    return configs.build(RunConfig, values), tokenizers.load(epath.Path(workdir) / TOKENIZER)


def announce(notes: list[str]) -> None:
    """Prints notes once, from the primary process."""
    if multihost.is_primary():
        for note in notes:
            print(note, flush=True)
