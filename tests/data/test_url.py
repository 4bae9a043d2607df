"""Url: blocked domains and their subdomains, blocked pages, words; everything else is kept."""

import gzip
import time
import tracemalloc

import pytest

from lmjax.data.document import Document
from lmjax.data.stage import Counts, run
from lmjax.data.url import Url, members, split_url
from lmjax.errors import UserError

LIST = """# adult sites
bad.example
0.0.0.0 tracker.example   # of a hosts file
WWW.Upper.Example
news.example/ads/page?x=1
http://scheme.example/
||adblock.example^
xn--mnchen-3ya.example

! a comment
"""


def judge(*urls, **options):
    """The urls that are kept, and the reasons of those that are not."""
    documents = [Document(f"{i}", "text", "web", {"url": url} if url is not None else {}) for i, url in enumerate(urls)]
    losses = {}
    counts = Counts("url", lambda loss, document: losses.update({urls[int(loss.id)]: (loss.reason, loss.detail)}))
    return [document.meta.get("url") for document in run(Url(**options), documents, counts)], losses, counts


@pytest.mark.parametrize("pack", [None, gzip.compress])
def test_lists(tmp_path, pack):
    path = tmp_path / ("list.txt" if pack is None else "list.txt.gz")
    path.write_bytes((pack or bytes)(LIST.encode()))
    blocked = [
        "http://bad.example/", "https://www.bad.example/x", "https://a.b.BAD.example:8080/x?y#z", "//bad.example/x", "bad.example",
        "http://user:secret@bad.example/", "http://bad.example./", "http://tracker.example", "http://upper.example",
        "https://news.example/ads/page?x=1", "http://www.news.example/ads/page/?x=1#top", "https://scheme.example/a",
        "https://adblock.example", "http://münchen.example/",
    ]  # fmt: skip
    kept = [
        "http://notbad.example/", "http://bad.example.org/", "http://good.example/?u=http://bad.example/", "http://example/",
        "http://news.example/ads/page", "http://news.example/", "http://good.example@news.example/", None, "", "http://[bad",
        "not a url", "http://" + "a." * 500_000 + "example",
    ]  # fmt: skip
    found, losses, counts = judge(*blocked, *kept, lists=(str(path),))
    assert found == kept and set(losses) == set(blocked)
    assert losses["https://a.b.BAD.example:8080/x?y#z"] == ("blocked_domain", "bad.example")
    assert losses["https://news.example/ads/page?x=1"] == ("blocked_page", "news.example/ads/page?x=1")
    assert counts.tally.counts["url"] == {"none": 2, "unreadable": 2}
    assert Url(lists=(str(path),)).files() == (str(path),)


def test_words_and_exceptions():
    urls = [
        "http://a.example/xxx",
        "http://xxx.example/",
        "http://a.example/%78xx",
        "http://b.example/essex",
        "http://c.example/xxx?Casino=1",
    ]
    found, losses, _ = judge(*urls, words=("XXX", "casino"), allow=("xxx.example",))
    assert found == ["http://xxx.example/", "http://b.example/essex"]
    assert losses["http://a.example/%78xx"] == ("blocked_word_in_url", "xxx") and losses[urls[-1]][1] == "casino"
    found, losses, _ = judge("http://a.b.example", "http://c.b.example", domains=("b.example",), allow=("a.b.example",))
    assert found == ["http://a.b.example"]


def test_nothing_is_blocked_by_default():
    assert judge("http://a.example", None, "x")[0] == ["http://a.example", None, "x"]


@pytest.mark.parametrize(
    "url, parts",
    [
        ("https://WWW.Example.org/A/b/?q=1#f", ("example.org", "A/b?q=1")),
        ("example.org/a", ("example.org", "a")),
        ("http://127.0.0.1:80/", ("127.0.0.1", "")),
        ("http://[::1]/x", ("::1", "x")),
        ("http:///x", None),
        ("\ud800", None),
        ("http://" + "é" * 300, None),
    ],
)
def test_splitting(url, parts):
    assert split_url(url) == parts


def test_members_agree_with_a_set():
    entries = {f"{i}.example" for i in range(0, 3000, 3)}
    find = members(iter(sorted(entries)))
    assert all((find([text]) is not None) == (text in entries) for text in (f"{i}.example" for i in range(3000)))
    assert members(iter(()))(["a"]) is None


def test_an_entry_costs_little_memory():
    tracemalloc.start()
    find = members(f"site{i}.example" for i in range(10_000))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 10_000 * 16 and find(["site7.example"]) == "site7.example"


def test_long_urls_take_no_longer_than_they_are_long():
    start = time.process_time()
    judge(
        "http://a.example/" + "a/" * 1_000_000,
        "http://a.example/" + "%" * 1_000_000,
        domains=("b.example",),
        words=("x",),
    )
    assert time.process_time() - start < 3


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match=r"url\.lists: no such file"):
        Url(lists=(str(tmp_path / "none"),)).files()
    for options in ({"words": ("a-b",)}, {"domains": ("",)}, {"allow": ("#",)}):
        with pytest.raises(UserError, match="url"):
            Url(**options)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a.example\n" * 1000)[:-9])
    with pytest.raises(UserError, match="cut short"):
        Url(lists=(str(tmp_path / "a.gz"),)).open(tmp_path)
