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
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    active = [True]
    ends = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        ends.append(signal.SIGHUP)

    def reset_in_child() -> None:
        # A forked worker shares the pipe: its signals are not ours.
        if active:
            signal.set_wakeup_fd(-1)
            for number in ends:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset_in_child)
    old_handlers = {number: signal.signal(number, _ignore) for number in ends}
    old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    core.watch_signals(read_fd, old_fd, {int(each): each.name for each in ends})
    try:
        yield
    finally:
        active.clear()
        signal.set_wakeup_fd(old_fd)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        core.unwatch_signals()
        os.close(read_fd)
        os.close(write_fd)


def _ignore(number: int, frame: object) -> None:
    """Handle a signal by doing nothing: the C++ monitor thread acts on it."""
