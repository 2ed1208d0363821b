"""The rivals outside the engine train the same model on the same batches."""

import argparse

import _table1_worker
import _workload
import pytest
import torch
from _plain_loops import run_ddp, run_pipe
from _runs import Job
from _systems import SYSTEMS
from _table1_worker import run_engine
from _work import LayerCounter
from _workload import Settings, build_model

import pipetransformer as pt
from tests.support.ranks import run_ranks

TINY = Settings(width=8, heads=1)


def tiny_model():
    torch.manual_seed(0)
    return build_model(TINY)


def arguments(**changes):
    options = {
        "seed": 5,
        "epochs": 1,
        "slots": 2,
        "alpha": 1 / 3,
        "microbatches": None,
        "slot_memory": None,
        "baseline_pipe": None,
    }
    return argparse.Namespace(**{**options, **changes})


def counted(model):
    return LayerCounter(list(model)[1:-1])


def plain_descent(model, params):
    """Gradient descent: unlike AdamW it takes a scaled gradient for another one."""
    return torch.optim.SGD(params, lr=0.1)


def train(rank, in_engine):
    _workload.make_optimizer = plain_descent
    model = tiny_model().double()
    model[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    counter = counted(model)
    if in_engine:
        history = run_engine(SYSTEMS["best-static"], model, arguments(), counter)
    else:
        history = run_ddp(model, arguments())
    weights = [p.detach() for p in model.parameters()]
    return weights, counter.rows(), history.to_json()


@pytest.mark.distributed
def test_plain_ddp_trains_what_the_engine_trains():
    engine = run_ranks(train, 2, True, timeout_s=100)
    plain = run_ranks(train, 2, False, timeout_s=100)
    start = [p.detach().double() for p in tiny_model().parameters()]
    for a, b, before in zip(engine[0][0], plain[0][0], start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert (a - before).norm() > 1e-5, "too small a change to compare"
    mine, theirs = engine[0][2], plain[0][2]
    for key in ("samples", "optimizer_steps", "num_frozen_layers"):
        assert mine["epochs"][0][key] == theirs["epochs"][0][key], key
    assert abs(mine["final_accuracy"] - theirs["final_accuracy"]) < 2 / 719
    assert theirs["final_accuracy"] == plain[1][2]["final_accuracy"]
    # Both count the same work: 12 blocks, every training and test sample once.
    for results in (engine, plain):
        assert sum(rows["trained"] for _, rows, _ in results) == 12 * 1078
        assert sum(rows["forward"] for _, rows, _ in results) == 12 * 719
    assert set(theirs["phase_seconds"]) >= {"data", "forward", "backward", "evaluate"}
    assert theirs["epochs"][0]["elapsed_seconds"] <= theirs["total_seconds"]


class Joined(torch.nn.Module):
    """Our own pipeline behind the interface of `--baseline-pipe`."""

    def __init__(self, model, num_stages, chunks):
        super().__init__()
        half = len(model) // num_stages
        self.pipe = pt.Pipe.from_plan(
            model,
            cuts=[0, half, len(model)],
            num_microbatches=chunks,
        )

    def forward(self, inputs):
        return self.pipe(inputs)


class Reference:
    """What old pipelines return: a handle to the outputs."""

    def __init__(self, outputs):
        self.outputs = outputs

    def local_value(self):
        return self.outputs


def joined(model, *, num_stages, chunks):
    return Joined(model, num_stages, chunks)


def referring(model, *, num_stages, chunks):
    pipe = Joined(model, num_stages, chunks)
    return lambda inputs: Reference(pipe(inputs))


@pytest.mark.parametrize("name", ["joined", "referring"])
def test_another_pipeline_takes_the_place_of_static_pipe(name):
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    counter = counted(model)
    history = run_pipe(
        model, arguments(baseline_pipe=f"{__name__}:{name}", microbatches=4)
    )
    assert counter.rows() == {"trained": 12 * 1078, "forward": 12 * 719}
    shape = history.epochs[0].shape
    assert (shape.num_stages, shape.num_microbatches) == (2, 4)
    assert any(
        not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )


def test_a_baseline_without_a_colon_is_refused():
    with pytest.raises(ValueError, match="--baseline-pipe: expected MODULE:ATTR"):
        run_pipe(tiny_model(), arguments(baseline_pipe="mypackage"))


def test_several_processes_for_one_pipeline_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="expected one process, got 2"):
        run_pipe(tiny_model(), arguments(baseline_pipe="mypackage:Pipe"))


def test_a_baseline_pipeline_is_started_alone(tmp_path):
    slots = Job("static-pipe", 4, flags=("--epochs=1",))
    assert "--nproc-per-node=4" in slots.command(tmp_path)
    alone = Job("static-pipe", 4, baseline_pipe="mypackage:Pipe")
    command = alone.command(tmp_path)
    assert "--nproc-per-node=1" in command and "--slots=4" in command
    assert "--baseline-pipe=mypackage:Pipe" in command


def test_ranks_meet_before_the_clock_starts(tmp_path, monkeypatch):
    (tmp_path / "ready-1").touch()
    _table1_worker.meet(tmp_path, 0, 2)
    assert (tmp_path / "ready-0").exists()
    monkeypatch.setattr(_table1_worker, "MEETING_DEADLINE_S", 0.05)
    with pytest.raises(TimeoutError, match="expected all 3 to start"):
        _table1_worker.meet(tmp_path, 0, 3)
