"""What is aimed at stands with its figure, and what nobody waited for is no time."""

import pytest

import failure_time
import pipe_overhead
import transition_time
from faults.case import Case
from faults.checks import Verdict
from faults.report import summary
from harness.common import Row
from transformations.pause_runs import Change, PauseRun


def verdict_of(fault, outcome, seconds):
    case = Case("in backward", fault, "store host", 3)
    return Verdict(case, (), outcome, seconds, 0)


def test_nobody_waits_for_a_lost_store_whose_run_finishes():
    found = summary(
        [
            verdict_of("store stopped", "3 finished", 0.004),
            verdict_of("store killed", "3 PeerFailure", 0.3),
            verdict_of("store killed", "3 finished", 0.01),
            verdict_of("store paused", "3 finished", 0.8),
        ]
    )
    times = {fault: (row["median_s"], row["max_s"]) for fault, row in found.items()}
    assert times == {
        "store stopped": (None, None),
        "store killed": (0.3, 0.3),
        "store paused": (0.8, 0.8),
    }


def test_killed_ranks_have_a_target_for_the_slowest_repeat(monkeypatch):
    times = iter([[0.05, 0.09], [0.05, 0.11], [0.04, 0.08]] + [[2.0, 2.1]] * 3)
    monkeypatch.setattr(failure_time, "seconds_to_error", lambda *_: next(times))
    rows = failure_time.rows_of((3,), 3, 0)
    aims = {(row.system, row.metric): row.target for row in rows}
    (aim,) = (aim for aim in aims.values() if aim is not None)
    assert aims["killed, 3 processes", "last survivor"] is aim
    assert aim.judged({"max": 110.0})["met"] is False
    assert aim.judged({"max": 99.0})["met"] is True


def test_change_of_groups_and_still_pause_have_targets(monkeypatch):
    monkeypatch.setattr(
        transition_time, "switch_times", lambda *_, **__: [[0.03, 0.02, 0.01]]
    )
    rows = transition_time.switch_rows((4, 8), 1, 3)
    aimed = [row for row in rows if row.target is not None]
    assert [(row.system, row.metric) for row in aimed] == [("new, 8 processes", "p50")]
    assert aimed[0].target.judged({"median": aimed[0].median})["met"] is False


def test_pause_of_a_model_is_of_the_changes_of_one_run():
    phases = {"decide": 0.1, "move": 0.1, "first_step": 0.04}
    changes = [Change("4x1 -> 2x2", 0.2, phases, joins=True, predicted_s=0.3)] * 2
    rows = transition_time.pause_rows("model", PauseRun(1, 0.05, changes))
    assert {row.values_of for row in rows} == {"changes of one run"}
    values = {row.metric: row.values for row in rows}
    assert values["with its first step"] == pytest.approx((240.0, 240.0))
    assert values["predicted"] == pytest.approx((300.0, 300.0))
    (aimed,) = (row for row in rows if row.target is not None)
    assert aimed.metric == "without moved bytes"
    assert aimed.median == pytest.approx(2.0)
    assert aimed.target.judged({"median": aimed.median})["met"] is False


def test_overhead_above_the_loop_has_a_target_and_a_rivals_has_none():
    metrics = (
        pipe_overhead.FORWARD,
        pipe_overhead.FORWARD_ABOVE,
        pipe_overhead.BACKWARD_ABOVE,
    )
    rows = [
        Row(system, metric, "us", (11.0, 9.0, 10.5))
        for system in ("loop", "never", "other:pipe never")
        for metric in metrics
    ]
    found = pipe_overhead.judged(("never", "always"), rows)
    aimed = [(row.system, row.metric) for row in found if row.target is not None]
    assert aimed == [("never", metric) for metric in metrics[1:]]
    aim = found[4].target
    assert aim.judged({"median": 10.5})["met"] is False
    assert aim.judged({"median": 9.9})["met"] is True
