"""Builds and runs the model of the rendezvous: every interleaving of three ranks."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
SOURCES = [
    "tests/autodp/cpp/membership_model.cpp",
    "csrc/autodp/membership/membership.cpp",
]

# The order of the model's `Bug`; which invariant finds it.
PLANTED = [
    "one list",
    "members have a standing",
    "members have a standing",
    "fenced ranks end",
    "members have a standing",
    "nobody waits for the dead",
    "members have a standing",
]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    binary = tmp_path_factory.mktemp("model") / "membership_model"
    command = [COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'csrc'}", *(str(ROOT / source) for source in SOURCES)]
    subprocess.run([*command, "-o", str(binary)], check=True, timeout=110)

    def run(bug):
        done = subprocess.run(
            [str(binary), str(bug)], capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, done.stderr
        states, verdict = done.stdout.strip().split(" ", 1)
        return int(states), verdict

    return run


def test_roll_call_agrees_on_one_list_of_ranks_that_answered(model):
    states, verdict = model(0)
    print(f"{states} states")
    assert verdict == "ok"
    assert states > 10_000


@pytest.mark.parametrize(("bug", "invariant"), list(enumerate(PLANTED, start=1)))
def test_planted_bug_breaks_its_invariant(model, bug, invariant):
    assert model(bug)[1] == invariant
