"""Builds and runs the torch-free tests of slab and codecs under sanitizers."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "tests/autocache/cpp/slab_test.cpp",
    *(ROOT / f"csrc/core/{name}.cpp" for name in ("cgroups", "hash", "host_memory")),
    *(
        ROOT / f"csrc/autocache/{name}.cpp"
        for name in (
            "own_file",
            "process",
            "record",
            "shared_memory",
            "slab",
            "slot",
            "superblock",
        )
    ),
]
COMPILER = shutil.which("g++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("flags", "rounds"),
    [
        (["-O2", "-fsanitize=address,undefined"], 20_000),
        # gcc says that it does not model fences; here all shared words are atomic,
        # so what it reports would be a race all the same.
        (["-O1", "-fsanitize=thread", "-Wno-tsan"], 3_000),
    ],
    ids=["address", "thread"],
)
def test_slab_tears_nothing_and_survives_its_writers(tmp_path, flags, rounds):
    binary = tmp_path / "slab_test"
    command = [COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command += [*flags, f"-I{ROOT / 'csrc'}", *map(str, SOURCES), "-o", str(binary)]
    subprocess.run(command, check=True, timeout=100)
    run = subprocess.run(
        [str(binary), str(rounds)],
        timeout=150,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_codecs_stay_within_their_rows(tmp_path):
    binary = tmp_path / "codec_test"
    command = [COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-O2"]
    command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{ROOT / 'csrc'}", "-o", str(binary)]
    sources = ["tests/autocache/cpp/codec_test.cpp", "csrc/autocache/codec.cpp"]
    command += [str(ROOT / source) for source in sources]
    subprocess.run(command, check=True, timeout=100)
    run = subprocess.run(
        [str(binary), "3000"],
        timeout=150,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_slab_stays_within_memory_that_others_write():
    run = subprocess.run(
        [
            "timeout",
            "280",
            str(ROOT / "tools/sanitize.sh"),
            "address",
            "200",
            "0",
            "slab",
        ],
        timeout=290,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert re.search(r"^20000 rounds, .* 0 failures$", run.stdout, re.M)
