"""The built-in corpus: deterministic, no machine path in it, broken files counted."""

import json
import pathlib

import pytest

from lmjax.data import corpus
from lmjax.data.corpus import make_corpus
from lmjax.data.written import read_written
from lmjax.errors import UserError
from lmjax.files import sha256_file

PROSE = "A sentence that says what the thing is for. " * 10
SHAPES = f'''"""{PROSE}"""

class Circle(Shape, metaclass=Meta):
    """A round one."""

    def area(self, scale: float = 1.0) -> float:
        """Its area."""
        return 3 * scale

async def draw(*shapes, **options):
    """Draws them."""
    def inner():
        """Not part of the interface."""
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, with all that real ones hold."""
    root = tmp_path / "python3.11"
    files = {
        "shapes.py": SHAPES.encode(),
        "copy_of_shapes.py": SHAPES.encode(),
        "latin.py": b"# -*- coding: latin-1 -*-\r\nname = 'caf\xe9'\r\n",
        "marked.py": b"\xef\xbb\xbfx = 1\n",
        "empty/__init__.py": b"",
        "test/test_shapes.py": f'"""{PROSE}"""\nimport shapes\n'.encode(),
        "test/bad_coding.py": b"# -*- coding: uft-8 -*-\n",
        "test/bad_bytes.py": b"x = '\xff'\n",
        "badsyntax.py": b"def broken(:\n",
        "test/badsyntax.py": b"also = broken(\n",
        "pydoc_data/topics.py": b'topics = {"assert": "\\nThe assert statement\\n", "break": "The break" " statement"}\n',
        "pydoc_data/__init__.py": b"hidden = 1\n",
        "encodings/cp037.py": b"table = 1\n",
        "site-packages/other.py": b"other = 1\n",
        "_sysconfigdata__linux.py": b"prefix = '/machine/path'\n",
        "data.txt": b"no source\n",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    monkeypatch.setattr(corpus, "standard_library", lambda: root)
    return root


def test_what_becomes_of_each_file(library, tmp_path):
    manifest, skipped = make_corpus(tmp_path / "out")
    assert not skipped and make_corpus(tmp_path / "out") == (manifest, True)
    code = {d.id: d for d in read_written(tmp_path / "out" / "code.jsonl.zst")}
    docs = {d.id: d for d in read_written(tmp_path / "out" / "docs.jsonl.zst")}
    assert list(code) == [
        "badsyntax.py", "copy_of_shapes.py", "latin.py", "marked.py", "test/badsyntax.py", "test/test_shapes.py"
    ]  # fmt: skip
    assert code["latin.py"].text == "# -*- coding: latin-1 -*-\r\nname = 'café'\r\n"
    assert code["marked.py"].text == "x = 1\n"
    assert code["test/test_shapes.py"].meta == {
        "path": "test/test_shapes.py",
        "module": "test.test_shapes",
        "license": "PSF-2.0",
        "group": "test/test_shapes.py",
    }
    assert list(docs) == ["docstrings/copy_of_shapes", "topics/assert", "topics/break"]
    assert docs["topics/assert"].text == "The assert statement\n"
    assert docs["docstrings/copy_of_shapes"].meta["group"] == "copy_of_shapes.py"
    assert docs["topics/assert"].meta["group"] == "topics/assert"
    counts = manifest.counts
    assert counts["sources"]["code"]["documents"] == 6 and counts["sources"]["docs"]["documents"] == 3
    assert counts["duplicates"] == 1 and counts["failed"] == len(manifest.content["failures"]) == 3
    assert [message.split(":")[0] for message in manifest.content["failures"]] == [
        "badsyntax.py", "test/bad_bytes.py", "test/bad_coding.py"
    ]  # fmt: skip
    assert counts["texts"] == counts["documents"] + sum(
        counts[k] for k in ("empty", "duplicates", "left_out", "failed")
    )
    assert counts["bytes"] == sum(len(d.text.encode()) for d in (*code.values(), *docs.values()))


def test_docstrings_stand_below_their_names(library):
    assert corpus.read_docstrings(SHAPES, "shapes") == (
        f"shapes\n\n{PROSE.strip()}\n\n"
        "class shapes.Circle(Shape)\n\nA round one.\n\n"
        "shapes.Circle.area(self, scale: float=1.0)\n\nIts area.\n\n"
        "shapes.draw(*shapes, **options)\n\nDraws them.\n"
    )
    assert corpus.read_docstrings('"""Short."""', "x") == ""


def test_the_same_installation_gives_the_same_bytes_anywhere(library, tmp_path, monkeypatch):
    first, _ = make_corpus(tmp_path / "a")
    moved = library.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(corpus, "standard_library", lambda: moved)
    second, _ = make_corpus(tmp_path / "b")
    assert first.fingerprint() == second.fingerprint()
    assert str(tmp_path) not in json.dumps([first.inputs, first.counts, first.content])
    for name, digest in first.content["files"].items():
        assert sha256_file(tmp_path / "a" / name) == sha256_file(tmp_path / "b" / name) == digest


def test_a_changed_library_is_another_corpus(library, tmp_path):
    make_corpus(tmp_path / "out")
    (library / "marked.py").write_text("x = 2\n")
    with pytest.raises(UserError, match="made from other inputs"):
        make_corpus(tmp_path / "out")


def test_no_source_is_a_users_error(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "standard_library", lambda: pathlib.Path(tmp_path))
    with pytest.raises(UserError, match="the corpus has no code"):
        make_corpus(tmp_path / "out")


def test_a_sample_of_this_installation(tmp_path):
    manifest, _ = make_corpus(tmp_path / "out", max_bytes=1_000_000)
    counts = manifest.counts
    assert 950_000 < counts["bytes"] <= 1_000_000
    assert counts["texts"] == counts["documents"] + sum(
        counts[k] for k in ("empty", "duplicates", "left_out", "failed")
    )
    assert counts["failed"] < 20 and counts["left_out"] > 500
    for source in ("code", "docs"):
        documents = list(read_written(tmp_path / "out" / f"{source}.jsonl.zst"))
        assert len({d.id for d in documents}) == len({d.text for d in documents}) == len(documents) > 0


def test_a_sample_of_nothing_is_a_users_error(library, tmp_path):
    with pytest.raises(UserError, match="max_bytes=10 is too small"):
        make_corpus(tmp_path / "tiny", max_bytes=10)
