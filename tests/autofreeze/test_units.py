"""Units, boundaries, and parts shared across a boundary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipetransformer.autofreeze import (
    boundary_of,
    movable_boundary,
    noise_in_front,
    resolve_units,
    starting_units,
)
from pipetransformer.skip import Namespace
from tests.pipe.skips import declares


def test_units_default_to_every_layer_but_the_last():
    assert resolve_units(4, None) == (1, 2, 3)
    assert resolve_units(1, None) == ()


def test_units_keep_the_given_ends():
    assert resolve_units(10, [3, 5, 9]) == (3, 5, 9)
    assert resolve_units(10, []) == ()


@pytest.mark.parametrize(
    "units, text",
    [
        ([3, 3], r"units: expected increasing layer indices from 1, got \[3, 3\]"),
        ([0, 3], r"units: expected increasing layer indices from 1, got \[0, 3\]"),
        ([3, 10], "units: expected ends below 10, .* got 10"),
        ([-1], "units: expected a count >= 0, got -1"),
    ],
)
def test_units_refuse_bad_ends(units, text):
    with pytest.raises(ValueError, match=text):
        resolve_units(10, units)


def test_units_refuse_an_empty_model():
    with pytest.raises(ValueError, match="num_layers: expected a count >= 1, got 0"):
        resolve_units(0, None)


def test_boundary_is_where_the_last_frozen_unit_ends():
    assert [boundary_of((3, 5, 9), count) for count in range(4)] == [0, 3, 5, 9]
    with pytest.raises(ValueError, match=r"expected a count in \[0, 3\], got 4"):
        boundary_of((3, 5, 9), 4)


def frozen(*layers):
    return [layer.requires_grad_(False) for layer in layers]


def test_units_begin_frozen_up_to_the_first_that_trains():
    def lines(count):
        return [nn.Linear(2, 2) for _ in range(count)]

    layers = nn.Sequential(*frozen(*lines(3)), *lines(2))
    assert starting_units(layers, (1, 2, 3, 4)) == 3
    assert starting_units(layers, (2, 4)) == 1, "a unit begins frozen as a whole"
    assert starting_units(layers, ()) == 0
    layers[1].bias.requires_grad_(True)
    assert starting_units(layers, (1, 2, 3, 4)) == 1
    assert starting_units(nn.Sequential(*lines(3)), (1, 2)) == 0


def test_layers_without_parameters_begin_frozen_only_before_a_frozen_one():
    noise, line = nn.Dropout(), nn.Linear(2, 2)
    (base,) = frozen(nn.Linear(2, 2))
    assert starting_units(nn.Sequential(noise, line), (1,)) == 0
    assert starting_units(nn.Sequential(noise, base, line), (1, 2)) == 2
    assert starting_units(nn.Sequential(base, noise, line), (1, 2)) == 1


def test_boundary_moves_freely_without_shared_parts():
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for wanted in range(5):
        assert movable_boundary(layers, (1, 2, 3, 4), wanted) == (wanted, None)


def tied():
    embedding, head = nn.Linear(2, 2), nn.Linear(2, 2)
    head.weight = embedding.weight
    return nn.Sequential(nn.Linear(2, 2), embedding, nn.Linear(2, 2), head)


def test_tied_parameter_holds_the_boundary_before_it():
    allowed, reason = movable_boundary(tied(), (1, 2, 3), 3)
    assert allowed == 1
    assert reason == (
        "layers 1 and 3 share the parameter weight: 1 of 3 units can freeze"
    )


def test_tied_parameter_holds_its_whole_unit():
    assert movable_boundary(tied(), (2, 3), 2)[0] == 0


def test_parameter_shared_within_the_frozen_part_holds_nothing():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    layers = nn.Sequential(first, second, nn.Linear(2, 2))
    assert movable_boundary(layers, (1, 2), 2) == (2, None)
    assert movable_boundary(layers, (1, 2), 1)[0] == 0


def test_shared_buffer_and_shared_module_hold_the_boundary():
    first, second = nn.Module(), nn.Module()
    table = torch.zeros(2)
    first.register_buffer("table", table)
    second.register_buffer("table", table)
    allowed, reason = movable_boundary(nn.Sequential(first, second), (1,), 1)
    assert (allowed, "share the buffer table" in reason) == (0, True)
    dropout = nn.Dropout()
    layers = nn.Sequential(nn.Linear(2, 2), dropout, nn.Linear(2, 2), dropout)
    allowed, reason = movable_boundary(layers, (1, 2, 3), 3)
    assert (allowed, "share the module Dropout" in reason) == (1, True)


@st.composite
def skip_layouts(draw):
    """Layers with the pairs that stash and pop, unit ends, and units asked for."""
    count = draw(st.integers(2, 9))
    ends = draw(st.sets(st.integers(1, count - 1)))
    spans = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    pairs = [p for p in draw(st.lists(spans, max_size=5)) if p[0] < p[1]]
    layers = [nn.Sequential() for _ in range(count)]
    for first, second in pairs:
        namespace = Namespace()  # of equal names, as in a stack of blocks
        layers[first].append(declares("skip").isolate(namespace))
        layers[second].append(nn.Sequential(declares((), "skip").isolate(namespace)))
    wanted = draw(st.integers(0, len(ends)))
    return nn.Sequential(*layers), pairs, tuple(sorted(ends)), wanted


@given(skip_layouts())
@settings(deadline=None, max_examples=200)
def test_boundary_never_lies_between_a_stash_and_its_pop(layout):
    layers, pairs, ends, wanted = layout

    def is_free(units):
        boundary = boundary_of(ends, units)
        return not any(first < boundary <= second for first, second in pairs)

    allowed, reason = movable_boundary(layers, ends, wanted)
    assert is_free(allowed), "a skip goes past the boundary"
    assert allowed == max(n for n in range(wanted + 1) if is_free(n)), (
        "held for nothing"
    )
    assert (reason is None) == (allowed == wanted)


def test_skip_that_goes_past_the_boundary_is_named():
    pair = nn.Sequential(declares("left"), nn.ReLU(), declares((), "left"), nn.ReLU())
    assert movable_boundary(pair, (1, 2, 3), 2) == (
        0,
        "layers 0 and 2 share the skip 'left': 0 of 2 units can freeze",
    )
    assert movable_boundary(pair, (1, 2, 3), 3) == (3, None)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize(
    ("layers", "boundary", "named"),
    [
        ([Noise(), nn.Linear(2, 2)], 2, ["0 (Noise)"]),
        ([Noise(), nn.Linear(2, 2)], 0, []),
        ([nn.Sequential(nn.Flatten(), nn.Dropout())], 1, ["0 (Sequential)"]),
        ([nn.Flatten(), nn.ReLU(), nn.Linear(2, 2)], 3, []),
        # Usual: encoders that were trained with dropout, and are frozen without.
        ([nn.Linear(2, 2), nn.Dropout(), Noise()], 3, []),
        ([nn.TransformerEncoderLayer(2, 1, 2)], 1, []),
    ],
)
def test_noise_in_front_of_frozen_layers_is_named(layers, boundary, named):
    assert noise_in_front(nn.Sequential(*layers), boundary) == named
