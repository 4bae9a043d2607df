"""Imports go down only: this table is the architecture."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent / "lmjax"

# First match wins. A module may import strictly lower levels and its own package.
LEVELS = [
    ("lmjax.config", 0), ("lmjax.errors", 0), ("lmjax.axes", 0), ("lmjax.files", 0), ("lmjax.batch", 0),
    ("lmjax.bucket", 0), ("lmjax.lock", 0), ("lmjax.xla_flags", 0),
    ("lmjax.model.config", 1), ("lmjax.data.config", 1), ("lmjax.optim.config", 1), ("lmjax.sharding.config", 1),
    ("lmjax.train.config", 1.5),  # RunConfig: the sections above, together
    # documents on disk: the tokenizers learn from them, the data stages read and write them
    ("lmjax.data.document", 1.5), ("lmjax.data.read", 1.5), ("lmjax.data.inputs", 1.5), ("lmjax.data.compression", 1.5),
    ("lmjax.data.written", 1.5),
    ("lmjax.tokenizers", 1.6), ("lmjax.sharding", 1.6), ("lmjax.plan.hardware", 1.6),
    ("lmjax.plan.ladder", 3.5),  # reads what the monitor wrote
    ("lmjax.plan.compile", 5.9),  # the very step of a run, for hardware that is not here
    ("lmjax.data", 2), ("lmjax.model", 2), ("lmjax.optim", 2),
    ("lmjax.generate", 3), ("lmjax.checkpoint", 3), ("lmjax.monitor", 3), ("lmjax.plan", 3),
    ("lmjax.train", 4), ("lmjax.hf", 4),
    ("lmjax.eval", 5),
    ("lmjax.workdir", 5.5), ("lmjax.parts", 5.6), ("lmjax.trained", 5.7), ("lmjax.interchange", 5.8),
    ("lmjax.run", 6),
    ("lmjax.output", 6), ("lmjax.quickstart", 6),
    ("lmjax.verbs", 6.5),
    ("lmjax.cli", 7),
]  # fmt: skip
NO_JAX = ("lmjax.config", "lmjax.errors", "lmjax.axes", "lmjax.files", "lmjax.bucket", "lmjax.lock", "lmjax.xla_flags", "lmjax.batch",
          "lmjax.tokenizers", "lmjax.data", "lmjax.plan", "lmjax.output", "lmjax.verbs", "lmjax.cli")  # fmt: skip
JAX = ("jax", "jaxlib", "flax", "optax", "orbax")
# the parts of `plan` that ask the compiler
MAY_JAX: tuple[str, ...] = ("lmjax.plan.compile",)


def level(module: str) -> float:
    for prefix, number in LEVELS:
        if module == prefix or module.startswith(prefix + "."):
            return number
    raise AssertionError(f"{module} has no level: add it to the table (and to DESIGN's)")


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        if path.name != "__init__.py":
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST):
    """Every imported module, function-level imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (ROOT.parent / (full.replace(".", "/") + ".py")).exists()
                yield full if is_module else node.module


def test_imports_go_down():
    wrong = []
    for name, tree in modules():
        for target in imports(tree):
            if not target.startswith("lmjax.") or target == "lmjax":
                continue
            same_package = name.rsplit(".", 1)[0] == target.rsplit(".", 1)[0] != "lmjax"
            if not same_package and not level(target) < level(name) and level(target) != 0:
                wrong.append(f"{name} (level {level(name)}) imports {target} (level {level(target)})")
    assert not wrong, "\n".join(wrong)


def test_data_and_plan_import_no_jax():
    wrong = []
    for name, tree in modules():
        if name.startswith(NO_JAX) and not name.startswith(MAY_JAX or "-"):
            wrong += [f"{name} imports {target}" for target in imports(tree) if target.split(".")[0] in JAX]
    assert not wrong, "\n".join(wrong)


def test_configs_import_no_jax():
    for name, tree in modules():
        if name.endswith(".config"):
            assert not [t for t in imports(tree) if t.split(".")[0] in JAX], name


def test_packages_are_empty():
    """`__init__.py` files only make a folder importable: no import effects, no second name for anything."""
    for path in ROOT.rglob("__init__.py"):
        if path.parent != ROOT:
            assert not path.read_text().strip(), f"{path} must be empty"
