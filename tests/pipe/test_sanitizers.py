"""The torch-free engine under the thread, address and undefined sanitizers."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("which", ["thread", "address"])
def test_engine_is_clean_under_sanitizers(which):
    run = subprocess.run(
        [
            "timeout",
            "280",
            str(ROOT / "tools/sanitize.sh"),
            which,
            "200",
            "0",
            "execution",
        ],
        timeout=290,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "200 rounds, 0 failures" in run.stdout
