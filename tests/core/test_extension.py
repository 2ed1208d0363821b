import ast
import pathlib
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


def test_each_binding_loads_the_extension_before_it_uses_it():
    # Any room can be imported first, and only this form asks the loader.
    bindings = sorted(pathlib.Path(_extension.__file__).parent.glob("*/_binding.py"))
    assert len(bindings) >= 5
    for path in bindings:
        imports = [
            (node.module, [alias.name for alias in node.names])
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("pipetransformer")
        ]
        assert imports[0] == ("pipetransformer", ["_C"]), path


def test_the_planner_can_be_imported_first():
    script = "from pipetransformer.planner import Plan"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150
    )
    assert result.returncode == 0, result.stderr
