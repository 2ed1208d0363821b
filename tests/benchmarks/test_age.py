"""How many commits to what was measured are newer, or why nobody knows."""

import pytest

from harness.age import age
from tests.benchmarks.test_provenance import Tree


@pytest.fixture
def tree(tmp_path):
    found = Tree(tmp_path / "origin")
    found.write("measured.py")
    found.commit()
    return found


def change(tree, path, text):
    tree.write(path, text)
    return tree.commit()


def test_only_later_commits_to_what_was_measured_count(tree):
    change(tree, "measured.py", "before\n")
    commit = tree.git("rev-parse", "HEAD")
    for number in range(3):
        change(tree, "code.py", f"{number}\n")
    assert age(tree.root, commit, ["measured.py"]).newer == 0
    change(tree, "measured.py", "1\n")
    change(tree, "measured.py", "2\n")
    found = age(tree.root, commit, ["measured.py"])
    assert (found.newer, found.foreign) == (2, False)
    assert str(found) == "2 newer commits to what it measures"
    assert age(tree.root, commit, ["measured.py", "code.py"]).newer == 5


@pytest.mark.parametrize("known", [True, False])
def test_commit_that_is_none_of_the_history_is_foreign(tree, known):
    first = tree.git("rev-parse", "HEAD")
    lost = change(tree, "code.py", "lost\n") if known else "0123456789" * 4
    tree.git("reset", "-q", "--hard", first)
    found = age(tree.root, lost, ["code.py"])
    assert (found.newer, found.foreign) == (None, True)
    assert found.why == f"expected a commit of this history, got {lost}"


def test_shallow_clone_cannot_tell(tree, tmp_path):
    old = tree.git("rev-parse", "HEAD")
    for number in range(2):
        new = change(tree, "code.py", f"{number}\n")
    clone = tmp_path / "clone"
    tree.git("clone", "-q", "--depth=1", f"file://{tree.root}", str(clone))
    found = age(clone, old, ["code.py"])
    assert (found.newer, found.foreign) == (None, False)
    assert f"cannot be counted: {old[:7]} is not in this shallow clone" in str(found)
    assert age(clone, new, ["code.py"]).newer == 0


def test_tree_without_git_cannot_tell(tmp_path):
    found = age(tmp_path, "0" * 40, ["code.py"])
    assert (found.newer, found.why, found.foreign) == (None, "no git checkout", False)
