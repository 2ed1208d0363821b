import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from pipetransformer import _extension


def last_error(script, **options):
    """Run a script that must fail; return the last line of what it says."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=150,
        **options,
    )
    assert result.returncode != 0
    return result.stderr.splitlines()[-1]


def test_build_for_another_torch_is_named(monkeypatch):
    from pipetransformer import _build_info

    monkeypatch.setattr(_build_info, "TORCH_VERSION", "1.0.0")
    with pytest.raises(ImportError, match="got one for torch 1.0.0; rebuild it"):
        _extension.load()


def test_an_import_under_another_torch_ends_in_one_line_with_both_versions():
    # What an installation with build isolation leaves: a record of another torch.
    script = """
        import torch
        torch.__version__ = "1.0.0"
        from pipetransformer import PipeTransformer
    """
    from pipetransformer import _build_info

    last = last_error(script)
    assert last.startswith("ImportError: pipetransformer._C: expected a build for")
    assert f"for torch 1.0.0, got one for torch {_build_info.TORCH_VERSION};" in last
    # pip keeps wheels by their source, whatever torch: the wrong one would come again.
    assert "pip install --no-build-isolation --no-cache-dir --force-reinstall" in last


def test_missing_build_says_how_to_rebuild():
    script = """
        import sys
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name == "pipetransformer._build_info":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Hide())
        from pipetransformer import PipeTransformer
    """
    last = last_error(script)
    assert "expected a built extension, got none" in last
    assert "setup.py build_ext --inplace" in last


def test_the_stubs_alone_are_no_extension(tmp_path):
    package = pathlib.Path(_extension.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(package, tmp_path / "pipetransformer", ignore=without)
    last = last_error(
        "from pipetransformer import Plan",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert "fails with: no file that fits this Python; rebuild it" in last


def test_a_room_is_a_module_of_its_own():
    from pipetransformer._C.planner import Shape

    assert Shape.__module__ == "pipetransformer._C.planner"


def test_the_planner_can_be_imported_first():
    script = "from pipetransformer.planner import Plan"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150
    )
    assert result.returncode == 0, result.stderr
