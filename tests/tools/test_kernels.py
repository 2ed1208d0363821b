"""What setup.py compiles kernels for."""

import ast
import os
import pathlib
import re

import pytest

SETUP = pathlib.Path(__file__).parents[2] / "setup.py"


def cuda_architectures(release):
    """Call the function of setup.py, which cannot be imported without building."""
    tree = ast.parse(SETUP.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "cuda_architectures"
    ]
    names = {"os": os, "re": re}
    exec(compile(tree, str(SETUP), "exec"), names)
    return names["cuda_architectures"](release)


@pytest.mark.parametrize(
    ("wanted", "release", "expected"),
    [
        ("", "13.0", ("75", "80", "90")),
        ("", "12.8", ("70", "75", "80", "90")),
        ("9.0+PTX;7.0", "12.8", ("70", "90")),
        ("8.0 10.0a 12.0+PTX", "13.0", ("80", "100a", "120")),
        ("Hopper", "13.0", ("75", "80", "90")),
    ],
)
def test_architectures_are_those_of_torchs_variable(
    wanted, release, expected, monkeypatch
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    assert cuda_architectures(release) == expected
