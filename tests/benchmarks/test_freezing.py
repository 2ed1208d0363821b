"""What the freezing benchmark makes of its runs."""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import pytest

import freezing
import freezing_time
from harness import provenance
from harness.age import Age
from harness.common import Series
from harness.paired import non_inferiority
from harness.provenance import Tree
from harness.timing import Sample
from training import freezing_worker


def runs(*scores, work=100, evaluations=0):
    return [
        {"score": score, "work": work, "evaluations": evaluations} for score in scores
    ]


def figures(task, found):
    rows, lines = freezing.rows_of(task, found)
    return {(row.system, row.metric): row for row in rows}, lines


def test_policies_are_compared_with_the_unfrozen_run_of_the_same_seed():
    found = {
        "unfrozen": runs(90.0, 80.0, 85.0),
        "guarded": runs(90.1, 79.9, 85.0, work=50),
        "cap 1/3": runs(89.0, 78.9, 84.1, work=25),
    }
    rows, lines = figures("digits 50 %", found)
    mean = rows["digits 50 %, guarded", "mean difference"].values[0]
    assert mean == pytest.approx(0.0, abs=1e-12)
    work = rows["digits 50 %, cap 1/3", "work of unfrozen over its own"].values
    assert work == (4.0, 4.0, 4.0)
    limit = rows["digits 50 %, guarded", "lower limit"]
    assert limit.target.bound == -0.3
    told = {line[1]: line[4] for line in lines}
    assert told["guarded"].endswith("passes") and told["cap 1/3"].endswith("FAILS")


def test_evaluations_that_a_policy_needs_are_told_beside_its_work():
    found = {
        "unfrozen": runs(90.0, 80.0),
        "guarded": runs(90.0, 80.0),
        "guarded, held-out loss": runs(90.0, 80.0, work=50, evaluations=30),
    }
    rows, _ = figures("sst2 1024", found)
    name, metric = "sst2 1024, guarded, held-out loss", "the same with its evaluations"
    assert rows[name, "work of unfrozen over its own"].values == (2.0, 2.0)
    assert rows[name, metric].values == (1.25, 1.25)
    assert ("sst2 1024, guarded", metric) not in rows


def test_curves_tell_the_score_by_the_work_that_the_unfrozen_run_does():
    def run(*curve):
        return {"work": curve[-1][0], "curve": list(curve)}

    found = {
        "unfrozen": [run((50, 80.0), (100, 90.0)), run((50, 82.0), (100, 92.0))],
        "cap 1/3": [run((50, 80.0), (60, 89.0)), run((50, 82.0), (55, 91.0))],
    }
    rows, lines = freezing.curves_of("digits", found)
    cells = {(row.system, row.metric): row.values for row in rows}
    at = "with {} % of the work".format
    assert ("digits, unfrozen", at(40)) not in cells
    assert cells["digits, unfrozen", at(80)] == (80.0, 82.0)
    assert cells["digits, unfrozen", at(100)] == (90.0, 92.0)
    for share in (60, 100):
        assert cells["digits, cap 1/3", at(share)] == (89.0, 91.0)
    assert lines[0] == ["digits", "unfrozen", *"-" * 4, "81.00", "81.00", "91.00"]


def test_a_held_out_set_is_there_for_sst2_alone(capsys):
    with pytest.raises(SystemExit):
        freezing.parse_args(["--policies", "guarded, held-out loss"])
    assert "expected tasks of SST-2, got digits" in capsys.readouterr().err


def test_the_margin_is_that_of_the_kind_of_task():
    found = {"unfrozen": runs(90.0, 80.0), "guarded": runs(90.1, 79.9)}
    for task, margin in (("sst2 1024", 0.5), ("xquad", 0.5), ("digits", 0.3)):
        rows, _ = figures(task, found)
        assert rows[f"{task}, guarded", "lower limit"].target.bound == -margin


def test_so_many_seeds_show_what_the_margin_asks_for():
    spread = [0.4 * sign for sign in (1, -1) * 20]
    needed = freezing.seeds_needed(spread, 0.3)
    # With the normal quantiles 1.645 + 0.842 and the spread of these differences.
    assert needed == math.ceil((2.4865 * 0.4051 / 0.3) ** 2)
    differences = (spread * 2)[: 4 * needed]
    test = non_inferiority([80 + d for d in differences], [80.0] * len(differences))
    assert test.passes
    assert freezing.seeds_needed([0.0, 0.0], 0.3) == 2
    assert freezing.seeds_needed(spread, 0.1) > 8 * needed


class Sitting:
    """The benchmark with a worker that makes the first so many seeds it is told."""

    def __init__(self, monkeypatch, tmp_path):
        self.json, self.told, self.most, self.changed = tmp_path / "x.json", [], 9, {}
        self._monkeypatch, self._root = monkeypatch, tmp_path
        monkeypatch.setattr(freezing, "ROOT", tmp_path)
        monkeypatch.setattr(freezing, "run_child", self._work)
        monkeypatch.setattr(freezing, "unpack_model", lambda folder: folder)
        monkeypatch.setattr(
            freezing,
            "age",
            lambda root, commit, paths: Age(self.changed.get(commit, 0)),
        )
        monkeypatch.setattr(freezing, "command", lambda: "one command")
        monkeypatch.setattr(provenance, "command", lambda: "one command")

    def _work(self, line, **_):
        at = line.index("--seeds") + 1
        seeds = [int(each) for each in line[at : line.index("--model")]]
        folder = Path(line[line.index("--out") + 1])
        self.told.append(seeds)
        for seed in seeds[: self.most]:
            for name in ("unfrozen", "cap 1-3"):
                keys = dict.fromkeys(("evaluations", "held_out", "curve"), 0)
                run = {"score": 50.0 + seed, "frozen": [0], "losses": [], "work": 2}
                file = folder / f"xquad, {name}, {seed}.json"
                file.write_text(json.dumps({**run, **keys}))

    def take(self, commit, most, *options, seeds=6):
        """Take a sitting; return its status, and seeds and commits in the file."""
        self.most = most
        tree = Tree(commit, ())
        for module in (freezing, provenance):
            self._monkeypatch.setattr(module, "tree_of", lambda *_: tree)
        line = ["--tasks", "xquad", "--policies", "cap 1/3", "--seeds", str(seeds)]
        status = freezing.main([*line, "--json", str(self.json), *options])
        content = json.loads(self.json.read_text())
        self.commits, self.so_far = content["commits"], content["seeds_so_far"]
        runs = content["runs"]["xquad"]["cap 1/3"]
        return status, [(run["seed"], run["commit"]) for run in runs]


IN_PARTS = ("--minutes", "60")


def test_a_sitting_goes_on_where_the_one_before_has_stopped(monkeypatch, tmp_path):
    sitting = Sitting(monkeypatch, tmp_path)
    assert sitting.take("a", 1, *IN_PARTS) == (0, [(0, "a")]), "one is kept, too"
    assert sitting.so_far == {"xquad": 1}
    whole = sitting.take("b", 9, *IN_PARTS)
    assert whole == (0, [*zip(range(6), "abbbbb", strict=True)])
    assert sitting.commits == ["a", "b"]
    written = sitting.json.stat().st_mtime_ns
    assert sitting.take("c", 9, *IN_PARTS) == whole
    assert sitting.json.stat().st_mtime_ns == written, "nothing new, no new commit"
    assert sitting.told == [[*range(6)], [1, 2, 3, 4, 5]]
    _, anew = sitting.take("c", 9)
    assert {commit for _, commit in anew} == {"c"}, "at once: one commit"


def test_seeds_of_before_a_change_of_what_decides_are_made_again(monkeypatch, tmp_path):
    sitting = Sitting(monkeypatch, tmp_path)
    sitting.take("a", 2, *IN_PARTS)
    sitting.take("b", 2, *IN_PARTS)
    sitting.changed = {"a": 3, "b": 0}
    _, seeds = sitting.take("c", 9, *IN_PARTS)
    assert seeds == [*zip(range(6), "ccbbcc", strict=True)]


def test_other_commands_and_seeds_that_are_not_asked_for_stay_out(
    monkeypatch, tmp_path
):
    sitting = Sitting(monkeypatch, tmp_path)
    sitting.take("a", 9, *IN_PARTS)
    _, seeds = sitting.take("b", 9, *IN_PARTS, "--first-seed", "4")
    assert [seed for seed, _ in seeds] == [4, 5, 6, 7, 8, 9]
    assert [commit for _, commit in seeds] == [*"aabbbb"]
    monkeypatch.setattr(freezing, "command", lambda: "another command")
    _, seeds = sitting.take("c", 9, *IN_PARTS)
    assert {commit for _, commit in seeds} == {"c"}


def test_a_tree_that_changes_within_a_sitting_leaves_no_figures(
    monkeypatch, tmp_path, capsys
):
    sitting = Sitting(monkeypatch, tmp_path)
    sitting.take("a", 2, *IN_PARTS)
    before = sitting.json.read_text()
    work = sitting._work

    def moved(line, **_):
        work(line)
        monkeypatch.setattr(freezing, "tree_of", lambda *_: Tree("z", ()))

    monkeypatch.setattr(freezing, "run_child", moved)
    assert sitting.take("b", 9, *IN_PARTS)[0] == 1
    assert "the tree was changed meanwhile" in capsys.readouterr().err
    assert sitting.json.read_text() == before
    monkeypatch.setattr(freezing, "begin", lambda: begun(Tree("b", ("x.py",))))
    assert freezing.main(["--tasks", "xquad", *IN_PARTS]) == 1
    assert "expected a tree as committed" in capsys.readouterr().err


def begun(tree):
    return provenance.Start(tree, 0.0, 0.0, 0.0)


def test_seeds_that_have_not_all_their_runs_are_made_again(monkeypatch):
    def run(seed, commit="a"):
        return {"seed": seed, "commit": commit}

    monkeypatch.setattr(freezing, "age", lambda *_: Age(0))
    runs = {
        "unfrozen": [run(0), run(1), run(2), {"score": 1.0}],
        "guarded": [run(0), run(2, "b"), {"score": 1.0}],
    }
    found = freezing.whole_seeds(runs, ["unfrozen", "guarded"])
    assert found == {0: [run(0), run(0)]}, "1 lacks a run, 2 is of two commits"
    assert freezing.whole_seeds({}, ["unfrozen"]) == {}


def worker_args(tmp_path, **changed):
    policies = ["unfrozen", "cap 1/3", "guarded"]
    settings = {"task": "xquad", "out": tmp_path, "proof_seed": None, **changed}
    return argparse.Namespace(policies=policies, **settings)


def scores_of(tmp_path):
    return {
        path.stem.split(", ")[1]: json.loads(path.read_text())["score"]
        for path in tmp_path.iterdir()
    }


@pytest.mark.parametrize(
    ("frozen", "evaluations", "wanted"),
    [
        ([0, 0], 0, {"cap 1-3": 1, "guarded": 2, "unfrozen": 2}),
        ([0, 3], 0, {"cap 1-3": 1, "guarded": 2, "unfrozen": 3}),
        ([0, 0], 8, {"cap 1-3": 1, "guarded": 2, "unfrozen": 3}),
    ],
)
def test_a_policy_that_froze_nothing_has_made_the_unfrozen_run(
    frozen, evaluations, wanted, monkeypatch, tmp_path
):
    made = []

    def make(args, name, seed):
        made.append(name)
        guarded = name == "guarded"
        return {
            "score": len(made),
            "frozen": frozen if guarded else [4 if name != "unfrozen" else 0],
            "evaluations": evaluations,
            "losses": [],
            "work": 1,
        }

    monkeypatch.setattr(freezing_worker, "made", make)
    freezing_worker.make_seed(worker_args(tmp_path), 5)
    assert scores_of(tmp_path) == wanted
    freezing_worker.make_seed(worker_args(tmp_path), 5)
    assert len(made) == wanted["unfrozen"], "what is there is not made again"


@pytest.mark.parametrize("differs", [None, "losses", "score", "work"])
def test_one_seed_proves_that_freezing_nothing_is_the_unfrozen_run(
    differs, monkeypatch, tmp_path
):
    def make(args, name, seed):
        own = {"score": 50.0, "losses": [1.0], "work": 9, "evaluations": 0}
        if name == "unfrozen" and differs is not None:
            own[differs] = 7
        return {**own, "frozen": [4 if name == "cap 1/3" else 0]}

    monkeypatch.setattr(freezing_worker, "made", make)
    freezing_worker.make_seed(worker_args(tmp_path, proof_seed=4), 5)
    told = json.loads((tmp_path / "xquad, unfrozen, 5.json").read_text())
    assert told["same_as"] == "guarded"
    args = worker_args(tmp_path, proof_seed=4)
    if differs is None:
        freezing_worker.make_seed(args, 4)
        told = json.loads((tmp_path / "xquad, unfrozen, 4.json").read_text())
        assert "same_as" not in told
    else:
        with pytest.raises(RuntimeError, match=f"the unfrozen run's {differs}"):
            freezing_worker.make_seed(args, 4)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_seed_that_fails_ends_the_sitting(jobs, monkeypatch, tmp_path):
    begun = []

    def make(*given):
        begun.append(given[-1])
        raise OSError("no more room")

    monkeypatch.setattr(freezing_worker, "make_seed", make)
    monkeypatch.setattr(freezing_worker, "_make_alone", make)
    line = ["worker", "--task", "xquad", "--policies", "unfrozen", "--out", "x"]
    seeds = ["--seeds", *map(str, range(50))]
    monkeypatch.setattr(sys, "argv", [*line, "--jobs", str(jobs), *seeds])
    with pytest.raises(OSError, match="no more room"):
        freezing_worker.main()
    assert len(begun) <= jobs


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_seed_is_begun_when_the_time_is_over(jobs, monkeypatch, tmp_path):
    begun = []

    def make(*given):
        begun.append(given[-1])
        time.sleep(0.05)

    monkeypatch.setattr(freezing_worker, "make_seed", make)
    monkeypatch.setattr(freezing_worker, "_make_alone", make)
    line = ["worker", "--task", "xquad", "--policies", "unfrozen", "--out", "x"]
    line += ["--jobs", str(jobs), "--seeds", *map(str, range(400))]
    monkeypatch.setattr(sys, "argv", line + ["--minutes", str(2 / 60)])
    freezing_worker.main()
    assert begun and len(begun) < 400
    assert sorted(begun) == [*range(len(begun))]
    del begun[:]
    monkeypatch.setattr(sys, "argv", [*line[:-400], "7", "8", "9"])
    freezing_worker.main()
    assert sorted(begun) == [7, 8, 9]


def test_seeds_side_by_side_have_a_process_each(monkeypatch):
    called = []
    monkeypatch.setattr(
        freezing_worker.subprocess, "run", lambda line, check: called.append(line)
    )
    monkeypatch.setattr(sys, "argv", ["worker", "--jobs", "2", "--seeds", "3", "4"])
    freezing_worker._make_alone(4)
    assert called == [
        [sys.executable, *sys.argv, "--jobs", "1", "--seeds", "4"],
    ]


def test_seconds_are_compared_within_a_round_and_bounded_by_the_work():
    def series(policy, seconds, work):
        sample = Sample(1.0, 1.0)
        made = [
            freezing_time.Run(sample, {freezing_time.WALL_TIME: s}, work, [])
            for s in seconds
        ]
        return Series(policy, tuple(made), (), ())

    found = freezing_time.ratios_of(
        "digits",
        {
            "unfrozen": series("unfrozen", (10.0, 20.0, 30.0), 300),
            "cap 1/3": series("cap 1/3", (5.0, 11.0, 10.0), 100),
            "guarded": series("guarded", (10.5, 21.0, 31.0), 300),
        },
        quick=False,
    )
    cap, guarded = found
    assert (cap.name, cap.value, cap.bound) == (
        "digits: best static / cap 1/3",
        2.0,
        3.0,
    )
    assert cap.target is None and guarded.bound is None
    assert guarded.value == pytest.approx(20 / 21)
    assert guarded.target.judged({"value": guarded.value})["met"] is False
