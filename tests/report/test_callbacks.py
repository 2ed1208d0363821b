"""What a run tells the user's callbacks, and what the writers make of it."""

import csv
import errno
import os
import signal
import stat
import sys
import types

import pytest
import torch

import pipetransformer as pt
from pipetransformer.core import text_files
from pipetransformer.report import (
    Callback,
    CsvWriter,
    EpochRecord,
    History,
    Listeners,
    PlanShape,
    RecoveryRecord,
    StepRecord,
    TransformationRecord,
)
from tests.engine.losses import SURVIVING
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import Ranks, run_ranks
from tests.support.toy import ToySet, accuracy


class Notes(Callback):
    """Notes all that it is told."""

    def __init__(self):
        self.told = []

    def on_step(self, step):
        self.told.append(("step", step))

    def on_epoch(self, record):
        self.told.append(("epoch", record.epoch, record.optimizer_steps))

    def on_evaluation(self, epoch, metrics):
        self.told.append(("evaluation", epoch, sorted(metrics)))

    def on_transformation(self, record):
        before = record.before and record.before.num_stages
        self.told.append(("transformation", before, record.after.num_stages))

    def on_failure(self, record):
        self.told.append(("failure", record.lost))

    def on_end(self, history):
        self.told.append(("end", len(history.epochs)))

    def named(self, name):
        return [entry for entry in self.told if entry[0] == name]


def engine_with(callbacks, freeze=None, **changes):
    engine = make_engine(freeze=freeze or schedule(0, 6), config=config(**changes))
    arguments = engine._arguments
    object.__setattr__(arguments, "listeners", Listeners(callbacks))
    return engine


def train(engine, epochs=2, evaluates=True):
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(50), 12):
                engine.step(batch)
            if evaluates:
                engine.evaluate(ToySet(21, seed=2), {"accuracy": accuracy})
    return engine


def test_all_that_happens_is_told_in_order():
    notes = Notes()
    engine = train(
        engine_with(
            [notes],
            plan=pt.PlanConfig(slot_memory_bytes=34_000),
            pipe=pt.PipeConfig(num_slots=4),
        )
    )
    names = [entry[0] for entry in notes.told]
    steps = ["step"] * 5
    one_pass = [*steps, "epoch", "evaluation"]
    assert names == ["transformation", *one_pass, "transformation", *one_pass, "end"]
    records = [entry[1] for entry in notes.named("step")]
    assert [r.step for r in records] == list(range(1, 11))
    assert {r.total_steps for r in records} == {10}
    assert [r.epoch for r in records] == [0] * 5 + [1] * 5
    assert all(r.loss > 0 and r.learning_rate > 0 for r in records)
    assert notes.named("epoch") == [("epoch", 0, 5), ("epoch", 1, 5)]
    assert [entry[1] for entry in notes.named("evaluation")] == [0, 1]
    first, second = notes.named("transformation")
    assert first[1] is None and second[1] == first[2] > second[2]
    assert notes.told[-1] == ("end", 2) and len(engine.history.epochs) == 2


def test_accumulated_batches_are_one_step():
    notes = Notes()
    train(engine_with([notes], freeze=schedule(0), accumulation_steps=2), 1)
    records = [entry[1] for entry in notes.named("step")]
    assert [(r.step, r.total_steps) for r in records] == [(1, 3), (2, 3), (3, 3)]


def test_a_loop_of_the_users_own_tells_its_steps():
    notes = Notes()
    with engine_with([notes], freeze=schedule(0)) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                engine.backward(engine.loss(batch))
                engine.update()
    assert [entry[1].step for entry in notes.named("step")] == [1, 2]


def test_an_exception_is_one_of_the_script():
    class Bad(Callback):
        def on_step(self, step):
            raise KeyError("mine")

    notes = Notes()
    with pytest.raises(KeyError, match="mine"):
        train(engine_with([notes, Bad()], freeze=schedule(0)))
    assert notes.told[-1][0] == "end"


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="callbacks: expected pt.report.Callback"):
        pt.PipeTransformer(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss=torch.nn.functional.cross_entropy,
            callbacks=[print],
        )


def told_by(rank, dies):
    notes = Notes()
    engine = engine_with([notes], freeze=schedule(0), autodp=SURVIVING)
    data = ToySet(48)
    with engine:
        for epoch in engine.epochs(2):
            for number, batch in enumerate(engine.batches(data, 12)):
                if dies and rank == 1 and (epoch, number) == (1, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.step(batch)
    return notes.told


@pytest.mark.distributed
def test_the_lead_alone_is_told():
    lead, other = run_ranks(told_by, 2, False)
    assert len([entry for entry in lead if entry[0] == "step"]) == 8
    assert other == []


@pytest.mark.distributed
def test_a_loss_is_told_to_the_lead_that_goes_on():
    with Ranks(told_by, 2, True) as ranks:
        told = ranks.outcomes([0])[0][1]
    assert ("failure", [1]) in told and told[-1][0] == "end"
    steps = [entry[1].step for entry in told if entry[0] == "step"]
    assert steps == list(range(1, 9)), "each step once"


def test_rows_of_the_csv_files_are_those_of_the_run(tmp_path):
    engine = train(engine_with([CsvWriter(tmp_path / "out")]))
    with open(tmp_path / "out" / "epochs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [0, 1]
    for row, record in zip(rows, engine.history.epochs, strict=True):
        assert float(row["train_loss"]) == record.train_loss
        assert int(row["num_frozen_layers"]) == record.shape.num_frozen_layers
        assert float(row["eval_accuracy"]) == record.metrics["accuracy"]
    with open(tmp_path / "out" / "changes.csv", newline="") as file:
        changes = list(csv.DictReader(file))
    assert len(changes) == 1 + len(engine.history.transformations)
    assert changes[1]["reason"] == engine.history.transformations[0].reason
    mode = stat.S_IMODE((tmp_path / "out" / "epochs.csv").stat().st_mode)
    assert mode == 0o600


def test_a_loss_of_ranks_is_a_row_of_the_changes(tmp_path):
    writer, shape = CsvWriter(tmp_path), PlanShape(0, 0, 1, 2, 1)
    writer.on_failure(RecoveryRecord(1, 15, [3], shape, None, 0.5, {}))  # stands by
    assert not list(tmp_path.iterdir())
    writer.on_failure(RecoveryRecord(1, 15, [2], None, shape, 10.5, {}))
    with open(tmp_path / "changes.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["step"], row["num_replicas"]) == ("15", "2")
    assert (row["pause_seconds"], row["reason"]) == ("10.5", "ranks [2] lost")


def test_the_change_that_a_lost_lead_has_written_stays(tmp_path):
    told_of(tmp_path, range(1, 3))  # changes at steps 10 and 20
    writer, shape = CsvWriter(tmp_path), PlanShape(0, 0, 1, 1, 1)
    writer.on_failure(RecoveryRecord(2, 20, [0], shape, shape, 0.5, {}))
    writer.on_failure(RecoveryRecord(2, 22, [], shape, shape, 0.5, {}))
    assert rows_of(tmp_path, "changes.csv", "step") == ["10", "20", "20", "22"]
    reasons = rows_of(tmp_path, "changes.csv", "reason")[2:]
    assert reasons == ["ranks [0] lost", "recovered, nobody lost"]


def told_of(folder, epochs, *, step=0):
    """Tell a new writer of passes, each after a change of plan."""
    writer = CsvWriter(folder)
    shape = PlanShape(0, 0, 1, 1, 1)
    for epoch in epochs:
        change = TransformationRecord(
            epoch=epoch,
            step=10 * epoch,
            before=shape,
            after=shape,
            pause_seconds=0.5,
            phases={},
            reason=f"of {folder.name}",
        )
        writer.on_transformation(change)
        writer.on_epoch(EpochRecord(epoch, shape, 8, 8, 1, 1.0, 0.5, 0, 0))
        writer.on_evaluation(epoch, {"accuracy": epoch / 10})
    return writer


def rows_of(folder, name, column):
    with open(folder / name, newline="") as file:
        return [row[column] for row in csv.DictReader(file)]


def test_rows_of_a_run_that_goes_on_stay_and_those_of_another_are_replaced(tmp_path):
    told_of(tmp_path, range(3))
    told_of(tmp_path, range(2, 5))  # resumed, or another lead
    expected = ["0", "1", "2", "3", "4"]
    assert rows_of(tmp_path, "epochs.csv", "epoch") == expected
    accuracies = ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert rows_of(tmp_path, "epochs.csv", "eval_accuracy") == accuracies
    steps = ["0", "10", "20", "30", "40"]
    assert rows_of(tmp_path, "changes.csv", "step") == steps
    told_of(tmp_path, range(2))
    assert rows_of(tmp_path, "epochs.csv", "epoch") == ["0", "1"]
    assert rows_of(tmp_path, "changes.csv", "step") == ["0", "10"]


def test_an_evaluation_after_a_resumption_is_of_the_row_that_is_there(tmp_path):
    wanted = pt.CheckpointConfig(directory=tmp_path / "runs", resume=True)
    for epochs, evaluates in ((2, False), (2, True), (3, False)):
        engine = make_engine(
            freeze=pt.freeze.Never(),
            config=config(checkpoint=wanted),
            callbacks=[CsvWriter(tmp_path)],
        )
        with engine:
            if evaluates:
                engine.prepare(ToySet(24), 12)
                engine.evaluate(ToySet(8), {"accuracy": accuracy})
            for _ in engine.epochs(epochs):
                for batch in engine.batches(ToySet(24), 12):
                    engine.step(batch)
    assert rows_of(tmp_path, "epochs.csv", "epoch") == ["0", "1", "2"]
    evaluated = rows_of(tmp_path, "epochs.csv", "eval_accuracy")
    assert [bool(cell) for cell in evaluated] == [False, True, False]


def test_a_table_that_cannot_be_written_is_told_and_tried_again(
    tmp_path, monkeypatch, caplog
):
    written = text_files.replace
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(path, text):
        raise full

    monkeypatch.setattr(text_files, "replace", fails)
    writer = told_of(tmp_path, range(2))
    assert "epochs.csv is not written: " in caplog.text
    assert "changes.csv is not written: " in caplog.text
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(text_files, "replace", written)
    writer.on_evaluation(1, {"accuracy": 0.5})
    assert rows_of(tmp_path, "epochs.csv", "epoch") == ["0", "1"]
    assert not (tmp_path / "changes.csv").exists()
    writer.on_end(History(world_size=1, seed=0))  # no row of it has come since
    assert rows_of(tmp_path, "changes.csv", "step") == ["0", "10"]


def test_a_table_that_cannot_be_read_now_loses_no_rows(tmp_path, caplog):
    folder, away = tmp_path / "out", tmp_path / "away"
    told_of(folder, range(2))
    folder.rename(away)
    folder.write_text("in the way")  # of a folder: what is below it cannot be read
    writer = told_of(folder, range(2, 3))
    assert "epochs.csv cannot be read: " in caplog.text
    folder.unlink()
    away.rename(folder)
    writer.on_end(History(world_size=1, seed=0))
    assert rows_of(folder, "epochs.csv", "epoch") == ["0", "1", "2"]
    accuracies = ["0.0", "0.1", "0.2"]
    assert rows_of(folder, "epochs.csv", "eval_accuracy") == accuracies
    assert rows_of(folder, "changes.csv", "step") == ["0", "10", "20"]


@pytest.mark.parametrize("text", ["", "x,y\n1,2\n", "epoch,loss\nfirst,2\n", "\0\n"])
def test_a_file_that_is_none_of_ours_is_replaced(text, tmp_path):
    (tmp_path / "epochs.csv").write_text(text)
    told_of(tmp_path, range(1))
    assert rows_of(tmp_path, "epochs.csv", "epoch") == ["0"]


def test_tables_replace_a_link_and_leave_what_it_leads_to(tmp_path):
    (tmp_path / "precious").write_text("key")
    (tmp_path / "epochs.csv").symlink_to(tmp_path / "precious")
    told_of(tmp_path, range(1))
    assert (tmp_path / "precious").read_text() == "key"
    assert rows_of(tmp_path, "epochs.csv", "epoch") == ["0"]


def test_all_callbacks_are_told_of_the_end_whatever_one_raises():
    ended = []

    class Ends(Callback):
        def __init__(self, name):
            self.name = name

        def on_end(self, history):
            ended.append(self.name)
            if self.name == "first":
                raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        Listeners([Ends("first"), Ends("second")]).end(None)
    assert ended == ["first", "second"]


class Recorded:
    """Stands for the run of a service."""

    def __init__(self):
        self.logged, self.closed, self.exit_code = [], False, None

    def log(self, values, step):
        self.logged.append((step, values))

    def add_scalar(self, name, value, step):
        self.logged.append((step, {name: value}))

    def flush(self):
        pass

    def finish(self, exit_code=None):
        self.closed, self.exit_code = True, exit_code

    close = finish

    def names(self):
        return {name for _, values in self.logged for name in values}


def test_weights_and_biases_begins_with_the_first_record(monkeypatch):
    runs = []

    def init(**options):
        runs.append((options, Recorded()))
        return runs[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    writer = pt.report.WandbWriter(every_steps=5, project="mine")
    assert runs == [], "other ranks make none"
    train(engine_with([writer]))
    ((options, run),) = runs
    assert options == {"project": "mine"} and run.closed and run.exit_code == 0
    assert {"loss", "evaluation/accuracy", "plan/num_stages"} <= run.names()
    assert [step for step, values in run.logged if "loss" in values] == [5, 10]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ZeroDivisionError(), 1), (SystemExit(2), 1), (SystemExit(0), 0)],
)
def test_weights_and_biases_is_told_whether_a_run_has_failed(error, code, monkeypatch):
    made = Recorded()
    stand_in = types.SimpleNamespace(init=lambda **_: made)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    engine = engine_with([pt.report.WandbWriter(every_steps=1)])
    with pytest.raises(type(error)), engine:
        for batch in engine.batches(ToySet(24), 12):
            engine.step(batch)
            raise error
    assert made.closed and made.exit_code == code


def test_a_good_run_within_the_handling_of_an_error_is_a_good_one(monkeypatch):
    made = Recorded()
    stand_in = types.SimpleNamespace(init=lambda **_: made)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    try:
        raise ValueError("the first attempt")
    except ValueError:
        train(engine_with([pt.report.WandbWriter(every_steps=1)]))
    assert made.closed and made.exit_code == 0


def test_tensorboard_gets_scalars_by_step(monkeypatch, tmp_path):
    made = Recorded()
    stand_in = types.ModuleType("torch.utils.tensorboard")
    writers = []

    def make(folder):
        writers.append(folder)
        return made

    stand_in.SummaryWriter = make
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    writer = pt.report.TensorBoardWriter(tmp_path, every_steps=2)
    assert not writers, "ranks that stand by would leave empty files"
    train(engine_with([writer]))
    assert made.closed and writers == [str(tmp_path)]
    losses = [step for step, values in made.logged if "loss" in values]
    assert losses == [2, 4, 6, 8, 10]
    told = {"epoch/train_loss", "evaluation/accuracy", "plan/frozen_units"}
    assert told <= made.names()


def test_the_first_set_has_its_first_metrics_by_name_once_there_is_another(tmp_path):
    told = []

    class Notes(pt.report.Callback):
        def on_evaluation(self, epoch, metrics):
            told.append(metrics)

    with engine_with([Notes(), pt.report.CsvWriter(tmp_path)]) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
            for name in ("test", "valid"):
                engine.evaluate(ToySet(8, seed=len(name)), name=name)
    assert "test/loss" not in told[0] and told[1]["test/loss"] == told[0]["loss"]
    assert "test/loss" in told[2] and "test/loss" not in told[3]
    found = rows_of(tmp_path, "epochs.csv", "eval_test/loss")
    assert [float(cell) for cell in found] == [told[0]["loss"], told[2]["test/loss"]]


def test_a_set_that_a_pass_did_not_evaluate_has_no_metrics_of_it():
    with engine_with([]) as engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(ToySet(8), 4):
                engine.step(batch)
            for name in ("a", "b") if epoch == 0 else ("b", "b", "c"):
                engine.evaluate(ToySet(8), name=name)
    first, second = (record.metrics for record in engine.history.epochs)
    assert {*first} == {"loss", "a/loss", "b/loss"}
    assert {*second} == {"loss", "b/loss", "c/loss"}


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("torch.utils.tensorboard", lambda: pt.report.TensorBoardWriter("x")),
        ("wandb", pt.report.WandbWriter),
        ("rich.progress", pt.report.ProgressBar),
    ],
)
def test_a_missing_package_is_named(module, make, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="expected the package .*, got none"):
        make()


def test_a_bar_moves_to_the_end(monkeypatch):
    pytest.importorskip("rich")
    bar = pt.report.ProgressBar()
    for step in (1, 2, 3):
        bar.on_step(StepRecord(step, 3, 0, 0.5, 0.1))
    (task,) = bar._bar.tasks
    assert task.completed == task.total == 3 and "loss 0.5" in task.description
    assert task.fields["left"] == ""
    for seconds, told in ((59.6, "1:00 left"), (3725, "1:02:05 left")):
        bar.on_step(StepRecord(3, 3, 0, 0.5, 0.1, seconds))
        assert task.fields["left"] == told
    bar.on_end(None)
    assert bar._bar.finished


def test_intervals_below_one_are_refused(tmp_path):
    for make in (
        lambda: pt.report.TensorBoardWriter(tmp_path, every_steps=0),
        lambda: pt.report.WandbWriter(every_steps=0),
    ):
        with pytest.raises(ValueError, match="every_steps: expected at least 1"):
            make()


@pytest.mark.parametrize(
    ("metrics", "tags"),
    [
        ({"loss": 1.0, "f1/macro": 0.5, "macro": 0.4}, ["loss", "f1/macro", "macro"]),
        ({"loss": 1.0, "aux/loss": 0.5, "f1": 0.4}, ["loss", "aux/loss", "f1"]),
        ({"loss": 1.0, "dev/loss": 1.0}, ["dev/loss"]),
        (
            {"loss": 1.0, "f1/a": 0.5, "dev/loss": 1.0, "dev/f1/a": 0.5},
            ["dev/loss", "dev/f1/a"],
        ),
    ],
)
def test_metrics_of_several_sets_have_a_tag_by_set_and_no_other_is_lost(
    metrics, tags, monkeypatch
):
    made = Recorded()
    stand_in = types.SimpleNamespace(init=lambda **_: made)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    writer = pt.report.WandbWriter()
    writer.on_evaluation(0, metrics)
    ((_, values),) = made.logged
    assert values == {f"evaluation/{tag}": metrics[tag] for tag in tags}


@pytest.mark.parametrize("name", ["wandb", "torch.utils.tensorboard"])
def test_the_first_plan_of_a_resumed_run_is_told_at_its_step(name, monkeypatch):
    made = Recorded()
    module = types.ModuleType(name)
    module.init = lambda **_: made
    module.SummaryWriter = lambda folder: made
    monkeypatch.setitem(sys.modules, name, module)
    is_wandb = name == "wandb"
    writer = pt.report.WandbWriter() if is_wandb else pt.report.TensorBoardWriter("x")
    shape = PlanShape(1, 2, 2, 1, 4)
    writer.on_transformation(
        TransformationRecord(3, None, shape, 0.1, {}, "resumed", step=500)
    )
    assert {step for step, _ in made.logged} == {500}
