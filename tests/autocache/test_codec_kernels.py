"""The codec's kernels on the host: their source, with threads for CUDA's.

Shows that they give the bits of the host's codec and touch nothing outside of rows;
tests/gpu/test_codec.py shows the same on a device.
"""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP = ROOT / "tests/autocache/cpp"
COMPILER = shutil.which("g++") or shutil.which("c++")
LAUNCH = re.compile(
    r"(\w+<[^<>]*>)\s*<<<(.*?),\s*kThreads, 0, \w+>>>\(\s*params\)", re.S
)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("sanitizer", "rounds"), [("address,undefined", 20), ("thread", 4)]
)
def test_kernels_give_the_bits_of_the_host(tmp_path, sanitizer, rounds):
    source = (ROOT / "csrc/autocache/cuda/codec.cu").read_text()
    text, launches = LAUNCH.subn(r"launch_on_host(\1, \2, kThreads, params)", source)
    assert launches == source.count("<<<") == 7
    if sanitizer == "thread":  # that several threads store the same flag is meant
        text = re.sub(
            r"params\.(kept|whole)\[(\w+(?:\.x)?)\] = false",
            r"std::atomic_ref(params.\1[\2]) = false",
            text,
        )
    kernels, binary = tmp_path / "codec.cpp", tmp_path / "codec_kernels_test"
    kernels.write_text(text)
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", "-ffp-contract=off"]
    command += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command += ["-I", str(ROOT / "csrc"), "-I", str(CPP / "standin")]
    command += [str(CPP / "codec_kernels_test.cpp"), str(kernels)]
    command += [str(ROOT / "csrc/autocache/codec.cpp"), "-o", str(binary)]
    subprocess.run(command, check=True, timeout=110)
    ran = subprocess.run(
        [str(binary), str(rounds), "1"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
