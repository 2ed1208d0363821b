"""Starts the process that ranks are forked from, once per test session.

A new interpreter imports torch for seconds, and DistributedDataParallel and the
optimizers for seconds more; a fork of a process that has done so does not. The
server ends with the process that started it, and its children end with the server.
"""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import sys
from multiprocessing import forkserver

ROOT = pathlib.Path(__file__).parents[2]
PRELOAD = "tests.support.preload"
# Read while modules are imported: threads that they start would not survive a fork.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
READY_S = 200


@contextlib.contextmanager
def _environment(**values):
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check():
    """Run in the first child: a server without its modules would only be slow."""
    sys.exit(0 if PRELOAD in sys.modules else 7)


@functools.cache
def context():
    """Return the multiprocessing context whose processes are forked by the server.

    Raises:
        RuntimeError: The server does not fork, or could not import its modules.
    """
    multiprocessing.set_forkserver_preload([PRELOAD])
    made = multiprocessing.get_context("forkserver")
    with _environment(**ENVIRONMENT):
        forkserver.ensure_running()
    first = made.Process(target=_check, daemon=True)
    first.start()
    first.join(READY_S)
    if first.exitcode != 0:
        first.kill()
        raise RuntimeError(
            f"fork server: expected a child with {PRELOAD}, got exit code "
            f"{first.exitcode}"
        )
    return made
