"""Turns SIGTERM and SIGHUP into the failure of the run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

from pipetransformer import _C

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def termination(core: _C.autodp.ControlPlane) -> Iterator[None]:
    """Fail the run of `core` when SIGTERM or SIGHUP arrives while the body runs.

    Launchers send SIGTERM to all ranks when one has died, a terminal that is closed
    and a connection that is dropped send SIGHUP. SIGHUP is left alone where it has
    another action than to end the process: ignored, as under ``nohup``, or handled by
    the program.

    Python's own handler would wait until the main thread is back in Python, which a
    blocked collective never is. So the signal goes through Python's wakeup descriptor
    to a C++ thread, which fails the run at once: waits and collectives raise
    `PeerFailure`. Nothing is raised from inside a handler. Signals that another reader
    of the descriptor waits for are passed on to it.

    Does nothing outside of the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        logger.debug("not in the main thread: signals keep their handlers")
        yield
        return
    watch = _Watch(core)
    try:
        yield
    finally:
        watch.end()


class _Watch:
    """One run's handler of the signals, on top of what was there before.

    Runs that are open at once may end in any order: each takes itself out from between
    the one above it and what is below. As the handler that Python calls it does
    nothing: the C++ monitor thread acts.
    """

    def __init__(self, core: _C.autodp.ControlPlane) -> None:
        self._core = core
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._active = active = [True]
        ends = [signal.SIGTERM]
        hangup = signal.getsignal(signal.SIGHUP)
        if hangup is signal.SIG_DFL or isinstance(hangup, _Watch):
            ends.append(signal.SIGHUP)

        def reset_in_child() -> None:  # stays for good, and must not hold the run
            # A forked worker shares the pipe: its signals are not ours.
            if active:
                signal.set_wakeup_fd(-1)
                for number in ends:
                    signal.signal(number, signal.SIG_DFL)

        os.register_at_fork(after_in_child=reset_in_child)
        self._below = {number: signal.signal(number, self) for number in ends}
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._pass_on_to(self._old_fd)

    def __call__(self, number: int, frame: object) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Put back what was there before, as far as that is still this run's to do."""
        self._active.clear()
        above = self._above(signal.SIGTERM)
        if above is None:
            current = _wake(self._old_fd)
            if current != self._write_fd:
                _wake(current)  # the program's own
        elif above._old_fd == self._write_fd:
            above._pass_on_to(self._old_fd)
        for number, below in self._below.items():
            if signal.getsignal(number) is self:
                signal.signal(number, below)
            elif (other := self._above(number)) is not None:
                other._below[number] = below
        self._core.unwatch_signals()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _above(self, number: signal.Signals) -> _Watch | None:
        """Return the run that was opened after this one and has its handler below."""
        current = signal.getsignal(number)
        while isinstance(current, _Watch):
            below = current._below.get(number)
            if below is self:
                return current
            current = below
        return None

    def _pass_on_to(self, descriptor: int) -> None:
        self._old_fd = descriptor
        ends = {int(number): number.name for number in self._below}
        self._core.watch_signals(self._read_fd, descriptor, ends)


def _wake(descriptor: int) -> int:
    """Let signals be written to a descriptor; return where they were until now."""
    try:
        return signal.set_wakeup_fd(descriptor)
    except (OSError, ValueError) as error:
        logger.debug("nobody reads signals at %d any more: %s", descriptor, error)
        return signal.set_wakeup_fd(-1)
