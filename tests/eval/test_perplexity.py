"""Likelihood against closed forms: a model that knows nothing, and one that knows bigrams."""

import collections
import math

import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.data.eval_batches import EvalBatches
from lmjax.data.source import open_source
from lmjax.eval.perplexity import Likelihood, evaluate, predicted_tokens
from lmjax.train.loss import Sums


@pytest.fixture(scope="module")
def sources(line):
    return {name: open_source(folder, "train", name) for name, folder in zip(("prose", "lists"), line.shards)}


def documents(source):
    return source.read(np.arange(source.num_documents))


def run(step, sources, rows=None, length=16):
    return evaluate(step, {}, {n: (s, list(EvalBatches(s, length, 4, rows))) for n, s in sources.items()})


def sums(nll, batch):
    zero = jnp.zeros(())
    return Sums(zero, jnp.sum(batch.loss_weights), jnp.sum(batch.loss_weights * nll), zero)


def test_a_uniform_model_costs_log_v_a_token(sources):
    metrics = run(lambda params, batch: sums(math.log(262.0), batch), sources)
    assert metrics["eval/perplexity"] == pytest.approx(262.0, rel=1e-5)
    tokens = sum(len(d) - 1 for s in sources.values() for d in documents(s))
    bytes_ = sum(s.num_bytes for s in sources.values())
    assert metrics["eval/bits_per_byte"] == pytest.approx(math.log2(262) * tokens / bytes_, rel=1e-5)


def test_every_token_but_each_documents_first_is_counted_once(sources):
    """nll = -log p(target | token) of a bigram table: the whole set's sum is that over the documents, windows or not."""
    table = np.random.default_rng(0).uniform(0.1, 5.0, (262, 262)).astype(np.float32)
    metrics = run(lambda params, batch: sums(table[batch.tokens, batch.targets], batch), sources)
    for name, source in sources.items():
        pairs = collections.Counter(pair for d in documents(source) for pair in zip(d[:-1].tolist(), d[1:].tolist()))
        total, count = sum(table[pair] * n for pair, n in pairs.items()), sum(pairs.values())
        assert count == predicted_tokens(source)
        assert metrics[f"eval/{name}/loss"] == pytest.approx(total / count, rel=1e-5)
        assert metrics[f"eval/{name}/bits_per_byte"] == pytest.approx(total / math.log(2) / source.num_bytes, rel=1e-5)


def test_a_part_of_the_rows_stands_for_the_whole(sources):
    whole = run(lambda params, batch: sums(2.0, batch), sources)
    part = run(lambda params, batch: sums(2.0, batch), sources, rows=3)
    assert part == pytest.approx(whole)


def test_a_perplexity_that_no_float_holds_is_not_an_error():
    assert Likelihood(1e6, 10, 10).metrics("eval")["eval/perplexity"] > 1e300
