"""Whether a stage takes four times as long for a text four times as long, and not sixteen times."""

import time
from collections.abc import Callable

from lmjax.data.document import Document
from lmjax.data.stage import Apply, Tally


def assert_linear(apply: Apply, piece: str, characters: int) -> None:
    """Over a text of one piece over and over; the best of three, so that other load does not count."""

    def seconds(length: int) -> float:
        return min(timed(lambda: apply(Document("d", piece * (length // len(piece)), "s"), Tally())) for _ in range(3))

    assert seconds(4 * characters) < 4 * 2.5 * max(seconds(characters), 0.002)


def timed(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start
