"""Runs that are open at once take their signal handlers back in any order."""

import contextlib
import os
import signal

import pytest

from pipetransformer.autodp import ControlPlane, connect
from tests.autodp.world import FAST, until


@pytest.fixture(autouse=True)
def program():
    """Gives the program a handler of its own and a reader of signals, for a while."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    handlers = {
        number: signal.signal(number, action)
        for number, action in (
            (signal.SIGTERM, lambda number, frame: None),
            (signal.SIGHUP, signal.SIG_DFL),
        )
    }
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    own = signal.getsignal(signal.SIGTERM)
    yield own, reader, writer
    signal.set_wakeup_fd(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.close(reader)
    with contextlib.suppress(OSError):  # a test may have closed it
        os.close(writer)


@contextlib.contextmanager
def opened(count):
    """Planes that handle signals, opened one after the other, and their ends."""
    with contextlib.ExitStack() as planes:
        watched = []
        for _ in range(count):
            info, store = connect(FAST)
            plane = ControlPlane(store, info, FAST)
            planes.callback(plane.close)
            ends = contextlib.ExitStack()
            ends.enter_context(plane.termination())
            watched.append((plane, ends))
        yield watched


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def wakeup():
    """Return where signals are written to now."""
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return found


ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS)
def test_what_was_there_before_comes_back_whoever_ends_first(order, program):
    own, _, writer = program
    with opened(0):
        before = descriptors()
    with opened(3) as watched:
        for number in order:
            watched[number][1].close()
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert wakeup() == writer
    assert descriptors() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", range(3))
def test_a_signal_ends_the_runs_that_are_left_and_reaches_the_program(
    first, number, program
):
    _, reader, _ = program
    with opened(3) as watched:
        watched[first][1].close()
        # Where a descriptor of the first one's would be used again.
        others = [os.pipe() for _ in range(4)]
        os.kill(os.getpid(), number)
        left = [plane for at, (plane, _) in enumerate(watched) if at != first]
        for plane in left:
            until(lambda plane=plane: plane.failure is not None)
            assert plane.failure.phase == number.name
        assert watched[first][0].failure is None
        until(lambda: number in read_all(reader))
        for ends in others:
            os.set_blocking(ends[0], False)
            assert read_all(ends[0]) == b"", "a signal was written to it"
        for _, ends in watched:
            ends.close()
        for end in sum(others, ()):
            os.close(end)


def read_all(descriptor):
    try:
        return os.read(descriptor, 99)
    except BlockingIOError:
        return b""


def test_a_reader_of_the_program_that_is_gone_is_not_put_back(program):
    _, _, writer = program
    with opened(1) as watched:
        os.close(writer)
        watched[0][1].close()
        assert wakeup() == -1


def test_a_handler_that_the_program_sets_meanwhile_stays(program):
    def own(number, frame):
        pass

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with opened(1) as watched:
        signal.signal(signal.SIGTERM, own)
        signal.set_wakeup_fd(writer)
        watched[0][1].close()
        assert signal.getsignal(signal.SIGTERM) is own
        assert wakeup() == writer
    signal.set_wakeup_fd(-1)
    os.close(reader)
    os.close(writer)
