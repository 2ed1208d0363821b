import pathlib
import re
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
    line = r"epoch (\d): \{'loss': ([\d.]+), 'accuracy': ([\d.]+)\}"
    lines = [re.fullmatch(line, text) for text in result.stdout.splitlines()]
    assert [int(found[1]) for found in lines] == list(range(5))
    losses = [float(found[2]) for found in lines]
    assert losses[-1] < 0.9 * losses[0]
    assert float(lines[-1][3]) > 0.7  # two classes; chance is six deviations away
