"""Each script of the pipeline runs to its end, and its table can be rendered."""

import json
import sys
from pathlib import Path

import pytest
import torch

import gpu_pipe
import pipe_models
import pipe_overhead
import pipe_overlap
import pipe_throughput
import unet_timeline
from harness import timing
from pipe.encoder import Shape
from pipe.models import resnet101

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES

OVERHEAD = ["--stages=2", "--microbatches=2", "--iterations=1"]
THROUGHPUT = ["--microbatches=2", "--no-processes"]
MODELS = ["--device=cpu", "--models=resnet101", "--stages=2", "--microbatches=2"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    # No repeat counts as disturbed: a test must not depend on what else runs.
    monkeypatch.setattr(timing, "MIN_BUSY_CORES", float("inf"))
    workload = pipe_models.Workload(lambda: resnet101(width=4, classes=2), 32, 4)
    monkeypatch.setattr(pipe_models, "CPU_WORKLOADS", {"resnet101": workload})
    tiny = Shape(blocks=2, width=8, heads=1, tokens=2, rows=4)
    monkeypatch.setattr(pipe_throughput, "SHAPE", tiny)


@pytest.mark.parametrize(
    ("script", "flags", "table", "lines"),
    [
        (pipe_overhead, OVERHEAD, "overhead", ["loop", "never", "always"]),
        (pipe_overlap, ["--sleep=0.001"], "rows", ["loop", "never"]),
        (
            pipe_throughput,
            THROUGHPUT,
            "throughput",
            ["one thread M=2", "zb-h1 M=2", "gpipe always M=2", "inference, gpipe M=2"],
        ),
        (
            unet_timeline,
            ["--device=cpu", "--scale=tiny"],
            "timeline",
            ["baseline", "+ copy streams", "- early recomputation"],
        ),
        (pipe_models, MODELS, "models", ["resnet101 n=2 m=2"]),
    ],
)
def test_script_writes_what_its_table_needs(
    monkeypatch, tmp_path, capsys, script, flags, table, lines
):
    name = script.__name__
    path = tmp_path / f"{name}.json"
    flags = [*flags, "--repeats=3", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", [name, *flags])
    assert script.main() == 0
    content = json.loads(path.read_text())
    assert content["name"] == name
    rendered = "\n".join(TABLES[table](content))
    printed = capsys.readouterr().out
    for line in lines:
        assert f"| {line} |" in rendered
        assert line in printed


def test_gpu_script_writes_cells_and_overlap(monkeypatch, tmp_path, capsys):
    path = tmp_path / "gpu_pipe.json"
    flags = [*OVERHEAD, "--repeats=3", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", ["gpu_pipe", *flags])
    gpu_pipe.run_all(gpu_pipe.parse_args(), torch.device("cpu"), gpu_pipe.begin())
    content = json.loads(path.read_text())
    systems = {row["system"] for row in content["rows"]}
    assert {"loop", "never", "stream per stage"} <= systems
    assert content["bound"] == pytest.approx(4 / 3)
    assert "stream per stage" in capsys.readouterr().out
