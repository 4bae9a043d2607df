"""The index of items against comparing all windows with all windows, and what reads alike."""

import random

from lmjax.data.overlap import Item, build_index, content_words, word_spans


def brute(items: list[list[str]], words: list[str], n: int) -> dict[int, str]:
    """What the index must find, by comparing all windows with all windows."""
    found = {}
    windows = {width: {tuple(words[i : i + width]) for i in range(len(words) - width + 1)} for width in range(1, 30)}
    for number, item in enumerate(items):
        width = min(n, len(item))
        grams = {tuple(item[i : i + width]) for i in range(len(item) - width + 1)}
        if tuple(item) in windows[len(item)]:
            found[number] = "exact"
        elif grams & windows[width]:
            found[number] = "ngram"
    return found


def test_agrees_with_comparing_all_windows():
    """Of few words, so that items repeat themselves and share windows."""
    rng = random.Random(0)
    items = [rng.choices("abcd", k=rng.randint(3, 20)) for _ in range(60)]
    index = build_index([Item("b", str(i), (tuple(item),)) for i, item in enumerate(items)], 7, 3, 1000)
    kinds = set()
    for _ in range(300):
        words = rng.choices("abcde", k=rng.randint(0, 60))
        if rng.random() < 0.3:
            words += rng.choice(items)
        found = index.search(", ".join(words).upper()).items
        assert found == brute(items, words, 7)
        kinds |= set(found.values())
    assert kinds == {"exact", "ngram"}


def test_what_reads_alike_is_alike():
    assert content_words("Don’t STOP — straße, con\u00adtent!") == ["don't", "stop", "strasse", "content"]
    text = "Ça va?  “Don’t”  日本 ไทย x\ud800y ﬁn\n\n_ __init__ …"
    spans = word_spans(text)
    words = [text[a:b] for a, b in spans.tolist()]
    assert [word for original in words for word in content_words(original)] == content_words(text)
    assert len(spans) == len(content_words(text))
