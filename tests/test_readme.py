"""What a newcomer reads is true: paths, names, commands and fields exist, and the commands for one's own text run."""

import argparse
import ast
import contextlib
import dataclasses
import io
import pathlib
import re
import shlex
import typing

import pytest

from lmjax import cli
from lmjax import config as configs
from lmjax.checkpoint import layout
from lmjax.data.config import ShardsConfig, SplitConfig, TokenizerConfig
from lmjax.data.prepare import PrepareConfig, stage_names
from lmjax.monitor import write
from lmjax.train.config import RunConfig

ROOT = pathlib.Path(__file__).parent.parent
README, CONTRIBUTING = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
)  # fmt: skip
PAGES = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING}

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PATH = re.compile(
    r"(?<![\w/.-])(?:(?:lmjax|configs|scripts|tests|notebooks|constraints|tpu|\.ci)/[\w./-]*|\w+\.(?:md|toml))(?<![.-])"
)
# verb → its config; of the others: RunConfig
CONFIGS = {"prepare": PrepareConfig, "split": SplitConfig, "tokenizer": TokenizerConfig, "tokenize": ShardsConfig}


def section(page: str, title: str) -> str:
    """The text below a heading."""
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def commands(page: str) -> list[list[str]]:
    """The words after `lmjax` of each command line in the code blocks."""
    lines = [line for block in BLOCK.findall(page) for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    words = [[word for i, word in enumerate(line) if i or "=" not in word] for line in words]
    return [line[line.index("lmjax") + 1 :] for line in words if "lmjax" in line]


def spans(page: str) -> list[str]:
    """What stands in backticks, code blocks apart."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE))


def table(text: str, title: str) -> dict[str, list[str]]:
    """A table whose header begins with `title`: first cell → the others; backticks are taken off the first."""
    lines = text[text.index(f"| {title} |") :].split("\n\n", 1)[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in rows}


def verbs() -> set[str]:
    (sub,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return set(sub.choices)


def fields(cls: type, prefix: str = "") -> typing.Iterator[str]:
    """Every section and field, as `section.field`."""
    for name, hint in typing.get_type_hints(cls).items():
        yield prefix + name
        if dataclasses.is_dataclass(hint):
            yield from fields(hint, f"{prefix}{name}.")


# ------------------------------------------------------------------------------------------------------- paths and names


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    paths = {match.group() for match in PATH.finditer(PAGES[page])}
    assert len(paths) > 5
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_the_map_lists_the_library_and_nothing_else():
    rows = table(README, "in `lmjax/`")
    named = [
        (ROOT / "lmjax" / ("" if folder == "itself" else folder) / name).relative_to(ROOT).as_posix()
        for folder, (files,) in rows.items()
        for name in re.findall(r"`(\w+\.py)`", files)
    ]
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "lmjax").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)


def definitions(path: pathlib.Path) -> set[str]:
    """Names that a file defines: functions, classes, methods, fields and constants."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def test_what_a_row_of_contributing_points_at_is_there():
    """`lmjax/model/mlp.py:ACTIVATIONS`, `lmjax/model/norm.py:Norm.__call__`, `tests/…py:test_…`."""
    places = [span.partition(":") for span in spans(CONTRIBUTING) if re.fullmatch(r"[\w/]+\.py:[\w.]+", span)]
    assert len(places) > 20
    wrong = [
        f"{path}:{name}" for path, _, name in places if not set(name.split(".")) <= definitions(ROOT / path)
    ]  # fmt: skip
    assert not wrong


def test_the_stages_of_preparation_are_told_and_configured():
    """Every stage stands in the table, and every stage of a table in a config exists."""
    prepared = table(section(README, "Prepare data"), "stage")
    named = {name for cell in prepared for name in re.findall(r"\w+", cell)}
    assert named == set(stage_names(PrepareConfig))


def test_every_verb_and_every_file_of_a_run_is_told():
    assert not {verb for verb in verbs() if f"lmjax {verb}" not in README}
    told = {name.rstrip("/") for name in table(README, "in the workdir")}
    assert {write.METRICS, write.SUPERSEDED, write.TENSORBOARD, layout.CHECKPOINTS} <= told
    assert set(table(README, "stage")) <= verbs()


# ------------------------------------------------------------------------------------------------------ commands and fields


@pytest.mark.parametrize("words", [words for page in PAGES.values() for words in commands(page)], ids=shlex.join)
def test_every_command_parses(words, monkeypatch):
    """Arguments, the config file, and the type of every override."""
    monkeypatch.chdir(ROOT)
    args = cli.parse(words)
    values = configs.from_file(args.config) if getattr(args, "config", None) else {}
    for override in args.overrides:
        configs.set_override(values, override)
        if args.verb in ("eval", "generate"):
            assert configs.is_free(RunConfig, override.partition("=")[0])
    configs.build(CONFIGS.get(args.verb, RunConfig), values)


def test_every_plan_is_made(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    plans = [words for words in commands(README) if words[0] == "plan" and "--topology" not in words]  # those compile
    assert plans and not any(cli.main(words) for words in plans)
    assert "parameters" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("page", PAGES)
def test_every_field_exists(page):
    known = {name for cls in (RunConfig, *CONFIGS.values()) for name in fields(cls)}
    sections = "|".join(
        name for name, hint in typing.get_type_hints(RunConfig).items() if dataclasses.is_dataclass(hint)
    )
    name = re.compile(rf"(?:(?:--)?config\.([\w.]+)|((?:{sections})\.[\w.]+))(?:=.*)?")
    found = [name.fullmatch(word) for span in spans(PAGES[page]) for word in span.split() if not word.endswith(".py")]
    told = {match[1] or match[2] for match in found if match}
    assert told and told <= known


def test_what_may_change_on_a_resume_is_what_is_marked_free():
    paragraph = section(README, "Stop and resume").split("Free to change", 1)[1].split("\n\n", 1)[0]
    free = set()
    for field in dataclasses.fields(RunConfig):
        hint = typing.get_type_hints(RunConfig)[field.name]
        leaves = (
            [f"{field.name}.{leaf.name}" for leaf in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else []
        )
        marked = [leaf for leaf in leaves if configs.is_free(RunConfig, leaf)]
        whole = configs.is_free(RunConfig, field.name) or (leaves and marked == leaves)
        free |= {field.name} if whole else set(marked)
    assert set(spans(paragraph)) == free


# ------------------------------------------------------------------------------------------------------------- own text

SMALL = {
    "split": ["--config.validation=0.2", "--config.test=0.2"],
    "tokenizer": ["--config.vocab_size=480"],
    "tokenize": ["--config.num_workers=0"],
    "train": ["model.vocab_size=480", "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "data.seq_len=32",
              "train.steps=4", "train.batch_size=8", "optim.warmup_steps=1", "eval.rows=8", "monitor.log_every=1",
              "monitor.peak_flops=1e12"],
    "generate": ["--max-tokens", "12"],
}  # fmt: skip
SMALL["train"] = [f"--config.{override}" for override in SMALL["train"]]


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """The commands of the section, run as written on these pages' own paragraphs; folder, and verb → what it printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_texts").mkdir()
    for number, paragraph in enumerate((README + CONTRIBUTING).split("\n\n")):
        (folder / "my_texts" / f"{number:03}.md").write_text(paragraph, encoding="utf-8")
    block = BLOCK.findall(section(README, "Train on your own text"))[0]
    outputs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "configs").symlink_to(ROOT / "configs")
        for words in commands(f"```bash\n{block}```\n"):
            outputs[words[0]] = run(words + SMALL.get(words[0], []))
        outputs["train again"] = run([*next(w for w in commands(README) if "my_run/run" in w), *SMALL["train"]])
    return folder, outputs


def run(words: list[str]) -> str:
    """A command in this process; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = cli.main(words)
    assert code == 0, out.getvalue()
    return out.getvalue()


@pytest.mark.slow
def test_the_commands_for_own_text_do_what_they_say(own_text):
    _, outputs = own_text
    assert list(outputs)[:-1] == ["split", "tokenizer", "tokenize", "plan", "train", "eval", "generate", "trace"]
    assert all("made in" in outputs[verb] for verb in ("split", "tokenizer", "tokenize"))
    assert "step 4/4" in outputs["train"] and "nothing to do" in outputs["train again"]
    assert "all of test" in outputs["eval"] and "mine" in outputs["eval"]
    assert outputs["generate"].startswith("Once upon a time") and len(outputs["generate"]) > len("Once upon a time\n")
    assert re.search(r"^  \d{3}\.md  tokens \d+-\d+$", outputs["trace"], re.MULTILINE)


@pytest.mark.slow
def test_the_folder_of_a_run_holds_what_the_table_says(own_text):
    folder, _ = own_text
    told = {name.rstrip("/") for name in table(README, "in the workdir")}
    there = {path.name for path in (folder / "my_run" / "run").iterdir()}
    assert there <= told
    assert told - there <= {write.SUPERSEDED, "compile_cache", "packing"}  # of a resume; one for all runs of a process
