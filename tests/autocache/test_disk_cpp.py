"""Builds and runs the torch-free tests of the disk tier under sanitizers."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_disk_tier_tears_nothing_and_survives_its_writers(sanitizer, tmp_path):
    run = subprocess.run(
        [
            "timeout",
            "280",
            str(ROOT / "tools/sanitize.sh"),
            sanitizer,
            "30",
            "0",
            "disk",
        ],
        timeout=290,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert re.search(r"^300 rounds, 0 failures$", run.stdout, re.M)
