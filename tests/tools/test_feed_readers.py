"""The C++ that reads bytes and numbers of others, fed under the address sanitizer."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_readers_are_clean_under_the_address_sanitizer():
    run = subprocess.run(
        [
            "timeout",
            "280",
            str(ROOT / "tools/sanitize.sh"),
            "address",
            "300",
            "0",
            "readers",
        ],
        timeout=290,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    found = re.search(r"^300 rounds, (\d+) planned, 0 failures$", run.stdout, re.M)
    assert found is not None, run.stdout[-4000:]
    assert int(found[1]) > 30  # most numbers are refused
