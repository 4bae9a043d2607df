"""Notebooks are run whole, on a tiny run, and show what they promise; committed, they hold no output and no code of their own."""

import ast
import pathlib
import re

import nbclient
import nbformat
import pytest

from lmjax import config as configs
from lmjax import run
from lmjax.train.config import RunConfig

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
QUICKSTART = ROOT / "notebooks" / "quickstart.ipynb"
TINY = {
    "model": {"vocab_size": 264, "num_layers": 1, "d_model": 32, "num_heads": 2},
    "data": {"seq_len": 64},
    "optim": {"learning_rate": 0.01, "warmup_steps": 2},
    "train": {"steps": 6, "batch_size": 8, "precision": "float32"},
    "eval": {"every": 3, "rows": 8},
    "monitor": {"log_every": 1, "tensorboard": False, "peak_flops": 1e12},
}


def code(path: pathlib.Path) -> str:
    """The code cells as Python: `!…` and `%…` lines are passed over."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return re.sub(r"^(\s*)[!%].*$", r"\1pass", "\n".join(cells), flags=re.MULTILINE)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_defines_nothing(path):
    """What is worth a name belongs into the library."""
    definitions = ast.FunctionDef | ast.ClassDef | ast.Lambda
    assert not [node for node in ast.walk(ast.parse(code(path))) if isinstance(node, definitions)]


@pytest.fixture(scope="module")
def executed(line, tmp_path_factory):
    """The quickstart's notebook, run in a fresh kernel on a run of a few steps."""
    workdir = tmp_path_factory.mktemp("notebook") / "run"
    values = {**TINY}
    for override in line.overrides():
        configs.set_override(values, override)
    assert run.train(configs.build(RunConfig, values), workdir) == TINY["train"]["steps"]
    notebook = nbformat.read(QUICKSTART, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMJAX_WORKDIR", str(workdir))
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        client = nbclient.NotebookClient(
            notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(QUICKSTART.parent)}}
        )
        client.execute()
    return notebook


def outputs(notebook, words: str) -> list[dict]:
    """What the code cell that holds the words put out."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return cell.outputs


def printed(notebook, words: str) -> str:
    """The same as plain text."""
    return "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs(notebook, words))


@pytest.mark.slow
def test_the_quickstarts_notebook_shows_what_it_says(executed):
    for words in ("read_metrics(WORKDIR)", "reader(0)", "weights > 0"):
        assert [out for out in outputs(executed, words) if "image/png" in out.get("data", {})], words
    assert re.search(r"^\d\d\.txt tokens 0-\d+$", printed(executed, "trained.trace("), re.MULTILINE)
    sharded = printed(executed, "table.add_row")
    assert all(path in sharded for path in ("embed/token", "layers/attention/qkv", "final_norm/scale"))
    assert all(axis in sharded and "('tensor', 'fsdp')" in sharded for axis in ("'fsdp': 2", "'tensor': 2"))
    assert "CPU 0,4" in printed(executed, "visualize_array_sharding")
    prompt, text = "def read_config(path):\n", printed(executed, "trained.generate(")
    assert text.startswith(prompt) and len(text) > len(prompt)
