"""Replicas never step on gradients that were not reduced, also in a last step."""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

TEXT = (
    "backward: expected a gradient of every trainable parameter, got none of "
    "2.inner.weight, 2.inner.bias; give them requires_grad=False, or use them"
)


class Dropped(nn.Module):
    """A layer that leaves its weights out when it is told to."""

    def __init__(self):
        super().__init__()
        self.inner, self.leaves_out = nn.Linear(4, 4), False

    def forward(self, x):
        return x if self.training and self.leaves_out else x + self.inner(x)


def train(rank, epochs, out, freezes, ranks=(0, 1), accumulate=1):
    """Leave the weights out at a batch of an epoch; return the error's text."""
    torch.manual_seed(0)
    layer = Dropped()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), layer, nn.Linear(4, 8))
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=nn.functional.cross_entropy,
        freeze=schedule(*freezes),
        config=config(plan=pt.PlanConfig(num_stages=1), accumulation_steps=accumulate),
    )
    try:
        with engine:
            for epoch in engine.epochs(epochs):
                for batch in engine.batches(ToySet(24), 12):
                    layer.leaves_out = (epoch, batch.index) == out and rank in ranks
                    engine.step(batch)
            return float(model[0].weight.detach().sum())
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("epochs", "freezes", "out"), [(1, (0,), (0, 1)), (2, (0, 1), (0, 1))]
)
@pytest.mark.distributed
def test_weights_left_out_in_the_last_step_under_a_plan_are_refused(
    epochs, freezes, out
):
    for text in run_ranks(train, 2, epochs, out, freezes):
        assert TEXT in str(text)


@pytest.mark.distributed
def test_the_rank_that_leaves_weights_out_tells_so_and_the_others_name_it():
    mine, other = run_ranks(train, 2, 1, (0, 1), (0,), (0,))
    assert str(mine).startswith(TEXT)
    assert "rank 0" in str(other) and TEXT in str(other)


@pytest.mark.distributed
def test_weights_left_out_in_the_last_batch_alone_of_a_step_are_refused():
    text = TEXT.replace("2.inner.weight, 2.inner.bias", "some that other batches")
    for found in run_ranks(train, 2, 1, (0, 1), (0,), (0, 1), 2):
        assert text.partition(";")[0] in str(found)


@pytest.mark.distributed
def test_layers_that_use_their_weights_in_every_step_train_on():
    left, right = run_ranks(train, 2, 2, None, (0, 1))
    assert isinstance(left, float) and left == right
