"""A script for the removed torch Pipe runs with the installing lines added."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "old_script.py"

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.compat]


def test_old_script_trains_under_ddp():
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    accuracy = re.search(r"test accuracy (\d\.\d+)", result.stdout)
    assert accuracy is not None, result.stdout
    assert float(accuracy.group(1)) >= 0.9


def test_old_script_names_nothing_new_but_the_installation():
    lines = SCRIPT.read_text().splitlines()
    ours = [line for line in lines if "pipetransformer" in line]
    assert ours == [
        "import pipetransformer.compat  # new",
        "pipetransformer.compat.install()  # new",
    ]
