"""`lmjax VERB …`: arguments, and the exit code.

Exit codes: 0 done; 2 the user's mistake, in one line; 1 anything else.
"""

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from lmjax import __version__, verbs
from lmjax.errors import RunError, UserError

GRACE_S = 5.0  # that the coordinator leaves others to come to the same mistake: once it is gone they abort, whatever they had to tell
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # of GLIBC_TUNABLES, read when a process starts


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    parser = argparse.ArgumentParser(
        prog="lmjax",
        description="Train language models in JAX, from raw text to an evaluated model.",
        epilog="Any field of a config is overridden by --config.section.field=value.",
    )
    parser.add_argument("--version", action="version", version=f"lmjax {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, function: Callable, config: bool | None = None) -> argparse.ArgumentParser:
        """`config`: None, it takes none; False, it may; True, it must."""
        sub = subparsers.add_parser(name, help=function.__doc__, description=function.__doc__, allow_abbrev=False)
        sub.set_defaults(function=function, takes_config=config is not None)
        if config is not None:
            sub.add_argument("--config", required=config, metavar="FILE", help="a file that defines get_config()")
        return sub

    sub = verb("corpus", verbs.corpus)
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--max-bytes", type=int, metavar="N", help="a part of it, for a quick try")

    sub = verb("prepare", verbs.prepare, config=False)
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

    sub = verb("split", verbs.split, config=False)
    sub.add_argument("--documents", required=True, nargs="+", metavar="PATH", help="a corpus, or files, folders, globs")
    sub.add_argument("--source", metavar="NAME", help="the source's name, for files that are no corpus")
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = verb("tokenizer", verbs.tokenizer, config=False)
    sub.add_argument("--documents", metavar="DIR", help="made by `lmjax split`; not needed for an import")
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = verb("tokenize", verbs.tokenize, config=False)
    sub.add_argument("--documents", required=True, metavar="DIR", help="made by `lmjax split`")
    sub.add_argument("--tokenizer", required=True, metavar="DIR", help="made by `lmjax tokenizer`")
    sub.add_argument("--out", required=True, metavar="DIR")

    sub = verb("train", verbs.train, config=True)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="the run's folder; goes on where it stands")
    sub.add_argument("--distributed", action="store_true", help="join the other processes of a TPU pod or SLURM job")

    sub = verb("eval", verbs.evaluate)
    add_run_arguments(sub)
    sub.add_argument("--split", default="validation", help="train, validation or test (default: validation)")
    sub.add_argument(
        "--needle", nargs="+", metavar="PATH", help="hide a needle in these documents instead, and ask for it"
    )
    sub.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], metavar="N", help="tokens, with --needle")
    sub.add_argument("--json", action="store_true")

    sub = verb("generate", verbs.generate)
    add_run_arguments(sub)
    sub.add_argument("--prompt", action="append", metavar="TEXT", help="repeat for a batch (default: none, from <bos>)")
    sub.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"prompt", "seed"}: prints a JSON line {"text"} for each'
    )
    sub.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="prompts of --prompts at a time (default: 16)"
    )
    sub.add_argument("--features", metavar="FILE", help="a .npz whose arrays stand before the prompts, one for each")
    sub.add_argument("--max-tokens", type=int, default=128, metavar="N")
    sub.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: 0.8)")
    sub.add_argument("--top-k", type=int, metavar="K")
    sub.add_argument("--top-p", type=float, metavar="P")
    sub.add_argument("--seed", type=int, default=0)

    sub = verb("hf-import", verbs.hf_import)
    sub.set_defaults(takes_config=True)
    sub.add_argument("--from", dest="folder", required=True, metavar="DIR", help="config.json, safetensors, tokenizer")
    sub.add_argument("--out", required=True, metavar="WORKDIR")
    sub.add_argument("--tokenizer", metavar="DIR", help="made by `lmjax tokenizer`, where --from holds none")

    sub = verb("hf-export", verbs.hf_export)
    add_run_arguments(sub)  # its mesh may be of other devices
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")

    sub = verb("trace", verbs.trace)
    sub.add_argument("--workdir", required=True, metavar="DIR")
    sub.add_argument("--step", type=int, required=True, metavar="N", help="counting from 0")
    sub.add_argument("--json", action="store_true")

    sub = verb("plan", verbs.plan, config=True)
    sub.add_argument("--devices", type=int, metavar="N", help="default: the fewest that the mesh takes")
    sub.add_argument("--hardware", metavar="NAME", help="such as v5p or h100: time, cost, and what fits on it")
    sub.add_argument("--json", action="store_true")
    sub.add_argument(
        "--topology", metavar="NAME", help="a TPU slice or GPUs, such as v5p:4x4x4 or h200:8: compile the step for it"
    )
    rest = sub.add_argument_group("with --hardware or --topology, what the figures rest on")
    rest.add_argument("--mfu", type=float, help="share of the peak that the model's FLOPs reach (default: 0.4)")
    rest.add_argument("--tokens", type=int, metavar="N", help="of the run (default: by config.train.steps)")
    rest.add_argument("--budget-usd", type=float, metavar="USD", help="what does it buy?")
    rest.add_argument("--usd-per-hour", type=float, metavar="USD", help="of a device (default: the table's list price)")
    rest.add_argument("--watts", type=float, metavar="W", help="of a device (default: the table's)")
    rest.add_argument("--pue", type=float, help="of the data centre (default: the table's)")
    rest.add_argument(
        "--grid", metavar="NAME", help="such as us or europe-west4, or kg of CO2e for a kWh (default: us)"
    )
    rest.add_argument(
        "--slices", type=int, metavar="N", help="of TPUs, or nodes of GPUs (default: one, or as many as the GPUs fill)"
    )
    rest.add_argument("--preemptions-per-day", type=float, metavar="N", help="of the run (default: 1)")
    rest.add_argument("--save-s", type=float, metavar="S", help="that a checkpoint holds the run up (default: 30)")
    rest.add_argument("--restart-s", type=float, metavar="S", help="from a preemption to the next step (default: 300)")

    sub = verb("scaling", verbs.scaling)
    sub.add_argument("--runs", required=True, metavar="DIR", help="a folder of workdirs, each of a finished run")
    sub.add_argument("--parameters", type=float, metavar="N", help="of a run to predict, embeddings included")
    sub.add_argument("--tokens", type=float, metavar="N", help="of a run to predict")
    sub.add_argument("--against", metavar="WORKDIR", help="a finished run to predict and compare with")
    sub.add_argument("--budget", type=float, metavar="FLOPS", help="training FLOPs, to be spent best")
    sub.add_argument("--interval", type=float, default=0.9, metavar="P", help="its probability (default: 0.9)")
    sub.add_argument("--resamples", type=int, default=500, metavar="N", help="of the bootstrap (default: 500)")
    sub.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    sub.add_argument("--plot", metavar="FILE", help="such as scaling.png or scaling.svg; needs matplotlib")
    sub.add_argument("--json", action="store_true")

    sub = verb("quickstart", verbs.quickstart)
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
    if argv is None and args.function in (verbs.train, verbs.hf_import):
        use_huge_pages()
    try:
        args.function(args)
    except UserError as error:
        return leave(2, f"lmjax {args.verb}: {error}")
    except RunError as error:
        return leave(1, f"lmjax {args.verb}: {error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing more to tell
        return leave(1, "")
    except SystemExit as error:  # of a second Ctrl-C, or of rich when the reader went away
        return leave(error.code if isinstance(error.code, int) else 1, "")
    except Exception:
        return leave(1, traceback.format_exc().rstrip())
    return 0


def use_huge_pages() -> None:
    """Starts this very process again with large arrays on huge pages, where the C library is glibc.

    XLA on a CPU maps a step's temporaries anew at every step: in pages of 4 KiB that is up to a third of the step's time, and of
    that of an import.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave(code: int, message: str) -> int:
    """Tells what went wrong. One of several processes ends here and now: at exit it would wait for the others."""
    with contextlib.suppress(BrokenPipeError):
        print(message, file=sys.stderr, flush=True, end="\n" if message else "")
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        if jax.process_index() == 0:
            time.sleep(GRACE_S)
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
