"""What may be installed: bounds that agree, and pins for the checks before a change."""

import pathlib
import re
from importlib import metadata

import pytest

requirements = pytest.importorskip("packaging.requirements")

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "requirements"
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted():
    """The requirements of the tests, examples and checks; the site has its own."""
    lines = [
        line
        for path in sorted(FOLDER.glob("*.txt"))
        if path.name not in ("constraints.txt", "docs.txt")
        for line in path.read_text().splitlines()
    ]
    return [requirements.Requirement(line) for line in lines]


def pins():
    lines = (FOLDER / "constraints.txt").read_text().splitlines()
    found = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    # Exact versions alone: no index, no address, no option.
    assert all(found)
    return {normal(pin[1]): pin[2] for pin in found}


def installed_with(names):
    """The names, and all that their packages need here, except for what they pin."""
    found, open_ends = set(), list(names)
    while open_ends:
        name = normal(open_ends.pop())
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            needed = requirements.Requirement(line)
            here = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if here and not any(s.operator == "==" for s in needed.specifier):
                open_ends.append(needed.name)
    return found


def test_torch_has_the_same_bounds_wherever_it_is_named():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"torch([^"]*)"', project) == [">=2.11,<2.14"] * 2
    bounds = requirements.Requirement("torch>=2.11,<2.14").specifier
    (pinned,) = re.findall(r"torch==([0-9.]+)", (ROOT / "Makefile").read_text())
    assert pinned in bounds
    assert "for torch 2.11 to 2.13" in (ROOT / "README.md").read_text()


def version_of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def test_the_constraints_pin_all_that_the_checks_install():
    pinned = pins()
    others = [name for name, pin in pinned.items() if version_of(name) != pin]
    if others:
        pytest.skip(f"other versions than the pinned are installed: {others}")
    names = installed_with([*(each.name for each in wanted()), "torch"])
    assert sorted(names - {"torch"}) == sorted(pinned)


def test_the_constraints_are_within_the_requirements():
    pinned = pins()
    for each in wanted():
        assert pinned[normal(each.name)] in each.specifier, each
