"""A disk that fails at any one operation of a save or a resume loses no checkpoint."""

import json
import subprocess
import sys

import pytest

from tests.engine.disk_faults import COMPILER, ROOT

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD of Linux"),
]
DEADLINE_S = 200


def test_a_fault_at_any_operation_loses_no_checkpoint_and_is_one_clear_error(tmp_path):
    """Three saves and a resume; more of them with the program itself."""
    program = [sys.executable, "-m", "tests.engine.disk_faults", str(tmp_path)]
    done = subprocess.run(
        [*program, "--saves", "3", "--resumes", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Faults that are overcome, and faults that are told, of both kinds.
    ends = {"saved", "save failed", "resumed", "resume refused"}
    assert set(found["outcomes"]) == ends and min(found["outcomes"].values()) >= 5
    assert found["faults"] == sum(found["outcomes"].values())
