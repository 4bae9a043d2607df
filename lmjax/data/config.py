"""Configs of the data stages and of the data of a run."""

import dataclasses
from typing import Literal

from lmjax.config import free, need


@dataclasses.dataclass(frozen=True)
class SplitConfig:
    """`lmjax split`: documents to train, validation and test, by the hash of their text: copies fall on one side."""

    validation: float = 0.02  # share of the documents
    test: float = 0.02  # share of the documents
    seed: int = 0  # another seed draws another split
    text_field: str = "text"  # of JSON lines and Parquet that are read; the other fields become meta
    id_field: str | None = "id"  # holds an id, unique in its source; where it is missing the id is `path#line`

    def __post_init__(self):
        need(self.text_field != self.id_field, f"config.text_field and config.id_field are both {self.text_field!r}")
        shares = (self.validation, self.test)
        need(
            min(shares) >= 0 and sum(shares) < 1, f"config.validation and config.test must be shares below 1: {shares}"
        )


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """`lmjax tokenizer`: train one, or import one."""

    kind: Literal["byte", "sentencepiece", "hf"] = "sentencepiece"  # hf: a `tokenizer.json`
    path: str | None = free(None)  # import this .model or tokenizer.json instead of training; its content is an input
    algorithm: Literal["bpe", "unigram"] = "bpe"  # sentencepiece only
    vocab_size: int = 4096  # pieces, special ones and 256 bytes included
    split_digits: bool = True  # each digit is a piece: numbers are spelled alike, 1 % fewer bits a byte on code
    sample_bytes: int = 10_000_000  # UTF-8 bytes of the training split to learn from, drawn over all sources by size
    seed: int = 0  # of the sample

    def __post_init__(self):
        need(
            self.kind != "hf" or self.path is not None, "config.kind='hf' imports: set config.path to a tokenizer.json"
        )
        need(
            self.kind != "byte" or self.path is None, "config.kind='byte' has nothing to import: leave config.path out"
        )
        need(self.sample_bytes > 0, f"config.sample_bytes={self.sample_bytes} must be positive")
        need(self.kind == "byte" or self.vocab_size > 300, f"config.vocab_size={self.vocab_size} must exceed 300")


@dataclasses.dataclass(frozen=True)
class ShardsConfig:
    """`lmjax tokenize`: documents to shards of token ids."""

    add_bos: bool = True  # the tokenizer's <bos> before each document, where it has one
    add_eos: bool = True  # the tokenizer's <eos> after each document, where it has one
    shard_tokens: int = 100_000_000  # a shard is closed after this many; a document is never cut
    seed: int = 0  # of the one shuffle of the documents
    num_workers: int = free(2)  # encoding processes; the shards do not depend on it

    def __post_init__(self):
        need(self.shard_tokens >= 1, f"config.shard_tokens={self.shard_tokens} must be at least 1")
        need(self.num_workers >= 0, f"config.num_workers={self.num_workers} must not be negative")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """A mixture, a row length or both, from one step on."""

    from_step: int  # the first step that uses it; the first stage starts at 0
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    # source → share of the rows, normalized; empty: the run's own. Either all stages have weights or none has
    seq_len: int | None = None  # T of the stage's rows; none: data.seq_len. Rows grow or shrink so that tokens stay


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a run reads."""

    shards: tuple[str, ...] = free(())  # folders made by `lmjax tokenize`; their sources together are the run's
    # (free: where they lie may change; what they hold is compared by fingerprint)
    seq_len: int = 256  # T, tokens in a row; a run-time choice, shards do not depend on it
    packing: Literal["concat", "best_fit", "document"] = "concat"
    # concat: documents one after another, cut where a row ends, no padding. best_fit: none is cut that fits in a row.
    # document: one in each row, from its start
    features: dict[str, str] = dataclasses.field(default_factory=dict, metadata={"free": True})
    # source → .npz of features, an array [P, I] for each document's id; they stand before its text. Compared by content
    packing_dir: str | None = free(None)  # holds the rows that best_fit prepares; none: `packing/` in the workdir
    cache_dir: str | None = free(
        None
    )  # local folder to which shards of a bucket (gs://) are fetched, ahead of the step
    cache_bytes: int = free(50_000_000_000)  # of cache_dir, at most: half the boot disk of a TPU VM. Rows come from all
    # shards, so what does not fit is fetched again and again
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    # source → share of the rows; empty: by temperature
    temperature: float | None = None  # where nothing has weights: share ∝ tokens^(1/temperature); none: 1, as they are;
    # 3.3 lifts rare languages (alpha = 0.3: Conneau et al. 2020, arXiv 1911.02116; Xue et al. 2021, arXiv 2010.11934)
    max_epochs: dict[str, float] = dataclasses.field(default_factory=dict)
    # source → how often its tokens may be read over the run (packing=document: its documents, a row of seq_len tokens each);
    # "*": each that is not named. The rest goes to the others
    max_tokens: dict[str, int] = dataclasses.field(default_factory=dict)  # source → tokens to read of it over the run
    stages: tuple[StageConfig, ...] = ()  # weights (instead of `weights`) and row lengths that change by step
    train_split: str = "train"
    eval_split: str = "validation"
    num_workers: int = free(0)  # reading processes; 0 reads in threads
    prefetch: int = free(4)  # steps read ahead, for each worker
    verify: Literal["full", "size"] = free("full")
    # before a run: hash every shard (1 GB/s), or compare sizes and record counts only, for corpora too large to hash.
    # Shards in a bucket are compared by size, and hashed when they are fetched

    def __post_init__(self):
        need(min(self.seq_lens) >= 2, f"config.data.seq_len={min(self.seq_lens)} must be at least 2")
        need(self.num_workers >= 0, f"config.data.num_workers={self.num_workers} must not be negative")
        need(self.prefetch >= 0, f"config.data.prefetch={self.prefetch} must not be negative")
        need(self.cache_bytes > 0, f"config.data.cache_bytes={self.cache_bytes} must be positive")
        need(
            not self.features or self.packing == "document",
            f"config.data.features stand before one document: packing={self.packing!r} must be 'document'",
        )
        self.check_stages()
        for weights in (self.weights, *(stage.weights for stage in self.stages)):
            need(all(w >= 0 for w in weights.values()), f"config.data: weights must not be negative: {weights}")
            need(not weights or sum(weights.values()) > 0, "config.data: the weights sum to 0")
        weighted = bool(self.weights) or any(stage.weights for stage in self.stages)
        need(
            self.temperature is None or not weighted,
            "config.data: weights say what temperature would: give one of them",
        )
        need(
            self.temperature is None or self.temperature > 0,
            f"config.data.temperature={self.temperature} must be positive",
        )
        for name in ("max_epochs", "max_tokens"):
            caps = getattr(self, name)
            need(all(cap >= 0 for cap in caps.values()), f"config.data.{name} must not be negative: {caps}")

    def check_stages(self) -> None:
        """Stages rise from step 0, each says something, and no weights are given that nothing reads."""
        steps = [stage.from_step for stage in self.stages]
        need(
            steps == sorted(set(steps)) and steps[:1] in ([], [0]),
            f"config.data.stages must start at step 0 and rise: {steps}",
        )
        weighted = [bool(stage.weights) for stage in self.stages]
        need(not (self.weights and any(weighted)), "config.data: give weights or stages with weights, not both")
        need(all(weighted) or not any(weighted), "config.data.stages: give weights to all stages or to none")
        for stage in self.stages:
            said = stage.weights or stage.seq_len is not None
            need(bool(said), f"config.data.stages: the one from step {stage.from_step} has neither weights nor seq_len")
        for length in self.seq_lens:
            need(
                self.longest % length == 0,
                f"config.data.stages: seq_len={length} does not divide the longest one, {self.longest}",
            )

    @property
    def from_steps(self) -> tuple[int, ...]:
        """The first step of each stage; a run without stages has one."""
        return tuple(stage.from_step for stage in self.stages) or (0,)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """T of each stage."""
        return tuple(stage.seq_len or self.seq_len for stage in self.stages) or (self.seq_len,)

    def stage_steps(self, steps: int) -> list[tuple[int, int]]:
        """(T, steps) of each stage of a run of `steps`."""
        stops = [min(stop, steps) for stop in (*self.from_steps[1:], steps)]
        return [(n, max(0, stop - start)) for n, start, stop in zip(self.seq_lens, self.from_steps, stops)]

    @property
    def longest(self) -> int:
        """The longest T of the run."""
        return max(self.seq_lens)

    def stage_rows(self, batch_size: int) -> tuple[int, ...]:
        """Rows of a step in each stage: `batch_size` is that of rows of `seq_len`, and a step's tokens are the same in all.

        Raises:
          UserError: a step's tokens are no whole number of a stage's rows.
        """
        tokens = batch_size * self.seq_len
        for length in self.seq_lens:
            need(
                tokens % length == 0,
                f"config.data.stages: {batch_size} × {self.seq_len} tokens of a step are no whole rows of {length}",
            )
        return tuple(tokens // length for length in self.seq_lens)
