"""The rivals outside the engine train the same model on the same batches."""

import argparse
import functools

import pytest
import torch

import pipetransformer as pt
from pipetransformer.autocache import ActivationCache
from pipetransformer.autofreeze import FreezeStatistics, Progress
from tests.support.ranks import run_ranks
from training import plain_loops, table1_worker, workload
from training.frozen_prefix import frozen_units
from training.plain_loops import run_ddp, run_pipe, run_plain
from training.runs import Job
from training.systems import CACHED_DDP, DDP, FULL, PLAIN, REFERENCE, SYSTEMS
from training.table1_worker import run_engine
from training.work import LayerCounter
from training.workload import Settings, build_model

TINY = Settings(width=8, heads=1)
TRAIN, TEST = 150, 61  # samples: three steps of an epoch, the last one short
EPOCHS = 4


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
        "profiles": None,
        "baseline_pipe": None,
    }
    return argparse.Namespace(**{**options, **changes})


def counted(model):
    return LayerCounter(list(model)[1:-1], model[-1])


def small_split():
    """Return parts of both sets in float64."""
    parts = [s.first(n) for s, n in zip(SPLIT(), (TRAIN, TEST), strict=True)]
    return tuple(
        workload.Digits(inputs.double(), targets)
        for inputs, targets in (part.tensors() for part in parts)
    )


SPLIT = workload.load_split


def sgd(model, params):
    """Return what scales with its gradients, which AdamW does not."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def train(rank, name):
    """Train in float64; in a process of its own, so what is replaced stays so."""
    for module in (plain_loops, table1_worker):
        module.load_split = small_split
    workload.make_optimizer = sgd
    # The row that is compared before a first record has tests of its own.
    ActivationCache.audits = property(lambda _: False)
    model = tiny_model().double()
    counter, args = counted(model), arguments(epochs=EPOCHS)
    system = SYSTEMS[name]
    if system.engine:
        history = run_engine(system, model, args, counter)
    elif system.one_process:
        history = run_plain(model, args)
    else:
        history = run_ddp(model, args, freezes=system.freezes)
    weights = [p.detach() for p in model.parameters()]
    return weights, counter.rows(), history.to_json()


@functools.cache
def in_engine(name):
    return run_ranks(train, 2, name, timeout_s=100)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "ranks", "twin"),
    [(PLAIN, 1, REFERENCE), (DDP, 2, REFERENCE), (CACHED_DDP, 2, FULL)],
)
def test_a_plain_loop_trains_what_the_engine_trains(name, ranks, twin):
    plain, engine = run_ranks(train, ranks, name, timeout_s=100), in_engine(twin)
    # 12 steps, sums in another order: far from 1e-9, a wrong gradient far above it.
    start = [p.detach().double() for p in tiny_model().parameters()]
    for a, b, before in zip(engine[0][0], plain[0][0], start, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert (a - before).norm() > 1e-5, "too small a change to compare"
    mine, theirs = engine[0][2], plain[0][2]
    keys = ("samples", "optimizer_steps", "num_frozen_layers", "cache_hits")
    assert len(theirs["epochs"]) == EPOCHS
    for ours, other in zip(mine["epochs"], theirs["epochs"], strict=True):
        assert {key: ours[key] for key in keys} == {key: other[key] for key in keys}
        assert ours["train_loss"] == pytest.approx(other["train_loss"], rel=1e-10)
    assert theirs["final_accuracy"] == mine["final_accuracy"]
    for own in plain[1:]:  # every rank ends with the same
        assert own[2]["final_accuracy"] == theirs["final_accuracy"]
        for a, b in zip(own[0], plain[0][0], strict=True):
            assert torch.equal(a, b)
    # Both do the same work: nothing that is frozen is trained or computed twice.
    assert _total(plain) == _total(engine)
    assert theirs["epochs"][0]["elapsed_seconds"] <= theirs["total_seconds"]
    assert set(theirs["phase_seconds"]) >= {"data", "forward", "backward", "evaluate"}


def _total(results):
    kinds = results[0][1]
    return {kind: sum(rows[kind] for _, rows, _ in results) for kind in kinds}


@pytest.mark.distributed
def test_a_run_without_freezing_computes_every_block_for_every_sample():
    assert _total(in_engine(REFERENCE)) == {
        "trained": 12 * TRAIN * EPOCHS,
        "forward": 0,
        "evaluated": 12 * TEST * EPOCHS,
    }


@pytest.mark.parametrize("alpha", [1 / 5, 1 / 3, 1 / 2])
def test_the_plain_loop_freezes_at_the_pace_of_the_policy(alpha):
    policy = pt.freeze.AlphaCap(alpha, gradient_term=False)
    policy.bind(12)
    for epoch in range(10):
        policy.observe(FreezeStatistics(None))
        decided = policy.decide(Progress(epoch, step=0))
        assert frozen_units(alpha, 12, epoch) == decided


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
    assert counter.rows() == {
        "trained": 12 * 1078,
        "forward": 0,
        "evaluated": 12 * 719,
    }
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
    table1_worker.meet(tmp_path, 0, 2)
    assert (tmp_path / "ready-0").exists()
    monkeypatch.setattr(table1_worker, "MEETING_DEADLINE_S", 0.05)
    with pytest.raises(TimeoutError, match="expected all 3 to start"):
        table1_worker.meet(tmp_path, 0, 3)
