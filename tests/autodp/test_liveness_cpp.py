"""Builds and runs the torch-free tests of the liveness tracker."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_liveness_finds_the_dead_and_forgives_a_pause(tmp_path):
    binary = tmp_path / "liveness_test"
    command = [COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/autodp/cpp/liveness_test.cpp")]
    subprocess.run([*command, "-o", str(binary)], check=True, timeout=100)
    run = subprocess.run([str(binary)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout
