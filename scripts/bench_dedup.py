"""Near-duplicates found and removed, beside datasketch: speed, what is found, and memory.

    python scripts/bench_dedup.py [--quick] [--documents N] [--json FILE]

The documents are made of lines of real text (`real_documents.py`): most stand alone, some have a near-copy with a word changed
here and there (Jaccard similarity of their shingles 0.85 to 1), some a decoy that shares two thirds of their lines (0.5 to 0.6).
Both sides read the same files and compare the same shingles by 112 hashes in 14 bands, on one core, in turn. Wall times of a
busy machine are dropped; the times of the processor, which barely depend on it, stand beside. Needs the extra `peers`.
"""

import argparse
import itertools
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_harness import Row, Sampler, Worker, environment, ratio, serve, show, write
from rich.console import Console

from lmjax.data import minhash
from lmjax.data.document import Document
from lmjax.data.engine import LocalEngine
from lmjax.data.near_dedup import NearDedup
from lmjax.data.stage import Shard
from lmjax.data.written import read_written, write_documents
from lmjax.files import read_json, write_json

COMMAND = "python scripts/bench_dedup.py"
SHARD = 2500  # documents
LINES = 400_000  # of real text, at most
COPIES, DECOYS = 0.2, 0.1  # share of the documents that have one
SIMILAR = 0.85  # planted copies are at least so similar
WORKER = "BENCH_DEDUP_WORKER"


# --------------------------------------------------------------------------------------------------------------- documents


def real_lines(limit: int, quick: bool) -> list[str]:
    """Different lines of six to forty words, whose letters are ASCII: what an English page is made of; `quick`: of installed packages."""
    from real_documents import package_documents, real_documents

    lines: dict[str, None] = {}
    for document in package_documents() if quick else real_documents():
        for line in document.text.splitlines():
            if 6 <= line.count(" ") < 40 and (line.isascii() or all(c.isascii() or not c.isalpha() for c in line)):
                lines[" ".join(line.split())] = None
        if len(lines) >= limit:
            break
    return list(lines)


def similarity(left: str, right: str) -> float:
    """Jaccard similarity of the sets of shingles."""
    return minhash.jaccard(minhash.shingle_hashes(left, 5), minhash.shingle_hashes(right, 5), 1 << 30)


def copy(rng: random.Random, lines: Sequence[str], text: str) -> tuple[str, float]:
    """A near-copy and how similar it is."""
    while True:
        words = text.split(" ")
        for _ in range(rng.randint(0, 1 + len(words) // 60)):
            words[rng.randrange(len(words))] = rng.choice(rng.choice(lines).split(" "))
        made = " ".join(words)
        if (jaccard := similarity(text, made)) >= SIMILAR:
            return made, jaccard


def make(count: int, lines: Sequence[str], seed: int = 0) -> Iterator[tuple[str, str, float]]:
    """(id, text, similarity to its original) of `count` documents; a copy of document 12 is called `12/copy`."""
    rng, made = random.Random(seed), 0
    for number in itertools.count():
        chosen = rng.sample(lines, rng.randint(20, 120))
        text = "\n".join(chosen)
        kinds = [(str(number), text, 0.0)]
        draw = rng.random()
        if draw < COPIES:
            kinds.append((f"{number}/copy", *copy(rng, lines, text)))
        elif draw < COPIES + DECOYS:
            other = "\n".join([*chosen[: round(0.7 * len(chosen))], *rng.sample(lines, round(0.3 * len(chosen)))])
            kinds.append((f"{number}/decoy", other, similarity(text, other)))
        yield from kinds[: count - made]
        made += len(kinds)
        if made >= count:
            return


def write_corpus(folder: Path, count: int, lines: Sequence[str]) -> dict[str, float]:
    """Shards of documents in a random order and their list; returns the planted copies and how similar each is."""
    documents = list(make(count, lines))
    random.Random(1).shuffle(documents)
    shards = []
    for number, start in enumerate(range(0, count, SHARD)):
        path = folder / f"{number:05d}.jsonl.zst"
        part = [Document(name, text, "lines") for name, text, _ in documents[start : start + SHARD]]
        counts = write_documents(path, part)
        shards.append(["lines", number, str(path), len(part), counts["bytes"]])
    write_json(folder / "shards.json", shards)
    present = {name for name, _, _ in documents}
    return {n: jaccard for n, _, jaccard in documents if n.endswith("/copy") and n.removesuffix("/copy") in present}


def read_shards(folder: str) -> list[Shard]:
    """As `write_corpus` wrote them."""
    return [
        Shard(source, number, Path(path), *counts)
        for source, number, path, *counts in read_json(f"{folder}/shards.json")
    ]


# ------------------------------------------------------------------------------------------------------------------- sides


def peak_mib() -> float:
    """Most memory that this program had resident; `getrusage` would begin with what its parent had."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def ours(folder: str) -> dict[str, Any]:
    """lmjax: (dropped, survivor) of all, times and peak memory."""
    shards, work = read_shards(folder), Path(tempfile.mkdtemp())
    start, busy = time.perf_counter(), time.process_time()
    with LocalEngine() as engine:
        decided = NearDedup().decide(shards, work, engine)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = peak_mib()
    pairs = []
    for shard in shards:
        ids = [document.id for document in read_written(shard.path)]
        pairs += [(ids[row], decision["survivor"]) for row, decision in NearDedup().decisions(decided[shard.key])]
    shutil.rmtree(work)
    return {"seconds": seconds, "busy": busy, "peak_mib": peak, "pairs": pairs}


def datasketch(folder: str, scheme: str) -> dict[str, Any]:
    """The peer, as its documentation shows: a document that finds another in the index is its duplicate.

    Args:
      folder: of the shards.
      scheme: "legacy" is the permutations that lmjax uses, by their prime; "affine32" (new in 2.0) has no prime and 32 bits.
    """
    from datasketch import MinHash, MinHashLSH

    start, busy = time.perf_counter(), time.process_time()
    index, pairs = MinHashLSH(num_perm=112, params=(14, 8)), []
    for shard in read_shards(folder):
        for document in read_written(shard.path):
            words = minhash.simplify(document.text).split(b" ")
            signature = MinHash(num_perm=112, seed=1, scheme=scheme)
            signature.update_batch([b" ".join(words[i : i + 5]) for i in range(len(words) - 4)])
            if found := index.query(signature):
                pairs.append((document.id, found[0]))
            else:
                index.insert(document.id, signature)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = peak_mib()
    return {"seconds": seconds, "busy": busy, "peak_mib": peak, "pairs": pairs}


class Side:
    """One of the two: a fresh process for each sample, whose peak memory is then its own."""

    def __init__(self, verb: str, folder: Path, **options: str):
        self.verb, self.arguments = verb, {"folder": str(folder), **options}
        self.answers: list[dict[str, Any]] = []

    def sample(self) -> float:
        """Seconds."""
        worker = Worker(__file__, {WORKER: "1", "OMP_NUM_THREADS": "1"})
        self.answers.append(worker.call(self.verb, **self.arguments))
        worker.close()
        return self.answers[-1]["seconds"]

    def busy(self) -> float:
        """Median seconds of the processor."""
        return statistics.median(answer["busy"] for answer in self.answers)


def found(pairs: Sequence[Sequence[str]], planted: dict[str, float]) -> tuple[float, float]:
    """Recall and precision: a pair is right if its two are a planted copy and its original."""
    named = {
        one if one.endswith("/copy") else other for one, other in pairs if one.split("/")[0] == other.split("/")[0]
    }
    right = named & planted.keys()
    return len(right) / len(planted), len(right) / max(1, len(pairs))


# -------------------------------------------------------------------------------------------------------------------- main


def measure(folder: Path, count: int, quick: bool, patience_s: float) -> tuple[list[Row], Sampler]:
    """All figures."""
    lines = real_lines(LINES // 10 if quick else LINES, quick)
    planted = write_corpus(folder / "all", count, lines)
    write_corpus(folder / "tenth", max(1, count // 10), lines)
    sides = {
        "ours": Side("ours", folder / "all"),
        "datasketch": Side("datasketch", folder / "all", scheme="legacy"),
        "datasketch, its new permutations": Side("datasketch", folder / "all", scheme="affine32"),
    }
    sampler = Sampler(1, patience_s)
    samples = sampler.run({name: side.sample for name, side in sides.items()})
    for side in sides.values():
        if not side.answers:
            side.sample()  # too busy for a wall time: what it finds and its time of the processor still count
    rows = []
    for name, side in sides.items():
        mine = name == "ours"
        speed = count / samples[name].median if samples[name].kept else None
        recall, precision = found(side.answers[0]["pairs"], planted)
        rows.append(Row(f"{name}: {count:,} documents", speed, "documents/s", None, COMMAND))
        rows.append(Row(f"{name}: recall of {len(planted):,} copies", recall, "", ">= 0.95" if mine else None, COMMAND))
        rows.append(Row(f"{name}: precision", precision, "", ">= 0.99" if mine else None, COMMAND))
        if not mine:
            target = ">= 3" if name == "datasketch" else None
            rows.append(Row(f"{name}: time / ours", ratio(samples[name], samples["ours"]), "×", target, COMMAND))
            rows.append(
                Row(f"{name}: time of the processor / ours", side.busy() / sides["ours"].busy(), "×", target, COMMAND)
            )
    tenth = Side("ours", folder / "tenth")
    tenth.sample()
    small, large, peer = (side.answers[0]["peak_mib"] for side in (tenth, sides["ours"], sides["datasketch"]))
    rows.append(Row("datasketch: peak memory", peer, "MiB", None, COMMAND))
    rows.append(Row("ours: peak memory", large, "MiB", None, COMMAND))
    target = None if quick else "<= 1.1"  # three thousand documents are one shard
    rows.append(Row("ours: peak memory with 10 × the input / with 1 ×", large / small, "×", target, COMMAND))
    return rows, sampler


def main() -> int:
    """Measures, prints, writes; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="3,000 documents: seconds instead of minutes")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--patience", type=float, default=900, help="seconds to wait for an idle machine (default 900)")
    parser.add_argument("--json", help="also write the rows here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = 3000 if arguments.quick else arguments.documents
        rows, sampler = measure(
            Path(folder), count, arguments.quick, min(arguments.patience, 20) if arguments.quick else arguments.patience
        )
    rows += environment(["numpy", "xxhash", "datasketch"])
    console = Console(width=120)
    show("near-duplicates", rows, console)
    console.print(f"samples: {sampler.kept} kept, {sampler.dropped} dropped because others used the machine")
    if arguments.json:
        write(arguments.json, rows)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    if os.environ.get(WORKER):
        serve({"ours": ours, "datasketch": datasketch})
    else:
        sys.exit(main())
