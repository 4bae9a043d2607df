"""C4's rules: the lines that go, those that change, and the documents that are dropped."""

import pytest
from test_rules import reason, verdict

from lmjax.data.c4 import C4
from lmjax.data.document import Document
from lmjax.data.stage import Drop, Tally

LINES = [f"This is sentence number {i} of some." for i in range(6)]


def c4(*lines, **fields):
    tally = Tally()
    answer = C4(**fields).apply(Document("id", "\n".join([*LINES, *lines]), "s"), tally)
    removed = {key: number for key, number in tally.counts["c4_lines"].items() if key != "kept"}
    return answer.reason if isinstance(answer, Drop) else answer.text.split("\n")[len(LINES) :], removed


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (f"This is {'x' * 1001} long.", "long_word"),
        ("This does not end", "no_terminal_punctuation"),
        ("This does not end...", "no_terminal_punctuation"),
        ("Two words.", "too_few_words"),
        ("Please enable JavaScript in your browser.", "javascript"),
        ("Read our Privacy Policy and more.", "policy"),
        ("   ", "blank"),
    ],
)
def test_c4_removes_lines(line, rule):
    assert c4(line) == ([], {rule: 1})


def test_c4_keeps_and_edits_lines():
    assert c4('  He said [12] "so", [edit] and left.\t') == (['He said  "so",  and left.'], {"citation": 2})
    assert c4(f"This is {'x' * 999}.") == ([f"This is {'x' * 999}."], {})
    assert c4("Wow [1] yes.") == (["Wow  yes."], {"citation": 1})  # a citation counts among the words
    assert c4("No end here is", terminal_punctuation=False) == (["No end here is"], {})
    assert c4("See [1] here [2]", "[3].", citations=False, terminal_punctuation=False, min_line_words=None) == (
        ["See [1] here [2]", "[3]."], {},
    )  # fmt: skip
    assert verdict(C4(), "\n".join(LINES)).text == "\n".join(LINES)
    assert verdict(C4(), "\n".join(["[1] A first line.", *LINES])).text.startswith("A first line.\n")


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["And then Lorem Ipsum came."], "lorem_ipsum"),
        (["It reads java{script} for us."], "curly_bracket"),
        (["It reads { for JavaScript users."], []),  # the line goes before its bracket is seen
        (["It reads { without an end"], []),
        (["A { b c.", "Lorem ipsum dolor."], "curly_bracket"),
        (["Lorem ipsum dolor.", "A { b c."], "lorem_ipsum"),
        (["My Java[1]Script is off."], []),  # a citation hides nothing
    ],
)
def test_c4_drops_documents(lines, code):
    assert c4(*lines)[0] == code


def test_c4_counts_sentences_and_long_lines():
    assert verdict(C4(), "\n".join(LINES[:4])) == Drop("too_few_sentences", 4)
    assert reason(C4(), "One is here. Two is here. Three is here. Four is here. Five is here.") == "keep"
    assert reason(C4(min_sentences=None), "no sentence") == "no_lines_left"
    long = ["word " * 40 + "end."] * 3
    assert c4(*long, min_long_lines=3)[0] == long
    assert c4(*long[:2], min_long_lines=3)[0] == "too_few_long_lines"
