"""The documents, and the fenced blocks of code in them."""

import pathlib
import re
import textwrap
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "METRICS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# A block of no kind has an empty one: the opening fence is all that follows.
FENCED = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.M)


class Block(NamedTuple):
    """What stands between two fences, without the indentation of a list."""

    kind: str
    title: str
    code: str
    line: int


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, kind=None):
    """The blocks of a page, or those of one kind, in order."""
    text = page.read_text()
    found = []
    for fence in FENCED.finditer(text):
        name, _, rest = fence[2].partition(" ")
        title = re.fullmatch(r'(?:title="([^"]+)")?', rest)
        line = text.count("\n", 0, fence.start()) + 1
        assert title, f"{name_of(page)}:{line}: {fence[0].splitlines()[0]}"
        code = textwrap.dedent(fence[3])
        found.append(Block(name, title[1] or "", code, line))
    return [block for block in found if kind in (None, block.kind)]
