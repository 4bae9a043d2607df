"""What a task finds is written in files of bounded size, however small its parts."""

import numpy as np
from linear_time import timed

from lmjax.data import sketches
from lmjax.data.sketches import Outcomes


def outcomes(written, tmp_path):
    return Outcomes(tmp_path, "found", lambda folder, name, block: written.append((name, block.tolist())))


def test_files_are_bounded_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(sketches, "BLOCK_RECORDS", 4)
    written: list = []
    found = outcomes(written, tmp_path)
    for low, high in ((0, 0), (0, 3), (3, 3), (3, 5), (5, 6), (6, 6)):
        found.add(np.arange(low, high))
    assert found.flush() == ["found.0", "found.1"] == found.flush()  # and no file for nothing
    assert written == [("found.0", [0, 1, 2, 3, 4]), ("found.1", [5])]


def test_parts_of_one_or_no_record_take_linear_time(tmp_path):
    def add(count):
        found = outcomes([], tmp_path)
        for i in range(count):
            found.add(np.arange(i % 2))

    few, many = (min(timed(lambda n=n: add(n)) for _ in range(3)) for n in (3000, 12000))
    assert many < 4 * 2.5 * max(few, 0.002)
