"""The checklist of the pipe names tests that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_checklist_has_every_row_and_names_tests_that_exist():
    text = (ROOT / "docs" / "reference" / "pipe-checklist.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.M) == [str(k) for k in range(1, 74)]
    sources = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    files = {p.name for p in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 50
    assert [n for n in named if f"def {n}(" not in sources] == []
    named_files = re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", text)
    assert [name for name in named_files if name not in files] == []
