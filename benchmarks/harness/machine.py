"""What a benchmark ran on."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path


def machine() -> dict[str, str | int | None]:
    """What a figure depends on; None for what is not there.

    Processor, cores, GPU, operating system, versions, the compiler and the flags of
    the extension, and the intra-op threads of this process.
    """
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu_names(),
        "torch": _of_torch("__version__"),
        "cuda": _of_torch("cuda"),
        "python": platform.python_version(),
        "os": _os_name(),
        **_build(),
        "threads": _threads(),
    }


def _os_name() -> str:
    """Distribution, kernel and its release."""
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # a system without such a file
        distribution = ""
    kernel = f"{platform.system()} {platform.release()}"
    return f"{distribution}, {kernel}" if distribution else kernel


def _build() -> dict[str, str | None]:
    """The extension's compiler and flags, as setup.py noted them."""
    name = "pipetransformer._build_info"
    if importlib.util.find_spec(name) is None:  # not built
        return {"compiler": None, "flags": None}
    noted = importlib.import_module(name)
    return {what: getattr(noted, what.upper(), None) for what in ("compiler", "flags")}


def _threads() -> int | None:
    """Intra-op threads of torch, or what it would take from the environment."""
    if (torch := sys.modules.get("torch")) is not None:
        return int(torch.get_num_threads())
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() else os.cpu_count()


def _cpu_name() -> str:
    """The processor's model name, or its architecture where no name is known."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _gpu_names() -> str | None:
    """Names of the NVIDIA devices, comma-separated."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if answer.returncode != 0:  # a driver's tool without a device
        return None
    return ", ".join(answer.stdout.splitlines()) or None


def _of_torch(name: str) -> str | None:
    """What torch says of its build, read without importing it.

    Not the package's metadata: a wheel's version there may lack the CUDA version.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(rf"^{name}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return found.group(1) if found else None
