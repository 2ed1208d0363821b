"""backward twice, autograd.grad, double backward: right numbers or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .models import MODES, Functional, dense, grads, linears, make_pipe

DISPATCHES = ("serial", "threads")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")
every_case = [
    pytest.mark.parametrize("mode", MODES),
    pytest.mark.parametrize("dispatch", DISPATCHES),
    pytest.mark.parametrize("schedule", SCHEDULES),
]


def in_every_case(test):
    for mark in every_case:
        test = mark(test)
    return test


def mean_square(output, target):
    return ((output - target) ** 2).mean()


class Case:
    """A pipeline and the plain model, with one loss of the same data."""

    def __init__(self, mode, dispatch, schedule):
        self.layers = dense()
        self.plain = copy.deepcopy(self.layers)
        self.takes_loss = schedule != "gpipe"
        self.pipe = make_pipe(
            self.layers,
            3,
            4,
            mode,
            dispatch=dispatch,
            schedule=schedule,
            loss=mean_square if self.takes_loss else None,
        )
        self.x = torch.randn(9, 5, dtype=torch.double, requires_grad=True)
        self.target = torch.randn(9, 5, dtype=torch.double)

    def loss(self):
        if self.takes_loss:
            return self.pipe(self.x, targets=self.target)
        return mean_square(self.pipe(self.x), self.target)

    def plain_loss(self):
        return mean_square(self.plain(self.x), self.target)


@in_every_case
def test_backward_twice_gives_the_plain_models_gradients_twice(
    mode, dispatch, schedule
):
    case = Case(mode, dispatch, schedule)
    expected = torch.autograd.grad(
        case.plain_loss(), [case.x, *case.plain.parameters()]
    )
    loss = case.loss()
    for times in (1, 2, 3):
        loss.backward(retain_graph=times < 3)
        found = [case.x.grad, *grads(case.layers)]
        torch.testing.assert_close(found, [times * g for g in expected])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    case.pipe.close()


@in_every_case
def test_kept_gradients_are_not_changed_by_a_second_backward(mode, dispatch, schedule):
    # An optimizer that works in place must not reach what is delivered again.
    case = Case(mode, dispatch, schedule)
    loss = case.loss()
    loss.backward(retain_graph=True)
    first = grads(case.layers)
    for p in [case.x, *case.layers.parameters()]:
        p.grad.fill_(float("nan"))
    case.x.grad = None
    case.layers.zero_grad()
    loss.backward()
    case.pipe.close()
    for mine, before in zip(grads(case.layers), first, strict=True):
        assert torch.equal(mine, before)


@in_every_case
def test_autograd_grad_leaves_grad_fields_alone(mode, dispatch, schedule):
    case = Case(mode, dispatch, schedule)
    plain = [case.x, *case.plain.parameters()]
    ours = [case.x, *case.layers.parameters()]
    expected = torch.autograd.grad(case.plain_loss(), plain)
    loss = case.loss()
    for keep in (True, False):
        found = torch.autograd.grad(loss, ours, retain_graph=keep)
        torch.testing.assert_close(found, expected)
    # Some of them, in any order.
    some = [4, 0, len(ours) - 1]
    found = torch.autograd.grad(case.loss(), [ours[k] for k in some])
    torch.testing.assert_close(list(found), [expected[k] for k in some])
    assert all(p.grad is None for p in ours)
    case.pipe.close()


@in_every_case
def test_double_backward_is_refused_with_a_clear_text(mode, dispatch, schedule):
    case = Case(mode, dispatch, schedule)
    for wanted in ([case.x], list(case.layers.parameters())):
        with pytest.raises(RuntimeError, match="expected create_graph=False"):
            torch.autograd.grad(case.loss(), wanted, create_graph=True)
    assert all(p.grad is None for p in case.layers.parameters())
    case.loss().backward()
    case.plain_loss().backward()
    torch.testing.assert_close(grads(case.layers), grads(case.plain))
    case.pipe.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_two_losses_of_one_output_add_up(mode, dispatch):
    layers = nn.Sequential(*linears(2), Functional(lambda x: (x.sin(), x.cos())))
    plain = copy.deepcopy(layers)
    pipe = make_pipe(layers, 3, 2, mode, dispatch=dispatch)
    x = torch.randn(4, 5, dtype=torch.double)
    for model in (pipe, plain):
        first, second = model(x)
        first.sum().backward(retain_graph=True)
        (second**2).sum().backward()
    pipe.close()
    torch.testing.assert_close(grads(layers), grads(plain))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_two_calls_before_one_backward_add_up(mode, dispatch):
    layers = dense()
    plain = copy.deepcopy(layers)
    pipe = make_pipe(layers, 4, 3, mode, dispatch=dispatch)
    x, z = torch.randn(2, 6, 5, dtype=torch.double)
    for model in (pipe, plain):
        (model(x) * model(z)).sum().backward()
    pipe.close()
    torch.testing.assert_close(grads(layers), grads(plain))


class Counted(nn.Module):
    """Counts, by a hook on its input and output, how often its backward runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, dtype=torch.double)
        self.seen = []

    def forward(self, x):
        y = self.inner(x)
        watched = [tensor for tensor in (x, y) if tensor.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(
            watched, lambda grads: self.seen.append([g is not None for g in grads])
        )
        return y


@in_every_case
@pytest.mark.parametrize("num_stages", [1, 3])
def test_multi_grad_hooks_of_layers_run_once_per_backward_of_a_cell(
    mode, dispatch, schedule, num_stages
):
    layers = nn.Sequential(*[Counted() for _ in range(3)])
    loss = None if schedule == "gpipe" else mean_square
    pipe = make_pipe(
        layers, num_stages, 4, mode, dispatch=dispatch, schedule=schedule, loss=loss
    )
    x = torch.randn(8, 5, dtype=torch.double)
    if loss is None:
        mean_square(pipe(x), x).backward()
    else:
        pipe(x, targets=x).backward()
    pipe.close()
    assert [layer.seen for layer in layers] == [
        [[True]] * 4,
        [[True, True]] * 4,
        [[True, True]] * 4,
    ]


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("mode, num_again", [("never", 0), ("always", 1)])
def test_flops_are_counted_in_both_passes(dispatch, mode, num_again):
    def flops(model):
        with FlopCounterMode(display=False) as counter:
            model(x).square().sum().backward()
        return counter.get_total_flops()

    layers = nn.Sequential(*linears(3))
    x = torch.randn(8, 5, dtype=torch.double)
    forward = 3 * 2 * 8 * 5 * 5
    total = flops(layers)
    pipe = make_pipe(layers, 3, 4, mode, dispatch=dispatch)
    assert flops(pipe) == total + num_again * forward
    pipe.close()
