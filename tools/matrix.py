#!/usr/bin/env python3
"""Builds and tests each (Python, torch) that is to be had: ``make matrix``.

Usage: ``python3 tools/matrix.py [--python 3.11 ...] [--torch 2.13 ...] [--again]``.
For each pair: an environment below ``build/matrix``, torch, an installation from the
sdist without build isolation, and the tests of ``TESTS`` away from the checkout's own
package. The table is printed and kept in ``build/matrix/matrix.json`` after each pair;
a later call goes on with the pairs that it lacks, and two calls may run different
pairs at the same time. PyPI's torch for Linux is the CUDA
build, gigabytes each. Exits with 1 if a pair failed; one not to be had is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13")
PACKAGES = (
    *("hypothesis", "ninja", "numpy", "scipy", "setuptools>=68,<82"),
    *("pytest", "pytest-timeout", "pytest-rerunfailures"),
)
# Extension, bindings, autograd, random numbers, a planner and whole runs.
TESTS = (
    *("tests/core/test_extension.py", "tests/core/test_hash.py"),
    *("tests/pipe/test_transparency.py", "tests/pipe/test_random.py"),
    *("tests/pipe/test_weight_casts.py", "tests/pipe/test_refusals.py"),
    "tests/planner/test_search.py",
    *("tests/autofreeze", "tests/engine/test_training.py"),
)
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
DOWNLOAD_S, BUILD_S, TEST_S = 1200.0, 1800.0, 1200.0

Entry = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing from the table, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--again", action="store_true", help="forget earlier pairs")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "matrix.json"
    if options.again:
        kept.unlink(missing_ok=True)
    for python in options.python:
        for torch in options.torch:
            name = f"python {python}, torch {torch}"
            if read(kept).get(name, {}).get("state") != "passed":
                made = pair(python, torch)
                # Read again: another call may have run other pairs meanwhile.
                table = {**read(kept), name: made}
                kept.write_text(json.dumps(table, indent=2) + "\n")
                print(row(name, made), flush=True)
    table = read(kept)
    print("\n" + "\n".join(row(name, entry) for name, entry in sorted(table.items())))
    return int(any(entry["state"] == "failed" for entry in table.values()))


def read(kept: pathlib.Path) -> dict[str, Entry]:
    """Return the table of earlier pairs."""
    table: dict[str, Entry] = json.loads(kept.read_text()) if kept.exists() else {}
    return table


def row(name: str, entry: Entry) -> str:
    """Return a line of the table."""
    return f"{name}: {entry['state']}, {entry['what']}"


def pair(python: str, torch: str) -> Entry:
    """Install, build and test one pair."""
    folder = FOLDER / f"{python}-{torch}"
    log = FOLDER / f"{python}-{torch}.log"
    log.write_text("")
    interpreter = runnable(python)
    if interpreter is None:
        return {"state": "not to be had", "what": f"no python{python} on the PATH"}
    own = str(folder / "bin" / "python")
    make = [interpreter, "-m", "venv", str(folder)]
    if not pathlib.Path(own).exists() and call(make, log, 120):
        return {"state": "failed", "what": "no environment: " + last_line(log)}
    wanted = [f"torch=={torch}.*", *PACKAGES]
    if call([own, *PIP, *wanted], log, DOWNLOAD_S):
        return {"state": "not to be had", "what": "torch: " + last_line(log)}
    commit = shown(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    # Both now: the checkout may change during the build.
    source, place = sdist(own, log, folder), checkout_without_package(folder / "tests")
    start = time.monotonic()
    flags = ["--no-build-isolation", "--no-cache-dir", "--no-deps"]
    flags += ["--force-reinstall"]
    if call([own, *PIP, *flags, str(source)], log, BUILD_S):
        return {"state": "failed", "what": "build: " + last_line(log)}
    seconds = round(time.monotonic() - start)
    tests = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    failed = call(tests, log, TEST_S, cwd=place)
    what = counts(log.read_text()) or last_line(log)
    exact = shown([own, "-c", "import torch; print(torch.__version__)"])
    entry: Entry = {"state": "failed" if failed else "passed", "what": what}
    entry |= {"torch": exact, "commit": commit, "build_s": seconds}
    return {**entry, "tests": list(TESTS)}


def runnable(python: str) -> str | None:
    """Return the path of that Python, if one of the ``PATH`` starts and is it."""
    code = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"
    homes = sorted(pathlib.Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    for found in [shutil.which(f"python{python}"), *map(str, homes)]:
        if found is None:
            continue
        if shown([found, "-c", code]).split()[-1:] == [python]:
            return found
    return None


def shown(command: Sequence[str]) -> str:
    """Return what a command prints; empty if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def sdist(python: str, log: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Make the source distribution anew; setup.py asks for a torch, any will do."""
    target = folder / "sdist"
    shutil.rmtree(target, ignore_errors=True)
    command = [python, "setup.py", "-q", "sdist", "--dist-dir", str(target)]
    call(command, log, 300, cwd=ROOT)
    (made,) = target.glob("*.tar.gz")
    return made


def checkout_without_package(folder: pathlib.Path) -> pathlib.Path:
    """Copy what tests read; the package is the installed one."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("tests", "benchmarks", "examples", "tools", "csrc", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def call(
    command: Sequence[str],
    log: pathlib.Path,
    limit_s: float,
    cwd: pathlib.Path | None = None,
) -> int:
    """Run a command with its output in the log; return its code, 124 if too slow."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd or FOLDER,
                env=clean,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            output.write(f"more than {limit_s:.0f} s\n")
            return 124
    return done.returncode


def last_line(log: pathlib.Path) -> str:
    """Return the last error of a log, else its last line."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror:", line, re.IGNORECASE)]
    return (errors or lines)[-1].strip()[:160]


def counts(text: str) -> str:
    """Return pytest's counts, such as ``3 failed, 120 passed``; empty without any."""
    found = re.findall(r"^(?:=+ )?(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", text, re.M)
    return str(found[-1]) if found else ""


if __name__ == "__main__":
    sys.exit(main())
