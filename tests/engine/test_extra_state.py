"""What modules keep besides tensors, by torch's `get_extra_state`, goes with them."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet


class Counting(nn.Module):
    """A layer whose output depends on how often it has run."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.seen = inner, 0
        self.last = torch.zeros(2, dtype=torch.double)  # no buffer

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.last = self.last + 1
        return self.inner(x) / (1 + self.seen)

    def get_extra_state(self):
        return {"seen": self.seen, "last": self.last}

    def set_extra_state(self, state):
        self.seen, self.last = state["seen"], state["last"]


class Unreadable(Counting):
    def get_extra_state(self):
        return {"inner": object()}

    def set_extra_state(self, state):
        raise AssertionError("never sent")


class OneWay(Counting):
    """Its state is of no use to others."""

    def get_extra_state(self):
        return {"inner": object()}

    set_extra_state = nn.Module.set_extra_state


def build(kind, world):
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), kind(nn.Linear(4, 4)), kind(nn.Linear(4, 8))
    plan = pt.PlanConfig(num_stages=world, num_microbatches=1)
    return pt.PipeTransformer(
        nn.Sequential(*layers),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=nn.functional.cross_entropy,
        freeze=schedule(0, 2),
        config=config(plan=plan),
    )


def joins(rank, kind):
    """Train an epoch of two stages, one of two replicas; return what layers counted."""
    engine, found = build(kind, 2), []
    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                if epoch == 1 and batch.index == 0:
                    layers = list(engine._arguments.model)[1:]
                    shape = engine.plan.num_stages, engine.plan.num_replicas
                    found.append((shape, [(m.seen, m.last.tolist()) for m in layers]))
                engine.step(batch)
        reasons = [each.reason for each in engine.history.aborted]
    return found, reasons


@pytest.mark.distributed
def test_a_replica_that_joins_is_given_the_extra_state_of_modules():
    for found, _ in run_ranks(joins, 2, Counting):
        assert found == [((1, 2), [(2, [2.0, 2.0])] * 2)]


@pytest.mark.distributed
def test_an_extra_state_that_modules_do_not_take_back_is_not_sent():
    results = run_ranks(joins, 2, OneWay)
    assert [found[0][0] for found, _ in results] == [(1, 2)] * 2


@pytest.mark.distributed
def test_an_extra_state_that_cannot_be_read_back_keeps_the_plan():
    (_, reasons), _ = run_ranks(joins, 2, Unreadable)
    text = "expected tensors and plain values, got object at ['extra_state']['1']"
    assert any(text in str(reason) for reason in reasons), reasons


def test_state_dict_copies_the_extra_state_of_modules():
    engine = build(Counting, 1)
    with engine:
        engine.prepare(ToySet(24), 12)
        found = engine.state_dict()
        layer = engine._arguments.model[1]
        assert found["1._extra_state"]["seen"] == layer.seen
        kept = found["1._extra_state"]["last"]
        assert kept is not layer.last and torch.equal(kept, layer.last)
    torch.manual_seed(0)
    again = build(Counting, 1)._arguments.model
    again.load_state_dict(found)
