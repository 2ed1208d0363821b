"""Ties the life of a process to that of the one that started it (Linux)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent):
    """Be killed by the kernel when process `parent` ends, stopped or not.

    The setting belongs to this process and not to what it forks. The kernel watches
    the thread of the parent that started us: its main thread, see `Ranks`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
