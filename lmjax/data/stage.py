"""What a stage of preparation is: `Iterable[Document] → Iterator[Document]`, and the counts of what became of each document.

A `MapStage` judges each document alone; a `GlobalStage` (duplicates, caps) must see all of them first and then gives each shard
its decisions. Both are frozen dataclasses whose fields are their options, so a stage is its own section of the config, and both
obey one law, which `Counts.close` asserts wherever a stage has run:

    read + added = kept + dropped + failed
"""

import collections
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lmjax.data.document import Document, draw, to_bytes
from lmjax.errors import RunError, UserError

if TYPE_CHECKING:
    from lmjax.data.engine import Engine

log = logging.getLogger(__name__)

SAMPLES = 20  # kept for each reason, drawn by the hash of the id: the same whatever the shards
SAMPLE_CHARACTERS = 2000  # of a sample's text
TOLD = (
    3  # failures of a stage in a shard that are logged (all are counted and kept aside); successors that an event names
)


class Drop(NamedTuple):
    """Why a document goes no further."""

    reason: str  # a code, such as `too_few_words`: lower case, digits and `_`; few different ones
    detail: Any = None  # JSON: the figure that decided it, the id of the survivor …


class Failed(Exception):
    """A document that a stage could not judge; anything else that is raised counts the same, and is logged as a fault of ours."""


Verdict = Document | Drop | list[Document]  # a list: the document and others made from it, or in its place
Apply = Callable[[Document, "Tally"], Verdict]


class Tally:
    """What a stage counts beside its verdicts: `tally.add("pii", "email", 2)`. Sums over shards."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)

    def add(self, kind: str, key: str, number: int | float = 1) -> None:
        """Adds to a count; `kind` names a table of the report, `key` its row."""
        self.counts[kind][key] += number


class Stage:
    """What map and global stages share."""

    name: ClassVar[str]  # names the section of the config, the folder, the rows of the report: `near_dedup`
    tries_again: ClassVar[bool] = False  # where failures ended a run, the next one judges their shards anew: they may
    # have passed, as those of an endpoint that was down
    keeps: ClassVar[str | None] = None  # a folder in the stage's own that outlives its options: what it holds was dear,
    # and each thing in it is named by all that decides it
    version: ClassVar[int] = 1  # raised when the same options come to decide otherwise: old outputs are then redone

    def files(self) -> Sequence[str]:
        """Files and folders of the user that the stage reads: their content is part of what it was made from.

        Raises:
          UserError: one is missing, or an extra is not installed. Called before anything runs.
        """
        return ()

    def sources_named(self) -> Mapping[str, Iterable[str]]:
        """Option → sources that it names: one that is not read is a mistake, which would do nothing in silence."""
        return {}

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """JSON for the stage's part of the report, once all shards are done.

        Files that the stage writes to `folder / "publish"` appear in the output as `<stage>/…`.
        """
        return {}


class MapStage(Stage):
    """Judges each document alone. Override `apply`; or `open`, where resources are loaded first; or `process`, for batches."""

    fits: ClassVar[bool] = False  # `fit` wants to see the documents that come in

    def fit(self, shards: Sequence[Path], folder: Path) -> None:
        """Makes what `open` needs, once, before any document: a model, an index. `shards` hold the documents that come in,
        if `fits`; they are read by `read_written`."""

    def open(self, folder: Path) -> Apply:
        """The function that judges, in a worker process, with its resources; `folder` is where `fit` wrote."""
        return self.apply

    def apply(self, document: Document, tally: Tally) -> Verdict:
        """The verdict on one document."""
        raise NotImplementedError

    def process(self, documents: Iterable[Document], counts: "Counts", folder: Path) -> Iterator[Document]:
        """The stage over a stream."""
        apply = self.open(folder)
        for document in documents:
            try:
                verdict = apply(document, counts.tally)
            except (UserError, RunError):
                raise  # about the run, not about this document
            except (
                Exception
            ) as error:  # whatever a document does to a library: it is set aside, counted, and has a budget
                counts.fail(document, error)
                continue
            yield from counts.settle(document, verdict)


class Shard(NamedTuple):
    """A file of documents on its way through the stages, all of one source."""

    source: str
    number: int
    path: Path  # `read_written` reads it
    documents: int
    text_bytes: int  # UTF-8
    sha256: str = ""  # of the file

    @property
    def key(self) -> str:
        """Names the shard's files in every stage: `web/00012`."""
        return f"{self.source}/{self.number:05d}"


class GlobalStage(Stage):
    """Sees all documents, by tasks over shards and files, then decides."""

    def decide(self, shards: Sequence[Shard], folder: Path, engine: "Engine") -> dict[str, Path]:
        """Runs the tasks that decide. Memory must not grow with the corpus: sort and merge by files.

        Args:
          shards: in the order of the corpus: a document's place is (index of its shard, row in it).
          folder: the stage's own, for intermediate files.
          engine: runs tasks in processes, here or on many machines; see `engine.Task`.

        Returns:
          For each shard's key a file that `decisions` reads.
        """
        raise NotImplementedError

    def decisions(self, path: Path) -> Iterator[tuple[int, Any]]:
        """(row of the shard, decision) in rising order, for the documents that are not simply kept; of JSON lines, as most write."""
        with path.open("rb") as file:
            yield from (tuple(json.loads(line)) for line in file)

    def carry_out(self, document: Document, decision: Any, tally: Tally) -> Verdict:
        """What a decision means for its document."""
        raise NotImplementedError

    def process(self, documents: Iterable[Document], counts: "Counts", path: Path) -> Iterator[Document]:
        """Carries the decisions of a shard out."""
        decisions = self.decisions(path)
        row, decision = next(decisions, (None, None))
        for number, document in enumerate(documents):
            if number != row:
                yield from counts.settle(document, document)
                continue
            yield from counts.settle(document, self.carry_out(document, decision, counts.tally))
            row, decision = next(decisions, (None, None))
        if row is not None:
            raise RuntimeError(f"{self.name}: a decision on row {row} of a shard that ends before: {path}")


# ------------------------------------------------------------------------------------------------------------------- counts


class Event(NamedTuple):
    """What a stage did to a document: a line of the record that `lmjax prepare --explain` reads."""

    id: str
    stage: str
    what: str  # dropped, failed, changed, replaced or added
    reason: str | None = None
    detail: Any = None


class Counts:
    """What became of the documents of one shard in one stage.

    Args:
      stage: its name.
      record: is called with each event and its document.
    """

    def __init__(self, stage: str, record: Callable[[Event, Document], None] | None = None):
        self.stage, self.record = stage, record or (lambda event, document: None)
        self.read = self.added = self.kept = self.failed = self.changed = 0
        self.bytes_read = self.bytes_kept = 0  # UTF-8 of the texts
        self.dropped: collections.Counter = collections.Counter()
        self.tally = Tally()
        self.samples: dict[
            str, list[tuple[float, str, str, Any]]
        ] = {}  # reason → (draw, id, text, detail), smallest draws
        self.seconds = 0.0  # spent in this stage itself

    def reading(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The same documents, counted as they come in: apart from what the stage says, so that the law can fail."""
        for document in documents:
            self.read += 1
            self.bytes_read += len(to_bytes(document.text))
            yield document

    def settle(self, document: Document, verdict: Verdict) -> Iterator[Document]:
        """Counts a verdict, and yields what goes on."""
        if isinstance(verdict, Drop):
            self.drop(document, verdict)
            return
        if isinstance(verdict, Document):
            self.keep(document, verdict)
            yield verdict
            return
        if not verdict:
            raise RuntimeError(f"{self.stage}: a document without a successor must be dropped with a reason")
        self.added += len(verdict) - 1
        ids = [successor.id for successor in verdict]
        if document.id not in ids:  # else no event would bear its id
            told = {"by": ids[:TOLD], "documents": len(ids)}
            self.record(Event(document.id, self.stage, "replaced", None, told), document)
        for successor in verdict:
            if successor.id != document.id:
                self.record(Event(successor.id, self.stage, "added", None, {"from": document.id}), successor)
            self.keep(document, successor)
            yield successor

    def keep(self, document: Document, successor: Document) -> None:
        """One document goes on, perhaps changed."""
        self.kept += 1
        self.bytes_kept += len(to_bytes(successor.text))
        if successor.text is document.text or successor.text == document.text or successor.id != document.id:
            return
        self.changed += 1
        self.sample("changed", document, lambda: excerpt(successor.text))
        sizes = {"characters": [len(document.text), len(successor.text)]}
        self.record(Event(document.id, self.stage, "changed", None, sizes), successor)

    def drop(self, document: Document, drop: Drop) -> None:
        """One document ends here."""
        self.dropped[drop.reason] += 1
        self.sample(drop.reason, document, lambda: drop.detail)
        self.record(Event(document.id, self.stage, "dropped", drop.reason, drop.detail), document)

    def fail(self, document: Document, error: Exception) -> None:
        """One document could not be judged: it is set aside, never lost."""
        self.failed += 1
        why = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        if self.failed <= TOLD and not isinstance(error, Failed):
            trace = "".join(traceback.format_exception(error, limit=-2)).rstrip()
            log.warning("%s: document %r failed and is set aside: %s", self.stage, document.id, trace)
        self.sample("failed", document, lambda: why)
        self.record(Event(document.id, self.stage, "failed", None, why), document)

    def sample(self, reason: str, document: Document, detail: Callable[[], Any]) -> None:
        """Keeps the documents with the smallest draws of each reason."""
        add_sample(self.samples.setdefault(reason, []), reason, document, detail)

    def close(self) -> dict[str, Any]:
        """The counts as JSON.

        Raises:
          RuntimeError: a document was lost or came from nowhere: a fault of the stage.
        """
        dropped = sum(self.dropped.values())
        if self.read + self.added != self.kept + dropped + self.failed:
            raise RuntimeError(
                f"stage {self.stage} lost count: read {self.read} + added {self.added} is not"
                f" kept {self.kept} + dropped {dropped} + failed {self.failed}"
            )
        return {
            "read": self.read,
            "added": self.added,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "failed": self.failed,
            "changed": self.changed,
            "bytes_read": self.bytes_read,
            "bytes_kept": self.bytes_kept,
            "tally": {kind: dict(sorted(table.items())) for kind, table in sorted(self.tally.counts.items())},
            "samples": dict(sorted(self.samples.items())),
            "seconds": self.seconds,
        }


Sample = tuple[float, str, str, Any]  # draw, id, start of the text, detail


def excerpt(text: str) -> str:
    """As much of a text as a sample shows."""
    return text[:SAMPLE_CHARACTERS]


def add_sample(samples: list[Sample], reason: str, document: Document, detail: Callable[[], Any]) -> None:
    """Keeps the SAMPLES smallest draws, in order: any number of such lists merge to the one of all documents."""
    number = draw(document.id, f"sample/{reason}", 0)
    if len(samples) < SAMPLES or number < samples[-1][0]:
        samples.append((number, document.id, excerpt(document.text), detail()))
        samples.sort(key=lambda sample: sample[:2])
        del samples[SAMPLES:]


def run(
    stage: MapStage, documents: Iterable[Document], counts: Counts, folder: Path | None = None
) -> Iterator[Document]:
    """A map stage over documents in memory, for a notebook or a test: fills `counts` as it is consumed.

    `counts.seconds` is the time between taking a document and giving it on: what stands before and after is not in it.
    """
    source = timed(counts.reading(documents), counts, -1)
    yield from timed(stage.process(source, counts, Path(".") if folder is None else folder), counts, 1)


def timed(documents: Iterator[Document], counts: Counts, sign: int) -> Iterator[Document]:
    """The same documents; the time spent inside `documents` is added to (or, with sign -1, taken from) the stage's own."""
    while True:
        start = time.perf_counter()
        document = next(documents, None)
        counts.seconds += sign * (time.perf_counter() - start)
        if document is None:
            return
        yield document
