"""A replica that is alone is not wrapped in DDP until the user asks for it."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pipetransformer as pt
from pipetransformer.replica.replica import ActiveModel
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of
from tests.support.toy import ToySet


def trained(*, asks_at):
    """Train two epochs; ask for ``engine.model`` before one step; return what came."""
    engine, losses, steps = make_engine(freeze=schedule(0, 3), config=config()), [], 0
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                if steps == asks_at:
                    assert isinstance(engine.model, DistributedDataParallel)
                losses.append(engine.step(batch).item())
                steps += 1
        replica = engine._open().active()
        kind = type(replica.trained)
        assert engine.model is engine.model  # made once
    return losses, [p.detach().clone() for p in model_of(engine).parameters()], kind


def test_steps_with_and_without_ddp_have_the_same_bits():
    plain = trained(asks_at=None)
    assert plain[2] is ActiveModel
    for asks_at in (0, 1, 3):
        asked = trained(asks_at=asks_at)
        assert asked[0] == plain[0]
        for mine, other in zip(asked[1], plain[1], strict=True):
            assert torch.equal(mine, other)
    assert trained(asks_at=3)[2] is DistributedDataParallel


def test_a_loop_of_the_users_own_goes_through_ddp_and_counts_its_batches():
    engine = make_engine(freeze=schedule(0), config=config())
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                loss = nn.functional.cross_entropy(engine.model(batch), batch.targets)
                engine.backward(loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    (record,) = engine.history.epochs
    assert (record.optimizer_steps, record.unique_samples) == (2, 24)


class Forgetful(nn.Module):
    """A layer with a parameter that its output does not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_without_a_gradient_is_named_as_long_as_the_replica_is_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Forgetful(), nn.Linear(4, 8))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=nn.functional.cross_entropy,
        freeze=pt.freeze.Never(),
        config=config(),
    )
    text = (
        r"expected a gradient of every trainable parameter, got none of .*spare\.weight"
    )
    with engine, pytest.raises(RuntimeError, match=text):
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
