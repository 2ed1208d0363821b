"""Strict pipes draw from the global generators and pass containers on, as of old."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipetransformer.pipe import Pipe, is_recomputing, strict

from .models import MODES, Functional


@pytest.fixture
def strict_pipes(monkeypatch):
    """Strict pipes in a process that has an RPC agent, as far as the check knows."""
    monkeypatch.setattr(
        "torch.distributed.rpc.api._is_current_rpc_agent_set", lambda: True
    )
    strict.set_strict(True)
    yield
    strict.set_strict(False)


class Noisy(nn.Module):
    """Draws in several ways; notes what it drew, forward and again."""

    def __init__(self, stage, seen):
        super().__init__()
        self.stage, self.seen = stage, seen
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        noise = torch.rand(3, dtype=torch.double)
        self.seen.append((is_recomputing(), self.stage, noise))
        return F.dropout(self.dropout(x), 0.2) + noise.sum() * x


def clock_order(num_microbatches, num_stages):
    for clock in range(num_microbatches + num_stages - 1):
        for stage in range(num_stages):
            if 0 <= clock - stage < num_microbatches:
                yield clock - stage, stage


def loop_over_cells(layers, x, num_chunks):
    parts = list(x.chunk(num_chunks))
    for i, j in clock_order(len(parts), len(layers)):
        parts[i] = layers[j](parts[i])
    return torch.cat(parts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("chunks", [1, 4])
def test_strict_draws_equal_a_seeded_loop_in_clock_order(
    strict_pipes, mode, num_stages, chunks
):
    seen = []
    layers = nn.Sequential(*[Noisy(j, seen) for j in range(num_stages)])
    a = torch.ones(8, 6, dtype=torch.double, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    torch.manual_seed(11)
    expected = loop_over_cells(layers, a, chunks)
    state = torch.get_rng_state()
    expected.sum().backward()
    drawn = [noise for _, _, noise in seen]
    seen.clear()
    pipe = Pipe(layers, chunks, mode, return_tensors=True)
    assert pipe.current_dispatch() == "serial"
    torch.manual_seed(11)
    actual = pipe(b)
    assert torch.equal(actual, expected)
    assert torch.equal(torch.get_rng_state(), state)
    for (again, _, noise), other in zip(seen, drawn, strict=True):
        assert not again and torch.equal(noise, other)
    forward = list(seen)
    seen.clear()
    # The recomputation repeats the draws whatever the generators hold by then.
    torch.manual_seed(99)
    state = torch.get_rng_state()
    actual.sum().backward()
    pipe.close()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(b.grad, a.grad)
    num_again = {"never": 0, "except_last": chunks - 1, "always": chunks}[mode]
    assert len(seen) == num_again * num_stages
    for stage in range(num_stages):
        first = [noise for _, j, noise in forward if j == stage]
        again = [noise for _, j, noise in seen if j == stage]
        for noise, other in zip(again, first[:num_again][::-1], strict=True):
            assert torch.equal(noise, other)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
def test_strict_containers_are_passed_on_and_gathered_as_lists(
    strict_pipes, switch, chunks
):
    strict.set_strict(switch)
    inner = torch.arange(4.0)
    given = [inner]
    seen = []

    def first(x, values):
        seen.append(values)
        return x, values

    def second(x, values):
        return x, {"v": values[0] * 2}, 7

    layers = nn.Sequential(Functional(first), Functional(second))
    pipe = Pipe(layers, chunks, return_tensors=True)
    y, found, number = pipe(torch.arange(4.0), given)
    pipe.close()
    assert torch.equal(y, inner) and number == [7] * chunks
    if switch:
        assert all(values is given for values in seen)
        assert type(found) is list and len(found) == chunks
        assert all(torch.equal(each["v"], inner * 2) for each in found)
    else:
        assert all(len(values[0]) == 4 // chunks for values in seen)
        assert torch.equal(found["v"], inner * 2)


@pytest.mark.parametrize("mode", MODES)
def test_strict_gradients_equal_the_plain_models(strict_pipes, mode):
    layers = nn.Sequential(*[nn.Linear(5, 5, dtype=torch.double) for _ in range(3)])
    x = torch.randn(5, 5, dtype=torch.double)
    (layers(x) ** 2).sum().backward()
    expected = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    pipe = Pipe(layers, 4, mode)
    (pipe(x).local_value() ** 2).sum().backward()
    pipe.close()
    torch.testing.assert_close([p.grad for p in layers.parameters()], expected)
