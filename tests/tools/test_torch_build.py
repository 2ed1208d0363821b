"""The word before torch is installed: where CUDA comes along, and nowhere else."""

import json
import subprocess
import types

import pytest

import torch_build


def report(*names):
    return {"install": [{"metadata": {"name": name}} for name in names]}


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("torch", "filelock", "sympy"), 0),
        (("torch", "nvidia-cublas", "nvidia-nccl-cu13", "triton"), 2),
        ((), 0),
    ],
)
def test_packages_of_cuda_are_counted(names, count):
    assert len(torch_build.cuda_packages(report(*names))) == count


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (json.dumps(report("torch", "nvidia-cublas")), "CUDA build (1 packages"),
        (json.dumps(report("torch")), ""),
        ("no such index", "pip does not say"),
    ],
)
def test_what_is_said_and_that_it_always_ends_well(output, text, monkeypatch, capsys):
    asked = []

    def run(command, **_):
        asked.append(command)
        return types.SimpleNamespace(stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    assert torch_build.main(["torch==2.13.0"]) == 0
    told = capsys.readouterr().out
    assert text in told if text else told == ""
    assert "--dry-run" in asked[0] and asked[0][-1] == "torch==2.13.0"
    if "CUDA build" in text:
        assert "TORCH='torch==2.13.0+cpu'" in told
