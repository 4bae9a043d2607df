"""The output of a preparation, from the last shards: documents by source, the record of events, what stages publish."""

import itertools
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmjax.data import passes
from lmjax.data.engine import Engine, Task
from lmjax.data.stage import Shard
from lmjax.data.written import SUFFIX
from lmjax.files import sha256_file, sha256_json, whole

log = logging.getLogger(__name__)


def publish(shards: Sequence[Shard], done: Sequence[passes.Pass], out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes the output from the last shards; returns (counts, content) of the manifest."""
    files: dict[str, str] = {}
    counts: dict[str, Any] = {"documents": 0, "bytes": 0, "sources": {}}
    read = list(dict.fromkeys(receipt["source"] for receipt in done[0].receipts))
    for source in dict.fromkeys([shard.source for shard in shards]):
        own = [shard for shard in shards if shard.source == source]
        numbers = {"documents": sum(s.documents for s in own), "bytes": sum(s.text_bytes for s in own)}
        counts["sources"][source] = numbers
        for key, value in numbers.items():
            counts[key] += value
        if numbers["documents"]:
            files[f"{source}{SUFFIX}"] = join([shard.path for shard in own], out / f"{source}{SUFFIX}")
        else:
            log.warning("no document of the source %s is left", source)
    for kind, source in itertools.product(("events", "aside"), read):
        parts = [part for one in done for part in sorted((one.folder / kind / source).glob(f"*{SUFFIX}"))]
        if parts:
            files[f"{kind}/{source}{SUFFIX}"] = join(parts, out / kind / f"{source}{SUFFIX}")
    for folder, stage in [(one.folder, stage) for one in done for stage in one.stages]:
        made = passes.own_folder(folder, stage) / "publish"
        for path in sorted(path for path in made.rglob("*") if path.is_file()):
            name = f"{stage.name}/{path.relative_to(made).as_posix()}"
            files[name] = join([path], out / name)
    return counts, {"files": files}


def deal(shards: Sequence[Shard], field: str | None, work: Path, engine: Engine) -> list[Shard]:
    """The last shards by source, where a field makes sources."""
    if field is None:
        return list(shards)
    folder = work / f"99-deal-{sha256_json([field, [(shard.key, shard.sha256) for shard in shards]])[:12]}"
    tasks = [Task(shard.key, passes.deal_shard, (shard, field, folder)) for shard in shards]
    receipts = engine.run(tasks, folder, f"dealing by {field}")
    dealt = [
        passes.to_shard(source, shard.number, folder, made)
        for shard, receipt in zip(shards, receipts, strict=True)
        for source, made in receipt.items()
    ]
    return sorted(dealt, key=lambda shard: shard.source)  # stable: shards stay in their order


def join(parts: Sequence[Path], path: Path) -> str:
    """Files one after another (zstd frames may follow one another) as one; its sha256."""
    with whole(path) as temporary, open(temporary, "wb") as file:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
    return sha256_file(path)
