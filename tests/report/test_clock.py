"""The clock charges every second to exactly one phase."""

import threading
import time

import pytest

from pipetransformer.report import Clock
from pipetransformer.report import clock as clock_module


class FakeTime:
    """Stands in for the module `time`; moves only when told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(clock_module, "time", fake)
    return fake


def test_inner_phases_are_named_after_both_and_taken_out_of_the_outer(fake):
    clock = Clock()
    fake.now += 1
    with clock.phase("forward"):
        fake.now += 2
        with clock.phase("cache_read"):
            fake.now += 4
        fake.now += 8
    fake.now += 16
    assert clock.seconds() == {"other": 17, "forward": 10, "forward/cache_read": 4}
    assert clock.elapsed() == 31


def test_a_phase_that_raises_is_charged_and_left(fake):
    clock = Clock()
    with pytest.raises(KeyError), clock.phase("forward"):
        fake.now += 3
        raise KeyError
    fake.now += 1
    assert clock.seconds() == {"other": 1, "forward": 3}


def test_split_charges_what_came_after_to_an_inner_phase(fake):
    clock = Clock()
    with clock.phase("backward"):
        fake.now += 5
        clock.split("all_reduce", fake.now - 2)
        fake.now += 1
    assert clock.seconds() == {"other": 0, "backward": 4, "backward/all_reduce": 2}


def test_a_wait_is_divided_among_phases_beside_the_open_one(fake):
    clock = Clock()
    with clock.phase("pass"), clock.phase("forward"):
        fake.now += 3  # queues
        began = fake.now
        fake.now += 10
        clock.divide(
            began,
            [("optimizer", began - 1), ("backward", began + 4), ("forward", fake.now)],
        )
        fake.now += 1
    assert clock.seconds() == {
        "other": 0,
        "pass": 0,
        "pass/forward": 3 + 6 + 1,
        "pass/optimizer": 0,
        "pass/backward": 4,
    }
    with clock.phase("forward"):
        began = fake.now
        fake.now += 2
        clock.divide(began, [])
    assert clock.seconds()["forward"] == 2 and clock.elapsed() == 16


@pytest.mark.parametrize(("at", "inner"), [(0.0, 5), (1e9, 0)])
def test_split_stays_within_the_open_phase(fake, at, inner):
    clock = Clock()
    fake.now += 7
    with clock.phase("backward"):
        fake.now += 5
        clock.split("all_reduce", at)
    seconds = clock.seconds()
    assert seconds["backward/all_reduce"] == inner
    assert seconds["backward"] == 5 - inner and seconds["other"] == 7


def test_each_charges_what_making_an_item_takes_and_closes_the_source(fake):
    closed = []

    def source():
        try:
            for item in range(3):
                fake.now += 2
                yield item
        finally:
            closed.append(True)

    clock = Clock()
    for item in clock.each("data", source()):
        fake.now += 10
        if item == 1:
            break
    assert clock.since({}) == {"data": 4, "other": 20}
    assert list(clock.each("data", source())) == [0, 1, 2]
    assert len(closed) == 2


def test_since_gives_what_was_spent_meanwhile(fake):
    clock = Clock()
    fake.now += 1
    before = clock.seconds()
    with clock.phase("evaluate"):
        fake.now += 6
    assert clock.since(before) == {"evaluate": 6}


def test_another_thread_charges_nothing():
    clock = Clock()

    def work():
        with clock.phase("prefix"):
            clock.split("inner", 0.0)
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert set(clock.seconds()) == {"other"}
