import dataclasses
import json
import math

import pytest

from pipetransformer.planner import Transition
from pipetransformer.report import (
    AbortRecord,
    EpochRecord,
    History,
    PlanShape,
    RecoveryRecord,
    RefusalRecord,
    TransformationRecord,
    abort_line,
    closing_table,
    transformation_line,
    write_summary,
)

SHAPE = PlanShape(4, 5, 2, 2, 4)


def field_names(value):
    """The names in a summary, except for those of metrics and prices."""
    if isinstance(value, list):
        return {name for part in value for name in field_names(part)}
    if not isinstance(value, dict):
        return set()
    inner = [v for k, v in value.items() if k not in ("metrics", "transition")]
    return set(value) | {name for part in inner for name in field_names(part)}


def a_price():
    return Transition(kind="shape", pause_ns=5, accepted=False, rule="too dear")


def history():
    first, second = PlanShape(0, 0, 4, 1, 8), PlanShape(4, 5, 2, 2, 4)
    record = History(world_size=4, seed=7)
    record.add(TransformationRecord(0, None, first, 0.5, {}, "start"))
    record.add(
        TransformationRecord(1, first, second, 0.25, {"move": 0.1}, "units: 0 to 4")
    )
    for epoch, shape in enumerate((first, second)):
        record.epochs.append(
            EpochRecord(epoch, shape, 100, 100, 4, 2.0, 0.5, 50 * epoch, 50 * epoch)
        )
    record.epochs[-1].metrics["accuracy"] = 0.9
    return record


def test_summary_has_the_promised_fields(tmp_path):
    write_summary(history(), tmp_path / "run" / "summary.json")
    content = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert content["version"] == 1 and content["world_size"] == 4
    assert content["seed"] == 7 and content["final_accuracy"] == 0.9
    assert set(content["epochs"][0]) >= {
        "epoch",
        "num_frozen_layers",
        "num_stages",
        "num_replicas",
        "num_microbatches",
        "samples",
        "unique_samples",
        "optimizer_steps",
        "seconds",
        "train_loss",
        "accuracy",
        "cache_hits",
        "cache_misses",
        "cache",
    }
    (change,) = content["transformations"]
    assert change["from"]["num_stages"] == 4 and change["to"]["num_stages"] == 2
    assert set(change) >= {"epoch", "from", "to", "pause_seconds", "reason"}
    assert "total_seconds" in content
    assert content["aborted"] == [] and content["freezes"] == []
    assert content["counters"]["transformations_committed"] == 0


def test_price_names_phases_parts_bytes_and_the_group():
    phases = {
        "prepare/group": 0.0251,
        "prepare": 0.0276,
        "move": 0.0375,
        "rewire": 0.0038,
        "plan": 0.006,
        "first_step": 0.5,
    }
    shape = PlanShape(4, 5, 2, 2, 4)
    record = TransformationRecord(
        1,
        shape,
        shape,
        0.078,
        phases,
        "why",
        moved_bytes=29_881,
        group="cached",
        attempt=2,
    )
    assert transformation_line(record).endswith(
        "; why; pause 78 ms: plan 6.0, prepare 28 (group 25), move 38, rewire 3.8; "
        "29.9 kB moved; cached group; after 2 aborted attempts"
    )
    prepared = {**phases, "ahead": 0.5, "ahead/group": 0.025}
    line = transformation_line(dataclasses.replace(record, phases=prepared))
    assert "why; pause 78 ms: plan 6.0, prepare 28" in line
    assert "rewire 3.8; before it ahead 500 (group 25); 29.9 kB moved" in line
    content = record.to_json()
    assert content["moved_bytes"] == 29_881 and content["group"] == "cached"
    assert content["phases"] == phases and content["attempt"] == 2


def test_summary_is_json_whatever_was_measured(tmp_path):
    record = history()
    record.epochs[0] = dataclasses.replace(record.epochs[0], train_loss=math.nan)
    record.epochs[1].metrics["perplexity"] = math.inf
    write_summary(record, tmp_path / "summary.json")
    text = (tmp_path / "summary.json").read_text()
    content = json.loads(text, parse_constant=pytest.fail)
    assert content["epochs"][0]["train_loss"] is None
    assert content["epochs"][1]["metrics"] == {"accuracy": 0.9, "perplexity": None}
    with pytest.raises(IsADirectoryError):
        write_summary(record, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_every_field_of_the_summary_is_described(request):
    full = history()
    shape = full.epochs[0].shape
    full.aborted.append(AbortRecord(1, 5, shape, 0.5, {}, "no room"))
    full.recoveries.append(RecoveryRecord(1, 5, [1], shape, None, 0.5, {}))
    full.refusals.append(RefusalRecord(1, a_price()))
    full.freezes.append({"epoch": 1, "step": 5, "units": 2, "boundary": 3})
    content = full.to_json()
    del content["version"], content["transformations"][0]["phases"]["move"]
    text = (request.config.rootpath / "docs/formats.md").read_text()
    described = text.partition("## Run")[2]
    assert {n for n in field_names(content) if f"`{n}`" not in described} == set()


@pytest.mark.parametrize(
    "record",
    [
        TransformationRecord(
            1,
            SHAPE,
            PlanShape(6, 7, 1, 4, 2),
            0.25,
            {"move": 0.1, "prepare/group": 0.025},
            "units: 4 to 6",
            a_price(),
            step=17,
            plan_epoch=2,
            moved_bytes=29_881,
            group="cached",
            attempt=1,
        ),
        TransformationRecord(0, None, SHAPE, 0.5, {}, "start"),
        AbortRecord(1, 5, SHAPE, 0.5, {"plan": 0.1}, "no room", 2, 1, (1,), (3, 0)),
        RefusalRecord(1, a_price()),
        RecoveryRecord(1, 5, [1, 3], SHAPE, None, 10.5, {"roll_call": 10.0}),
    ],
)
def test_a_record_reads_what_it_wrote(record):
    content = json.loads(json.dumps(record.to_json()))
    assert type(record).from_json(content, "record") == record
    for name in content:
        with pytest.raises(ValueError, match=rf"^record {name}[^ ]*: (tr.* )?expected"):
            type(record).from_json({**content, name: object()}, "record")


def test_abort_line_says_what_was_tried_without_whom_and_why():
    record = AbortRecord(
        epoch=1,
        step=5,
        wanted=PlanShape(4, 5, 2, 2, 4),
        seconds=12.0312,
        phases={"plan": 0.002, "prepare": 12.028},
        reason="rank 3: no room",
        plan_epoch=2,
        attempt=1,
        without=(1,),
        culprits=(3,),
    )
    assert abort_line(record) == (
        "[epoch 1] plan epoch 2 was aborted, the old plan goes on: frozen 4, K=2, R=2, "
        "M=4 without ranks [1]; rank 3: no room; 12031 ms: plan 2.0, prepare 12028"
    )
    assert record.to_json()["culprits"] == [3] and record.to_json()["without"] == [1]


def test_transformation_line_says_what_changed_why_and_the_price():
    line = transformation_line(history().transformations[0])
    assert "K=4" in line and "K=2" in line and "R=2" in line
    assert "units: 0 to 4" in line and "250 ms" in line


def test_closing_table_has_one_row_per_epoch():
    lines = closing_table(history()).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:5] == ["epoch", "frozen", "K", "R", "M"]
    assert lines[3].split() == [
        "1",
        "4",
        "2",
        "2",
        "4",
        "50",
        "500.0",
        "-",
        "1.00",
        "50",
        "0.5000",
        "90.00",
        "%",
    ]
