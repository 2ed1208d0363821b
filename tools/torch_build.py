#!/usr/bin/env python3
"""Says before an installation whether it would bring the CUDA build of torch.

Usage: ``python tools/torch_build.py 'torch==2.13.0'``, with the interpreter of the
environment. Package indexes differ: PyPI's torch for Linux is built for CUDA, which is
gigabytes; PyTorch's own index has CPU builds. Asks pip what it would install, and
installs nothing. Always ends well: it is a word before the work, and no check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

_DEADLINE_S = 120.0
_TEXT = (
    "torch comes as the CUDA build ({packages} packages of CUDA, some gigabytes).\n"
    "The CPU build is enough here: give pip PyTorch's CPU index, and "
    "TORCH='{wanted}+cpu'."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line where CUDA's libraries would come along."""
    (wanted,) = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    command += ["--disable-pip-version-check", "--ignore-installed"]
    try:
        done = subprocess.run(
            [*command, "--report", "-", wanted],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        report = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"pip does not say which torch it would install: {error}")
        return 0
    count = len(cuda_packages(report))
    if count:
        print(_TEXT.format(packages=count, wanted=wanted))
    return 0


def cuda_packages(report: object) -> list[str]:
    """Return the names of CUDA's packages in a report of pip."""
    entries = report.get("install", []) if isinstance(report, dict) else []
    names = [str(entry["metadata"]["name"]) for entry in entries]
    return [name for name in names if name.lower().startswith(("nvidia-", "cuda-"))]


if __name__ == "__main__":
    sys.exit(main())
