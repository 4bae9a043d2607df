"""Likelihood of held-out text: loss, perplexity, bits per byte, by source and together.

    loss = Σ nll / Σ tokens,   perplexity = e^loss,   bits per byte = loss · tokens / (bytes · ln 2)

`tokens` are those that are predicted: all but each document's first. Bits per byte spread the likelihood of all of them over the
bytes of the text, so models with different tokenizers compare. Over a part of the rows, each source's loss stands for its whole.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from lmjax.batch import Batch
from lmjax.data.source import Source
from lmjax.train.loss import Sums

EvalStep = Callable[[dict, Batch], Sums]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of one source, or of several together."""

    nll: float  # nats, of all predicted tokens of the source
    tokens: int  # that are predicted
    bytes: int  # of text

    def metrics(self, prefix: str) -> dict[str, float]:
        """`<prefix>/loss`, `/perplexity`, `/bits_per_byte`."""
        loss = self.nll / self.tokens
        return {
            f"{prefix}/loss": loss,
            f"{prefix}/perplexity": math.exp(min(loss, 700.0)),  # e^710 is no float
            f"{prefix}/bits_per_byte": self.nll / (self.bytes * math.log(2)),
        }


def predicted_tokens(source: Source) -> int:
    """Tokens of a source that have one before them in their document."""
    lengths = np.diff(source.offsets)
    return source.num_tokens - int(np.count_nonzero(lengths))


def source_likelihood(step: EvalStep, params: dict, source: Source, batches: Iterable[Batch]) -> Likelihood:
    """Runs the batches of a source; its mean loss stands for all its tokens (exact where all its rows are run)."""
    sums = [step(params, batch) for batch in batches]
    nll, weight = (math.fsum(float(getattr(s, name)) for s in jax.device_get(sums)) for name in ("nll", "weight"))
    if weight == 0:
        raise ValueError(f"source {source.name!r}: the evaluated rows hold no predicted token")
    tokens = predicted_tokens(source)
    return Likelihood(nll / weight * tokens, tokens, source.num_bytes)


def evaluate(step: EvalStep, params: dict, sources: Mapping[str, tuple[Source, Iterable[Batch]]]) -> dict[str, float]:
    """`eval/…` over all sources and `eval/<source>/…` for each.

    Args:
      step: sums of one global batch.
      params: parameters on the mesh.
      sources: name → (source, its batches on the devices).
    """
    parts = {name: source_likelihood(step, params, source, batches) for name, (source, batches) in sources.items()}
    whole = Likelihood(*(sum(getattr(part, name) for part in parts.values()) for name in ("nll", "tokens", "bytes")))
    metrics = whole.metrics("eval")
    for name, part in parts.items():
        metrics |= part.metrics(f"eval/{name}")
    return metrics
