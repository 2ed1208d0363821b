"""One table of commands: what is run, and what a result must be of."""

import subprocess
from pathlib import Path

import pytest

import bench
from harness.commands import COMMANDS
from harness.provenance import Tree

ROOT = Path(__file__).parents[2]
CLEAN = Tree("0" * 40, ())


class Runs:
    """Notes what would be run; some of it fails."""

    def __init__(self, failing=()):
        self.lines = []
        self.failing = failing

    def __call__(self, line, *, cwd, env, check):
        assert (cwd, check) == (bench.ROOT, False) and "OMP_NUM_THREADS" in env
        self.lines.append(" ".join(["python", *line[1:]]))
        failed = any(name in line[-1] for name in self.failing)
        return subprocess.CompletedProcess(line, int(failed))


@pytest.fixture
def runs(monkeypatch):
    found = Runs()
    monkeypatch.setattr(bench.subprocess, "run", found)
    monkeypatch.setattr(bench, "tree_of", lambda _: CLEAN)
    return found


def test_each_command_runs_a_script_and_measures_what_there_is():
    for name, command in COMMANDS.items():
        assert command.name == name
        program = command.program
        path = (
            f"{program[1].replace('.', '/')}.py" if program[0] == "-m" else program[0]
        )
        assert path in command.measures
        for each in command.measures:
            assert (ROOT / each).exists(), each
        assert command.line.endswith(f" --json benchmarks/results/{name}.json")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (
            "table1_speedup",
            ["training/systems", "training/frozen_prefix"],
        ),
        ("fault_injection_continue", ["faults/states", "faults/worker"]),
        ("random_losses", ["faults/loss_judge", "faults/loss_worker"]),
    ],
)
def test_a_script_measures_by_files_of_its_own(name, files):
    for file in files:
        assert f"benchmarks/{file}.py" in COMMANDS[name].measures


def test_script_that_writes_results_has_a_command():
    published = {Path(c.program[0]).name for c in COMMANDS.values()}
    for path in sorted((ROOT / "benchmarks").glob("[a-z]*.py")):
        if "write_json(" in path.read_text() and path.name != "gpu_pipe.py":
            assert path.name in published, path.name


def test_what_is_run_is_what_a_result_must_be_of(runs):
    assert bench.main(["--again"]) == 0
    wanted = [c.line for c in COMMANDS.values() if c.part == "bench"]
    assert runs.lines == wanted and len(wanted) >= 19
    runs.lines.clear()
    assert bench.main(["--part", "seeds", "--again"]) == 0
    assert bench.main(["two_hosts"]) == 0
    assert runs.lines == [COMMANDS["demo_seeds"].line, COMMANDS["two_hosts"].line]


def test_failure_does_not_end_the_others_and_is_told(runs, capsys):
    runs.failing = ("planner_time",)
    assert bench.main(["planner_time", "paper_ladder"]) == 1
    assert len(runs.lines) == 2
    assert capsys.readouterr().err == "bench: planner_time failed\n"


def test_a_call_that_was_cut_short_goes_on_where_it_stopped(runs, monkeypatch, capsys):
    whys = {"paper_ladder": "3 newer commits", "planner_time": "not measured"}
    monkeypatch.setattr(bench, "why_again", lambda c, *_: whys.get(c.name, ""))
    took = {"paper_ladder": {"took_s": 61.0}}
    monkeypatch.setattr(bench, "result_of", lambda c, _: took.get(c.name))
    assert bench.main([]) == 0
    wanted = [COMMANDS[name].line for name in ("planner_time", "paper_ladder")]
    assert runs.lines == wanted
    told = capsys.readouterr().out
    assert "table1_speedup: stands\n" in told
    assert "1 of 2; left: about 2 min and 1 of unknown length\n" in told
    assert "2 of 2; left: about 2 min\n" in told


def test_what_is_named_is_measured_though_its_result_stands(runs, monkeypatch):
    monkeypatch.setattr(bench, "why_again", lambda *_: "")
    assert bench.main(["paper_ladder"]) == 0 and len(runs.lines) == 1


@pytest.mark.parametrize(
    ("tree", "got"),
    [(Tree("0" * 40, ("a.py", "b.py")), "a.py, b.py"), (Tree(None, ()), "no git")],
)
def test_changed_tree_is_refused_before_anything_runs(
    runs, monkeypatch, capsys, tree, got
):
    monkeypatch.setattr(bench, "tree_of", lambda _: tree)
    assert bench.main([]) == 1
    assert f"expected a clean tree, got {got}" in capsys.readouterr().err
    assert runs.lines == []


def test_unknown_measurement_is_refused(runs, capsys):
    with pytest.raises(SystemExit):
        bench.main(["nothing"])
    assert "NAME: expected one of table1_speedup" in capsys.readouterr().err


def test_makefile_runs_the_table_and_names_no_script_of_its_own():
    text = (ROOT / "Makefile").read_text()
    used = {word for word in text.split() if word.startswith("benchmarks/")}
    assert used - {"benchmarks/harness/commands.py"} == {"benchmarks/bench.py"}
    for part in {command.part for command in COMMANDS.values()}:
        assert f"\n{part}: build\n" in text
