"""Builds and runs the explicit-state model of the change of plans.

Every reachable state of three ranks that step the real machine over a fake board;
the planted bugs show that each invariant can fail.
"""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP = ROOT / "tests/autodp/cpp"
SOURCES = [
    *(CPP / name for name in ("protocol_model.cpp", "protocol_world.cpp")),
    CPP / "model_board.cpp",
    *sorted((ROOT / "csrc/autodp/protocol").glob("transition*.cpp")),
    ROOT / "csrc/autodp/protocol/plan_message.cpp",
    ROOT / "csrc/autodp/protocol/decision.cpp",
    ROOT / "csrc/core/hash.cpp",
    ROOT / "csrc/core/plain_text.cpp",
]
COMPILER = shutil.which("g++")

PLANTED = {
    "silence is yes": "all ready",
    "a refusal is yes": "all ready",
    "decisions overwrite": "one decision",
    "a rank believes its proposal": "one decision",
    "a removed decision returns": "one decision",
    "anyone commits": "writer commits",
    "use before the decision": "use after commit",
    "old plan after COMMIT": "use after commit",
    "plans change": "plan stays",
    "heads overwrite": "one writer",
    "heads without writer": "one writer",
    "one epoch too many goes": "keys stay",
    "nothing goes": "keys go",
    "a fenced rank goes on": "fenced is silent",
    "undecided epochs stay open": "fenced is past",
    "only the writer has a clock": "progress",
    "any parent is accepted": "lineage",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    binary = tmp_path_factory.mktemp("model") / "protocol_model"
    command = [COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'csrc'}", *map(str, SOURCES), "-o", str(binary)]
    subprocess.run(command, check=True, timeout=110)
    run = subprocess.run([str(binary)], capture_output=True, text=True, timeout=110)
    return run.returncode, run.stdout


def test_protocol_holds_in_every_reachable_state(output):
    returncode, text = output
    assert returncode == 0, text
    assert "broken" not in text
    states = re.findall(r"^([a-z ]+): (\d+) states, (\d+) ends$", text, re.MULTILINE)
    assert len(states) == 7
    assert sum(int(count) for _, count, _ in states) > 100_000
    assert all(int(ends) > 0 for _, _, ends in states)


@pytest.mark.parametrize(("bug", "invariant"), PLANTED.items())
def test_protocol_model_finds_a_planted_bug(output, bug, invariant):
    assert re.search(
        rf"^{bug}: found after \d+ states: {invariant} \(", output[1], re.M
    )


def test_protocol_model_plants_no_other_bugs(output):
    assert len(re.findall(r" found after | NOT FOUND ", output[1])) == len(PLANTED)
