"""A result file says from which commit, by which command and alongside whom it came."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from harness.child import cpu_of_descendants_s
from harness.provenance import begin, command, provenance, tree_of

BURN = "import time\nwhile time.process_time() < {}: pass\n"


class Tree:
    """A source tree under git."""

    def __init__(self, root):
        self.root = root
        for folder in ("benchmarks", "docs"):
            (root / folder / "results").mkdir(parents=True)
        self.write("README.md")
        self.write("code.py")
        self.write(".gitignore", "*.so\n")
        self.write("benchmarks/results/speed.json")
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        line = ["git", "-C", str(self.root), *who, *arguments]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def write(self, path, text="text\n"):
        (self.root / path).write_text(text)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_clean_tree_is_named_by_its_commit(tree, capsys):
    found = provenance(begin(tree.root), tree.root)
    assert found["commit"] == tree.git("rev-parse", "HEAD")
    assert (found["dirty"], found["changed"]) == (False, [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", ["code.py", "new.py", "benchmarks/new.py"])
@pytest.mark.parametrize("when", ["before", "meanwhile", "before, then undone"])
def test_tree_that_was_changed_at_either_end_is_dirty(tree, when, path):
    if when != "meanwhile":
        tree.write(path, "other\n")
    start = begin(tree.root)
    if when == "meanwhile":
        tree.write(path, "other\n")
    if when == "before, then undone":
        tree.git("stash", "-q", "--include-untracked")
    found = provenance(start, tree.root)
    assert (found["dirty"], found["changed"]) == (True, [path])


def test_staged_and_deleted_files_are_changes(tree):
    (tree.root / "code.py").unlink()
    tree.write("staged.py")
    tree.git("add", "staged.py")
    assert tree_of(tree.root).changed == ("code.py", "staged.py")


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "docs/results/training.md",
        "benchmarks/results/speed.json",
        "benchmarks/results/new.md",
    ],
)
def test_what_measurements_write_is_no_change(tree, path):
    tree.write(path, "other\n")
    tree.write("built.so")
    assert tree_of(tree.root).changed == ()


def test_commit_that_moves_while_measuring_is_dirty(tree):
    start = begin(tree.root)
    first, second = start.tree.commit, tree.commit()
    found = provenance(start, tree.root)
    assert first != second
    assert (found["commit"], found["dirty"], found["changed"]) == (first, True, [])


def test_tree_without_git_has_no_commit(tree, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("plain")
    found = provenance(begin(folder), folder)
    assert (found["commit"], found["dirty"]) == (None, None)
    assert "not for publication: expected a git checkout" in capsys.readouterr().err


def test_folder_within_another_repository_has_no_commit(tree):
    (tree.root / "unpacked").mkdir()
    assert tree_of(tree.root / "unpacked").commit is None


def test_dirty_tree_is_told_before_the_measurement(tree, capsys):
    tree.write("code.py", "other\n")
    begin(tree.root)
    assert "expected a clean tree, got changes of code.py" in capsys.readouterr().err


def test_command_line_is_the_whole_one(monkeypatch):
    line = ["/where/ever/python3", "-m", "some.module", "--json", "a b.json"]
    monkeypatch.setattr(sys, "orig_argv", line)
    assert command() == "python -m some.module --json 'a b.json'"
    assert shlex.split(command())[1:] == line[1:]


def test_time_of_children_is_none_of_others(tree, monkeypatch):
    busy = [100.0]
    monkeypatch.setattr("harness.provenance.machine_busy_s", lambda: busy[0])
    monkeypatch.setattr("harness.provenance.os.cpu_count", lambda: 2)
    start = begin(tree.root)
    spent = -sum(os.times()[:4])
    subprocess.run([sys.executable, "-c", BURN.format(0.3)], check=True)
    time.sleep(max(0.0, 1.1 - (time.monotonic() - start.wall_s)))
    spent += sum(os.times()[:4])
    busy[0] += spent + 0.5
    share = provenance(start, tree.root)["foreign_share"]
    wall_s = time.monotonic() - start.wall_s
    # git's own few milliseconds of this call count as ours.
    assert 0.25 / wall_s - 0.1 < share <= 0.26 / wall_s + 0.01


def test_time_of_living_children_is_known():
    # A tree of its own: this process has other children that live, the fork server.
    burn = BURN.format(0.3) + "print(time.process_time(), flush=True); time.sleep(60)"
    wait = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"
    line = [sys.executable, "-c", wait, burn]
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as top:
        try:
            told = float(top.stdout.readline())
            found = cpu_of_descendants_s(top.pid)
        finally:
            os.killpg(top.pid, signal.SIGKILL)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert told >= 0.3
    assert told - 2 * tick <= found <= told + 5 * tick
