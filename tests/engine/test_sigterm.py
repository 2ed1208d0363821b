"""SIGTERM at any point leaves the checkpoint of a whole step, and no half-done one."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from tests.engine.scenario import config, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import Block, ToySet, accuracy

pytestmark = pytest.mark.distributed

# Two ranks: epoch 0 runs as one pipeline, next to which rank 1 stands by; from epoch 1
# on rank 1 is a replica. An epoch has two steps.


class Striker:
    """Sends SIGTERM at one point of the script, and waits until the run knows."""

    def __init__(self, folder, point, rank):
        self.folder, self.point, self.rank = folder, point, rank
        self.engine = None
        (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def at(self, point, *, rank=0, victim=None):
        if self.point != point or self.rank != rank:
            return
        if self.engine is None:
            return  # the engine that is being made tries the optimizer
        self.point = None
        victim = rank if victim is None else victim
        pid = int((self.folder / f"pid-{victim}").read_text())
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 60
        while run_of(self.engine).plane.failure is None:
            assert time.monotonic() < end, "SIGTERM was not noticed"
            time.sleep(0.01)


class Counting(nn.Module):
    """A layer with running statistics that every forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x


def make(folder, striker):
    def loss(outputs, targets):
        if torch.is_grad_enabled():
            step = run_of(striker.engine).state.step
            striker.at(f"standby in step {step}", victim=1)
            striker.at(f"replica in step {step}", rank=1)
        return nn.functional.cross_entropy(outputs, targets)

    def optimizer(params):
        striker.at("change of plan", rank=1)  # between COMMIT and the first step
        return torch.optim.AdamW(params, lr=1e-2)

    torch.manual_seed(0)
    head = nn.Sequential(Counting(), nn.Linear(8, 3))
    steps = 1 if striker.point is None else None
    striker.engine = pt.PipeTransformer(
        nn.Sequential(nn.Linear(4, 8), Block(8), Block(8), head),
        optimizer=optimizer,
        loss=loss,
        freeze=schedule(0, 3),  # then one layer is left, and one stage
        config=config(
            plan=pt.PlanConfig(num_stages=2, num_microbatches=1, reshape="always"),
            checkpoint=pt.CheckpointConfig(
                directory=str(folder), every_epochs=100, every_steps=steps, keep=100
            ),
        ),
    )
    return striker.engine


def run_until(rank, folder, point):
    """Train; return how it ended and the plans' shapes."""
    striker = Striker(folder, point, rank)
    shapes = []
    files = folder / "files"

    def metric(outputs, targets):
        striker.at("evaluation")
        return accuracy(outputs, targets)

    try:
        with make(files, striker) as engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(24), 12):
                    engine.step(batch)
                shapes.append(engine.plan.shape[:2] if engine.plan else None)
                engine.evaluate(ToySet(21, seed=2), {"accuracy": metric})
    except pt.PeerFailure as failure:
        return failure.phase, failure.rank
    return shapes


# Where SIGTERM comes, whom it hits, and the steps that are whole by then.
POINTS = {
    "standby in step 1": (1, 1),
    "evaluation": (0, 2),
    "change of plan": (1, 2),
    "replica in step 3": (1, 3),
}


def run_all(rank, folder):
    outcomes = {}
    for point in (None, *POINTS):
        place = folder / (point or "undisturbed")
        place.mkdir(exist_ok=True)
        outcomes[point] = run_until(rank, place, point)
    return outcomes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sigterm")
    return folder, run_ranks(run_all, 2, folder, timeout_s=110)


def test_undisturbed_run_has_a_standby_first_and_then_two_replicas(runs):
    _, (first, second) = runs
    assert first[None] == [(2, 1), (1, 2)] and second[None] == [None, (1, 2)]


@pytest.mark.parametrize("point", POINTS)
def test_sigterm_leaves_the_state_after_the_last_whole_step(point, runs):
    folder, outcomes = runs
    victim, step = POINTS[point]
    assert [outcome[point] for outcome in outcomes] == [("SIGTERM", victim)] * 2
    (path,) = (folder / point / "files").iterdir()  # no second one, nothing unfinished
    assert path == checkpoint.path_of_step(folder / point / "files", step)
    found = checkpoint.read(path)
    whole = checkpoint.read(
        checkpoint.path_of_step(folder / "undisturbed" / "files", step)
    )
    for name, value in whole["model"].items():
        assert torch.equal(found["model"][name], value), name
    pairs = zip(found["optimizer_tensors"], whole["optimizer_tensors"], strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    for name in ("step", "epoch", "batch"):
        assert found["progress"][name] == whole["progress"][name]
