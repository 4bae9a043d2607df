"""Documents: what is drawn for one depends on it alone."""

from lmjax.data.document import draw


def test_draw_is_uniform_stable_and_independent():
    values = [draw(f"text {i}", "split", 0) for i in range(4000)]
    assert all(0 <= value < 1 for value in values) and abs(sum(values) / 4000 - 0.5) < 0.02
    assert values[0] == draw("text 0", "split", 0) and draw("\ud800", "split", 0) != draw("\ud801", "split", 0)
    other = [draw(f"text {i}", "sample", 0) for i in range(4000)]
    seeded = [draw(f"text {i}", "split", 1) for i in range(4000)]
    for drawn in (other, seeded):
        both = sum(a < 0.5 and b < 0.5 for a, b in zip(values, drawn, strict=True))
        assert abs(both / 4000 - 0.25) < 0.03
