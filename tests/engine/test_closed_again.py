"""An engine is left once, and in any order with others that are open."""

import contextlib
import signal

import pytest

import pipetransformer as pt
from tests.engine.scenario import make_engine, schedule
from tests.support.toy import ToySet


class Ends(pt.report.Callback):
    """Counts the ends that it is told of."""

    def __init__(self):
        self.count = 0

    def on_end(self, history):
        self.count += 1


def train(engine):
    for _ in engine.epochs(1):
        for batch in engine.batches(ToySet(24), 12):
            engine.step(batch)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_is_left_again_stays_as_it_is(fails):
    ends = Ends()
    engine = make_engine(freeze=schedule(0), callbacks=[ends])
    with contextlib.suppress(KeyError), engine:
        train(engine)
        if fails:
            raise KeyError("x")
    told = engine.history.to_json()
    engine.__exit__(None, None, None)
    engine.__exit__(KeyError, KeyError("y"), None)
    assert engine.history.to_json() == told
    assert ends.count == 1


def test_engines_that_are_open_at_once_are_left_in_the_order_of_opening():
    before = signal.getsignal(signal.SIGTERM)
    first, second = (make_engine(freeze=schedule(0)) for _ in range(2))
    first.__enter__()
    second.__enter__()
    train(first)
    first.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is not before, "the second one is open"
    train(second)
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before
