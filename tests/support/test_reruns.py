"""Second tries of the whole suite are named, and few."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Each fails once per process, as a test does whose ranks were starved.
FLAKY = """
import pytest
tried = set()

@pytest.mark.distributed
@pytest.mark.parametrize("number", range({}))
def test_starved(number):
    if number not in tried:
        tried.add(number)
        raise TimeoutError("no heartbeat")

def test_of_one_process():
    assert {}
"""


def run_suite(folder, *, flaky, rerun="1", sound=True):
    path = folder / "test_scratch.py"
    path.write_text(FLAKY.format(flaky, sound))
    line = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    line += ["-p", "tests.conftest", "-p", "no:cacheprovider", str(path)]
    env = {**os.environ, "RERUN_DISTRIBUTED": rerun, "PYTHONPATH": str(ROOT)}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        line, env=env, cwd=folder, capture_output=True, text=True, timeout=200
    )
    named = re.findall(r"^(RERUN|FAILED) .*?::(\S+)", done.stdout, re.MULTILINE)
    return done, named


def test_second_tries_are_named_and_three_of_them_pass(tmp_path):
    done, named = run_suite(tmp_path, flaky=3)
    assert done.returncode == 0, done.stdout
    assert named == [("RERUN", f"test_starved[{n}]") for n in range(3)]
    assert "TimeoutError: no heartbeat" in done.stdout


def test_fourth_test_that_fails_has_failed(tmp_path):
    done, named = run_suite(tmp_path, flaky=4)
    assert done.returncode == 1, done.stdout
    assert ("FAILED", "test_starved[3]") in named
    assert [name for kind, name in named if kind == "RERUN"] == [
        f"test_starved[{n}]" for n in range(3)
    ]


@pytest.mark.parametrize("rerun", ["0", "1"])
def test_only_tests_of_several_processes_get_a_second_try(tmp_path, rerun):
    done, named = run_suite(tmp_path, flaky=0, rerun=rerun, sound=False)
    assert done.returncode == 1
    assert named == [("FAILED", "test_of_one_process")]


def test_second_tries_have_to_be_asked_for(tmp_path):
    done, named = run_suite(tmp_path, flaky=1, rerun="0")
    assert (done.returncode, named) == (1, [("FAILED", "test_starved[0]")])
