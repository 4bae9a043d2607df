"""Real texts that a Debian machine carries, for benchmarks: documents, and HTML pages as they are.

    apt-get install python3.11-doc dict-gcide linux-doc-6.1 debian-handbook postgresql-doc-15 sqlite3-doc anarchism fortunes \\
        manpages-de manpages-fr manpages-ja manpages-es manpages-ru
    python scripts/real_documents.py                          how much there is, by source

About 25,000 pages and manuals in 27 languages, 26,000 in the form of short texts (fortunes, entries of a dictionary), and what
installed Python packages say of themselves. The order is the same on each run; ids are paths.
"""

import argparse
import ast
import collections
import gzip
import importlib.metadata
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lmjax.data.document import Document
from lmjax.data.words import split_words

PACKAGES = [
    "python3.11-doc",
    "dict-gcide",
    "linux-doc-6.1",
    "debian-handbook",
    "postgresql-doc-15",
    "sqlite3-doc",
    "anarchism",
    "fortunes",
    "manpages-de",
    "manpages-fr",
    "manpages-ja",
    "manpages-es",
    "manpages-ru",
]
TREES = {  # source → folder of files
    "python_doc": "/usr/share/doc/python3.11/html",
    "linux_doc": "/usr/share/doc/linux-doc-6.1",
    "debian_handbook": "/usr/share/doc/debian-handbook",
    "postgresql_doc": "/usr/share/doc/postgresql-doc-15",
    "sqlite_doc": "/usr/share/doc/sqlite3",
    "anarchism": "/usr/share/doc/anarchism",
    "manpages_de": "/usr/share/man/de",
    "manpages_fr": "/usr/share/man/fr",
    "manpages_ja": "/usr/share/man/ja",
    "manpages_es": "/usr/share/man/es",
    "manpages_ru": "/usr/share/man/ru",
}
FORTUNES, DICTIONARY = Path("/usr/share/games/fortunes"), Path("/usr/share/dictd/gcide")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm", ".yaml", "")  # beside manual pages: .1 … .9, .3pm
MANUAL = re.compile(r"\.[1-9][a-z]*$")
ENTRIES_APART = 20  # every so manieth entry of the dictionary is a document
BASE64 = {digit: number for number, digit in enumerate(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
)}  # fmt: skip


def need_packages() -> None:
    """Ends with the line that installs what is missing."""
    missing = [folder for folder in (*TREES.values(), str(FORTUNES)) if not os.path.isdir(folder)]
    if not DICTIONARY.with_suffix(".index").exists():
        missing.append(f"{DICTIONARY}.index")
    if missing:
        sys.exit(f"missing: {', '.join(missing)}\nThe texts come with: apt-get install {' '.join(PACKAGES)}")


def files(root: str) -> Iterator[tuple[str, Path]]:
    """(path within the tree, file), links to folders followed, each real file once."""
    seen = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        if os.path.realpath(folder) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        for name in sorted(names):
            path = Path(folder, name)
            real = path.resolve()
            if path.is_file() and real not in seen:
                seen.add(real)
                yield path.relative_to(root).as_posix(), path


def content(path: Path) -> bytes:
    """A file's bytes, uncompressed."""
    data = path.read_bytes()
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def real_pages(limit: int | None = None) -> Iterator[Document]:
    """HTML pages as they are: `text` is the HTML."""
    need_packages()
    return itertools.islice(pages(), limit)


def pages() -> Iterator[Document]:
    """The pages of all trees."""
    for source, root in TREES.items():
        for name, path in files(root):
            if name.removesuffix(".gz").endswith((".html", ".htm")):
                text = content(path).decode("utf-8", "replace")
                yield Document(name, text, source, {"path": str(path), "url": f"https://{source}.example/{name}"})


def real_documents(limit: int | None = None) -> Iterator[Document]:
    """Documents as text: HTML stripped to plain text, manual pages as their source."""
    need_packages()
    return itertools.islice(itertools.chain(tree_documents(), fortunes(), entries(), package_documents()), limit)


def tree_documents() -> Iterator[Document]:
    """The texts of all trees, a file a document."""
    from resiliparse.extract.html2text import extract_plain_text

    for source, root in TREES.items():
        for name, path in files(root):
            plain = name.removesuffix(".gz")
            suffix = os.path.splitext(plain)[1]
            if suffix not in TEXT_SUFFIXES and not MANUAL.search(plain):
                continue
            text = content(path).decode("utf-8", "replace")
            if suffix in (".html", ".htm"):
                text = extract_plain_text(text, main_content=False)
            yield Document(name, text, source, {"path": str(path)})


def fortunes() -> Iterator[Document]:
    """Sayings, jokes and verses, many of them short."""
    for name, path in files(str(FORTUNES)):
        if not name.endswith((".dat", ".u8")):
            sayings = path.read_bytes().decode("utf-8", "replace").split("\n%\n")
            for number, text in enumerate(sayings):
                yield Document(f"{name}#{number}", text, "fortunes", {"path": str(path)})


def entries() -> Iterator[Document]:
    """Entries of a dictionary, one of so many; dictd keeps place and length of each in base 64."""
    data = gzip.decompress(DICTIONARY.with_suffix(".dict.dz").read_bytes())
    lines = DICTIONARY.with_suffix(".index").read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines[::ENTRIES_APART]):
        word, *place = line.split("\t")[:3]
        start, length = (sum(BASE64[c] << 6 * i for i, c in enumerate(reversed(digits))) for digits in place)
        text = data[start : start + length].decode("utf-8", "replace")
        yield Document(f"{number}/{word}", text, "dictionary", {"path": f"{DICTIONARY}.dict.dz"})


def package_documents() -> Iterator[Document]:
    """Descriptions and docstrings of the installed Python packages: on every machine, if not the same on each."""
    found = {distribution.name: distribution for distribution in importlib.metadata.distributions()}
    for name in sorted(found):
        description = found[name].metadata.get_payload() if found[name].metadata else ""
        if isinstance(description, str) and description.strip():
            yield Document(f"{name}/description", description, "packages", {})
        for file in sorted(map(str, found[name].files or ())):
            if file.endswith(".py") and "/test" not in file:
                yield from docstrings(Path(found[name].locate_file(file)), f"{name}/{file}")


def docstrings(path: Path, name: str) -> Iterator[Document]:
    """The docstrings of a module, as one document."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    if text := "\n\n".join(filter(None, texts)):
        yield Document(name, text, "docstrings", {"path": str(path)})


def main() -> None:
    """Documents, bytes and words of each source."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--limit", type=int, help="of documents")
    limit = parser.parse_args().limit
    totals = collections.defaultdict(collections.Counter)
    for document in real_documents(limit):
        figures = {"documents": 1, "bytes": len(document.text.encode("utf-8", "replace"))}
        totals[document.source].update(figures | {"words": len(split_words(document.text))})
    totals["all"] = sum(totals.values(), collections.Counter())
    for source, total in totals.items():
        print(f"{source:18}" + "".join(f"{total[key]:>14,} {key}" for key in ("documents", "bytes", "words")))


if __name__ == "__main__":
    main()
