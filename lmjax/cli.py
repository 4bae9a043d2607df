"""`lmjax VERB …`: each verb is one function here, which imports what it needs: `--help` and `plan` never wait for jax.

Exit codes: 0 done; 2 the user's mistake, in one line; 1 anything else.
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from lmjax import __version__
from lmjax import config as configs
from lmjax.errors import RunError, UserError

HUGE_PAGES = "glibc.malloc.hugetlb=1"  # of GLIBC_TUNABLES, read when a process starts

# ------------------------------------------------------------------------------------------------------------------- verbs


def corpus(args: argparse.Namespace) -> None:
    """Write the built-in corpus: this Python's own source and its documentation."""
    from lmjax.data.corpus import make_corpus

    with working("reading this Python's source and documentation"):
        result = make_corpus(args.out, max_bytes=args.max_bytes)
    made(args.out, *result)


def prepare(args: argparse.Namespace) -> None:
    """Clean, filter, deduplicate and report on documents, by the stages that a config names."""
    from lmjax.data.prepare import PrepareConfig

    if args.explain is not None:
        from lmjax.data.report import explain

        for line in explain(args.out, args.explain):
            write(f"{line}\n")
        return
    config = configs.load(PrepareConfig, args.config, args.overrides)
    from lmjax.data import prepare as stages

    if args.dry_run:
        from lmjax.data import dry_run

        with working("trying the stages on a sample") as update:
            estimate = dry_run.estimate(config, args.documents, args.source, args.sample, told(update))
        dry_run.show(estimate)
        return
    with working("preparing") as update:
        result = stages.prepare(config, args.out, args.documents, args.source, told(update))
    made(args.out, *result)
    print(f"  report: {os.path.join(args.out, 'report.html')}")


def split(args: argparse.Namespace) -> None:
    """Split documents into train, validation and test by the hash of their text."""
    from lmjax.data.config import SplitConfig
    from lmjax.data.split import split_documents

    with working("splitting documents"):
        result = split_documents(args.documents, args.out, stage_config(SplitConfig, args), source=args.source)
    made(args.out, *result)


def tokenizer(args: argparse.Namespace) -> None:
    """Train or import a tokenizer."""
    from lmjax.data.config import TokenizerConfig
    from lmjax.tokenizers.train import train_tokenizer

    with working("making the tokenizer"):
        result = train_tokenizer(args.documents, args.out, stage_config(TokenizerConfig, args))
    made(args.out, *result)


def tokenize(args: argparse.Namespace) -> None:
    """Turn split documents into shards of token ids."""
    from lmjax.data.config import ShardsConfig
    from lmjax.data.shards import write_shards

    with working("tokenizing") as update:
        progress = lambda part, done, total: update(f"tokenizing {part}: {done:,} of {total:,} documents")  # noqa: E731
        config = stage_config(ShardsConfig, args)
        result = write_shards(args.documents, args.tokenizer, args.out, config, progress)
    made(args.out, *result)


def train(args: argparse.Namespace) -> None:
    """Train, or go on with, the run of a workdir."""
    from lmjax.train.config import RunConfig

    config = configs.load(RunConfig, args.config, args.overrides)  # before jax: a typo is answered at once
    from lmjax import run

    run.train(config, args.workdir, args.distributed)


def evaluate(args: argparse.Namespace) -> None:
    """Loss, perplexity and bits per byte of a run on a whole held-out split; or a needle in a haystack."""
    from lmjax import run

    if args.needle is not None:
        return find_needles(args)
    with working(f"evaluating all of the {args.split} split"):
        result = run.evaluate(args.workdir, args.split, args.step, args.overrides)
    if args.json:
        print(json.dumps(result))
    else:
        show_likelihoods(result, args.split)


def find_needles(args: argparse.Namespace) -> None:
    """How often a number that is hidden in long text is found again."""
    import dataclasses

    from lmjax import run
    from lmjax.data.read import read_documents
    from lmjax.eval.needle import NeedleConfig, table

    config = NeedleConfig(lengths=tuple(args.lengths))
    with working("asking for needles"):
        documents = read_documents(args.needle, "haystack")
        step, cells = run.find_needles(args.workdir, documents, config, args.step, args.overrides)
    if args.json:
        print(json.dumps({"step": step, "cells": [dataclasses.asdict(cell) for cell in cells]}))
        return
    for title, what in (("said word for word", "exact"), (f"likelier than {config.distractors} others", "first")):
        print(f"step {step}, the needle {title}, by its depth in the text:")
        print("\n".join(table(cells, what)))


def generate(args: argparse.Namespace) -> None:
    """Continue prompts with a run's model, streamed."""
    from lmjax import run
    from lmjax.generate.sample import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.prompts is not None:
        return complete(args, sampling)
    stream = run.generate(args.workdir, args.prompt or [""], args.max_tokens, sampling, args.step, args.overrides)
    show_stream(args.prompt or [""], stream)


def complete(args: argparse.Namespace, sampling) -> None:
    """`generate --prompts`: a JSON line {"text"} for each line {"prompt", "seed"} of a file."""
    from lmjax import run

    configs.need(args.prompt is None, "--prompt and --prompts exclude each other")
    configs.need(args.batch_size >= 1, f"--batch-size={args.batch_size} must be at least 1")
    requests = read_requests(args.prompts, args.seed)
    model = run.load_model(args.workdir, args.step, args.overrides)
    for text in run.complete(model, requests, args.max_tokens, sampling, args.batch_size):
        print(json.dumps({"text": text}), flush=True)


def hf_import(args: argparse.Namespace) -> None:
    """Turn a folder of Hugging Face into a workdir that evaluates, generates and is begun from."""
    from lmjax import run
    from lmjax.plan import params

    with working("reading the checkpoint"):
        kind, config = run.import_hf(args.folder, args.out, args.tokenizer, args.overrides)
    print(f"{args.out}: {kind}, {params.total(config.model):,} parameters")


def hf_export(args: argparse.Namespace) -> None:
    """Write a checkpoint of a run as a folder of Hugging Face."""
    from lmjax import run

    with working("writing the checkpoint"):
        kind, step, vocab = run.export_hf(args.workdir, args.out, args.step, args.dtype)
    print(f"{args.out}: step {step} as {kind}, {args.dtype}, {vocab:,} ids")


def trace(args: argparse.Namespace) -> None:
    """List the documents that a step of a run reads."""
    from lmjax import run

    for row in run.trace(args.workdir, args.step):
        if args.json:
            print(json.dumps(row))
            continue
        print(f"row {row['row']}  {row['source']}, epoch {row['epoch']}")
        for piece in row["documents"]:
            print(f"  {piece['id']}  tokens {piece['start_token']}-{piece['stop_token']}")


def plan(args: argparse.Namespace) -> None:
    """Parameters, FLOPs and memory of a config, without running it."""
    from lmjax.plan import report
    from lmjax.train.config import RunConfig

    config = configs.load(RunConfig, args.config, args.overrides)
    estimate = report.plan(config, args.devices, args.hardware, args.mfu)
    if args.json:
        print(json.dumps(report.to_dict(estimate)))
    else:
        report.show(estimate)


def quickstart(args: argparse.Namespace) -> None:
    """From raw text to a model that writes, on the built-in corpus, by the commands above."""
    from lmjax.quickstart import run_quickstart

    run_quickstart(args.out, args.config, args.overrides)


# ------------------------------------------------------------------------------------------------------------------ output


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A live line with the time on a terminal's stderr while a stage runs; yields what changes its text."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text)
        yield lambda text: progress.update(task, description=text)


def told(update: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """What an engine is to call: `update` with the tasks done."""
    return lambda label, done, total: update(f"{label}: {done:,} of {total:,} tasks")


def made(out: str, manifest, skipped: bool) -> None:
    """A line about a stage's output, and one for each of its parts."""
    print(
        f"{out}: {'already there' if skipped else f'made in {manifest.seconds:.1f} s'}: {show_counts(manifest.counts)}"
    )
    for name, part in parts(manifest.counts):
        print(f"  {name}: {show_counts(part)}")


def show_counts(counts: dict) -> str:
    """The counts themselves, without those that are zero."""
    return ", ".join(f"{name} {value:,}" for name, value in counts.items() if isinstance(value, int | float) and value)


def parts(counts: dict, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """(`train/code`, its counts) for the innermost dicts of nested counts."""
    for name, value in counts.items():
        if isinstance(value, dict):
            inner = f"{prefix}{name}/" if prefix or name not in ("sources", "splits") else ""
            yield from parts(value, inner)
            if value and not any(isinstance(part, dict) for part in value.values()):
                yield inner.rstrip("/"), value


def show_likelihoods(result: dict, split: str) -> None:
    """The result of `eval` as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("source", "loss (nats)", "perplexity", "bits/byte", title=f"step {result['step']}, all of {split}")
    names = sorted({key.split("/")[1] for key in result if key.count("/") == 2})
    for label, prefix in [*((name, f"eval/{name}") for name in names), ("all", "eval")]:
        values = [result[f"{prefix}/{kind}"] for kind in ("loss", "perplexity", "bits_per_byte")]
        table.add_row(label, f"{values[0]:.4f}", f"{values[1]:.2f}", f"{values[2]:.4f}")
    Console().print(table)


def show_stream(prompts: Sequence[str], stream) -> None:
    """Prints one prompt's text as it comes; several are printed one after another when they are done."""
    texts = list(prompts)
    live = len(prompts) == 1
    if live:
        write(prompts[0])
    for gained in stream:
        texts = [text + more for text, more in zip(texts, gained, strict=True)]
        if live:
            write(gained[0])
    if live:
        return write("\n")
    for number, text in enumerate(texts):
        write(f"--- {number} ---\n{text}\n")


def read_requests(path: str, seed: int) -> list[tuple[str, int]]:
    """(prompt, seed) of each line {"prompt", "seed"} of a file; `seed` where a line has none."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        requests = [(line["prompt"], line.get("seed", seed)) for line in lines]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path} must hold JSON lines {{"prompt", "seed"}}: {error!r}') from error
    for number, (prompt, own) in enumerate(requests, 1):
        fits = isinstance(prompt, str) and type(own) is int and 0 <= own < 1 << 32
        configs.need(fits, f"{path}:{number}: prompt must be a text and seed an integer of 32 bits")
    return requests


def write(text: str) -> None:
    """Text to stdout at once; what the terminal cannot encode is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


# --------------------------------------------------------------------------------------------------------------- arguments


def stage_config(cls: type, args: argparse.Namespace):
    """The config of a data stage: of the file, if one is given, and the overrides."""
    if args.config is not None:
        return configs.load(cls, args.config, args.overrides)
    values: dict = {}
    for override in args.overrides:
        configs.set_override(values, override)
    return configs.build(cls, values)


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    parser = argparse.ArgumentParser(
        prog="lmjax",
        description="Train language models in JAX, from raw text to an evaluated model.",
        epilog="Any field of a config is overridden by --config.section.field=value.",
    )
    parser.add_argument("--version", action="version", version=f"lmjax {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, function: Callable, config: bool | None = None) -> argparse.ArgumentParser:
        """`config`: None, it takes none; False, it may; True, it must."""
        sub = verbs.add_parser(name, help=function.__doc__, description=function.__doc__, allow_abbrev=False)
        sub.set_defaults(function=function, takes_config=config is not None)
        if config is not None:
            sub.add_argument("--config", required=config, metavar="FILE", help="a file that defines get_config()")
        return sub

    sub = verb("corpus", corpus)
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--max-bytes", type=int, metavar="N", help="a part of it, for a quick try")

    sub = verb("prepare", prepare, config=False)
    sub.add_argument("--documents", nargs="+", default=[], metavar="PATH", help="a corpus, or files, folders, globs")
    sub.add_argument("--source", metavar="NAME", help="the source's name, for files that are no corpus")
    sub.add_argument("--out", metavar="DIR", help="an output of this verb is brought up to date")
    sub.add_argument(
        "--dry-run", action="store_true", help="try a sample; estimate what is kept, and each source's tokens"
    )
    sub.add_argument(
        "--sample", type=int, default=1000, metavar="N", help="documents of a source to try (default: 1000)"
    )
    sub.add_argument("--explain", metavar="ID", help="tell what happened to a document in --out")

    sub = verb("split", split, config=False)
    sub.add_argument("--documents", required=True, nargs="+", metavar="PATH", help="a corpus, or files, folders, globs")
    sub.add_argument("--source", metavar="NAME", help="the source's name, for files that are no corpus")
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = verb("tokenizer", tokenizer, config=False)
    sub.add_argument("--documents", metavar="DIR", help="made by `lmjax split`; not needed for an import")
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = verb("tokenize", tokenize, config=False)
    sub.add_argument("--documents", required=True, metavar="DIR", help="made by `lmjax split`")
    sub.add_argument("--tokenizer", required=True, metavar="DIR", help="made by `lmjax tokenizer`")
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = verb("train", train, config=True)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="the run's folder; goes on where it stands")
    sub.add_argument("--distributed", action="store_true", help="join the other processes of a TPU pod or SLURM job")

    sub = verb("eval", evaluate)
    add_run_arguments(sub)
    sub.add_argument("--split", default="validation", help="train, validation or test (default: validation)")
    sub.add_argument(
        "--needle", nargs="+", metavar="PATH", help="hide a needle in these documents instead, and ask for it"
    )
    sub.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], metavar="N", help="tokens, with --needle")
    sub.add_argument("--json", action="store_true")

    sub = verb("generate", generate)
    add_run_arguments(sub)
    sub.add_argument("--prompt", action="append", metavar="TEXT", help="repeat for a batch (default: none, from <bos>)")
    sub.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"prompt", "seed"}: prints a JSON line {"text"} for each'
    )
    sub.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="prompts of --prompts at a time (default: 16)"
    )
    sub.add_argument("--max-tokens", type=int, default=128, metavar="N")
    sub.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, metavar="K")
    sub.add_argument("--top-p", type=float, metavar="P")
    sub.add_argument("--seed", type=int, default=0)

    sub = verb("hf-import", hf_import)
    sub.set_defaults(takes_config=True)
    sub.add_argument("--from", dest="folder", required=True, metavar="DIR", help="config.json, safetensors, tokenizer")
    sub.add_argument("--out", required=True, metavar="WORKDIR")
    sub.add_argument("--tokenizer", metavar="DIR", help="made by `lmjax tokenizer`, where --from holds none")

    sub = verb("hf-export", hf_export)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="the run's folder")
    sub.add_argument("--step", type=int, metavar="N", help="the checkpoint (default: the newest)")
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")

    sub = verb("trace", trace)
    sub.add_argument("--workdir", required=True, metavar="DIR")
    sub.add_argument("--step", type=int, required=True, metavar="N", help="counting from 0")
    sub.add_argument("--json", action="store_true")

    sub = verb("plan", plan, config=True)
    sub.add_argument("--devices", type=int, metavar="N", help="default: the fewest that the mesh takes")
    sub.add_argument("--hardware", metavar="NAME", help="such as v5p or h100: holds the memory against it")
    sub.add_argument("--mfu", type=float, default=0.4, help="for the time, with --hardware (default: 0.4)")
    sub.add_argument("--json", action="store_true")

    sub = verb("quickstart", quickstart)
    sub.set_defaults(takes_config=True)
    sub.add_argument(
        "--config", default=None, metavar="FILE", help="of the training (default: configs/pretrain/tiny.py)"
    )
    sub.add_argument("--out", default="quickstart", metavar="DIR")
    return parser


def add_run_arguments(sub: argparse.ArgumentParser) -> None:
    """Arguments of verbs that read a run."""
    sub.set_defaults(takes_config=True)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="the run's folder")
    sub.add_argument("--step", type=int, metavar="N", help="the checkpoint (default: the newest)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments, and the config overrides among them in `overrides`."""
    parser = build_parser()
    prefix = "--config."
    args = parser.parse_args([arg for arg in argv if not arg.startswith(prefix)])
    args.overrides = [arg.removeprefix(prefix) for arg in argv if arg.startswith(prefix)]
    if args.verb == "prepare":
        check_prepare(parser, args)
    if args.overrides and not args.takes_config:
        parser.error(f"`lmjax {args.verb}` takes no config: --config.{args.overrides[0]}")
    return args


def check_prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """--explain reads an output; all else needs a config, and writes one unless it is dry."""
    if args.out is None and not args.dry_run:
        parser.error("prepare: --out DIR is needed")
    if args.config is None and args.explain is None:
        parser.error("prepare: --config FILE is needed, such as configs/data/web.py")
    if args.sample < 1:
        parser.error("prepare: --sample must be at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if argv is None and args.function is train:
        use_huge_pages()
    try:
        args.function(args)
    except UserError as error:
        return leave(2, f"lmjax {args.verb}: {error}")
    except RunError as error:
        return leave(1, f"lmjax {args.verb}: {error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing more to tell
        return 1
    except Exception:
        return leave(1, traceback.format_exc().rstrip())
    return 0


def use_huge_pages() -> None:
    """Starts this very process again with large arrays on huge pages, where the C library is glibc.

    XLA on a CPU maps a step's temporaries anew at every step: in pages of 4 KiB that is up to a third of the step's time.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave(code: int, message: str) -> int:
    """Tells what went wrong. One of several processes ends here and now: at exit it would wait for the others."""
    print(message, file=sys.stderr, flush=True)
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
