"""Fingerprints change with whatever changes values; hashes follow content."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipetransformer.autocache import cacheable, fingerprint_chain, hash_rows
from pipetransformer.skip import Namespace
from tests.pipe.skips import Pop, Stash
from tests.support.ranks import run_ranks


class Scaled(nn.Module):
    def __init__(self, scale=2.0, act=torch.relu):
        super().__init__()
        self.scale = scale
        self.act = act
        self.table = torch.ones(2)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.act(x * self.scale)


def make_layers():
    torch.manual_seed(3)
    return [
        nn.Linear(4, 4),
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1)),
        Scaled(),
        nn.Linear(4, 4),
    ]


def changed_from(change, count=4):
    """Index of the first element that differs after `change(layers)`."""
    layers = make_layers()
    before = fingerprint_chain(layers, count)
    change(layers)
    after = fingerprint_chain(layers, count)
    same = [a == b for a, b in zip(before, after, strict=True)]
    first = same.index(False) if False in same else None
    assert first is None or not any(same[first:])
    return first


def set_item(layers, index, layer):
    layers[index] = layer


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda m: None, None),
        (lambda m: m[1].train(not m[1].training), None),
        (lambda m: m[1].requires_grad_(False), None),
        (lambda m: m[0].weight.data.view(-1)[5].mul_(1.0001), 1),
        (lambda m: m[1][0].running_mean.add_(1e-3), 2),
        (lambda m: setattr(m[1][1], "p", 0.2), 2),
        (lambda m: setattr(m[2], "scale", 2.5), 3),
        (lambda m: setattr(m[2], "act", torch.tanh), 3),
        (lambda m: m[2].table.add_(1), 3),
        (lambda m: m[2].hidden.add_(1), 3),
        (lambda m: m[3].double(), 4),
        (lambda m: set_item(m, 3, nn.Linear(4, 4, bias=False)), 4),
        (lambda m: set_item(m, 2, nn.Identity()), 3),
    ],
)
def test_chain_changes_from_the_changed_layer_on(change, first):
    assert changed_from(change) == first


def test_chain_starts_with_the_context():
    layers = make_layers()
    plain = fingerprint_chain(layers, 4)
    other = fingerprint_chain(layers, 4, context="autocast bfloat16")
    assert len(plain) == 5
    assert all(a != b for a, b in zip(plain, other, strict=True))
    assert fingerprint_chain(layers, 2) == plain[:3]


def skip_layers(first, second):
    """Two stashes and two pops: the third layer's and the fourth layer's names."""
    names = Namespace(), Namespace()
    return [
        Stash().isolate(names[0]),
        Stash().isolate(names[1]),
        Pop().isolate(names[first]),
        Pop().isolate(names[second]),
    ]


def test_chain_tells_whose_skips_are_popped():
    chain = fingerprint_chain(skip_layers(0, 1), 4)
    assert fingerprint_chain(skip_layers(0, 1), 4) == chain, "names differ by process"
    other = fingerprint_chain(skip_layers(1, 0), 4)
    same = [a == b for a, b in zip(chain, other, strict=True)]
    assert same == [True, True, True, False, False]


def test_chain_of_a_copy_is_equal():
    layers = make_layers()
    assert fingerprint_chain(copy.deepcopy(layers), 4) == fingerprint_chain(layers, 4)


def chain_of_process(rank):
    return fingerprint_chain(make_layers(), 4)


@pytest.mark.distributed
def test_chain_is_the_same_in_every_process():
    first, second = run_ranks(chain_of_process, 2)
    assert first == second == fingerprint_chain(make_layers(), 4)


def test_cacheable_names_the_module_that_forbids_it():
    layers = [layer.eval() for layer in make_layers()]
    assert cacheable(layers) is None
    layers[1][1].train()
    assert cacheable(layers) == "layer 1 (Sequential.1: Dropout) is in train mode"
    layers[1] = nn.BatchNorm1d(4, track_running_stats=False).eval()
    assert cacheable(layers) == (
        "layer 1 (BatchNorm1d) normalises with the statistics of each batch"
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 3))
def test_row_hashes_are_equal_exactly_for_equal_rows(row_values, columns):
    values = torch.tensor(row_values, dtype=torch.int16)
    wide = values[:, None].expand(-1, columns).contiguous()
    hashes = hash_rows(wide, values).tolist()
    for i, a in enumerate(row_values):
        for j, b in enumerate(row_values):
            assert (hashes[i] == hashes[j]) == (a == b)


def test_row_hash_depends_on_dtype_shape_and_order_not_on_memory_or_batch():
    x = torch.randn(6, 3, 5)
    plain = hash_rows(x)
    assert plain.dtype == torch.int64 and plain.shape == (6,)
    assert torch.equal(hash_rows(x.transpose(1, 2).contiguous().transpose(1, 2)), plain)
    assert torch.equal(hash_rows(x[2:4]), plain[2:4])
    for other in (x.double(), x.view(6, 15), x.transpose(1, 2), x + 0.5):
        assert not torch.equal(hash_rows(other), plain)
    assert not torch.equal(hash_rows(x, plain), hash_rows(plain, x))
