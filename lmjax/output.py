"""What the verbs tell on the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence


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


def write(text: str) -> None:
    """Text to stdout at once; what the terminal cannot encode is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
