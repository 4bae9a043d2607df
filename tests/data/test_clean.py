"""Clean: main text of pages, boilerplate lines, repair of characters; code survives; nothing takes more than linear time."""

import random
import time
import unicodedata

import pytest

from lmjax.data.boilerplate import RULE, remove_boilerplate, rule_of
from lmjax.data.clean import Clean
from lmjax.data.document import Document
from lmjax.data.extract import MAX_DEPTH, flatten, trim_tags
from lmjax.data.repair import KINDS, LINE_ENDS, UNCLEAN, around, clean_text, mend_lines, tidy
from lmjax.data.stage import Counts, Tally, run
from lmjax.errors import UserError

PROSE = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all. " * 4
PAGE = f"""<!doctype html><html lang="en-GB"><head><title> A  fox
 story </title><link rel="License" href="https://creativecommons.org/licenses/by/4.0/"></head><body><div class=page><div class=middle>
<nav><ul><li><a href="/">Home</a><li><a href="/a">About</a></ul></nav>
<article><h1>The fox</h1><p>{PROSE}</p><script>var x = "<p>no</p>";</script><pre>def f():
    return 1</pre><ul><li>one</li><li>two</li></ul><p>{PROSE}</p><img alt="a picture" src="x">
<p>See <a href="https://example.org/x">this</a>.</p></article><footer>Copyright 2020 Example</footer></div></div></body></html>"""


def clean(text, counts=None, source="web", meta=None, **options):
    """What the stage makes of one document, or the reason why it makes none of it."""
    counts = counts or Counts("clean")
    documents = list(run(Clean(**options), [Document("d", text, source, meta or {})], counts))
    return documents[0] if documents else next(iter(counts.dropped), "failed")


def page(html, **options):
    return clean(html, meta={"format": "html"}, **options)


def tallied(function, *arguments):
    tally = Tally()
    return function(*arguments, tally), {kind: dict(table) for kind, table in tally.counts.items()}


# ------------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_the_main_text_of_a_page(extractor):
    document = page(PAGE, extractor=extractor)
    assert PROSE.strip() in document.text and "    return 1" in document.text and "one" in document.text
    assert not any(
        word in document.text for word in ("Home", "About", "var x", "Copyright", "<", "example.org", "picture")
    )
    assert document.meta == {
        "title": "A fox story", "html_lang": "en-GB", "format": "text", "extractor": extractor,
        "license_link": "https://creativecommons.org/licenses/by/4.0/",
    }  # fmt: skip


def test_options_of_the_extractor():
    assert "Home" in page(PAGE, main_content=False, boilerplate="none").text
    assert "https://example.org/x" in page(PAGE, links=True).text and "a picture" in page(PAGE, alt_text=True).text
    assert "• one" in page(PAGE).text and "• one" not in page(PAGE, bullets=False).text
    assert "Home" in page(PAGE, main_content=False, boilerplate="none", extractor="trafilatura").text


def test_meta_of_before_is_kept():
    document = clean(PAGE, meta={"format": "html", "url": "u", "title": "given"})
    assert document.meta["url"] == "u" and document.meta["title"] == "given"


def test_only_pages_are_parsed():
    assert clean("<p>a</p>").text == "<p>a</p>" and clean("<p>a</p>", meta={"format": "text"}).text == "<p>a</p>"


@pytest.mark.parametrize("html", ["", "<script>1</script>", "<p> \u200b </p>", "\0", "<html><head></head></html>"])
def test_pages_without_text(html):
    assert page(html) == "empty"


def test_a_page_that_is_too_large():
    counts = Counts("clean")
    assert clean(PAGE, counts, meta={"format": "html"}, max_html_characters=100) == "html_too_large"
    assert counts.samples["html_too_large"][0][3] == len(PAGE)
    assert clean(PAGE, meta={"format": "html"}, max_html_characters=len(PAGE)) != "html_too_large"


def test_a_lone_surrogate_in_a_page():
    counts = Counts("clean")
    assert clean("<p>a \ud800 b</p>", counts, meta={"format": "html"}).text == "a \ufffd b"
    assert counts.tally.counts["characters"] == {"surrogate": 1}


def test_a_page_that_makes_the_parser_panic_fails_alone(monkeypatch):
    import lmjax.data.extract as module

    class PanicException(BaseException):
        pass

    def panic(tree):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setitem(module.EXTRACTORS, "resiliparse", lambda *_: panic)
    counts = Counts("clean")
    assert clean(PAGE, counts, meta={"format": "html"}) == "failed" and counts.failed == 1
    monkeypatch.setitem(module.EXTRACTORS, "resiliparse", lambda *_: lambda tree: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        page(PAGE)


# ----------------------------------------------------------------------------------------------------------- hostile pages


def test_deep_pages_are_flattened():
    deep = "<div class=a>" * 3000 + "<p>hello</p>" + "</div>" * 3000 + "<p>end</p>"
    flat, tally = tallied(flatten, deep)
    assert flat == "<div class=a>" * MAX_DEPTH + "<p>hello</p>" + "</div>" * MAX_DEPTH + "<p>end</p>"
    assert tally == {"html": {"deep_tags": 2 * (3000 - MAX_DEPTH)}}
    wide = "<div><DIV>x</DIV></div><article >y</article>" * 3000
    assert tallied(flatten, wide) == (wide, {})


def test_end_tags_that_close_nothing_do_not_hide_depth():
    flat, _ = tallied(flatten, "<div><table><td></div>" * 2000)
    assert flat.count("<div>") + flat.count("<table>") == MAX_DEPTH and flat.count("</div>") == MAX_DEPTH // 2
    tables = "<div><table><td><div>x</div></td></table></div>" * 2000
    assert tallied(flatten, tables) == (tables, {})
    deep = "<table><td>" * 600 + "<div>x</div>" * 600 + "</table>" * 600
    assert tallied(flatten, deep)[0] == "<table><td>" * 512 + "<td>" * 88 + "x" * 600 + "</table>" * 512


def test_tags_of_thousands_of_attributes_lose_them():
    many = "<p>a<div " + " ".join(f"a{i}=1" for i in range(1000)) + ">b</div>"
    assert tallied(trim_tags, many) == ("<p>a<div>b</div>", {"html": {"tags_without_their_attributes": 1}})
    image = "<p>text " * 100 + f'<img src="data:{"A" * 5000}" alt="x">' + "words " * 1000
    assert tallied(trim_tags, image) == (image, {})


SLACK_S = 3  # what grows by the square of these takes minutes
NORMAL_S_PER_CHARACTER = 2.5e-7  # ten times what an ordinary page takes on a slow machine
HOSTILE = {
    "nested": "<div>" * 20_000 + "hello",
    "nested and closed": "<div><article>" * 20_000 + "hello" + "</article></div>" * 20_000,
    "hidden depth": "<div><table><td></div>" * 20_000 + "hello",
    "attributes": "<p>a <div " + " ".join(f"a{i}=1" for i in range(50_000)) + ">b</div>",
    "open tags": "<a" * 500_000,
    "one sign": "<" * 2_000_000,
    "entities": "&" * 2_000_000,
    "one letter": "a" * 5_000_000,
    "spaces": " " * 10_000_000 + "x",
    "comment": "<!--" * 500_000,
    "unclosed": "<font>x<p>" * 20_000,
    "list": "<li>x" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_page_takes_long(name):
    start = time.process_time()
    page(HOSTILE[name])
    assert time.process_time() - start < SLACK_S + 10 * NORMAL_S_PER_CHARACTER * len(HOSTILE[name])


HOSTILE_TEXT = {
    "letter": "a" * 5_000_000,
    "accents": "é" * 2_000_000,
    "marks": "a" + "\u0301\u0316" * 500_000,
    "marks beyond": "a" + "\U0001d165\U0001d16d" * 200_000,
    "mojibake": "Ã©" * 200_000,
    "suspects apart": "é      " * 300_000,
    "controls": "\x01" * 2_000_000,
    "joiners": "\u200c" * 2_000_000,
    "spaces": " " * 5_000_000 + "x",
    "space lines": " \n" * 200_000,
    "newlines": "\n" * 5_000_000 + "x",
    "nbsp": "\u00a0" * 2_000_000 + "x",
    "surrogates": "\ud800" * 1_000_000,
    "menu": "Home\n" * 50_000,
    "digits": "copyright 2020 " * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE_TEXT)
def test_no_text_takes_long(name):
    start = time.process_time()
    clean(HOSTILE_TEXT[name], boilerplate="all")
    assert time.process_time() - start < SLACK_S + 10 * NORMAL_S_PER_CHARACTER * len(HOSTILE_TEXT[name])


# -------------------------------------------------------------------------------------------------------------- characters


@pytest.mark.parametrize(
    "text, wanted, kinds",
    [
        ("a\r\nb\rc\x0bd\x0ce\u2028f\u2029g\u0085h", "a\nb\nc\nd\ne\nf\ng\nh", {}),
        ("a\0\x1b[1mb\x7f\x9fc", "a[1mbc", {"control": 4}),
        ("a\tb", "a\tb", {}),
        ("\ufeffsoft\u00adly zero\u200bwidth\u2060", "softly zerowidth", {"zero_width": 4}),
        ("\u202eevil\u202c \u2066x\u2069\u200e", "evil x", {"bidi": 5}),
        ("a\u00a0b\u2009c\u3000d", "a b c\u3000d", {"space": 2}),
        ("if a:\n\u00a0\u00a0\u00a0 b", "if a:\n    b", {"space": 3}),  # as wide as before
        ("a\ud800b", "a\ufffdb", {"surrogate": 1}),
        ("x\U000e0041\U000e0042\ufdd0\ufffc", "x", {"tag": 2, "noncharacter": 2}),
        ("می\u200cخواهم", "می\u200cخواهم", {}),  # Persian needs it
        ("क्\u200dष", "क्\u200dष", {}),  # and Hindi
        ("\U0001f469\u200d\U0001f467 \u2764\ufe0f\u200d\U0001f525", "\U0001f469\u200d\U0001f467 \u2764\ufe0f\u200d\U0001f525", {}),
        ("pass\u200c\u200dword", "password", {"joiner": 2}),
        ("e\u0301 \u212b \u1100\u1161", "é Å 가", {}),
        ("ﬁ ² ①", "ﬁ ² ①", {}),  # NFC, not NFKC
        ("", "", {}),
    ],
)  # fmt: skip
def test_characters(text, wanted, kinds):
    tally = Tally()
    assert clean_text(text, tally, mend=False) == wanted
    assert dict(tally.counts["characters"]) == kinds
    assert clean_text(wanted, tally) == wanted  # nothing is left to do
    document = clean("x" + text + "x")
    assert document.text == tidy(clean_text("x" + text + "x", Tally()))


def test_the_quick_look_misses_nothing():
    characters = "".join(map(chr, range(0x10000))).replace("\u200c", " \u200c")
    for pattern in (LINE_ENDS, *(pattern for pattern, _ in KINDS.values())):
        runs = pattern.findall(characters)
        assert "\n" not in runs and all(UNCLEAN.search(sign) for run in runs for sign in run)


def test_marks_in_a_row_are_cut():
    tally = Tally()
    zalgo = "a" + "\u0316\u0301" * 100 + "b"
    text = clean_text(zalgo, tally)
    assert text.endswith("b") and sum(unicodedata.combining(c) > 0 for c in unicodedata.normalize("NFD", text)) == 30
    assert tally.counts["characters"] == {"marks_in_a_row": 1}
    tibetan = "བསྒྲུབས་" * 50 + "ก็ที่นี่" * 50
    assert clean_text(tibetan, Tally()) == unicodedata.normalize("NFC", tibetan)


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("l’été à la plage".encode().decode("cp1252"), "l’été à la plage"),
        ("Ã¼ber FlÃ¼sse", "über Flüsse"),
        ("Привет, мир".encode().decode("latin-1"), "Привет, мир"),
        ("l’humanitÃ©", "l’humanité"),
        ("It\x92s", "It’s"),
    ],
)
def test_wrong_decodings_are_mended(wrong, right):
    tally = Tally()
    assert mend_lines("fine\n" + wrong + "\nÅngström, naïve", tally) == "fine\n" + right + "\nÅngström, naïve"
    assert tally.counts["mended"] == {"lines": 1}
    assert clean(wrong).text == right and clean(wrong, fix_encoding=False).text != right


def test_right_text_is_not_mended():
    for text in ("Œuvre d’Été – «çà»", "ÅÄÖ åäö", "Привет", "東京", "£5 ± 3°", "naïve café", "a ² b", "ŠŽ šž", "ÉTÉ"):
        assert mend_lines(text, Tally()) == text


def test_what_ftfy_is_shown_is_all_that_it_finds_bad():
    from ftfy.badness import MOJIBAKE_CATEGORIES, is_bad

    signs = "".join(MOJIBAKE_CATEGORIES.values()).replace("-", "") + "aZ .,Ђўâà‚≈"
    rng, bad = random.Random(0), 0
    for _ in range(10_000):
        text = "x " + "".join(rng.choices("abc é", k=rng.randrange(12))) + "".join(rng.choices(signs, k=4)) + "yz"
        bad += is_bad(text)
        assert not is_bad(text) or is_bad(around(text)), text
    assert bad > 2000


def test_white_space():
    assert tidy("a\n\n\n\nb") == tidy("a\n\n\nb") == "a\n\n\nb"
    assert tidy("\n\n  a  \n\t \n\n\n\n    b\t\n\n\nc   d\n ") == "  a\n\n\n    b\n\n\nc   d"
    assert clean("\n    indented\n\tcode()\n").text == "    indented\n\tcode()"


# -------------------------------------------------------------------------------------------------------------------- code

CODE = "\ufeffdef f():\r\n\treturn '\u00a0\u200b\x0c'  \r\n\r\n\r\n\r\n\r\n# Ã© \ud800\rx\n"


def test_code_survives():
    wanted = CODE.replace("\r\n", "\n").replace("\r", "\n")
    assert clean(CODE, code=True).text == wanted and clean(CODE, source="c", code_sources=("c",)).text == wanted
    assert clean(CODE, source="web", code_sources=("c",)).text != wanted
    assert clean(" \n", code=True) == "empty"
    document = Document("d", "x = 1\n", "s", {})
    assert next(run(Clean(code=True), [document], Counts("clean"))).text is document.text


# ------------------------------------------------------------------------------------------------------------- boilerplate


@pytest.mark.parametrize(
    "rule, lines",
    [
        ("skip", ["Skip to content", "Zum Inhalt springen", "Jump to navigation, search"]),
        ("cookies", ["We use cookies to give you the best experience.", "Accept all cookies", "Cookie policy"]),
        ("cookies", ["By continuing to use this website you agree to our use of cookies."]),
        ("share", ["Share this", "Share on Facebook", "Tweet", "Follow us on Instagram", "Email this article"]),
        ("copyright", ["© 2020 Example Inc. All rights reserved.", "Copyright (c) 2011-2014 Foo", "(C) 2003 bar"]),
        ("copyright", ["Foo and Sons, all rights reserved", "Alle Rechte vorbehalten."]),
        ("login", ["Log in", "Sign up / Log in", "Forgot your password?", "Create an account"]),
        ("comments", ["Leave a comment", "3 Comments", "No comments yet", "Reply"]),
        ("pages", ["« Previous page", "Next »", "Older posts", "Page 2 of 10"]),
        (
            "newsletter",
            ["Subscribe to our newsletter", "Sign up for our weekly newsletter!", "Enter your email address"],
        ),
        (
            "script",
            ["Please enable JavaScript to view the comments.", "JavaScript is disabled in your browser.", "Loading…"],
        ),
        ("more", ["Read more", "Continue reading The story of my life", "Click here to download", "» Read more »"]),
        ("top", ["Back to top", "Return to the top of this page ↑"]),
        ("menu", ["Main menu", "Toggle navigation", "Related posts"]),
        ("path", ["Home > Products > Shoes", "You are here: Home » News"]),
        ("legal", ["Privacy Policy", "Terms of Service", "Powered by WordPress", "Impressum"]),
    ],
)
def test_rules(rule, lines):
    for line in lines:
        assert rule_of(line) == rule and rule_of(f"  • {line} ") == rule, line
    assert set(RULE.groupindex) >= {rule}


@pytest.mark.parametrize(
    "line",
    [
        "", "The home page of the project is on the web.", "I read more than I write.", "Next, we add the eggs.",
        "Share this recipe with a cup of tea and a friend who has time.", "Copyright law protects the author.",
        "He wanted to go back to the top of the mountain before night fell.", "The first comment was kind.",
        "He said: log in now, or lose it all.", "home = path / 'x'", "print(x)", "search(pattern, text)", "<div>",
        "Previous work has shown that this holds.", "a > b > c", "We use cookies" + " and bake them in the oven" * 8,
        "3.5", "- 12", "* * *", "Contact the author for the data.", "Subscribe to new mailbox.",
    ],
)  # fmt: skip
def test_prose_stays(line):
    assert rule_of(line) is None


def test_how_long_a_line_may_be_that_goes():
    """160 characters where a word of the rules is rare, 60 elsewhere."""
    for line, length in (("We use cookies on this page, ", 160), ("Subscribe to our ", 60)):
        assert rule_of(line + "x" * (length - len(line))) and not rule_of(line + "x" * (length - len(line) + 1))


def test_menus():
    menu = "\n".join(
        ["Home Kitchen", "Garden", "Toys & Games", "Books", "Music", "Log in", "Shoes", "Women's Fashion", "Baby"]
    )
    text, tally = tallied(remove_boilerplate, f"{PROSE}\n{menu}\n\n{PROSE}", 8)
    assert text == f"{PROSE}\n\n{PROSE}" and tally == {"boilerplate_lines": {"login": 1, "menu_entry": 8}}
    for kept in (
        menu.replace("Log in\n", "").replace("Books\n", ""),  # too few
        menu.replace("Log in", "Logs").lower(),  # a list of words
        menu.replace("Log in", "Logs").replace("\n", "\n  "),  # indented
        menu.replace("Log in", "Logs").replace("\n", ",\n"),  # verse, enumerations
    ):
        assert tallied(remove_boilerplate, kept, 8) == (kept, {})
    assert tallied(remove_boilerplate, menu.replace("Log in", "Logs"), 0)[1] == {}


def test_boilerplate_goes_from_what_came_from_the_web():
    text = f"Log in\n{PROSE}"
    assert clean(text, meta={"url": "u"}).text == PROSE.strip() and clean(text).text == text.strip()
    assert clean(text, boilerplate="all").text == PROSE.strip()
    assert clean(text, meta={"url": "u"}, boilerplate="none").text == text.strip()
    assert clean(text, meta={"url": None}).text == text.strip()  # a column that other rows fill
    assert clean("Log in\nRead more", meta={"url": "u"}) == "empty"


@pytest.mark.parametrize("options", [{"max_html_characters": 0}, {"menu_lines": -1}, {"menu_lines": 1}])
def test_impossible_options(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Clean(**options)


def test_a_missing_extractor_is_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Clean().files() == ()
    with pytest.raises(UserError, match="pip install trafilatura lxml_html_clean"):
        Clean(extractor="trafilatura").files()
