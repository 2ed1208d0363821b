import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from pipetransformer import _extension


def test_build_for_another_torch_is_named(monkeypatch):
    from pipetransformer import _build_info

    monkeypatch.setattr(_build_info, "TORCH_VERSION", "1.0.0")
    with pytest.raises(ImportError, match="got one for torch 1.0.0; rebuild it"):
        _extension.load()


def test_an_import_under_another_torch_ends_in_one_line_with_both_versions(tmp_path):
    # What an installation with build isolation leaves: a record of another torch.
    script = """
        import torch
        torch.__version__ = "1.0.0"
        from pipetransformer import PipeTransformer
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    from pipetransformer import _build_info

    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pipetransformer._C: expected a build for")
    assert f"for torch 1.0.0, got one for torch {_build_info.TORCH_VERSION};" in last
    # pip keeps wheels by their source, whatever torch: the wrong one would come again.
    assert "pip install --no-build-isolation --no-cache-dir --force-reinstall" in last


def test_missing_build_says_how_to_rebuild(tmp_path):
    script = """
        import sys
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name == "pipetransformer._build_info":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Hide())
        from pipetransformer import PipeTransformer
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode != 0
    assert "expected a built extension, got none" in result.stderr
    assert "setup.py build_ext --inplace" in result.stderr


def test_the_stubs_alone_are_no_extension(tmp_path):
    package = pathlib.Path(_extension.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / "pipetransformer", ignore=without)
    result = subprocess.run(
        [sys.executable, "-c", "from pipetransformer import Plan"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode != 0
    assert "fails with: no file that fits this Python; rebuild it" in result.stderr


def test_a_room_is_a_module_of_its_own():
    from pipetransformer._C.planner import Shape

    assert Shape.__module__ == "pipetransformer._C.planner"


def test_the_planner_can_be_imported_first():
    script = "from pipetransformer.planner import Plan"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150
    )
    assert result.returncode == 0, result.stderr
