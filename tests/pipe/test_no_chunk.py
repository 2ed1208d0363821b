"""NoChunk in every mode, dispatch and schedule: whole in, gradients added up."""

import pytest
import torch
from torch import nn

from pipetransformer.pipe import NoChunk

from .models import MODES, Functional, make_pipe

DISPATCHES = ("serial", "threads")
PLACES = ("argument", "list", "dict", "keyword")
M = 4


class Scale(nn.Module):
    """Uses the whole tensor, handed over in one of several ways."""

    def __init__(self):
        super().__init__()
        self.rows_seen = []

    def forward(self, x, given=None, *, whole=None):
        if isinstance(given, list):
            given = given[0]
        if isinstance(given, dict):
            given = given["whole"]
        whole = given if given is not None else whole
        self.rows_seen.append((x.shape[0], whole.shape[0]))
        return x * whole.sin().sum(0)


def call(pipe, place, x, tensor, **options):
    whole = NoChunk(tensor)
    if place == "keyword":
        return pipe(x, whole=whole, **options)
    given = {"argument": whole, "list": [whole], "dict": {"whole": whole}}[place]
    return pipe(x, given, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("place", PLACES)
def test_gradient_of_a_whole_tensor_is_the_sum(mode, dispatch, schedule, place):
    scale = Scale()
    layers = nn.Sequential(scale, Functional(torch.tanh))
    takes_loss = schedule != "gpipe"
    pipe = make_pipe(
        layers,
        2,
        M,
        mode,
        dispatch=dispatch,
        schedule=schedule,
        loss=(lambda y, t: (y - t).square().mean()) if takes_loss else None,
    )
    x = torch.randn(9, 3, dtype=torch.double, requires_grad=True)
    whole = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    target = torch.randn(9, 3, dtype=torch.double)
    plain = (torch.tanh(scale(x, whole)) - target).square().mean()
    expected = torch.autograd.grad(plain, [x, whole])
    scale.rows_seen.clear()
    if takes_loss:
        loss = call(pipe, place, x, whole, targets=target)
    else:
        loss = (call(pipe, place, x, whole) - target).square().mean()
    loss.backward()
    pipe.close()
    torch.testing.assert_close([x.grad, whole.grad], list(expected))
    assert {rows for _, rows in scale.rows_seen} == {5}
    again = {"never": 0, "except_last": M - 1, "always": M}[mode]
    assert len(scale.rows_seen) == M + again
