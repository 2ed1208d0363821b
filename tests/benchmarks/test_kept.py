"""A result stands while its command, its tree and what it measures are the same."""

import json

import pytest

from harness.commands import RESULTS, Command
from harness.kept import note_failure, result_of, why_again
from tests.benchmarks.test_provenance import Tree

SPEED = Command("speed", ("benchmarks/speed.py",), ("measured.py",))


@pytest.fixture
def tree(tmp_path):
    found = Tree(tmp_path / "origin")
    found.write("measured.py")
    found.commit()
    return found


def result(tree, **changes):
    content = {
        "commit": tree.git("rev-parse", "HEAD").strip(),
        "dirty": False,
        "quick": False,
        "command": SPEED.line,
    }
    return {**content, **changes}


def test_result_stands_until_what_it_measures_changes(tree):
    taken = result(tree)
    assert why_again(SPEED, taken, tree.root) == ""
    tree.write("other.py", "1\n")
    tree.commit()
    assert why_again(SPEED, taken, tree.root) == ""
    tree.write("measured.py", "1\n")
    tree.commit()
    why = "1 newer commits to what it measures"
    assert why_again(SPEED, taken, tree.root) == why
    assert why_again(SPEED, result(tree), tree.root) == ""
    parts = result(tree, commits=[taken["commit"], result(tree)["commit"]])
    assert why_again(SPEED, parts, tree.root) == why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dirty": True}, "not for publication"),
        ({"quick": True}, "not for publication"),
        ({"command": "python benchmarks/speed.py --less"}, "of another command"),
        (
            {"seeds": 6, "seeds_so_far": {"a": 6, "b": 4}},
            "not whole: b: 4 of 6 seeds",
        ),
    ],
)
def test_result_that_is_none_of_this_command_is_taken_again(tree, changes, why):
    assert why_again(SPEED, result(tree, **changes), tree.root) == why


def test_result_of_a_command_that_failed_is_taken_again(tree):
    path = tree.root / RESULTS / "speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result(tree)))
    written = path.stat().st_mtime
    note_failure(SPEED, 1, written + 60, tree.root)  # which left no file of its own
    assert why_again(SPEED, result_of(SPEED, tree.root), tree.root) == ""
    note_failure(SPEED, 1, written - 60, tree.root)
    assert why_again(SPEED, result_of(SPEED, tree.root), tree.root) == "ended with 1"


def test_file_that_is_missing_or_broken_is_no_result(tree):
    path = tree.root / RESULTS / "speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in (None, "{", "[]"):
        if text is not None:
            path.write_text(text)
        assert result_of(SPEED, tree.root) is None
    path.write_text(json.dumps(result(tree)))
    assert result_of(SPEED, tree.root) == result(tree)
    assert why_again(SPEED, None, tree.root) == "not measured"
