"""A run that hangs is ended in time, and the right process is named."""

import json
import threading
import time

from lmjax.monitor.watchdog import PATIENCE, Watchdog


class Cluster:
    """What some processes told: (index → (passed, step, place)), and whether each still tells."""

    def __init__(self, index, places, frozen=(), silent=False):
        self.index, self.count = index, len(places)
        self.places, self.frozen, self.silent, self.beat = places, frozen, silent, 0

    def publish(self, value):
        if self.silent:
            threading.Event().wait(60)

    def published(self):
        self.beat += 1
        return {
            index: json.dumps(
                {"passed": passed, "step": step, "place": place, "host": f"h{index}"}
                | {"beat": 0 if index in self.frozen else self.beat}
            )
            for index, (passed, step, place) in enumerate(self.places)
        }


def message(peers=None, place="step", hang_after_s=0.4):
    """What a watchdog says that sees no movement."""
    said = []
    with Watchdog(hang_after_s, peers, lambda: 5, said.append) as watchdog:
        watchdog.at(7, place)
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    return said[0] if said else None


def test_a_single_process():
    said = message()
    assert said.startswith("step 7 hangs: step 7 has not ended for") and "config.monitor.hang_after_s" in said
    assert said.endswith("; the last checkpoint is that of step 5") and "\n" not in said
    assert "waiting for the batch of step 7 has not ended" in message(place="batch")


def test_the_process_that_is_behind_is_named():
    places = [(9, 7, "step"), (8, 7, "batch"), (9, 7, "step")]
    assert "process 1 on h1 came only to the batch of step 7" in message(Cluster(0, places))
    assert "process 1 on h1 came only" in message(Cluster(1, places))  # by itself, too


def test_a_process_that_is_frozen_is_named():
    places = [(9, 7, "step")] * 3
    assert "process 2 on h2 does not answer" in message(Cluster(0, places, frozen=[2]))
    assert "process 0, the coordinator, does not answer" in message(Cluster(1, places, silent=True))


def test_nobody_is_blamed_where_all_stand_at_one_place():
    assert "all processes stand at the same place" in message(Cluster(0, [(9, 7, "step")] * 2))


def test_movement_keeps_it_quiet_and_slow_places_have_longer():
    said = []
    with Watchdog(0.3, None, end=said.append) as watchdog:
        for step in range(10):
            watchdog.at(step, "step")
            time.sleep(0.06)
        watchdog.at(10, "saving")
        time.sleep(0.3 * PATIENCE / 2)
        assert not said
    assert not [thread for thread in watchdog.threads if (thread.join(1), thread.is_alive())[1]]
    with Watchdog(None, end=said.append) as watchdog:
        watchdog.at(0, "step")
    assert not said


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """Ctrl-Z, or a laptop that slept: the clock leaps, the run goes on."""
    from lmjax.monitor import watchdog as module

    said, leap = [], [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda real=time.monotonic: real() + leap[0])
    with Watchdog(2.0, None, end=said.append) as watchdog:
        watchdog.at(0, "step")
        leap[0] += 100.0
        time.sleep(0.5)
        assert not said and watchdog.idle_s < 2.0
