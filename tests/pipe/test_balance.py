"""Balancing: exact blocks, and costs measured on copies."""

import copy
import itertools
import time

import pytest
import torch
from torch import nn

from pipetransformer.pipe.balance import balance_by_size, balance_by_time
from pipetransformer.pipe.balance.blockpartition import solve
from pipetransformer.pipe.balance.profile import layerwise_sandbox, profile_sizes

from .models import Functional
from .skips import Pop, Stash

# --- block partition ---------------------------------------------------------


def every_split(sequence, count):
    for inner in itertools.combinations(range(1, len(sequence)), count - 1):
        cuts = [0, *inner, len(sequence)]
        yield [list(sequence[a:b]) for a, b in itertools.pairwise(cuts)]


def largest(blocks):
    return max(sum(block) for block in blocks)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_blocks_have_the_smallest_largest_sum(length):
    for sequence in itertools.product((0, 1, 2, 5), repeat=length):
        for count in range(1, length + 1):
            blocks = solve(sequence, count)
            assert [x for block in blocks for x in block] == list(sequence)
            assert len(blocks) == count and all(blocks)
            best = min(largest(split) for split in every_split(sequence, count))
            assert largest(blocks) == best


def test_fractions_are_compared_exactly_enough():
    assert solve([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 2) == [
        [0.1, 0.2, 0.3, 0.4],
        [0.5, 0.6],
    ]


def test_equal_costs_and_zeros_are_spread():
    assert [len(block) for block in solve([1] * 8, 4)] == [2, 2, 2, 2]
    assert [len(block) for block in solve([9, 1, 1, 1, 1], 3)] == [1, 2, 2]


@pytest.mark.parametrize("partitions", [0, -1])
def test_block_count_must_be_positive(partitions):
    with pytest.raises(ValueError, match="expected a positive number of blocks, got"):
        solve([1, 2], partitions)


def test_fewer_costs_than_blocks_are_refused():
    with pytest.raises(ValueError, match=r"one cost per block \(3\), got 2"):
        solve([1, 2], 3)


# --- by time -----------------------------------------------------------------


class Slow(nn.Module):
    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__()
        self.seconds = forward_s, backward_s

    def forward(self, x):
        time.sleep(self.seconds[0])
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda grad: time.sleep(self.seconds[1]))
        return x * 1


@pytest.mark.parametrize("seconds", [(0.1, 0.0), (0.0, 0.1)])
def test_slow_layer_is_isolated(seconds):
    layers = nn.Sequential(Slow(), Slow(), Slow(*seconds), Slow())
    balance = balance_by_time(3, layers, torch.ones(2, 2), timeout=0, device="cpu")
    assert balance == [2, 1, 1]


def test_measuring_leaves_the_module_as_it_is():
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()).eval()
    state = copy.deepcopy(layers.state_dict())
    random_state = torch.get_rng_state()
    modes = []
    layers[0].register_forward_hook(lambda layer, *_: modes.append(layer.training))
    sample = torch.ones(4, 3)
    with torch.no_grad():
        balance_by_time(2, layers, sample, timeout=0.01, device="cpu")
    assert set(modes) == {True}
    assert not any(layer.training for layer in layers.modules())
    assert all(parameter.grad is None for parameter in layers.parameters())
    torch.testing.assert_close(layers.state_dict(), state)
    assert torch.equal(sample, torch.ones(4, 3)) and not sample.requires_grad
    assert torch.equal(torch.get_rng_state(), random_state)


def test_timeout_repeats_the_measurement():
    calls = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: calls.append(1))
    balance_by_time(1, nn.Sequential(layer), torch.ones(1, 2), timeout=0, device="cpu")
    assert len(calls) == 2  # the first one warms up
    balance_by_time(
        1, nn.Sequential(layer), torch.ones(1, 2), timeout=0.1, device="cpu"
    )
    assert len(calls) > 4


def test_module_with_gradients_is_refused():
    layers = nn.Sequential(nn.Linear(2, 2))
    layers(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="got: some parameter already has gradient"):
        balance_by_time(1, layers, torch.ones(1, 2), device="cpu")


def test_counts_are_checked_before_anything_runs():
    layers = nn.Sequential(Functional(pytest.fail))
    for function in (balance_by_time, balance_by_size):
        with pytest.raises(ValueError, match=r"one cost per block \(2\), got 1"):
            function(2, layers, torch.ones(1), device="cpu")
        with pytest.raises(ValueError, match="positive number of blocks, got 0"):
            function(0, layers, torch.ones(1), device="cpu")


def test_chain_with_skips_in_place_layers_and_tuples_is_measured():
    layers = nn.Sequential(
        nn.ReLU(inplace=True),
        Stash(),
        nn.Linear(3, 3),
        nn.ReLU(inplace=True),
        Functional(lambda x: (x, torch.arange(4))),
        Functional(lambda x, index: x[index]),
        Slow(0.1),
        Pop(),
        Functional(lambda x: x.add_(1)),
    )
    sample = -torch.ones(4, 3)
    balance = balance_by_time(3, layers, sample, timeout=0, device="cpu")
    assert balance[1] == 1 and sum(balance) == 9
    assert torch.equal(sample, -torch.ones(4, 3))


def test_several_inputs_are_spread_over_the_first_layer():
    layers = nn.Sequential(Functional(torch.add), nn.ReLU())
    sample = (torch.ones(2), torch.ones(2))
    assert balance_by_time(2, layers, sample, timeout=0, device="cpu") == [1, 1]


# --- by size -----------------------------------------------------------------


def test_size_needs_cuda():
    with pytest.raises(ValueError, match="device: expected a CUDA device, got cpu"):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.ones(1), device="cpu")


def test_size_is_activations_of_a_micro_batch_and_scaled_parameters():
    # CPU twin: the allocator's answers are given.
    used = iter([0, 100, 100, 100, 50, 250])
    rows = []
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), Stash())
    layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    sizes = profile_sizes(
        layers, torch.ones(8, 3), 2, 2.5, "cpu", allocated=lambda device: next(used)
    )
    assert rows == [1, 1]  # the first to warm up
    assert sizes == [100 * 4 + int(12 * 4 * 2.5), 0, 200 * 4]


def test_size_counts_no_workspaces_of_libraries():
    # As cuBLAS: the first call of a kind takes memory that it keeps.
    workspaces = set()

    def allocated(device):
        return 1000 * len(workspaces)

    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    for layer in layers:
        kind = type(layer).__name__
        layer.register_forward_hook(lambda *_, kind=kind: workspaces.add(kind))
    sizes = profile_sizes(layers, torch.ones(8, 3), 2, 1.0, "cpu", allocated=allocated)
    assert len(workspaces) == 2 and sizes == [48, 0, 48]


def test_size_needs_a_tensor():
    with pytest.raises(TypeError, match="input: expected a tensor in it, got list"):
        profile_sizes(nn.Sequential(), [1], 1, 1.0, "cpu", allocated=lambda device: 0)


def test_sandbox_yields_copies_in_train_mode():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    for copied, layer in zip(layerwise_sandbox(layers, "meta"), layers, strict=True):
        assert copied is not layer and copied.training and not layer.training
        assert all(p.device.type == "meta" for p in copied.parameters())
    assert layers[0].weight.device.type == "cpu"
