"""The layer check finds each planted violation and nothing in a clean tree."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "check_layers.py"

CLEAN = {
    "csrc/core/ids.h": "#include <vector>\n",
    "csrc/planner/plan.h": '#include "core/ids.h"\n',
    "csrc/pipe/pipe.cpp": '#include <ATen/core/Tensor.h>\n#include "planner/plan.h"\n',
    "csrc/autocache/cuda/copy.cu": '#include <cuda_runtime.h>\n#include "core/ids.h"\n',
    "csrc/python/bind_pipe.cpp": "#include <pybind11/pybind11.h>\n",
    "pipetransformer/__init__.py": "from pipetransformer._extension import load\n",
    "pipetransformer/_extension.py": "from pipetransformer import _C\n",
    "pipetransformer/__main__.py": "from pipetransformer.cli import main\n",
    "pipetransformer/cli/__init__.py": "from pipetransformer.planner import Plan\n",
    "pipetransformer/engine/__init__.py": "from pipetransformer import autodp, run\n",
    "pipetransformer/run/__init__.py": "from pipetransformer.autodp import Group\n",
    "pipetransformer/autodp/__init__.py": "from .group import Group\n",
    "pipetransformer/autodp/group.py": "from . import _wire\nGroup = _wire\n",
    "pipetransformer/autodp/_wire.py": "from pipetransformer import _C\n"
    "wire = _C.autodp.wire, _C.core.text\n",
    "pipetransformer/simulator/step.py": "from pipetransformer import _C\n"
    "costs = _C.planner.costs\n",
    "pipetransformer/pipe/__init__.py": "from pipetransformer.planner import Plan\n",
    "pipetransformer/planner/__init__.py": "Plan = int\n",
}

VIOLATIONS = [
    (
        "csrc/autodp/group.cpp",
        '\n#include "autocache/slab.h"\n',
        "csrc/autodp/group.cpp:2: autodp must not include autocache/slab.h "
        "(it may use core, device, network)",
    ),
    (
        "csrc/core/hash.cpp",
        '#include "planner/plan.h"\n',
        "core must not include planner/plan.h (it may use no other room)",
    ),
    (
        "csrc/planner/cost.cpp",
        "#  include <c10/util/Exception.h>\n",
        "torch-free code must not include c10/util/Exception.h",
    ),
    (
        "csrc/autofreeze/alpha_cap.cpp",
        "#include <ATen/core/Tensor.h>\n",
        "torch-free code must not include ATen/core/Tensor.h",
    ),
    (
        "csrc/pipe/node.cpp",
        "#include <pybind11/pybind11.h>\n",
        "only python may include pybind11/pybind11.h",
    ),
    (
        "csrc/pipe/node.cpp",
        "#include <torch/extension.h>\n",
        "only python may include torch/extension.h",
    ),
    (
        "csrc/pipe/node.cpp",
        "#include <cuda_runtime.h>\n",
        "only kernel files (.cu, .cuh) may include cuda_runtime.h",
    ),
    (
        "csrc/pipe/node.cpp",
        "#include <c10/cuda/CUDAStream.h>\n",
        "c10/cuda/CUDAStream.h is missing from a CPU torch",
    ),
    (
        "csrc/autocache/cuda/copy.cu",
        "#include <ATen/core/Tensor.h>\n",
        "a kernel file must not include torch (ATen/core/Tensor.h)",
    ),
    (
        "csrc/core/ids.h",
        '#include "core/ids.h"\n',
        "cycle of includes: core/ids.h -> core/ids.h",
    ),
    ("csrc/extras/a.h", "", "room extras is not in the table of rooms"),
    (
        "pipetransformer/autodp/group.py",
        "import pipetransformer.autocache.slab\n",
        "autodp must not import pipetransformer.autocache.slab (it may use",
    ),
    (
        "pipetransformer/autodp/group.py",
        "def f():\n    from pipetransformer.engine import PipeTransformer\n",
        "group.py:2: autodp must not import pipetransformer.engine (it may use core",
    ),
    (
        "pipetransformer/autodp/group.py",
        "from pipetransformer import __version__\n",
        "autodp must not import pipetransformer (it may use core",
    ),
    (
        "pipetransformer/autodp/group.py",
        "from ..pipe import Pipe\n",
        "autodp must not import pipetransformer.pipe (it may use core, device,",
    ),
    (
        "pipetransformer/autodp/group.py",
        "from pipetransformer import _C\nplan = _C.planner.Plan\n",
        "group.py:2: autodp must not use _C.planner",
    ),
    (
        "pipetransformer/engine/facade.py",
        "from pipetransformer._C.autodp import Store\n",
        "facade.py:1: _C is imported as 'from pipetransformer import _C' alone",
    ),
    (
        "pipetransformer/engine/facade.py",
        "import pipetransformer._C\n",
        "facade.py:1: _C is imported as 'from pipetransformer import _C' alone",
    ),
    (
        "pipetransformer/engine/facade.py",
        "from pipetransformer import _C as native\n",
        "facade.py:1: _C is imported as 'from pipetransformer import _C' alone",
    ),
    (
        "pipetransformer/engine/facade.py",
        "import tests.support.ranks\n",
        "the package must not import tests.support.ranks",
    ),
    (
        "pipetransformer/run/context.py",
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from pipetransformer.engine import facade\n",
        "context.py:3: run must not import pipetransformer.engine (it may use",
    ),
    (
        "pipetransformer/run/context.py",
        "from pipetransformer.autodp import _wire\n",
        "context.py:1: pipetransformer.autodp._wire is private to autodp",
    ),
    (
        "pipetransformer/run/context.py",
        "from pipetransformer.autodp.backends import _ABSENCE\n",
        "context.py:1: pipetransformer.autodp.backends._ABSENCE is private to autodp",
    ),
    (
        "pipetransformer/notes.py",
        "",
        "pipetransformer/notes.py: notes is not in the table of rooms",
    ),
    (
        "pipetransformer/autodp/told.py",
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from pipetransformer.autodp import told\n",
        "cycle of imports: pipetransformer.autodp.told -> pipetransformer.autodp.told",
    ),
    (
        "pipetransformer/autodp/_wire.py",
        "from pipetransformer.autodp import Group\n",
        "cycle of imports: pipetransformer.autodp -> pipetransformer.autodp.group -> "
        "pipetransformer.autodp._wire -> pipetransformer.autodp",
    ),
]


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_check_layers_accepts_a_clean_tree(checker, tmp_path, capsys):
    write_tree(tmp_path, CLEAN)
    assert checker.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "check_layers: ok\n"


@pytest.mark.parametrize("name, text, finding", VIOLATIONS)
def test_check_layers_finds_a_planted_violation(
    checker, tmp_path, capsys, name, text, finding
):
    extra = {"csrc/autocache/slab.h": "", "pipetransformer/autocache/slab.py": ""}
    write_tree(tmp_path, {**CLEAN, **extra, name: text})
    assert checker.main([str(tmp_path)]) == 1
    assert finding in capsys.readouterr().out


def test_check_layers_passes_on_this_project():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_check_layers_lists_the_torch_free_files():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--list-torch-free"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    names = done.stdout.split()
    assert "csrc/autofreeze/alpha_cap.cpp" in names
    assert "csrc/core/hash.cpp" in names
    assert "csrc/autofreeze/squared_norms.cpp" not in names
