"""What the freezing benchmark makes of its runs."""

import math

import pytest

import freezing
from harness.paired import non_inferiority


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
