"""Processes of the tests: how they start, what they bring back, that they end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import fork_server
from tests.support.ranks import Ranks, run_ranks

pytestmark = pytest.mark.distributed

DEADLINE_S = 60


def _origin(rank):
    from tests.support.preload import num_threads

    origin = (os.getppid(), num_threads() - 1)  # one waits to dump every stack
    return origin, fork_server.PRELOAD in sys.modules, os.environ["MARK"], rank


def test_ranks_are_forked_from_one_process_and_see_the_callers_environment(monkeypatch):
    monkeypatch.setenv("MARK", "1")
    first = run_ranks(_origin, 2)
    monkeypatch.setenv("MARK", "2")
    second = run_ranks(_origin, 2)
    server, threads = first[0][0]
    assert server != os.getpid() and threads == 1
    expected = [((server, 1), True, mark, rank) for mark in "12" for rank in range(2)]
    assert first + second == expected


def _hash_of_text(rank):
    return hash("text"), os.getppid()


def test_fresh_ranks_are_new_interpreters():
    hashes, parents = zip(*run_ranks(_hash_of_text, 2, fresh=True), strict=True)
    assert hashes[0] != hashes[1] and set(parents) == {os.getpid()}


def _fail(rank, number):
    if rank == 1:
        if number is None:
            raise KeyError("what it is about")
        os.kill(os.getpid(), number)
    return rank


def test_an_error_arrives_with_its_traceback():
    with pytest.raises(AssertionError, match=r"rank 1 failed:\n(.*\n)*KeyError: 'what"):
        run_ranks(_fail, 2, None)


@pytest.mark.parametrize("fresh", [False, True])
def test_death_without_a_result_is_told_with_its_exit_code(fresh):
    with pytest.raises(AssertionError, match="died without a result: {1: -9}"):
        run_ranks(_fail, 2, signal.SIGKILL, fresh=fresh)


def _sleep_forever(rank):
    while True:
        time.sleep(1)


def test_timeout_is_told_with_every_stack():
    ranks = Ranks(_sleep_forever, 2, timeout_s=6.0)
    with pytest.raises(AssertionError) as error, ranks:
        ranks.outcomes()
    assert "ranks [0, 1] gave no result in 6.0 s" in str(error.value)
    assert str(error.value).count("in _sleep_forever") == 2


def test_stopped_rank_is_killed_in_the_end():
    with Ranks(_fail, 2, signal.SIGSTOP, timeout_s=DEADLINE_S) as ranks:
        assert ranks.outcomes([0]) == {0: (True, 0)}
        assert ranks.processes[1].is_alive()
    assert [process.exitcode for process in ranks.processes] == [0, -signal.SIGKILL]
    ranks.kill(1)  # of one that has gone


def _speak(rank):
    os.write(2, b"from the rank\n")


def test_output_of_a_rank_is_that_of_its_test(capfd):
    run_ranks(_speak, 1)
    assert "from the rank" in capfd.readouterr().err


def _report_and_sleep(rank, folder):
    (folder / f"{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rank}.tmp").rename(folder / str(rank))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    _sleep_forever(rank)


SCRIPT = """
import os, pathlib, signal, sys, time
from tests.support.ranks import Ranks
from tests.support.test_ranks import _report_and_sleep

started = []
for name in ("forked", "fresh"):
    folder = pathlib.Path(sys.argv[1], name)
    folder.mkdir()
    started.append(Ranks(_report_and_sleep, 2, folder, fresh=name == "fresh"))
    while len(list(folder.glob("[01]"))) < 2:
        assert all(process.is_alive() for process in started[-1].processes)
        time.sleep(0.05)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_no_process_outlives_the_one_that_started_it(how, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": str(fork_server.ROOT)},
        timeout=150,
    )
    assert run.returncode == (-signal.SIGKILL if how == "killed" else 0)
    pids = [int(path.read_text()) for path in tmp_path.glob("*/[01]")]
    assert len(pids) == 4
    deadline = time.monotonic() + DEADLINE_S
    while living := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"still alive: {living}"
        time.sleep(0.05)
