"""What is asked of a run that has checkpoints: likelihoods, text, needles in haystacks, the documents of a step."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmjax.checkpoint import restore
from lmjax.data.document import Document
from lmjax.data.features import for_prompts
from lmjax.data.trace import trace as trace_step
from lmjax.errors import UserError
from lmjax.eval import needle
from lmjax.eval.needle import Cell, NeedleConfig
from lmjax.generate import decode
from lmjax.generate.sample import Sampling
from lmjax.model.decoder import Params
from lmjax.parts import Parts, build_evaluate, build_reader, build_reading_parts
from lmjax.sharding import mesh as meshes
from lmjax.tokenizers.base import Tokenizer
from lmjax.workdir import announce, open_run


class Model(NamedTuple):
    """A run's model, to generate with."""

    parts: Parts
    tokenizer: Tokenizer
    params: Params
    step: int = 0


def load_model(workdir: os.PathLike | str, step: int | None, overrides: list[str]) -> Model:
    """Restores the parameters of a checkpoint."""
    config, tokenizer = open_run(workdir, overrides)
    parts = build_reading_parts(config)
    with meshes.use(parts.mesh):
        restored = restore.restore(workdir, parts.abstract_weights(), step, partial=True)
    announce(list(restored.unreadable))
    parts = parts.with_model(config.model_after(restored.step))
    return Model(parts, tokenizer, restored.state.params, restored.step)


def evaluate(workdir: os.PathLike | str, split: str, step: int | None, overrides: list[str]) -> dict[str, Any]:
    """Likelihood of the whole of a split, by source and together; with the checkpoint's step."""
    config, _ = open_run(workdir, overrides)
    parts = build_reading_parts(config)
    with meshes.use(parts.mesh):
        restored = restore.restore(workdir, parts.abstract_weights(), step, partial=True)
        metrics = build_evaluate(parts, split, max_rows=None)(restored.state)
    announce(list(restored.unreadable))
    return {"step": restored.step, **metrics}


def find_needles(
    workdir: os.PathLike | str,
    documents: Iterable[Document],
    config: NeedleConfig,
    step: int | None,
    overrides: list[str],
) -> tuple[int, list[Cell]]:
    """A needle in a haystack of documents, by length and depth; with the checkpoint's step."""
    parts, tokenizer, weights, step = load_model(workdir, step, overrides)
    longest = max(config.lengths)
    if longest > parts.config.model.max_length:
        raise UserError(
            f"needle: {longest} tokens are more than config.model.max_length={parts.config.model.max_length}"
        )
    trials = needle.make_trials(config, documents, tokenizer)
    with meshes.use(parts.mesh):
        model = (parts.config.model, weights, parts.types)
        return step, needle.evaluate(trials, tokenizer, needle.greedy(*model, tokenizer), needle.likelihood(*model))


def stream(
    model: Model,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    prefix: np.ndarray | None = None,
) -> Iterator[list[str]]:
    """See `generate`; with `seeds`, each prompt's draw is its own; `prefix` are features [B, P, I] before the prompts."""
    parts, tokenizer, weights, _ = model
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [np.array([*bos, *tokenizer.encode(prompt)], np.int32) for prompt in prompts]
    numbers = tokenizer.vocab_size, tokenizer.eos_id, seeds, prefix
    with meshes.use(parts.mesh):
        tokens = decode.generate(parts.config.model, weights, ids, max_tokens, sampling, parts.types, *numbers)
        yield from decode.stream_text(tokens, tokenizer, len(prompts))


def generate(
    workdir: os.PathLike | str,
    prompts: list[str],
    max_tokens: int,
    sampling: Sampling,
    step: int | None,
    overrides: list[str],
    features: os.PathLike | str | None = None,
) -> Iterator[list[str]]:
    """Yields, as it is decoded, the text that each prompt gained: ["def", ""], [" f", "import"] …

    `features` is a `.npz` with an array for each prompt, in order.
    """
    prefix = None if features is None else for_prompts(features, len(prompts))
    yield from stream(load_model(workdir, step, overrides), prompts, max_tokens, sampling, prefix=prefix)


def complete(
    model: Model, requests: Iterable[tuple[str, int]], max_tokens: int, sampling: Sampling, batch_size: int
) -> Iterator[str]:
    """What follows each (prompt, seed), decoded `batch_size` at a time."""
    requests = iter(requests)
    while batch := list(itertools.islice(requests, batch_size)):
        prompts, seeds = zip(*batch, strict=True)
        gained = stream(model, prompts, max_tokens, sampling, seeds)
        yield from map("".join, zip(*gained, strict=True))


def trace(workdir: os.PathLike | str, step: int) -> list[dict[str, Any]]:
    """The documents in each row of the global batch of a step."""
    config, _ = open_run(workdir)
    reader = build_reader(config, workdir)
    reader.prepare(full=config.data.verify == "full")
    return trace_step(reader, step)
