"""The scripts about transformations run, find nothing wrong, and judge what is."""

import dataclasses
import json
import sys
from pathlib import Path

import endurance
import failure_time
import fault_injection
import pytest
import torch
import transformation_curve as curve
import transition_time
from _curve_runs import CurveRun
from _fault_case import Case
from _fault_checks import Reference, judge
from _fault_drive import Trace
from _fault_table import cases

from tests.support import fork_server

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The tests' own server: there is one per process."""
    fork_server.context()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "arguments", "tables"),
    [
        (
            fault_injection,
            ["--only=in move: SIGKILL, member of 2", "--heartbeat=6", "--jobs=1"],
            ["faults"],
        ),
        (failure_time, ["--quick"], ["rows"]),
        (endurance, ["--quick"], ["endurance"]),
        (transition_time, ["--quick", "--repeats=1"], ["switches", "pauses"]),
        (curve, ["--quick"], ["curve"]),
    ],
)
def test_script_finds_nothing_wrong_and_writes_what_tables_need(
    script, arguments, tables, tmp_path, capsys
):
    path = tmp_path / f"{script.__name__}.json"
    status = script.main([*arguments, f"--json={path}"])
    assert status == 0, capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["name"] == path.stem and content["quick"]
    for table in tables:
        assert len(TABLES[table](content)) > 2


def test_there_are_enough_cases_and_each_once():
    found = cases("raise")
    assert len(found) >= 100 and len(set(found)) == len(found)
    assert {case.world_size for case in found} == {2, 3, 4}


def test_a_case_of_unknown_words_is_refused():
    with pytest.raises(ValueError, match="expected one of .* got 'nowhere'"):
        Case("nowhere", "SIGKILL", "lead", 2)


# -- judging a case ------------------------------------------------------------

STEPS = [
    {"kind": "step", "at": float(n), "epoch": n // 5, "batch": n % 5} for n in range(15)
]


def trace(*, hashes=("a", "a"), ended="finished", strike=None, **changes):
    """Return what a run of two ranks left that both train all steps."""
    logs = []
    for rank, name in enumerate(hashes):
        lines = [
            {**s, "hash": f"{name}{n}", "ids": [rank]} for n, s in enumerate(STEPS)
        ]
        outcome = {"kind": "outcome", "at": 20.0, "ended": ended}
        outcome |= {"rank": None, "phase": "store", "history": {"epochs": []}}
        logs.append([*lines, outcome])
    if strike is not None:
        logs[strike].append({"kind": "strike", "at": 19.0})
    weights = {rank: [torch.zeros(2)] for rank in range(2)}
    nothing = Trace(logs, ["", ""], {}, None, float("inf"), {}, weights)
    return dataclasses.replace(nothing, **changes)


ENDS = Case("at pass close", "SIGTERM", "member", 2)
SLOW = Case("at pass close", "slow", "member", 2)


def problems(case, found):
    return judge(case, "raise", found, Reference.of(trace())).problems


def test_a_case_that_ends_as_it_should_has_no_problem():
    found = trace(ended="PeerFailure", strike=1)
    verdict = judge(ENDS, "raise", found, Reference.of(trace()))
    assert verdict.problems == () and verdict.seconds == 1.0
    assert problems(SLOW, trace(strike=1)) == ()


@pytest.mark.parametrize(
    ("case", "changes", "text"),
    [
        (ENDS, {"ended": "PeerFailure"}, "expected 1 strike, got 0"),
        (ENDS, {"strike": 1}, "expected PeerFailure"),
        (SLOW, {"strike": 1, "ended": "PeerFailure"}, "expected finished"),
        (SLOW, {"strike": 1, "hashes": ("a", "b")}, "different weights"),
        (SLOW, {"strike": 1, "hashes": ("b", "b")}, "other bits"),
        (SLOW, {"strike": 1, "hung": {0: ""}}, "hung"),
        (SLOW, {"strike": 1, "errors": ["KeyError: 1", ""]}, "KeyError"),
        (SLOW, {"strike": 1, "woken": False}, "did not end"),
        (SLOW, {"strike": 1, "checkpoints": {"x": None}}, "does not load"),
        (SLOW, {"strike": 1, "checkpoints": {"x": (3, "b2")}}, "not the state"),
        (SLOW, {"strike": 1, "weights": {}}, "nobody finished"),
        (SLOW, {"strike": 1, "weights": {0: [torch.ones(2)]}}, "undisturbed run"),
    ],
)
def test_each_check_of_a_case_can_fail(case, changes, text):
    assert any(text in problem for problem in problems(case, trace(**changes)))


def test_a_sample_that_is_lost_is_found():
    found = trace(strike=1)
    found.logs[0][3]["ids"] = []
    assert any("expected samples" in text for text in problems(SLOW, found))


# -- judging curves and growth -------------------------------------------------


def curve_run(**changes):
    state = {"weights": "w", "moments": "m", "rates": "r"}
    run = CurveRun(
        losses=[1.0, 0.5],
        evaluations=[(2.0, 1.0), (1.0, 0.5)],
        shapes=["2x1", "1x2"],
        states=[{0: (state, state)}, {0: (state, state)}],
        ids=[[0, 1], [1, 0]],
        step_ids=[[0, 1], [0, 1]],
        weights=[torch.zeros(1)],
    )
    return dataclasses.replace(run, **changes)


def test_each_check_of_a_curve_can_fail():
    good = curve_run()
    assert curve.broken_bits(good) == []
    assert curve.broken_samples(good, good, 2) == []
    other = {"weights": "x", "moments": "m", "rates": "r"}
    bad = curve_run(
        evaluations=[(2.0, 1.0), (1.1, 0.5)],
        states=[good.states[0], {0: (other, other)}],
    )
    assert curve.broken_bits(bad) == ["2x1 -> 1x2: test loss", "2x1 -> 1x2: weights"]
    lost = curve_run(ids=[[0, 0], [1, 0]], step_ids=[[0, 0], [0, 1]])
    assert len(curve.broken_samples(lost, good, 2)) == 2
    far = curve.distance(curve_run(losses=[1.0, 0.6]), good)
    assert far["training loss"] == pytest.approx(0.2) and far["test loss"] == 0.0


def test_growth_names_rank_and_count():
    early = {"descriptors": 9, "threads": 4, "memory_mb": 100.0, "store_keys": 30}
    late = {**early, "memory_mb": 115.0}
    assert endurance.Endurance(8, 1.0, [early], [late]).growth() == []
    late = {**early, "memory_mb": 117.0, "threads": 5}
    grown = endurance.Endurance(8, 1.0, [early], [late]).growth()
    assert grown == ["rank 0: threads 4 -> 5", "rank 0: memory_mb 100 -> 117"]
