"""A needle in a haystack: a number is hidden at a depth of real text, and asked for at its end.

    … text …
    The secret number of <key> is <value>.
    … text …
    The secret number of <key> is

Over a grid of context lengths and depths: how often the greedy continuation is the value, and how often the value is the most likely
one among others of its kind, which a model that cannot read back gets right one time in `1 + distractors`. All is drawn from the seed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.generate.decode import FINISHED, generate
from lmjax.generate.sample import Sampling
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig
from lmjax.model.dense import Dtypes
from lmjax.tokenizers.base import Tokenizer

KEY_LETTERS, VALUE_DIGITS = 8, 7
BETWEEN = "\n\n"  # documents of the haystack
SPARE_TOKENS = 4  # that a continuation may be longer than the value as it is encoded here

Complete = Callable[[Sequence[np.ndarray], int], Sequence[np.ndarray]]  # prompts, tokens at most → what follows each
Score = Callable[[np.ndarray, Sequence[np.ndarray]], np.ndarray]  # a prompt, continuations → log-likelihood of each


@dataclasses.dataclass(frozen=True)
class NeedleConfig:
    """The grid."""

    lengths: tuple[int, ...] = (1024, 2048)  # tokens of a whole context: text, needle, question and answer
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # share of the text that stands before the needle
    trials: int = 5  # of each length and depth
    distractors: int = 9  # other values among which the true one is ranked
    seed: int = 0

    def __post_init__(self):
        need(
            min(len(self.lengths), len(self.depths), self.trials) >= 1,
            "needle: lengths, depths and trials must not be empty",
        )
        need(all(0 <= depth <= 1 for depth in self.depths), f"needle: depths={self.depths} must be in [0, 1]")
        need(self.distractors >= 1, f"needle: distractors={self.distractors} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One question."""

    length: int
    depth: float
    prompt: np.ndarray  # int32 ids, the question at its end
    value: str
    choices: tuple[np.ndarray, ...]  # continuations; the first is the true one


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a length and a depth came to."""

    length: int
    depth: float
    trials: int
    exact: float  # share of greedy continuations that are the value
    first: float | None  # share of trials in which the value is the most likely choice; none: not scored


# ------------------------------------------------------------------------------------------------------------------- trials


def haystack(documents: Iterable[Document], tokenizer: Tokenizer, num_tokens: int) -> Int[np.ndarray, " tokens"]:
    """At least `num_tokens` ids of documents, one after another."""
    parts, total = [], 0
    for document in documents:
        parts.append(tokenizer.encode(document.text + BETWEEN))
        total += len(parts[-1])
        if total >= num_tokens:
            return np.concatenate(parts)
    need(False, f"needle: the documents hold {total} tokens, fewer than the longest context of {num_tokens}")


def make_trials(config: NeedleConfig, documents: Iterable[Document], tokenizer: Tokenizer) -> list[Trial]:
    """All questions of the grid, a function of the config, the documents and the tokenizer."""
    text = haystack(documents, tokenizer, max(config.lengths))
    grid = itertools.product(config.lengths, enumerate(config.depths), range(config.trials))
    return [
        make_trial(config, text, tokenizer, length, depth, np.random.default_rng([config.seed, length, place, trial]))
        for length, (place, depth), trial in grid
    ]


def make_trial(
    config: NeedleConfig, text: np.ndarray, tokenizer: Tokenizer, length: int, depth: float, rng: np.random.Generator
) -> Trial:
    """A question of exactly `length` tokens, its answer included."""
    key = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), KEY_LETTERS))
    first = 10 ** (VALUE_DIGITS - 1)
    values = [str(first + value) for value in rng.choice(9 * first, 1 + config.distractors, replace=False)]
    question = f"\nThe secret number of {key} is"
    needle, ask = (tokenizer.encode(part) for part in (f"{question} {values[0]}.\n", question))
    choices = tuple(tokenizer.encode(f" {value}") for value in values)
    bos = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.int32)
    room = length - len(bos) - len(needle) - len(ask) - len(choices[0])
    need(room >= 0, f"needle: a context of {length} tokens has no room for the needle and the question")
    hay = np.take(text, rng.integers(len(text)) + np.arange(room), mode="wrap")
    cut = round(depth * room)
    prompt = np.concatenate([bos, hay[:cut], needle, hay[cut:], ask]).astype(np.int32)
    return Trial(length, depth, prompt, values[0], choices)


# ------------------------------------------------------------------------------------------------------------------ answers


def evaluate(
    trials: Sequence[Trial], tokenizer: Tokenizer, complete: Complete, score: Score | None = None, batch_size: int = 8
) -> list[Cell]:
    """Asks all questions.

    Args:
      trials: in the order of the grid.
      tokenizer: of the model.
      complete: greedy continuations; see `greedy`.
      score: log-likelihoods of continuations, to rank the choices; see `likelihood`. None: they are not ranked.
      batch_size: prompts of one length that are completed together.
    """
    found: dict[tuple[int, float], list[tuple[bool, bool | None]]] = {}
    for length, group in itertools.groupby(trials, key=lambda trial: trial.length):
        group = list(group)
        for start in range(0, len(group), batch_size):
            batch = group[start : start + batch_size]
            most = max(len(trial.choices[0]) for trial in batch) + SPARE_TOKENS
            for trial, ids in zip(batch, complete([trial.prompt for trial in batch], most), strict=True):
                exact = tokenizer.decode(ids).strip().startswith(trial.value)
                first = None if score is None else int(np.argmax(score(trial.prompt, trial.choices))) == 0
                found.setdefault((length, trial.depth), []).append((exact, first))
    return [
        Cell(*place, len(results), float(np.mean([r[0] for r in results])),
             None if score is None else float(np.mean([r[1] for r in results])))
        for place, results in found.items()
    ]  # fmt: skip


def table(cells: Sequence[Cell], what: str = "exact") -> list[str]:
    """Lines of text: a row for each length, a column for each depth, per cent."""
    depths = sorted({cell.depth for cell in cells})
    lines = ["  tokens" + "".join(f"{depth:>8.0%}" for depth in depths)]
    for length in sorted({cell.length for cell in cells}):
        shares = {cell.depth: getattr(cell, what) for cell in cells if cell.length == length}
        lines.append(f"{length:>8,}" + "".join(f"{shares[depth]:>8.0%}" for depth in depths))
    return lines


# -------------------------------------------------------------------------------------------------------------- with a model


def greedy(config: ModelConfig, params: decoder.Params, types: Dtypes, tokenizer: Tokenizer) -> Complete:
    """Continuations by the decoder, its most likely token each time."""

    def complete(prompts: Sequence[np.ndarray], max_tokens: int) -> list[np.ndarray]:
        sampling, ends = Sampling(temperature=0.0), (tokenizer.vocab_size, tokenizer.eos_id)
        rows = np.stack(list(generate(config, params, prompts, max_tokens, sampling, types, *ends)), axis=1)
        return [row[row != FINISHED] for row in rows]

    return complete


@functools.partial(jax.jit, static_argnames=("config", "types", "width"))
def _log_likelihood(
    config: ModelConfig,
    params: decoder.Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    begin: Int[Array, ""],
    types: Dtypes,
    width: int,
) -> Float[Array, "B"]:
    """Of the tokens of each row from `begin` on to its length, at most `width` of them."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder.forward(config, params, tokens, places, Mask(), types)
    hidden = jax.lax.dynamic_slice_in_dim(hidden, begin - 1, width, axis=1)
    targets = jax.lax.dynamic_slice_in_dim(tokens, begin, width, axis=1)
    logs = jax.nn.log_softmax(decoder.unembed(config, params, hidden, types))
    chosen = jnp.take_along_axis(logs, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(begin + jnp.arange(width) < lengths[:, None], chosen, 0.0), axis=1)


def likelihood(config: ModelConfig, params: decoder.Params, types: Dtypes) -> Score:
    """Log-likelihoods by the decoder: a prompt is run once for each continuation."""

    def score(prompt: np.ndarray, choices: Sequence[np.ndarray]) -> np.ndarray:
        longest = max(map(len, choices))
        lengths = np.array([len(prompt) + len(choice) for choice in choices], np.int32)
        tokens = np.zeros((len(choices), -(-(len(prompt) + longest) // 32) * 32), np.int32)
        for row, choice in enumerate(choices):
            tokens[row, : lengths[row]] = np.concatenate([prompt, choice])
        return np.asarray(_log_likelihood(config, params, tokens, lengths, np.int32(len(prompt)), types, longest))

    return score
