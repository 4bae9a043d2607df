"""The verbs of `lmjax VERB`: each is one function, which imports what it needs, so that `--help` and `plan` never wait for jax."""

import argparse
import json
import os

from lmjax import config as configs
from lmjax.errors import UserError
from lmjax.output import made, show_likelihoods, show_stream, told, working, write


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
    from lmjax import trained

    if args.needle is not None:
        return find_needles(args)
    with working(f"evaluating all of the {args.split} split"):
        result = trained.evaluate(args.workdir, args.split, args.step, args.overrides)
    if args.json:
        print(json.dumps(result))
    else:
        show_likelihoods(result, args.split)


def find_needles(args: argparse.Namespace) -> None:
    """How often a number that is hidden in long text is found again."""
    import dataclasses

    from lmjax import trained
    from lmjax.data.read import read_documents
    from lmjax.eval.needle import NeedleConfig, table

    config = NeedleConfig(lengths=tuple(args.lengths))
    with working("asking for needles"):
        documents = read_documents(args.needle, "haystack")
        step, cells = trained.find_needles(args.workdir, documents, config, args.step, args.overrides)
    if args.json:
        print(json.dumps({"step": step, "cells": [dataclasses.asdict(cell) for cell in cells]}))
        return
    for title, what in (("said word for word", "exact"), (f"likelier than {config.distractors} others", "first")):
        print(f"step {step}, the needle {title}, by its depth in the text:")
        print("\n".join(table(cells, what)))


def generate(args: argparse.Namespace) -> None:
    """Continue prompts with a run's model, streamed."""
    from lmjax import trained
    from lmjax.generate.sample import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.prompts is not None:
        return complete(args, sampling)
    prompts = args.prompt or [""]
    stream = trained.generate(
        args.workdir, prompts, args.max_tokens, sampling, args.step, args.overrides, args.features
    )
    show_stream(prompts, stream)


def complete(args: argparse.Namespace, sampling) -> None:
    """`generate --prompts`: a JSON line {"text"} for each line {"prompt", "seed"} of a file."""
    from lmjax import trained

    configs.need(args.prompt is None, "--prompt and --prompts exclude each other")
    configs.need(args.features is None, "--features go with --prompt, not with --prompts")
    configs.need(args.batch_size >= 1, f"--batch-size={args.batch_size} must be at least 1")
    requests = read_requests(args.prompts, args.seed)
    model = trained.load_model(args.workdir, args.step, args.overrides)
    for text in trained.complete(model, requests, args.max_tokens, sampling, args.batch_size):
        print(json.dumps({"text": text}), flush=True)


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


def hf_import(args: argparse.Namespace) -> None:
    """Turn a folder of Hugging Face into a workdir that evaluates, generates and is begun from."""
    from lmjax import interchange
    from lmjax.plan import params

    with working("reading the checkpoint"):
        kind, config = interchange.import_hf(args.folder, args.out, args.tokenizer, args.overrides)
    print(f"{args.out}: {kind}, {params.total(config.model):,} parameters")


def hf_export(args: argparse.Namespace) -> None:
    """Write a checkpoint of a run as a folder of Hugging Face."""
    from lmjax import interchange

    with working("writing the checkpoint"):
        kind, step, vocab = interchange.export_hf(args.workdir, args.out, args.step, args.dtype, args.overrides)
    print(f"{args.out}: step {step} as {kind}, {args.dtype}, {vocab:,} ids")


def trace(args: argparse.Namespace) -> None:
    """List the documents that a step of a run reads."""
    from lmjax import trained

    for row in trained.trace(args.workdir, args.step):
        if args.json:
            print(json.dumps(row))
            continue
        print(f"row {row['row']}  {row['source']}, epoch {row['epoch']}")
        for piece in row["documents"]:
            print(f"  {piece['id']}  tokens {piece['start_token']}-{piece['stop_token']}")


def plan(args: argparse.Namespace) -> None:
    """Parameters, FLOPs, memory, time and cost of a config, without running it; for a slice, as the compiler has them."""
    import dataclasses

    from lmjax.plan import estimate, hardware
    from lmjax.train.config import RunConfig

    config = configs.load(RunConfig, args.config, args.overrides)
    stated = {field.name: getattr(args, field.name) for field in dataclasses.fields(estimate.Assumptions)}
    stated = {name: value for name, value in stated.items() if value is not None}
    if args.hardware is None and args.topology is None:
        idle = [name for name in stated if name != "tokens"]
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        configs.need(not idle, f"{flags}: say for which accelerator, by --hardware or --topology")
    assumed = estimate.Assumptions(**stated)
    devices, name, compiled = args.devices, args.hardware, None
    if args.topology is not None:
        configs.need(
            devices is None and name is None, "--topology states the devices: leave out --devices and --hardware"
        )
        name = hardware.by_topology(args.topology).name
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler needs no device, and may take none from others
        from lmjax.plan.compile import compile_step

        with working(f"compiling for {args.topology}"):
            compiled = compile_step(config, args.topology)
        devices = compiled.num_devices
    show_plan(estimate.plan(config, devices, name, assumed), compiled, args.json)


def show_plan(planned, compiled, as_json: bool) -> None:
    """Prints a plan, and what the compiler says of it."""
    from lmjax.plan import compiled as compiling
    from lmjax.plan import report

    if as_json:
        more = {} if compiled is None else {"compiled": compiling.to_dict(compiled)}
        print(json.dumps(report.to_dict(planned) | more))
        return
    report.show(planned)
    if compiled is not None:
        compiling.show(compiled, planned.memory.total, planned.device_flops)


def scaling(args: argparse.Namespace) -> None:
    """Fit a scaling law to finished runs; predict a larger run, and the best size for a budget."""
    from lmjax.plan import ladder

    options = args.resamples, args.interval, args.seed
    result = ladder.answer(args.runs, (args.parameters, args.tokens), args.against, args.budget, options)
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        ladder.show(result)
    if args.plot is not None:
        ladder.plot(result, args.plot)


def quickstart(args: argparse.Namespace) -> None:
    """From raw text to a model that writes, on the built-in corpus, by the commands above."""
    from lmjax.quickstart import run_quickstart

    run_quickstart(args.out, args.config, args.overrides)


def stage_config(cls: type, args: argparse.Namespace):
    """The config of a data stage: of the file, if one is given, and the overrides."""
    if args.config is not None:
        return configs.load(cls, args.config, args.overrides)
    values: dict = {}
    for override in args.overrides:
        configs.set_override(values, override)
    return configs.build(cls, values)
