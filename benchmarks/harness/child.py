"""Runs a command to its end, with a deadline, and times its whole process tree."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import struct_rusage

from harness.timing import Sample

KILL_DEADLINE_S = 10.0
LOG_TAIL_LINES = 20
# The machine's busy time is counted in ticks, mostly of 10 ms.
MIN_TICKED_S = 1.0


class RunFailed(RuntimeError):
    """A child process failed or ran past its deadline."""


def run_child(
    command: Sequence[str],
    *,
    timeout_s: float,
    log: Path,
    env: Mapping[str, str] | None = None,
) -> Sample:
    """Run a command to its end and time its whole process tree.

    The time includes the start of the process. Whatever the command started and left
    behind is killed, also on timeout and on an exception here.

    Args:
        command: Program and arguments.
        timeout_s: Seconds after which the tree is killed.
        log: File that receives stdout and stderr.
        env: The whole environment; None inherits this one.

    Raises:
        RunFailed: exit status other than 0, or timeout; ends with the log's tail.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    busy = machine_busy_s()
    start = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    try:
        in_time = _wait_for_exit(process.pid, timeout_s)
        wall_s = time.perf_counter() - start
    finally:
        usage = _end_tree(process)
    if not in_time or process.returncode != 0:
        got = f"status {process.returncode}" if in_time else "no end; killed"
        raise RunFailed(
            f"{' '.join(command)}: expected status 0 within {timeout_s:g} s, got {got};"
            f" end of {log}:\n{_tail(log)}"
        )
    cpu_s = usage.ru_utime + usage.ru_stime
    return Sample(wall_s, cpu_s, foreign_cpu_s(busy, machine_busy_s(), wall_s, cpu_s))


def foreign_cpu_s(
    busy_before: float | None, busy_after: float | None, wall_s: float, cpu_s: float
) -> float | None:
    """CPU seconds of the machine that went to others during a run of ours.

    None where the machine does not count them, where the run is too short for its
    ticks, and where the count misses our own time. In a container that sees only
    itself in /proc/stat the others look idle.
    """
    if busy_before is None or busy_after is None or wall_s < MIN_TICKED_S:
        return None
    foreign_s = busy_after - busy_before - cpu_s
    return max(0.0, foreign_s) if foreign_s > -0.1 * cpu_s else None


def machine_busy_s() -> float | None:
    """CPU seconds used on this machine since its start, stolen ones included."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
    except FileNotFoundError:
        return None
    # user (with guest), nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(field) for field in line.split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Whether the child ended in time; does not reap it."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def _end_tree(process: subprocess.Popen[bytes]) -> struct_rusage:
    """Kill what is left of a child's process tree, reap the child, return its usage.

    Launchers give their workers sessions of their own, so the child's group alone is
    not the tree. The child is reaped last: until then its id cannot be reused.
    """
    groups = {process.pid}
    for pid in _descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            groups.add(os.getpgid(pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    if not _wait_for_exit(process.pid, KILL_DEADLINE_S):
        raise RuntimeError(
            f"process {process.pid}: expected to end within {KILL_DEADLINE_S:g} s "
            "of SIGKILL, got no end"
        )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def _descendants(root: int) -> list[int]:
    """Ids of the living processes below one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # pid (name, which may hold spaces and brackets) state parent ...
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, open_ends = [], [root]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        found += below
        open_ends += below
    return found


def cpu_of_descendants_s(root: int) -> float:
    """CPU seconds of the living processes below one, and of those they reaped."""
    ticks = 0
    for pid in _descendants(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # pid (name) state ...; fields 14 to 17: own and children's time
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _tail(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
