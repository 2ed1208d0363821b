import json

from pipetransformer.report import (
    EpochRecord,
    History,
    PlanShape,
    TransformationRecord,
    closing_table,
    transformation_line,
    write_summary,
)


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
    }
    (change,) = content["transformations"]
    assert change["from"]["num_stages"] == 4 and change["to"]["num_stages"] == 2
    assert set(change) >= {"epoch", "from", "to", "pause_seconds", "reason"}
    assert "total_seconds" in content


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
        "50",
        "0.5000",
        "90.00",
        "%",
    ]
