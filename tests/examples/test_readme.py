import re
import subprocess
import sys

from tests.support.documents import ROOT, blocks

MOST_LINES = 160


def programs():
    """The README's Python: the quickstart, the same in plain DDP, the pipeline."""
    quickstart, plain, pipe = blocks(ROOT / "README.md", "python")
    return quickstart.code, plain.code, pipe.code


def run(path, **env):
    env.update(PYTHONPATH=str(ROOT), PATH="/usr/bin:/bin", OMP_NUM_THREADS="1")
    line = [sys.executable, str(path)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, env=env)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_plain_ddp_beside_the_quickstart_trains_the_same_model(tmp_path):
    quickstart, plain, _ = programs()
    shared = quickstart.partition("engine = ")[0]
    asks = "x, y = train_set[:]\nprint(nn.functional.cross_entropy({}(x), y).item())\n"
    script = tmp_path / "plain.py"
    script.write_text(shared + asks.format("model") + plain + asks.format("ddp"))
    launch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    result = run(script, **launch, MASTER_PORT="0")
    assert result.returncode == 0, result.stderr
    before, after = map(float, result.stdout.split())
    assert after < 0.9 * before


def test_pipeline_of_the_readme_has_the_gradients_of_the_plain_model(tmp_path):
    script = tmp_path / "pipe.py"
    script.write_text(
        "import torch\ntorch.manual_seed(0)\n"
        + programs()[2]
        + "torch.manual_seed(0)\n"
        "plain = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))\n"
        "plain(torch.randn(64, 16)).square().mean().backward()\n"
        "ours, theirs = pipe.parameters(), plain.parameters()\n"
        "for one, other in zip(ours, theirs, strict=True):\n"
        "    torch.testing.assert_close(one.grad, other.grad)\n"
    )
    result = run(script)
    assert result.returncode == 0, result.stderr


def test_readme_holds_the_quickstart_verbatim():
    code = (ROOT / "examples" / "quickstart.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


def test_quickstart_runs_and_learns():
    result = run(ROOT / "examples" / "quickstart.py")
    assert result.returncode == 0, result.stderr
    line = r"epoch (\d): \{'loss': ([\d.]+), 'accuracy': ([\d.]+)\}"
    lines = [re.fullmatch(line, text) for text in result.stdout.splitlines()]
    assert [int(found[1]) for found in lines] == list(range(5))
    losses = [float(found[2]) for found in lines]
    assert losses[-1] < 0.9 * losses[0]
    assert float(lines[-1][3]) > 0.7  # two classes; chance is six deviations away
