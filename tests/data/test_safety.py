"""What the lists find, what they must not find, and what becomes of it."""

from pathlib import Path

import pytest
from linear_time import assert_linear

from lmjax.data.document import Document
from lmjax.data.safety import CATEGORIES, LISTS, Matcher, Safety, read_list
from lmjax.data.stage import Counts, Drop, Tally, run
from lmjax.errors import UserError

FILLER = "the quick brown fox jumps over the lazy dog and goes home to read a book about trees "


def judge(text: str, meta: dict | None = None, **options):
    """What becomes of one document."""
    stage = Safety(**options)
    stage.files()
    return stage.open(Path("."))(Document("d", text, "s", meta or {}), Tally())


def found(text: str, *words: str) -> dict[str, int]:
    """Hits of some words."""
    return {word: number for (word, _), (_, number) in Matcher([("own", "\n".join(words))]).count(text).items()}


@pytest.fixture
def own(tmp_path) -> str:
    """A list of harmless words."""
    path = tmp_path / "own.txt"
    path.write_text("# remarks\nzig\nzag\t0.5\nZug  zwang\n\n")
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "Scunthorpe, Essex, Sussex and Penistone lie in England; Lightwater too",
        "an analysis of the assassin's class assignment, a cocktail and a peacock, the title of the document",
        "shitake, dickens, cockpit, basement, grape, therapist, drapes, swank, cumulative, circumstance, arsenal",
        "The patient had breast cancer; the vagina, the rectum and the penis were examined. Sexual health matters.",
        "assert class pass bass grass Cass",
        "my_ass_variable = shit2",
    ],
)
def test_innocent_words_are_not_found(text):
    document = Document("d", text, "s")
    assert Safety(threshold=0.001, min_distinct=1).open(Path("."))(document, Tally()) is document


@pytest.mark.parametrize("before", ["", " ", "(", "“", "-", "\n", "1.", "é "])
@pytest.mark.parametrize("after", ["", " ", ")", ".", "!", "-", "\n", "'s"])
def test_a_whole_word_is_found(before, after):
    assert found(f"{before}ZAG{after}", "zag") == {"zag": 1}


@pytest.mark.parametrize("text", ["zagx", "xzag", "zag1", "1zag", "zag_", "_zag", "zagé", "ézag", "zag\u0301"])
def test_a_part_of_a_word_is_not_found(text):
    assert found(text, "zag") == {}


def test_the_longest_at_a_place_counts_unless_it_is_no_whole_word():
    assert found("zag zug", "zag", "zag zug") == {"zag zug": 1}
    assert found("zag zugs", "zag", "zag zug") == {"zag": 1}
    assert found("zag\nzug zag zug zag", "zag zug", "zug zag") == {"zag zug": 2}


def test_scripts_without_spaces_need_no_boundary():
    assert found("这是测试词汇吗", "测试") == {"测试": 1}
    assert found("これはてすとです", "てすと") == {"てすと": 1}
    assert found("परीक्षा", "परी") == {}  # a mark belongs to its letter


def test_score_is_weighted_hits_per_thousand_words(own):
    text = "zig zag zig zug zwang " + "w " * 95  # 100 words; 1 + 0.5 + 1 + 1
    document = judge(text, lists={"own": own}, categories=(), threshold=1000.0)
    assert document.meta == {"safety": {"own": 35.0}} and document.text == text


def test_threshold_and_distinct_words(own):
    options = {"lists": {"own": own}, "categories": ()}
    text = "zig zag zig " + "w " * 97
    assert judge(text, **options, threshold=25.0, min_distinct=2) == Drop(
        "own", {"score": 25.0, "words": ["zig", "zag"]}
    )
    assert isinstance(judge(text, **options, threshold=25.1, min_distinct=2), Document)
    assert isinstance(judge(text, **options, threshold=25.0, min_distinct=3), Document)
    assert judge(text, **options, threshold=25.0, min_distinct=2, actions={"own": "tag"}).meta["safety"] == {
        "own": 25.0
    }
    assert judge(text, **options, thresholds={"own": 20.0}, min_distinct=1).reason == "own"
    assert isinstance(judge(text, **options, threshold=1.0, min_distinct=1, action="tag"), Document)


def test_what_is_over_most_is_the_reason(own, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("zug\t4")
    options = {"lists": {"own": own, "other": str(other)}, "categories": (), "min_distinct": 1, "threshold": 1.0}
    assert judge("zig zug w w", **options).reason == "other"
    assert judge("zig zug w w", **options, thresholds={"other": 100.0}).reason == "own"


def test_bundled_categories():
    for category in CATEGORIES:
        words = [
            word for word, weight in read_list((LISTS / "en" / f"{category}.txt").read_text(), category) if weight == 1
        ]
        assert len(words) >= 20
        verdict = judge(FILLER * 5 + " ".join(words[:5]) + ".")
        assert isinstance(verdict, Drop) and verdict.reason == category
        assert judge(FILLER * 100).meta == {}


def test_lists_are_clean():
    seen: dict[tuple[str, str], str] = {}
    for path in sorted(LISTS.glob("*/*.txt")):
        words = [word for word, _ in read_list(path.read_text("utf-8"), path.name)]
        assert words and len(set(words)) == len(words), path
        for word in words:
            assert len(word) > 1 and word == word.strip().lower()
            assert seen.setdefault((path.parent.name, word), path.stem) == path.stem, f"{word} in two categories"


def test_language_of_the_document_chooses_the_list():
    words = list(read_list((LISTS / "de" / "toxic.txt").read_text("utf-8"), "de"))[:5]
    text = FILLER + " ".join(word for word, _ in words)
    assert judge(text, {"language": "de"}, languages=("en", "de")).reason == "toxic"
    assert judge(text, languages=("en", "de")).reason == "toxic"
    assert judge(text, {"language": "en"}, languages=("en", "de")).meta.get("safety") is None
    for unknown in (None, ["de"], {"code": "de"}):
        assert judge(text, {"language": unknown}, languages=("en", "de")).reason == "toxic"
    assert judge(text, {"language": "fr"}, languages=("en", "de")).meta == {"language": "fr"}


def test_tally_and_counts(own):
    counts = Counts("safety")
    stage = Safety(lists={"own": own}, categories=(), min_distinct=1)
    kept = list(
        run(
            stage,
            [Document("a", "zig zag", "s"), Document("b", "zig " + FILLER * 20, "s"), Document("c", "x", "s")],
            counts,
        )
    )
    assert [document.id for document in kept] == ["b", "c"]
    closed = counts.close()
    assert closed["dropped"] == {"own": 1} and closed["tally"]["safety"] == {"own": 1}
    assert closed["tally"]["safety_words"] == {"own: zig": 2, "own: zag": 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"categories": ("toxik",)}, "toxic"),
        ({"languages": ("xx",)}, "xx"),
        ({"lists": {"My List": "x"}}, "lower case"),
        ({"actions": {"toxc": "tag"}}, "toxic"),
        ({"thresholds": {"hat": 1.0}}, "hate"),
        ({"threshold": 0.0}, "above 0"),
        ({"min_distinct": 0}, "at least 1"),
        ({"categories": ()}, "no lists"),
    ],
)
def test_impossible_options(options, says):
    with pytest.raises(UserError, match=says):
        Safety(**options)


def test_faults_of_a_users_list(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        Safety(lists={"own": str(tmp_path / "none.txt")}).files()
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        Safety(lists={"own": str(tmp_path)}).files()
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8"):
        Safety(lists={"own": str(tmp_path / "latin.txt")}).files()
    (tmp_path / "bad.txt").write_text("zig\theavy")
    with pytest.raises(UserError, match="heavy"):
        Safety(lists={"own": str(tmp_path / "bad.txt")}).open(tmp_path)


@pytest.mark.parametrize("text", ["", "z", "\ud800", "\ud800 zig \udfff", "İ zig", "zig\x00"])
def test_edges(text, own):
    assert isinstance(judge(text, lists={"own": own}, categories=()), Document)
    assert found(text, "zig").get("zig", 0) == text.count("zig")


@pytest.mark.parametrize("piece", ["a", "@", "ass", "ass ", "zig zag ", " ", "\ud800", "\u0301"])
def test_time_is_linear(piece):
    apply = Safety().open(Path("."))
    assert_linear(apply, piece, 20_000)
