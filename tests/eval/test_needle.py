"""Needles stand where they should; one who reads them finds all, one who does not finds what chance gives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.data.document import Document
from lmjax.errors import UserError
from lmjax.eval.needle import NeedleConfig, evaluate, greedy, likelihood, make_trials, table
from lmjax.model import decoder
from lmjax.model.attention import Mask
from lmjax.model.config import ModelConfig
from lmjax.model.dense import dtypes
from lmjax.tokenizers.byte import ByteTokenizer

BYTES = ByteTokenizer()
DOCUMENTS = [Document(str(n), f"Document {n}. " + "Nothing of interest is said here. " * n, "text") for n in range(30)]
CONFIG = NeedleConfig(lengths=(256, 400), depths=(0.0, 0.5, 1.0), trials=6, seed=3)


@pytest.fixture(scope="module")
def trials():
    return make_trials(CONFIG, DOCUMENTS, BYTES)


def test_a_context_has_its_length_and_the_needle_its_depth(trials):
    assert len(trials) == 2 * 3 * 6
    for trial in trials:
        assert len(trial.prompt) + len(trial.choices[0]) == trial.length
        text = BYTES.decode(trial.prompt)
        key = re.search(r"The secret number of (\w+) is$", text)[1]
        needle = f"\nThe secret number of {key} is {trial.value}.\n"
        assert text.count(needle) == 1 and text.count(trial.value) == 1
        before, after = text.split(needle)
        after = after.removesuffix(f"\nThe secret number of {key} is")
        assert abs(len(before) - trial.depth * (len(before) + len(after))) <= 1
        assert len({choice.tobytes() for choice in trial.choices}) == 1 + CONFIG.distractors
        assert BYTES.decode(trial.choices[0]) == f" {trial.value}"


def test_all_is_drawn_from_the_seed(trials):
    def prompts(seed):
        return [t.prompt.tobytes() for t in make_trials(NeedleConfig((256,), (0.5,), 6, seed=seed), DOCUMENTS, BYTES)]

    assert prompts(3) == prompts(3) != prompts(4) and len(set(prompts(3))) == 6


def test_one_who_looks_it_up_finds_all(trials):
    def value(prompt):
        found = re.findall(r"The secret number of (\w+) is (\d+)\.", BYTES.decode(prompt))
        return dict(found)[BYTES.decode(prompt).split()[-2]]

    def complete(prompts, most):
        return [np.asarray(BYTES.encode(f" {value(prompt)}, as it says"))[:most] for prompt in prompts]

    def score(prompt, choices):
        return np.array([BYTES.decode(choice) == f" {value(prompt)}" for choice in choices], float)

    cells = evaluate(trials, BYTES, complete, score)
    assert [(cell.exact, cell.first, cell.trials) for cell in cells] == [(1.0, 1.0, 6)] * 6
    assert table(cells) == [
        "  tokens      0%     50%    100%",
        "     256    100%    100%    100%",
        "     400    100%    100%    100%",
    ]


def test_one_who_guesses_gets_what_chance_gives():
    rng = np.random.default_rng(0)
    trials = make_trials(NeedleConfig((128,), (0.5,), trials=400), DOCUMENTS, BYTES)
    (cell,) = evaluate(
        trials,
        BYTES,
        lambda prompts, most: [BYTES.encode(f" {rng.integers(10**6, 10**7)}") for _ in prompts],
        lambda prompt, choices: rng.random(len(choices)),
    )
    assert cell.exact == 0.0 and abs(cell.first - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 400)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="hold 17 tokens, fewer than the longest context of 256"):
        make_trials(NeedleConfig((256,)), [Document("0", "x" * 15, "text")], BYTES)
    with pytest.raises(UserError, match="a context of 40 tokens has no room"):
        make_trials(NeedleConfig((40,)), DOCUMENTS, BYTES)


def test_a_decoders_answers_are_its_own():
    """Greedy continuations and likelihoods against one plain forward pass."""
    config, types = (
        ModelConfig(vocab_size=BYTES.vocab_size, num_layers=1, d_model=32, num_heads=2),
        dtypes("float32", "cpu"),
    )
    params = decoder.init(config, jax.random.key(0))
    prompt, choices = np.arange(20, 40, dtype=np.int32), [np.array([50, 51]), np.array([60, 61, 62])]

    def logs(ids):
        ids = jnp.asarray(ids)[None]
        hidden, _ = decoder.forward(config, params, ids, jnp.arange(ids.shape[1])[None], Mask(), types)
        return jax.nn.log_softmax(decoder.unembed(config, params, hidden, types)[0])

    scores = likelihood(config, params, types)(prompt, choices)
    for got, choice in zip(scores, choices, strict=True):
        table = logs(np.concatenate([prompt, choice]))
        assert got == pytest.approx(sum(float(table[19 + n, token]) for n, token in enumerate(choice)), abs=1e-4)
    (completed,) = greedy(config, params, types, BYTES)([prompt], 3)
    assert completed[0] == logs(prompt)[-1].argmax() and 1 <= len(completed) <= 3
