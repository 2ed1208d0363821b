"""Under torchrun: a killed worker ends the job; survivors save and say why."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from pipetransformer import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.distributed


def launch(folder, counts, processes=4):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}"]
    command += ["tests/support/train_script.py", str(folder), counts]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def marks(folder, epoch, processes, deadline_s=80):
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


@pytest.mark.parametrize(("counts", "role"), [("0", "standby"), ("0,6", "active")])
def test_killed_worker_ends_the_job_with_peer_failure(counts, role, tmp_path):
    job = launch(tmp_path, counts)
    try:
        found = marks(tmp_path, 2, 4)
        victim = max(rank for rank in found if found[rank][1] == role)
        os.kill(found[victim][0], signal.SIGKILL)
        output, _ = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode != 0
    survivors = [rank for rank in found if rank != victim]
    for rank in survivors:
        assert f"rank {rank} after" in output, output
        assert "peer failure" in (tmp_path / f"end-{rank}").read_text()
    assert checkpoint.newest_valid(tmp_path) is not None
