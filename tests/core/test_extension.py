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
        timeout=60,
    )
    assert result.returncode != 0
    assert "expected a built extension, got none" in result.stderr
    assert "setup.py build_ext --inplace" in result.stderr
