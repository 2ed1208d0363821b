"""The threads of the control plane and of guarded groups under the thread sanitizer."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_plane_has_no_data_races():
    run = subprocess.run(
        [
            "timeout",
            "280",
            str(ROOT / "tools/sanitize.sh"),
            "thread",
            "150",
            "0",
            "plane",
        ],
        timeout=290,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert re.search(r"^6 rounds, \d+ recoveries, .* 0 failures$", run.stdout, re.M)
