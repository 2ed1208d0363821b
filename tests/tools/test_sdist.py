"""The source distribution holds what a build needs, and nothing else."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> set[str]:
    """Paths in an sdist of a copy of the checkout; nothing is compiled."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("csrc", "pipetransformer", "requirements", "tests", "benchmarks"):
        unbuilt = shutil.ignore_patterns("*.so", "__pycache__", "results")
        shutil.copytree(ROOT / name, copy / name, ignore=unbuilt)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    # What a build in place leaves behind does not belong to the sources.
    (copy / "pipetransformer" / "_build_info.py").write_text("TORCH_VERSION = '0'\n")
    (copy / "pipetransformer" / "_C.so").write_bytes(b"")
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder)],
        cwd=copy,
        env={**os.environ, "PIPETRANSFORMER_BUILD_KERNELS": "0"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert made.returncode == 0, made.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        files = [member.name for member in opened if member.isfile()]
    return {name.split("/", 1)[1] for name in files}


def below(folder: str) -> set[str]:
    """Paths of a folder of the checkout, without what tools leave behind."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix not in {".so", ".pyc"}
        and path.name != "_build_info.py"
    }


def test_all_that_a_build_needs_is_there(names):
    for folder in ("csrc", "pipetransformer", "requirements"):
        assert below(folder) <= names
    top = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert top <= names
    kinds = {pathlib.Path(name).suffix for name in names}
    assert {".cpp", ".h", ".cu", ".pyi", ".typed", ".html"} <= kinds | {
        pathlib.Path(name).name.removeprefix("py") for name in names
    }


def test_nothing_else_is_there(names):
    rooms = {"csrc", "pipetransformer", "requirements", "pipetransformer.egg-info"}
    assert {name.split("/")[0] for name in names if "/" in name} == rooms
    built = [n for n in names if n.endswith((".so", ".pyc", "_build_info.py"))]
    assert built == []
