"""Under torchrun: a killed worker ends the job; survivors save and say why."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from pipetransformer.checkpoint import format as checkpoint
from tests.support import restart_script
from tests.support.ranks import run_ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.distributed


def launch(script, *arguments, processes, max_restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}"]
    command += [f"tests/support/{script}", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def marks(folder, epoch, processes, deadline_s=110):
    """Wait until every rank is in `epoch`; return {rank: (pid, role)}."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = {}
        for rank in range(processes):
            path = folder / f"rank-{rank}"
            if path.exists():
                pid, at, role, _ = path.read_text().split()
                if int(at) >= epoch:
                    found[rank] = (int(pid), role)
        if len(found) == processes:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not every rank reached epoch {epoch}")


def stop(job):
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize(("counts", "role"), [("0", "standby"), ("0,6", "active")])
def test_killed_worker_ends_the_job_with_peer_failure(counts, role, tmp_path):
    job = launch("train_script.py", tmp_path, counts, processes=4)
    try:
        found = marks(tmp_path, 2, 4)
        victim = max(rank for rank in found if found[rank][1] == role)
        os.kill(found[victim][0], signal.SIGKILL)
        output, _ = job.communicate(timeout=100)
    finally:
        stop(job)
    assert job.returncode != 0
    survivors = [rank for rank in found if rank != victim]
    for rank in survivors:
        # What the script says after the block may be cut off by torchrun's SIGTERM.
        assert f"rank {rank} ends: peer failure" in output, output
    assert checkpoint.newest_valid(tmp_path) is not None


@pytest.mark.timeout(220)  # two jobs, one after the other
def test_restarted_job_resumes_and_ends_as_if_nothing_had_happened(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        (folder / "checkpoints").mkdir(parents=True)
    assert run_ranks(restart_script.train, 2, whole) == ["finished"] * 2
    victim, step = 1, 7  # in the middle of the second pass
    job = launch("restart_script.py", part, victim, step, processes=2, max_restarts=1)
    try:
        output, _ = job.communicate(timeout=100)
    finally:
        stop(job)
    assert job.returncode == 0, output
    assert (part / "killed").read_text() == str(step)
    assert "step-0000000099.pt: expected a complete file" in output, "skipped silently"
    ids = {epoch: [] for epoch in range(restart_script.EPOCHS)}
    for rank in range(2):
        expected, found = (restart_script.logged(f, rank) for f in (whole, part))
        assert found == expected  # ids and losses, bit by bit
        for at, (batch, _) in found.items():
            ids[at // restart_script.STEPS] += batch
    steps = restart_script.EPOCHS * restart_script.STEPS
    done = (part / "log-0").read_text().count("\n")
    assert done <= steps + 1, "resumed from step 7, or 6 at the earliest"
    everyone = list(range(restart_script.SAMPLES))
    assert all(sorted(seen) == everyone for seen in ids.values())
