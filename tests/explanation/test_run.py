"""What an explanation of a run says, from the summary that the run wrote."""

import copy
import json

import pytest

from pipetransformer.core.wire import printable
from pipetransformer.explanation import explain_run
from pipetransformer.planner import Transition
from pipetransformer.report import (
    AbortRecord,
    EpochRecord,
    History,
    PlanShape,
    RecoveryRecord,
    RefusalRecord,
    Saved,
    TransformationRecord,
    recovery_line,
    write_summary,
)

FIRST = PlanShape(0, 0, 4, 1, 8)
SECOND = PlanShape(2, 4, 2, 2, 4)


def a_transition(**fields):
    values = dict(
        kind="shape",
        offered="K=2 R=2 M=4",
        terms_ns={"prepare": 20_000_000, "rewire": 10_000_000, "first_step": 1_000_000},
        pause_ns=31_000_000,
        gain_ns_per_step=5_000_000,
        remaining_steps=50,
        pay_back_steps=7,
        accepted=True,
        rule="it pays",
    )
    return Transition(**{**values, **fields})


def an_epoch(epoch, shape, *, steps=10, seconds=1.0, predicted=0):
    return EpochRecord(
        epoch=epoch,
        shape=shape,
        samples=100,
        unique_samples=100,
        optimizer_steps=steps,
        seconds=seconds,
        train_loss=0.5,
        cache_hits=0,
        cache_misses=0,
        predicted_step_ns=predicted,
    )


def a_history():
    phases = {
        "prepare/group": 0.02,
        "prepare": 0.03,
        "rewire": 0.005,
        "plan": 0.01,
        "first_step": 0.002,
    }
    history = History(world_size=4, seed=0, total_seconds=8.0)
    history.add(TransformationRecord(0, None, FIRST, 0.25, {}, "the first"))
    history.add(
        TransformationRecord(
            1,
            FIRST,
            SECOND,
            0.045,
            phases,
            "K=2 is shorter",
            a_transition(),
            moved_bytes=29_881,
            group="cached",
        )
    )
    history.aborted.append(
        AbortRecord(1, 10, SECOND, 12.0, {"plan": 0.1}, "rank 3: no room")
    )
    spent = {"prepare": 0.25, "prepare/group": 0.125, "roll_call": 10.0}
    history.recoveries += [
        RecoveryRecord(1, 17, [1, 3], SECOND, None, 10.5, spent),
        RecoveryRecord(2, 19, [2], None, None, 0.5, {}),
    ]
    history.counters.groups_reused = 1
    refused = a_transition(accepted=False, rule="too dear", anyway_terms_ns={})
    history.refusals.append(RefusalRecord(2, refused))
    history.epochs = [
        an_epoch(0, FIRST, predicted=110_000_000),
        an_epoch(1, SECOND),
        an_epoch(2, SECOND, steps=0),
    ]
    history.phase_seconds = {"other": 1.0, "forward": 6.0, "backward": 1.0}
    return history


def a_summary():
    return json.loads(json.dumps(a_history().to_json()))


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (None, ""),
        ("well", "; ended well"),
        ({"error": "OSError", "text": "disk full"}, "; ended with OSError: disk full"),
    ],
)
def test_how_the_run_ended_is_told_in_the_first_line(ended, told):
    found = explain_run({**a_summary(), "ended": ended})
    assert str(found).splitlines()[0] == f"run of 4 processes, 8.00 s{told}"
    assert found.to_dict()["ended"] == ended


def test_a_summary_of_before_says_nothing_of_the_end():
    old = {name: value for name, value in a_summary().items() if name != "ended"}
    found = explain_run(old)
    assert found.ended is None and "ended" not in str(found).splitlines()[0]
    with pytest.raises(ValueError, match="^summary ended: expected one of"):
        explain_run({**old, "ended": "badly"})


def test_what_freezing_saved_is_told():
    saved = Saved(1.5, 0.25, 0.02, 0.0085)
    summary = {**a_summary(), "freezing": saved.to_json()}
    found = explain_run(summary)
    assert found.freezing == saved
    assert found.to_dict()["freezing"] == summary["freezing"]
    assert (
        "so far freezing has saved 1.50 s of training, and changes of plan took "
        "0.25 s: the mean step took at least 20.000 ms with the fewest units frozen, "
        "and 8.500 ms with more"
    ) in str(found)
    cost = explain_run({**summary, "freezing": {**saved.to_json(), "seconds": -1.5}})
    assert "has cost 1.50 s" in str(cost)
    for wrong in ("much", True, float("nan"), -float("inf")):
        broken = {**saved.to_json(), "seconds": wrong}
        with pytest.raises(ValueError, match="summary freezing seconds"):
            explain_run({**summary, "freezing": broken})


def test_steps_and_pauses_are_put_beside_their_predictions():
    found = {m.what: m for m in explain_run(a_summary()).measured}
    step = found["step of epoch 0 (frozen 0, K=4, R=1, M=8)"]
    assert (step.predicted_ns, step.measured_ns) == (110_000_000, 100_000_000)
    assert step.error == pytest.approx(0.1)
    unknown = found["step of epoch 1 (frozen 2, K=2, R=2, M=4)"]
    assert (unknown.predicted_ns, unknown.error) == (None, None)
    assert not any("epoch 2" in what for what in found)  # no step, no time
    first = found["pause before epoch 0"]
    assert (first.predicted_ns, first.measured_ns) == (None, 250_000_000)
    # The first step comes after the pause, and is part of what was predicted.
    assert "a pause here also holds what the first" in str(explain_run(a_summary()))
    pause = found["pause before epoch 1"]
    assert (pause.predicted_ns, pause.measured_ns) == (31_000_000, 47_000_000)
    prepare = found["prepare before epoch 1"]
    assert (prepare.predicted_ns, prepare.measured_ns) == (20_000_000, 30_000_000)


def test_a_refused_change_is_compared_with_what_was_done_anyway():
    history = a_history()
    refused = a_transition(
        accepted=False, anyway_terms_ns={"prepare": 5_000_000, "rewire": 10_000_000}
    )
    (record,) = history.transformations
    history.transformations = [
        TransformationRecord(**{**vars(record), "transition": refused})
    ]
    found = {m.what: m for m in explain_run(history.to_json()).measured}
    assert found["pause before epoch 1"].predicted_ns == 15_000_000


def test_a_change_that_was_not_made_for_a_gain_is_not_said_to_pay_nothing_back():
    history = a_history()
    (record,) = history.transformations
    moved = a_transition(
        kind="boundary", gain_ns_per_step=0, pay_back_steps=None, rule="shorter"
    )
    history.transformations = [
        TransformationRecord(**{**vars(record), "transition": moved})
    ]
    history.refusals = []
    text = str(explain_run(json.loads(json.dumps(history.to_json()))))
    # The rule is part of the reason that has been told: once is enough.
    assert "change of boundary to K=2 R=2 M=4, accepted\n" in text
    assert "pay back" not in text
    assert "gain 0" not in text


def test_text_tells_changes_reasons_prices_and_refusals():
    text = str(explain_run(a_summary()))
    for part in (
        "run of 4 processes, 8.00 s",
        "epoch 0: first plan frozen 0, K=4, R=1, M=8; pause 250.000 ms",
        "epoch 1: frozen 0, K=4, R=1, M=8 -> frozen 2, K=2, R=2, M=4; pause 45.000 ms",
        "K=2 is shorter",
        "change of shape to K=2 R=2 M=4, accepted: it pays",
        "gain 5.000 ms a step over 50 steps left; pays back after 7 steps",
        "predicted: prepare 20.000 ms, rewire 10.000 ms, first_step 1.000 ms",
        "measured: prepare 30.000 ms (group 20.000 ms), plan 10.000 ms, rewire 5.000",
        "29881 bytes moved, cached group",
        f"before epoch 1: {SECOND}; rank 3: no room; 12000.000 ms lost",
        "Lost ranks",
        "epoch 1, step 17: ranks 1, 3; frozen 2, K=2, R=2, M=4 -> no plan; pause",
        "measured: roll_call 10000.000 ms, prepare 250.000 ms (group 125.000 ms)",
        "epoch 2, step 19: ranks 2; no plan -> no plan; pause 500.000 ms",
        "groups reused 1",
        "before epoch 2:",
        "refused: too dear",
        "forward   6.00 s  75.0 %",
    ):
        assert part in text


def test_a_loss_without_a_plan_is_told_in_the_words_of_the_log():
    history = a_history()
    told = str(explain_run(a_summary()))
    for record in history.recoveries:
        shapes = f"{record.before or 'no plan'} -> {record.after or 'no plan'}"
        assert f"; {shapes}; pause" in told
        assert f": {shapes}; pause" in recovery_line(record)


def test_text_says_what_predicted_steps_hold():
    text = str(explain_run(a_summary()))
    told, _, table = text.partition("Predicted against measured")[2].partition("what  ")
    assert "also holds optimizer" in " ".join(told.split())
    assert table.split()[:3] == ["predicted", "measured", "error"]


def test_json_is_complete_and_plain():
    values = explain_run(a_summary()).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["kind"], values["world_size"]) == ("run", 4)
    assert [change["from"] for change in values["changes"]] == [None, str(FIRST)]
    assert values["changes"][1]["transition"] == a_transition().to_dict()
    assert values["refusals"][0]["transition"]["rule"] == "too dear"
    assert values["changes"][1]["moved_bytes"] == 29_881
    assert values["aborts"][0]["reason"] == "rank 3: no room"
    assert values["counters"]["groups_reused"] == 1
    lost = values["recoveries"]
    assert [each["lost"] for each in lost] == [[1, 3], [2]]
    assert (lost[0]["from"], lost[0]["to"], lost[0]["step"]) == (str(SECOND), None, 17)
    assert lost[0]["phases_ns"]["roll_call"] == lost[0]["pause_ns"] - 500_000_000


def test_what_write_summary_writes_is_read(tmp_path):
    write_summary(a_history(), tmp_path / "run.json")
    summary = json.loads((tmp_path / "run.json").read_text())
    assert explain_run(summary) == explain_run(a_summary())


def test_the_error_of_another_rank_is_recorded_as_it_can_be_explained():
    reason = "RuntimeError: \x1b[31mno\n\troom\x1b[0m \ud800" + "x" * 10_000
    shown = printable(reason)
    assert shown.startswith("RuntimeError: \\x1b[31mno room\\x1b[0m \\ud800xxx")
    summary = a_summary()
    summary["aborted"][0]["reason"] = shown
    assert shown in str(explain_run(summary)) and len(shown) == 4096


def test_a_record_of_many_phases_is_one_pass_over_them():
    """One pass for each of them would not end in time."""
    summary = a_summary()
    names = [f"{outer}{part}" for outer in range(80_000) for part in ("", "/part")]
    summary["transformations"][0]["phases"] = dict.fromkeys(names, 0.001)
    text = str(explain_run(summary))
    assert "79999 1.000 ms (part 1.000 ms)" in text


def test_a_summary_without_prices_is_read():
    summary = a_summary()
    del summary["refusals"], summary["transformations"][0]["transition"]
    del summary["aborted"], summary["counters"], summary["freezes"]
    del summary["recoveries"]
    del summary["transformations"][0]["group"]
    for epoch in summary["epochs"]:
        del epoch["predicted_step_ns"], epoch["measured_step_ns"]
    report = explain_run(summary)
    assert report.changes[1].transition is None
    assert all(entry.predicted_ns is None for entry in report.measured)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), [], "summary: expected an object, got list"),
        (("epochs",), {}, "summary epochs: expected a list, got {}"),
        (("epochs", 0), 3, r"summary epochs\[0\]: expected an object, got int"),
        (("epochs", 0, "seconds"), -1, r"epochs\[0\] seconds: expected seconds from 0"),
        (("epochs", 0, "seconds"), float("nan"), "expected seconds from 0, got nan"),
        (("epochs", 0, "seconds"), 10**400, "expected seconds from 0, got 1000"),
        (("epochs", 0, "num_stages"), True, "num_stages: expected an integer, got Tr"),
        (("epochs", 0, "epoch"), 2**70, r"epoch: expected 0 to 2\*\*62"),
        (("world_size",), None, "summary world_size: expected an integer, got None"),
        (("transformations", 0, "to"), "K=2", r"transformations\[0\] to: expected an"),
        (("transformations", 0, "reason"), 1, "reason: expected a string, got 1"),
        (("transformations", 0, "phases"), {"a": "b"}, "phases a: expected seconds"),
        (("transformations", 0, "transition", "kind"), "x", "transition: transition k"),
        (("refusals", 0, "transition"), None, r"refusals\[0\] transition"),
        (("aborted", 0, "reason"), 1, r"aborted\[0\] reason: expected a string"),
        (("counters", "groups_built"), -1, "counters groups_built: expected 0 to"),
        (("first_plan",), 7, "summary first_plan: expected an object, got int"),
        (("first_plan", "reason"), "\x1b[2J", r"reason: expected text without control"),
        (("aborted", 0, "reason"), "a\tb", r"aborted\[0\] reason: expected text with"),
        (("aborted", 0, "reason"), "x" * 4097, "expected at most 4096 letters, got 40"),
        (("transformations", 0, "group"), "x" * 257, "group: expected at most 256 let"),
        (("counters",), {"\x9b2J": 1}, r"counters, name of a field: expected text wit"),
        (
            ("phase_seconds",),
            {"x" * 257: 1},
            "phase_seconds, name of a field: expected",
        ),
        (("refusals", 0, "transition", "rule"), "\x07", "rule: expected text without"),
    ],
)
def test_malformed_summaries_are_refused_naming_the_field(path, value, message):
    summary = copy.deepcopy(a_summary())
    if path:
        inner = summary
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    else:
        summary = value
    with pytest.raises(ValueError, match=message):
        explain_run(summary)
