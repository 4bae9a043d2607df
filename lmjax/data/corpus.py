"""The built-in corpus: what every Python installation carries, so that the whole line runs offline.

    code    the source of the standard library, one document a file
    docs    the language reference's prose (`pydoc_data.topics`), one document a topic, and the docstrings, one a module

The same installation gives the same bytes, whoever runs it and wherever it lies. A module's docstrings stand in both
sources: they are one group with its code, so that `lmjax split` puts both on the same side.
"""

import ast
import dataclasses
import hashlib
import io
import os
import pathlib
import platform
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from typing import Any

from etils import epath

from lmjax.data.document import Document, draw, to_bytes
from lmjax.data.written import SUFFIX, write_documents
from lmjax.errors import UserError
from lmjax.files import Manifest, run_stage, sha256_file, sha256_json

LICENSE = "PSF-2.0"  # of the distribution; a file under other terms says so in its text
TOPICS = "pydoc_data/topics.py"
MIN_DOC_CHARACTERS = 200  # shorter docstrings are labels, not prose

LEFT_OUT = {
    "site-packages": "not the standard library",
    "dist-packages": "not the standard library",
    "__pycache__": "not source",
    "encodings": "tables of characters",
    "idlelib": "one application's windows",
    "lib2to3": "its test data is broken on purpose, and newer versions lack it",
    "distutils": "newer versions lack it",
    "pydoc_data": "prose: it goes to docs",
}


def make_corpus(out: os.PathLike | str, max_bytes: int | None = None) -> tuple[Manifest, bool]:
    """Writes `OUT/code.jsonl.zst`, `OUT/docs.jsonl.zst` and the manifest.

    Args:
      out: the folder.
      max_bytes: UTF-8 bytes of both sources together; a sample of whole documents is drawn. None: all, about 30 MB.

    Returns:
      The manifest, and whether the stage was skipped because the folder already holds it.

    Raises:
      UserError: this installation carries no source, or `max_bytes` is too small for one document of each.
    """
    root = standard_library()
    paths = list_sources(root)
    inputs = {
        "python": platform.python_version(),
        "standard_library": sha256_json([(path.relative_to(root).as_posix(), sha256_file(path)) for path in paths]),
    }

    def make(folder: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
        corpus = collect(root, paths)
        if max_bytes is not None:
            corpus.draw_sample(max_bytes)
        written = {}
        for source, documents in corpus.sources.items():
            if not documents:
                raise UserError(
                    f"the corpus has no {source}: none lies in {root}, or max_bytes={max_bytes} is too small"
                )
            written[source] = write_documents(folder / f"{source}{SUFFIX}", documents)
        totals = {key: sum(count[key] for count in written.values()) for key in ("documents", "bytes")}
        files = {f"{source}{SUFFIX}": sha256_file(folder / f"{source}{SUFFIX}") for source in written}
        content = {"files": files, "failures": corpus.failures}
        return {**totals, "sources": written, **corpus.counts(), "files": len(paths)}, content

    return run_stage(out, "corpus", inputs, {"max_bytes": max_bytes}, make)


def standard_library() -> pathlib.Path:
    """Where this Python keeps its own source."""
    return pathlib.Path(sysconfig.get_path("stdlib"))


def list_sources(root: pathlib.Path) -> list[pathlib.Path]:
    """The Python files of the standard library, sorted; build settings, which hold this machine's paths, are left out."""
    paths = [root / TOPICS] if (root / TOPICS).exists() else []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [pathlib.Path(folder, name) for name in names if name.endswith(".py") and "_sysconfigdata" not in name]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


@dataclasses.dataclass
class Corpus:
    """The documents of both sources, each text once: texts = documents + empty + duplicates + left out + failed."""

    sources: dict[str, list[Document]] = dataclasses.field(default_factory=lambda: {"code": [], "docs": []})
    texts: int = 0
    empty: int = 0
    duplicates: int = 0
    left_out: int = 0  # beyond max_bytes
    failures: list[str] = dataclasses.field(default_factory=list)
    seen: set[bytes] = dataclasses.field(default_factory=set)

    def add(self, source: str, name: str, text: str, meta: dict[str, str]) -> bool:
        """Adds a document, unless its text is empty or was seen before; says which."""
        self.texts += 1
        digest = hashlib.sha256(to_bytes(text)).digest()
        new = bool(text.strip()) and digest not in self.seen
        if new:
            self.seen.add(digest)
            self.sources[source].append(Document(name, text, source, meta))
        elif text.strip():
            self.duplicates += 1
        else:
            self.empty += 1
        return new

    def fail(self, name: str, why: Exception) -> None:
        """Counts a text that could not be had."""
        self.texts += 1
        self.failures.append(f"{name}: {why}")

    def draw_sample(self, max_bytes: int) -> None:
        """Keeps whole documents of both sources, drawn by their text, up to `max_bytes` in all."""
        left, kept = max_bytes, set()
        everything = [document for documents in self.sources.values() for document in documents]
        for document in sorted(everything, key=lambda document: draw(document.text, "corpus", 0)):
            size = len(to_bytes(document.text))
            if size <= left:
                left -= size
                kept.add((document.source, document.id))
        for source, documents in self.sources.items():
            self.sources[source] = [document for document in documents if (source, document.id) in kept]
        self.left_out = len(everything) - len(kept)

    def counts(self) -> dict[str, int]:
        """For the manifest."""
        counts = {key: getattr(self, key) for key in ("texts", "empty", "duplicates", "left_out")}
        return {**counts, "failed": len(self.failures)}


def collect(root: pathlib.Path, paths: list[pathlib.Path]) -> Corpus:
    """Reads every file once. Some tests are not UTF-8 or not Python on purpose: they are counted as failed."""
    corpus = Corpus()
    for path in paths:
        name = path.relative_to(root).as_posix()
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        meta = {"path": name, "module": module, "license": LICENSE, "group": name}
        try:
            text = decode_source(path.read_bytes())
            if name == TOPICS:
                for topic, prose in read_topics(text).items():
                    corpus.add("docs", f"topics/{topic}", prose.strip() + "\n", meta | {"group": f"topics/{topic}"})
                continue
            new = corpus.add("code", name, text, meta)
            if new and not {"test", "tests"} & set(module.split(".")):  # whose docstrings are labels
                corpus.add("docs", f"docstrings/{module}", read_docstrings(text, module), meta)
        except (SyntaxError, ValueError, RecursionError) as error:
            corpus.fail(name, error)
    return corpus


def decode_source(data: bytes) -> str:
    """A Python file as text, by its declared encoding, with its own line ends; an error where it is not what it declares."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding)


def parse(text: str) -> ast.Module:
    """The syntax tree, without the warnings that are meant for the authors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def read_topics(text: str) -> dict[str, str]:
    """The one dict that `pydoc_data.topics` assigns: topic → prose."""
    for node in parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    raise ValueError("holds no dict of topics")


def read_docstrings(text: str, module: str) -> str:
    """A module's docstrings as prose, each below its name and signature; empty where there are too few."""
    prose = "\n".join(describe(parse(text), module))
    return prose if len(prose) >= MIN_DOC_CHARACTERS else ""


def describe(node: ast.AST, name: str) -> Iterator[str]:
    """The docstring of a module, class or function, then those inside."""
    if docstring := ast.get_docstring(node):
        yield f"{heading(node, name)}\n\n{docstring.strip()}\n"
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from describe(child, f"{name}.{child.name}")


def heading(node: ast.AST, name: str) -> str:
    """What stands above a docstring: the qualified name, with its arguments or bases."""
    if isinstance(node, ast.Module):
        return name
    if isinstance(node, ast.ClassDef):
        return f"class {name}({', '.join(map(ast.unparse, node.bases))})" if node.bases else f"class {name}"
    return f"{name}({ast.unparse(node.args)})"
