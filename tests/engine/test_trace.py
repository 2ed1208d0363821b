"""What a rank did, as a timeline: complete, in order, and bounded."""

import json
import stat
import threading
import time

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.pipe import Pipe, WithDevice, Workers
from pipetransformer.pipe.trace import take_cells, trace_cells
from pipetransformer.report import Timeline
from pipetransformer.transformation.records import record_loss
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model


@pytest.fixture(autouse=True)
def _off():
    yield
    trace_cells(0)
    take_cells()


def a_pipe(workers, *, order="gpipe", dispatch="threads"):
    loss = nn.functional.cross_entropy if order != "gpipe" else None
    return Pipe.from_plan(
        toy_model(),
        cuts=[0, 4, 8],
        num_microbatches=3,
        workers=workers,
        schedule=order,
        loss=loss,
        dispatch=dispatch,
    )


def run_step(pipe):
    data = ToySet(12)
    if pipe.schedule == "gpipe":
        nn.functional.cross_entropy(pipe(data.x), data.y).backward()
    else:
        pipe(data.x, targets=data.y).backward()


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb-h1"])
def test_every_cell_is_noted_once_and_none_overlaps_on_its_stage(order):
    with Workers(2) as workers:
        pipe = a_pipe(workers, order=order)
        trace_cells(1000)
        run_step(pipe)
        cells, left_out = take_cells()
    assert left_out == 0
    names = sorted((kind, stage, micro) for kind, stage, micro, _, _ in cells)
    backward = {"gpipe": "B", "1f1b": "B", "zb-h1": "IW"}[order]
    wanted = [(k, s, m) for k in "F" + backward for s in (0, 1) for m in range(3)]
    if order == "zb-h1":  # the first stage has no gradient to hand down first
        kinds = {k for k, s, _ in names if s == 0}
        assert kinds <= {"F", "B", "I", "W"} and len({n[1:] for n in names}) == 6
    else:
        assert names == sorted(wanted)
    for stage in (0, 1):
        own = sorted(cell[3:] for cell in cells if cell[1] == stage)
        assert all(begin <= end for begin, end in own)
        for (_, end), (begin, _) in zip(own, own[1:], strict=False):
            assert end <= begin, "a stage runs one cell at a time"
    forward = {(s, m): (b, e) for k, s, m, b, e in cells if k == "F"}
    for micro in range(3):
        assert forward[0, micro][1] <= forward[1, micro][0], (
            "a cell waits for its input"
        )


def test_one_dispatcher_notes_columns_as_one_cell():
    with Workers(2) as workers:
        pipe = a_pipe(workers, dispatch="serial")
        trace_cells(1000)
        run_step(pipe)
        cells, _ = take_cells()
    kinds = [cell[0] for cell in cells]
    assert kinds.count("F") == 6 and 1 <= kinds.count("B") <= 6


def test_nothing_is_noted_unless_asked_for():
    with Workers(2) as workers:
        pipe = a_pipe(workers)
        run_step(pipe)
        assert take_cells() == ([], 0)
        trace_cells(100)
        run_step(pipe)
        trace_cells(0)
        run_step(pipe)
        assert take_cells() == ([], 0), "what was not taken is dropped"


def test_the_last_cells_are_kept():
    with Workers(2) as workers:
        pipe = a_pipe(workers)
        trace_cells(5)
        run_step(pipe)
        cells, left_out = take_cells()
        assert (len(cells), left_out) == (5, 12 - 5)
        assert [c[4] for c in cells] == sorted(c[4] for c in cells)
        run_step(pipe)
        assert take_cells()[1] == 7, "and the count begins anew"


def test_parts_of_spare_work_are_noted_on_their_worker():
    left, threads = [2, 1, 3], {}

    def part(item):
        threads.setdefault(item, []).append(threading.get_ident())
        left[item] -= 1
        return left[item] > 0

    with Workers(2) as workers:
        own = workers.map(lambda _: threading.get_ident(), range(2))
        trace_cells(100)
        workers.spare(part, range(3)).wait()
        cells, _ = take_cells()
    assert {kind for kind, *_ in cells} == {"P"}
    for item, wanted in enumerate([2, 1, 3]):
        parts = sorted((b, e, w) for _, w, i, b, e in cells if i == item)
        assert [own[w] for _, _, w in parts] == threads[item] and len(parts) == wanted
        for (_, end, _), (begin, _, _) in zip(parts, parts[1:], strict=False):
            assert end <= begin, "an item is with one worker at a time"


def test_parts_and_cells_of_a_stage_do_not_overlap():
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.002)
            return x

    begun = threading.Event()

    def part(item):
        begun.set()
        time.sleep(0.0005)
        return not done

    model = nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 4), Slow())
    done = []
    with Workers(2) as workers:
        pipe = Pipe.from_plan(
            model,
            cuts=[0, 2, 4],
            num_microbatches=3,
            workers=workers,
            dispatch="threads",
        )
        trace_cells(1000)
        handle = workers.spare(part, range(2))
        assert begun.wait(60)
        pipe(torch.randn(12, 4)).sum().backward()
        done.append(True)
        handle.wait()
        cells, _ = take_cells()
    kinds = {kind for kind, *_ in cells}
    assert kinds == {"F", "B", "P"}
    for stage in (0, 1):
        spans = sorted((begin, end) for _, s, _, begin, end in cells if s == stage)
        for (_, end), (begin, _) in zip(spans, spans[1:], strict=False):
            assert end <= begin, "a worker does one thing at a time"


def test_frozen_layers_that_fill_bubbles_are_in_the_timeline(tmp_path):
    settings = config(
        trace=str(tmp_path),
        plan=pt.PlanConfig(num_stages=2, num_microbatches=3, prefix="filled"),
        pipe=pt.PipeConfig(num_slots=2),
        cache=pt.CacheConfig(enabled=False),
    )
    with make_engine(freeze=schedule(2), config=settings) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    events = json.loads((tmp_path / "trace-0.json").read_text())["traceEvents"]
    filling = [e for e in events if e.get("cat") == "frozen layers"]
    # The second pass: two batches of three micro-batches, two layers each.
    assert [e["name"] for e in filling].count("P2") >= 2 * 2
    assert {e["name"] for e in filling} == {"P0", "P1", "P2"}
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    named = {lanes[e["tid"]] for e in filling}
    assert named and named <= {"bubbles of stage 0", "bubbles of stage 1"}


def test_a_cell_that_fails_is_noted_too():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    layers = nn.Linear(4, 4), WithDevice(Fails(), "cpu")
    pipe = Pipe(nn.Sequential(*layers), chunks=2)
    trace_cells(100)
    with pytest.raises(KeyError):
        pipe(torch.randn(4, 4))
    cells, _ = take_cells()
    assert ("F", 1, 0) in [cell[:3] for cell in cells]
    pipe.close()


def test_a_run_writes_a_timeline_that_holds_its_steps(tmp_path):
    settings = config(
        trace=str(tmp_path / "out"),
        plan=pt.PlanConfig(num_stages=2, num_microbatches=3),
        pipe=pt.PipeConfig(num_slots=2),
    )
    with make_engine(freeze=schedule(0, 2), config=settings) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "trace-0.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    document = json.loads(path.read_text())
    assert document["otherData"]["simulated"] is False
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    cells = [e for e in events if e["cat"] != "phase"]
    forwards = [e for e in cells if e["cat"] == "forward"]
    assert len(forwards) >= 4 * 2 * 3, "steps, stages, micro-batches"
    phases = [e["name"] for e in events if e["cat"] == "phase"]
    for name in ("forward", "backward", "optimizer", "transformation", "pass"):
        assert name in phases, name
    # Cells and phases have one clock: each cell is in a phase of a step.
    spans = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"] in ("forward", "backward", "evaluate", "transformation")
    ]
    for cell in cells:
        begin, end = cell["ts"], cell["ts"] + cell["dur"]
        assert any(a - 1 <= begin and end <= b + 1 for a, b in spans), cell
    marks = [e for e in document["traceEvents"] if e["ph"] == "i"]
    assert [m["name"].partition(":")[0] for m in marks] == ["plan 1", "plan 2"]
    assert marks[1]["name"] == "plan 2: frozen 2, K=2, R=1, M=3"
    changes = [e for e in events if e["name"] == "transformation"]
    for mark in marks:
        assert any(e["ts"] <= mark["ts"] <= e["ts"] + e["dur"] for e in changes)
    named = {
        e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"
    }
    assert named == {"process", "stage 0", "stage 1"}
    assert take_cells() == ([], 0), "off again"


def test_a_timeline_marks_the_ranks_that_were_lost():
    with make_engine(freeze=schedule(0)) as engine:
        run = run_of(engine)
        timeline = Timeline(rank=0, origin_s=0.0)
        run.clock.sink = timeline.add_phase
        record_loss(run, None, None, [2], 0.5, {})
        run.clock.sink = None
    events = json.loads(timeline.to_json())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["ranks [2] lost"]


def traced(folder, epochs, *, resume=True, fails=False):
    """Run so many epochs, from the checkpoint that is there; a script that may fail."""
    wanted = pt.CheckpointConfig(directory=folder / "checkpoints", resume=resume)
    settings = config(trace=str(folder / "traces"), checkpoint=wanted)
    with make_engine(freeze=schedule(0), depth=1, config=settings) as engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(8), 8):
                engine.step(batch)
        if fails:
            raise RuntimeError("mine")


def steps_in(path):
    events = json.loads(path.read_text())["traceEvents"]
    return sum(each["name"] == "optimizer" for each in events)


def test_a_resumed_run_keeps_the_trace_of_the_one_that_crashed(tmp_path):
    with pytest.raises(RuntimeError, match="mine"):
        traced(tmp_path, 2, fails=True)
    traced(tmp_path, 3)
    traced(tmp_path, 6)
    told = {path.name: steps_in(path) for path in (tmp_path / "traces").iterdir()}
    assert told == {"trace-0.1.json": 2, "trace-0.2.json": 1, "trace-0.json": 3}


def test_a_run_that_begins_anew_replaces_the_trace_that_is_there(tmp_path):
    for epochs in (2, 1):
        traced(tmp_path, epochs, resume=False)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "trace-0.json" and steps_in(path) == 1


def train_more(rank, epochs, folder):
    traced(folder, epochs)


@pytest.mark.distributed
def test_every_rank_of_a_resumed_run_keeps_its_trace(tmp_path):
    for epochs in (1, 2):
        run_ranks(train_more, 2, epochs, tmp_path)
    names = {path.name for path in (tmp_path / "traces").iterdir()}
    assert names == {
        *("trace-0.json", "trace-1.json"),
        *("trace-0.1.json", "trace-1.1.json"),
    }


def test_a_trace_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with make_engine(
        freeze=schedule(0), config=config(trace=str(tmp_path / "file"))
    ) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
    assert "the run's trace is not written" in caplog.text
