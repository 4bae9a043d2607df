"""Runs a global stage over documents in memory, cut into shards, for the tests of duplicates."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmjax import files
from lmjax.data.document import Document, to_bytes
from lmjax.data.engine import LocalEngine, Task
from lmjax.data.stage import Counts, GlobalStage, Shard
from lmjax.data.written import read_written, write_documents


class Shuffled(LocalEngine):
    """Runs tasks in a random order, as many workers would finish them."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = random.Random(seed)

    def run(self, tasks: Sequence[Task], folder: Path, label: str = "") -> list[Any]:
        """See `Engine`."""
        super().run(self.random.sample(tasks, len(tasks)), folder, label)
        return super().run(tasks, folder, label)


class Outcome:
    """What a stage did with documents."""

    def __init__(self, kept: list[Document], dropped: dict[str, tuple[str, Any]], report: dict, counts: list[Counts]):
        self.kept, self.dropped, self.report, self.counts = kept, dropped, report, counts

    @property
    def ids(self) -> list[str]:
        """Of the documents that stay."""
        return [document.id for document in self.kept]


def write_shards(documents: Sequence[Document], folder: Path, size: int) -> list[Shard]:
    """Documents of one source in shards of so many."""
    shards = []
    for number, start in enumerate(range(0, len(documents), size)):
        part = documents[start : start + size]
        path = folder / f"{number:05d}.jsonl.zst"
        write_documents(path, part)
        shards.append(Shard(part[0].source, number, path, len(part), sum(len(to_bytes(d.text)) for d in part)))
    return shards


def run_global(
    stage: GlobalStage, documents: Sequence[Document], folder: Path, size: int = 7, seed: int = 0
) -> Outcome:
    """Decides and carries out."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, tally = write_shards(documents, folder / "shards", size), {}
    stage.files()
    decided = stage.decide(shards, folder / "stage", Shuffled(seed))
    kept, dropped, all_counts = [], {}, []
    for shard in shards:
        counts = Counts(
            stage.name, lambda loss, _: loss.reason and dropped.__setitem__(loss.id, (loss.reason, loss.detail))
        )
        kept += stage.process(counts.reading(read_written(shard.path)), counts, decided[shard.key])
        for kind, table in counts.close()["tally"].items():
            for key, value in table.items():
                tally.setdefault(kind, {}).setdefault(key, 0)
                tally[kind][key] += value
        all_counts.append(counts)
    return Outcome(kept, dropped, stage.finish(tally, folder / "stage"), all_counts)


def finished(documents: Sequence[Document], folder: Path, stage_folder: Path | None = None) -> Path:
    """A folder as an earlier preparation left it, with what the stage published."""
    write_documents(folder / "web.jsonl.zst", documents)
    files.write_atomic(folder / "events" / "web.jsonl.zst", b"no documents")
    files.write_atomic(folder / "decontaminate" / "flags.jsonl.zst", b"no documents")
    if stage_folder is not None:
        for path in sorted((stage_folder / "publish").rglob("*")):
            if path.is_file():
                target = folder / "near_dedup" / path.relative_to(stage_folder / "publish")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    content = {"files": {"web.jsonl.zst": files.sha256_file(folder / "web.jsonl.zst")}}
    files.write_manifest(folder, files.Manifest("prepare", {}, {}, {}, content, "", 0.0))
    return folder
