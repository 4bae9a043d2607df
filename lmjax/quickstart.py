"""`lmjax quickstart`: the whole line on the built-in corpus, by the very commands that a user types.

corpus → prepare → split → tokenizer → tokenize → train (killed once on purpose, and resumed) → eval → generate. Every stage
skips what is already done, so running it again is quick.
"""

import dataclasses
import json
import lzma
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lmjax import config as configs
from lmjax import files
from lmjax.checkpoint.layout import steps as checkpoint_steps
from lmjax.data.written import read_written
from lmjax.errors import RunError, UserError
from lmjax.monitor.write import read_metrics
from lmjax.train.config import RunConfig

CONFIG = "configs/pretrain/tiny.py"
PREPARE_CONFIG = "configs/data/quickstart.py"
TOKENIZER_CONFIG = "configs/tokenizer/unigram_4k.py"
HELD_OUT = ("--config.validation=0.04", "--config.test=0.04")  # enough of it to tell models apart
KILL_AFTER_STEPS = 20  # past the first checkpoint: enough to see that work is lost and done again
PROMPTS = (
    "def read_config(path):\n",
    "class Stack:\n",
    "The following example shows how to",
    "import os\nimport sys\n",
)


@dataclasses.dataclass
class Row:
    """A line of the final table."""

    stage: str
    seconds: float | None  # none: it was already done
    made: str
    where: str


class Quickstart:
    """The stages, with where each writes and what it made."""

    def __init__(self, out: str, config_file: str, overrides: Sequence[str]):
        self.out, self.config_file = Path(out), config_file
        self.overrides = [
            f"tokenizer={self.out / 'tokenizer'}", f"data.shards={self.out / 'shards'}", *overrides
        ]  # fmt: skip
        self.config = configs.load(RunConfig, config_file, self.overrides)
        self.console = Console(soft_wrap=True, highlight=False)
        self.rows: list[Row] = []

    def command(self, *words: str) -> list[str]:
        """A command line of this very installation, shown as the user would type it."""
        self.console.print(f"\n[bold]$ lmjax {shlex.join(words)}[/bold]", markup=True)
        return [sys.executable, "-m", "lmjax.cli", *words]

    def call(self, *words: str) -> None:
        """Runs a command to its end; its failure ends the quickstart."""
        code = subprocess.run(self.command(*words), check=False).returncode
        if code:
            raise RunError(f"`lmjax {words[0]}` ended with exit code {code}; what was finished before it is kept")

    # ------------------------------------------------------------------------------------------------------ data

    def data_stage(self, verb: str, folder: str, made: str, *words: str) -> None:
        """One data stage: its own manifest says whether it is done; `made` is filled with its counts."""
        where = self.out / folder
        start, done = time.monotonic(), (where / files.MANIFEST).exists()
        self.call(verb, *words, "--out", str(where))
        counts = files.read_manifest(where).counts
        self.rows.append(Row(verb, None if done else time.monotonic() - start, made.format(**counts), str(where)))

    def data(self) -> None:
        """Raw text to shards."""
        out = self.out
        self.data_stage("corpus", "corpus", "{documents:,} documents, {bytes:,} bytes")
        prepare = ("--config", PREPARE_CONFIG, "--documents", str(out / "corpus"))
        self.data_stage("prepare", "prepared", "{documents:,} documents without copies; see its report.html", *prepare)
        held_out = ("--documents", str(out / "prepared"), *HELD_OUT)
        self.data_stage("split", "documents", "{documents:,} documents in train, validation and test", *held_out)
        documents = ("--documents", str(out / "documents"))
        pieces = ("--config", TOKENIZER_CONFIG, *documents)
        self.data_stage("tokenizer", "tokenizer", "{vocab_size:,} pieces, {bytes_per_token:.2f} bytes a token", *pieces)
        self.data_stage("tokenize", "shards", "{tokens:,} tokens", *documents, "--tokenizer", str(out / "tokenizer"))

    # ----------------------------------------------------------------------------------------------------- train

    def train(self) -> None:
        """Trains; kills the first process some steps after its first checkpoint, and resumes."""
        run, steps = self.out / "run", self.config.train.steps
        start, done = time.monotonic(), steps in checkpoint_steps(run)
        words = (
            "train",
            "--config",
            self.config_file,
            "--workdir",
            str(run),
            *(f"--config.{o}" for o in self.overrides),
        )
        if not done:
            if not checkpoint_steps(run):
                self.train_and_kill(words, run)
            self.call(*words)
        last = [row for row in read_metrics(run) if "eval/loss" in row][-1]
        made = (
            f"step {last['step']:,}, {last['tokens']:,} tokens, {last['eval/bits_per_byte']:.3f} validation bits/byte"
        )
        self.rows.append(Row("train", None if done else time.monotonic() - start, made, str(run)))

    def train_and_kill(self, words: Sequence[str], run: Path) -> None:
        """Starts the training and sends SIGKILL, as a preemption or a crash would end it."""
        process = subprocess.Popen(self.command(*words))
        while process.poll() is None:
            time.sleep(0.2)
            saved = checkpoint_steps(run)
            if saved and last_step(run) >= saved[0] + KILL_AFTER_STEPS:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.console.print(
                    f"\n[bold]Killed on purpose (SIGKILL) after step {last_step(run)}; the last checkpoint is that of step "
                    f"{checkpoint_steps(run)[-1]}. The same command goes on from there:[/bold]"
                )
                return
        if process.returncode:
            raise RunError(f"`lmjax train` ended with exit code {process.returncode}")

    # -------------------------------------------------------------------------------------- evaluate and generate

    def evaluate(self) -> None:
        """Likelihood of the whole test split, beside what a general compressor makes of the same text."""
        path = self.out / "eval.json"
        start, result = time.monotonic(), self.finished(path)
        done = result is not None
        if result is None:
            words = ("eval", "--workdir", str(self.out / "run"), "--split", "test")
            run = subprocess.run([*self.command(*words), "--json"], stdout=subprocess.PIPE, text=True, check=False)
            if run.returncode:
                raise RunError(f"`lmjax eval` ended with exit code {run.returncode}")
            result = json.loads(run.stdout.splitlines()[-1]) | self.xz_bits_per_byte("test")
            files.write_json(path, result)
        sources = sorted({key.split("/")[1] for key in result if key.count("/") == 2 and key.startswith("eval/")})
        table = Table(
            "source", "loss (nats)", "perplexity", "bits/byte", "xz -9 bits/byte", title="all of the test split"
        )
        for label, name in [*((f"{source}", f"eval/{source}") for source in sources), ("all", "eval")]:
            table.add_row(
                label, f"{result[f'{name}/loss']:.3f}", f"{result[f'{name}/perplexity']:.1f}",
                f"{result[f'{name}/bits_per_byte']:.3f}", f"{result[f'xz/{label}']:.3f}",
            )  # fmt: skip
        self.console.print(table)
        made = f"{result['eval/bits_per_byte']:.3f} bits/byte of test text (xz -9: {result['xz/all']:.3f})"
        self.rows.append(Row("eval", None if done else time.monotonic() - start, made, str(path)))

    def finished(self, path: Path) -> dict | None:
        """The result of an earlier evaluation of the same step."""
        result = json.loads(path.read_text()) if path.exists() else None
        return result if result is not None and result["step"] == self.config.train.steps else None

    def xz_bits_per_byte(self, split: str) -> dict[str, float]:
        """`xz -9` on each source's held-out text as one stream, and on all of it."""
        texts = {}
        for path in sorted((self.out / "documents" / split).glob("*.jsonl.zst")):
            parts = [document.text.encode("utf-8", "surrogatepass") for document in read_written(path)]
            texts[path.name.removesuffix(".jsonl.zst")] = b"".join(parts)
        texts["all"] = b"".join(texts.values())
        return {f"xz/{name}": 8 * len(lzma.compress(text, preset=9)) / len(text) for name, text in texts.items()}

    def generate(self) -> None:
        """A few completions, one live, the others as a batch."""
        start = time.monotonic()
        words = (
            "generate",
            "--workdir",
            str(self.out / "run"),
            "--max-tokens",
            "96",
            "--temperature",
            "0.7",
            "--top-p",
            "0.95",
        )
        self.call(*words, "--prompt", PROMPTS[0])
        self.call(*words, *(word for prompt in PROMPTS[1:] for word in ("--prompt", prompt)))
        self.rows.append(Row("generate", time.monotonic() - start, f"{len(PROMPTS)} completions", "above"))

    def summary(self, seconds: float) -> None:
        """What was made, and what to try next."""
        table = Table("stage", "time (s)", "made", "where", title=f"lmjax quickstart: {seconds:.0f} s")
        for row in self.rows:
            table.add_row(
                row.stage, "done before" if row.seconds is None else f"{row.seconds:.1f}", row.made, row.where
            )
        run = self.out / "run"
        self.console.print("\n", table)
        self.console.print("Next:", style="bold")
        for line in (
            f"lmjax generate --workdir {run} --prompt 'class Queue:' --max-tokens 200",
            f"lmjax trace --workdir {run} --step 0",
            "lmjax plan --config configs/pretrain/llama3_8b.py --devices 64 --hardware v5p",
        ):
            self.console.print(f"  {line}", markup=False)


def last_step(run: Path) -> int:
    """The step of the newest row of a run's record, 0 before the first."""
    try:
        rows = read_metrics(run)
    except UserError:
        return 0  # not begun
    return rows[-1]["step"] if rows else 0


def run_quickstart(out: str, config_file: str | None, overrides: Sequence[str]) -> None:
    """All stages, then the table.

    Args:
      out: folder of everything that is made.
      config_file: of the training; none: the one that ships with the project.
      overrides: of its fields.
    """
    config_file = config_file or CONFIG
    if not os.path.exists(config_file):
        raise UserError(f"no {config_file} here: run `lmjax quickstart` in the project's folder, or give --config")
    start = time.monotonic()
    quickstart = Quickstart(out, config_file, overrides)
    quickstart.data()
    quickstart.train()
    quickstart.evaluate()
    quickstart.generate()
    quickstart.summary(time.monotonic() - start)
