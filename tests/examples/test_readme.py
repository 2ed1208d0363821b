import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_readme_holds_the_quickstart_verbatim():
    code = (ROOT / "examples" / "quickstart.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


def test_quickstart_runs_and_learns():
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("accuracy") == 5
