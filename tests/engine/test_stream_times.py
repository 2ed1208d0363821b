"""What a device did while the host waited is charged to the phases that it did."""

import time
from unittest import mock

import pytest
import torch

import pipetransformer as pt
from pipetransformer.device import StreamTimes
from tests.engine.scenario import config, make_engine, schedule
from tests.support.device_ranks import MARKS, NODE, pretend
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet


def on_device(test):
    for mark in MARKS:
        test = mark(test)
    return test


class Event:
    """An event of a stream whose times are made up."""

    def __init__(self, ms):
        self.ms = ms

    def elapsed_time(self, later):
        return later.ms - self.ms


def times_of(*marks):
    found = StreamTimes()
    for name, ms in marks:
        found._marks.append((name, Event(ms)))
    return found


STEPS = (
    ("forward", 0.0),
    ("backward", 2000.0),
    ("optimizer", 3000.0),
    ("forward", 7000.0),  # the loss that is waited for
    ("backward", 9000.0),
    ("optimizer", 10000.0),
)


@pytest.mark.parametrize(
    ("waited_s", "parts"),
    [
        (1.0, [("forward", 50.0)]),
        (4.5, [("optimizer", 46.0), ("forward", 50.0)]),
        (6.5, [("backward", 45.0), ("optimizer", 46.0), ("forward", 50.0)]),
        (60.0, [("backward", 45.0), ("optimizer", 46.0), ("forward", 50.0)]),
    ],
)
def test_a_wait_goes_back_over_the_phases_that_it_covers(waited_s, parts):
    times = times_of(*STEPS)
    assert times.parts("forward", 50.0 - waited_s, 50.0) == parts
    # What is queued behind the loss is the next wait's.
    later = times.parts("optimizer", 0.0, 60.0)
    assert later == [("backward", 59.0), ("optimizer", 60.0)]


def test_nothing_is_known_of_the_first_wait_and_of_the_host():
    assert times_of(*STEPS[:1]).parts("forward", 0.0, 1.0) == []
    assert times_of(*STEPS[:3]).parts("forward", 0.0, 1.0) == []
    times = StreamTimes()
    times.mark("optimizer")
    times.mark("forward", torch.device("cpu"))
    times.mark("backward")
    assert times.parts("forward", 0.0, 1.0) == []


def check_phases(_rank, libraries, replicas):
    """Let reads of a loss last; return what the waits were charged to, and the time."""
    fake = pretend(libraries)
    seen, parts = [], StreamTimes.parts

    def slow(times, phase, began, ended):
        time.sleep(0.05)  # stands for the wait
        found = parts(times, phase, 0.0, ended)
        seen.append([name for name, _ in found])
        # Of the wait the device was in the optimizer's step.
        return [("optimizer", time.perf_counter()), *found[-1:]] if found else []

    settings = config(
        devices=NODE[:2],
        plan=pt.PlanConfig(num_stages=1, num_microbatches=1, replicas="all"),
    )
    engine = make_engine(freeze=schedule(0), config=settings)
    with engine, mock.patch.object(StreamTimes, "parts", slow):
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(96), 12):
                engine.step(batch)
    spent = engine.history.epochs[-1].phase_seconds
    optimizer = sum(s for name, s in spent.items() if name.endswith("optimizer"))
    whole = engine.history.epochs[-1].seconds
    return seen, optimizer, sum(spent.values()), whole, fake.violations()


@on_device
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_on_a_device_charges_waits_to_what_the_device_did(libraries, replicas):
    for seen, optimizer, spent, whole, found in run_ranks(
        check_phases, replicas, libraries, replicas
    ):
        steady = ["backward", "optimizer", "forward"]
        assert seen[0] == [] and steady in seen[1:]
        assert set(map(tuple, seen[2:])) == {tuple(steady)}
        assert optimizer > 0.05 * (len(seen) - 2)
        assert spent <= whole * 1.001
        assert found == []
