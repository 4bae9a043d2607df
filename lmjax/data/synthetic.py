"""Synthetic documents: a model rewrites or extends a document by a template; two templates make a back-translation.

The model is a run of lmjax or an endpoint that speaks OpenAI's protocol (`answers.py`). Each request carries a seed, a function
of the document's id; its answer is asked for once. Given the answers, the output is a function of the input.

What comes back is judged before it is kept: neither empty, nor out of proportion, nor a copy of its source or of a sibling.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lmjax.config import need
from lmjax.data.answers import FOLDER, Answers, Made, Model, Request, run_file
from lmjax.data.document import Document, draw, grouped
from lmjax.data.stage import Counts, Drop, Failed, MapStage, Tally, Verdict
from lmjax.data.words import split_words
from lmjax.files import read_json, sha256_json, write_json

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")
SHINGLE = 5  # words, of which overlap is measured


@dataclasses.dataclass(frozen=True)
class Synthetic(Model, MapStage):
    """Adds documents that a model makes of others, or puts them in their place."""

    name: ClassVar[str] = "synthetic"
    version: ClassVar[int] = 2
    tries_again: ClassVar[bool] = True
    keeps: ClassVar[str] = FOLDER

    template: str = ""  # the prompt: {text}, {id}, {source} or a field of meta in braces; {{ and }} are braces
    second_template: str | None = None  # back-translation: the first answer is its {text}
    mode: Literal["add", "replace"] = "add"
    extend: bool = False  # the new document is the source's text and then the answer; the answer alone is judged
    samples: int = 1  # new documents for each document, each with its own seed
    share: float = 1.0  # of the documents that are given to the model, drawn by id, 0 to 1; the others pass
    seed: int = 0  # with the document's id: the request's seed
    min_ratio: float = 0.2  # characters of a new text to its source's, at least
    max_ratio: float = 3.0  # and at most
    max_overlap: float = 0.6  # Jaccard of word 5-grams with its source, and with its siblings: above, it is a copy
    on_failure: Literal["fail", "keep"] = "fail"  # of a request: the document is set aside, or goes on as it is
    batch_size: int = 64  # documents at a time. A workdir's model is loaded anew for each such batch, and another size
    # asks it for all answers again: their last bits depend on what is asked together

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("template", "second_template"):
            value = getattr(self, name)
            need(not value or "text" in PLACEHOLDER.findall(value), f"synthetic.{name}={value!r} must hold {{text}}")
        need(self.samples >= 1, f"synthetic.samples={self.samples} must be at least 1")
        need(0 < self.share <= 1, f"synthetic.share={self.share} must be in (0, 1]")
        need(
            0 <= self.min_ratio <= self.max_ratio,
            f"synthetic.min_ratio={self.min_ratio} must be in 0 … max_ratio={self.max_ratio}",
        )
        need(0 <= self.max_overlap <= 1, f"synthetic.max_overlap={self.max_overlap} must be in 0 … 1")
        need(self.batch_size >= 1, f"synthetic.batch_size={self.batch_size} must be at least 1")

    def files(self) -> Sequence[str]:
        """What the run says of itself."""
        need(bool(self.workdir or self.endpoint), "synthetic needs a workdir or an endpoint: which model is to write?")
        need(bool(self.template), "synthetic needs a template, which holds {text}")
        self.key()
        return [] if self.workdir is None else [str(run_file(self.workdir))]

    def fit(self, shards: Sequence[Path], folder: Path) -> None:
        """Settles which model answers."""
        write_json(folder / "model.json", self.identity())

    def process(self, documents: Iterable[Document], counts: Counts, folder: Path) -> Iterator[Document]:
        """The stage over a stream, a batch at a time, in order."""
        answers = Answers(self, folder)
        while batch := list(itertools.islice(documents, self.batch_size)):
            chosen = [document for document in batch if draw(document.id, "synthetic", self.seed) < self.share]
            made = iter(self.make(chosen, answers))
            waiting = {id(document) for document in chosen}
            for document in batch:
                if id(document) not in waiting:
                    yield from counts.settle(document, document)
                    continue
                try:
                    verdict = self.judge(document, next(made), answers.model, counts.tally)
                except Failed as error:
                    counts.fail(document, error)
                    continue
                yield from counts.settle(document, verdict)

    def make(self, documents: Sequence[Document], answers: Answers) -> list[list[Made]]:
        """For each document its answers, or why there is none."""
        requests = [self.request(document, k) for document in documents for k in range(self.samples)]
        results = answers.ask(requests)
        if self.second_template is not None:
            seconds = [
                result if isinstance(result, Failed) else self.second_request(request, result)
                for request, result in zip(requests, results, strict=True)
            ]
            results = answers.ask(seconds)
        made = [
            Made(0 if isinstance(request, Failed) else request.seed, result)
            for request, result in zip(requests, results, strict=True)
        ]
        return [made[start : start + self.samples] for start in range(0, len(made), self.samples)]

    def request(self, document: Document, k: int) -> Request | Failed:
        """What a document's k-th sample asks."""
        fields = {**document.meta, "text": document.text, "id": document.id, "source": document.source}
        seed = int(draw(document.id, f"synthetic/{k}", self.seed) * (1 << 32))
        try:
            return Request(fill(self.template, fields), seed, fields)
        except KeyError as error:
            return Failed(f"template: the document has no field {error.args[0]!r}")

    def second_request(self, first: Request, answer: str) -> Request | Failed:
        """What is asked of a first answer."""
        try:
            return Request(fill(self.second_template or "", {**first.fields, "text": answer}), first.seed, first.fields)
        except KeyError as error:
            return Failed(f"second_template: the document has no field {error.args[0]!r}")

    def judge(self, document: Document, made: list[Made], model: str, tally: Tally) -> Verdict:
        """The source and its new documents, or these alone."""
        accepted: list[Document] = []
        shingles = [shingled(document.text)]
        reasons = []
        for k, (seed, answer) in enumerate(made):
            tally.add("synthetic", "requested")
            if isinstance(answer, Failed):
                if self.on_failure == "fail":
                    raise answer
                reasons.append("request_failed")
                continue
            new = shingled(answer)
            reason = self.why_not(document.text, answer, new, shingles)
            if reason is not None:
                reasons.append(reason)
                continue
            shingles.append(new)
            accepted.append(self.document(document, answer, seed, k, model))
        for reason in reasons:
            tally.add("synthetic_rejected", reason)
        tally.add("synthetic", "accepted", len(accepted))
        if self.mode == "add":
            return [grouped(document), *accepted] if accepted else document
        if not accepted and set(reasons) == {"request_failed"}:
            return document  # on_failure=keep: without an answer there is nothing to put in its place
        return accepted or Drop("synthetic_rejected", reasons)

    def document(self, source: Document, answer: str, seed: int, k: int, model: str) -> Document:
        """A new document, which says what it was made from and by what, and falls on its source's side of a split."""
        made = {"synthetic": True, "from": source.id, "template": self.template_hash(), "model": model, "seed": seed}
        text = source.text + answer if self.extend else answer.strip()
        meta = {**grouped(source).meta, **made}
        return dataclasses.replace(source, id=f"{source.id}#synthetic-{self.mark(model)}-{k}", text=text, meta=meta)

    def mark(self, model: str) -> str:
        """Names in ids what made the documents: two such stages over one corpus give two documents of a source two ids."""
        options = [self.second_template, self.extend, self.seed, self.temperature, self.max_tokens]
        return sha256_json([model, self.template, *options])[:8]

    def template_hash(self) -> str:
        """Names the templates; the report holds them."""
        return sha256_json([self.template, self.second_template])[:12]

    def why_not(self, source: str, answer: str, new: frozenset, others: list[frozenset]) -> str | None:
        """Why an answer makes no document, or None; `others` are the shingles of the source and of its siblings so far."""
        length = len(answer.strip())
        if not length:
            return "empty"
        if length < self.min_ratio * len(source):
            return "too_short"
        if length > self.max_ratio * len(source):
            return "too_long"
        if jaccard(new, others[0]) > self.max_overlap:
            return "copy_of_source"
        if any(jaccard(new, other) > self.max_overlap for other in others[1:]):
            return "copy_of_sibling"
        return None

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """What made the documents."""
        templates = {"template": self.template, "second_template": self.second_template, "hash": self.template_hash()}
        return {**templates, "answered_by": read_json(folder / "model.json"), **tally.get("synthetic", {})}


def fill(template: str, fields: dict[str, Any]) -> str:
    """The template with its fields; braces in what is filled in stand for themselves.

    Raises:
      KeyError: a field is missing.
    """
    return PLACEHOLDER.sub(lambda match: str(fields[match[1]]) if match[1] else match[0][0], template)


def shingled(text: str) -> frozenset[str]:
    """Word 5-grams, folded; a shorter text is one of its own."""
    words = [word.casefold() for word in split_words(text)]
    grams = [" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)]
    return frozenset(grams or [" ".join(words)])


def jaccard(a: frozenset, b: frozenset) -> float:
    """What two sets share, of all they hold."""
    return len(a & b) / len(a | b)
