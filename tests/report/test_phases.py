"""Phases of a change of plan, and the ranges that a profiler sees."""

import pytest
import torch

from pipetransformer.report import Clock, Phases, parts_of
from pipetransformer.report import phases as phases_module


class FakeTime:
    """Stands in for the module `time`; moves only when told to."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(phases_module, "time", fake)
    return fake


def test_inner_phases_are_named_after_both_and_stay_in_the_outer(fake):
    phases = Phases()
    with phases.phase("prepare"):
        fake.now += 1
        with phases.phase("group"):
            fake.now += 2
        with phases.phase("group"):
            fake.now += 4
    with phases.phase("move"):
        fake.now += 8
    assert phases.seconds == {"prepare/group": 6, "prepare": 7, "move": 8}
    assert parts_of(phases.seconds) == {"prepare": {"group": 6}, "move": {}}


def test_a_phase_that_raises_is_timed_and_left(fake):
    phases = Phases()
    with pytest.raises(KeyError), phases.phase("move"), phases.phase("hash"):
        fake.now += 3
        raise KeyError
    with phases.phase("rewire"):
        fake.now += 1
    assert phases.seconds == {"move/hash": 3, "move": 3, "rewire": 1}


def test_a_profiler_sees_phases_and_clock_as_ranges():
    clock, phases = Clock(), Phases()
    with torch.profiler.profile() as profile:
        with clock.phase("transformation"), phases.phase("move"):
            torch.ones(1)
    names = [event.key for event in profile.key_averages()]
    assert "pt::transformation" in names and "pt::move" in names
