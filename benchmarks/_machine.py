"""What a benchmark ran on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path


def machine() -> dict[str, str | int | None]:
    """Processor, cores, GPU and versions; None for what is not there."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu_names(),
        "torch": importlib.metadata.version("torch"),
        "cuda": _cuda_version(),
    }


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


def _cuda_version() -> str | None:
    """The CUDA version torch was built for, read without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return found.group(1) if found else None
