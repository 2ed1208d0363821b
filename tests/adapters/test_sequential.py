import pytest
import torch
from torch import nn

from pipetransformer.adapters import sequential
from pipetransformer.pipe import PipeSequential


def test_groups_become_layers_and_units():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)),
    )
    flat, units = sequential(model)
    assert len(flat) == 6
    assert units == [3, 4]
    x = torch.randn(5, 4)
    assert torch.equal(flat(x), model(x))
    assert {id(p) for p in flat.parameters()} == {id(p) for p in model.parameters()}


def test_group_with_a_hook_stays_whole():
    group = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    group.register_forward_hook(lambda *args: None)
    flat, units = sequential(nn.Sequential(group, nn.Linear(4, 2)))
    assert list(flat)[0] is group and units == [1]


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="model: expected an nn.Sequential, got Linear"):
        sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model: expected at least 2 elements, got 1"):
        sequential(nn.Sequential(nn.Linear(2, 2)))


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_forward_of_its_own_is_refused_and_in_a_group_kept():
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(ValueError, match="got Doubled with a forward of its own"):
        sequential(Doubled(*layers))
    flat, _ = sequential(nn.Sequential(Doubled(*layers), nn.Linear(4, 2)))
    assert isinstance(flat[0], Doubled)


def test_no_layer_gets_lost():
    act = nn.ReLU()
    group = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    flat, units = sequential(nn.Sequential(group, nn.Linear(4, 2)))
    assert list(flat)[0] is group and units == [1]
    flat, _ = sequential(nn.Sequential(act, nn.Linear(4, 4), act))
    assert len(flat) == 3, "what takes it says that it stands there twice"


def test_names_that_meet_are_kept_apart():
    named = nn.Sequential()
    named.add_module("a_0", nn.Linear(4, 4))
    named.add_module("a", nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    named.add_module("head", nn.Linear(4, 2))
    flat, units = sequential(named)
    assert len(flat) == 4 and units == [1, 3]
    x = torch.randn(3, 4)
    assert torch.equal(flat(x), named(x))


@pytest.mark.parametrize("extra", ["forward", "parameter", "buffer"])
def test_a_group_with_more_than_layers_stays_whole(extra):
    group = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if extra == "forward":
        group.forward = lambda x: 2 * group[1](group[0](x))
    elif extra == "parameter":
        group.register_parameter("scale", nn.Parameter(torch.ones(())))
    else:
        group.register_buffer("mean", torch.zeros(4))
    flat, units = sequential(nn.Sequential(group, nn.Linear(4, 2)))
    assert list(flat)[0] is group and units == [1]


def test_an_activation_of_several_groups_leaves_them_whole():
    act = nn.ReLU()
    groups = [nn.Sequential(nn.Linear(4, 4), act) for _ in range(2)]
    model = nn.Sequential(*groups, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    flat, units = sequential(model)
    assert list(flat)[:2] == groups and len(flat) == 4 and units == [1, 2]


def test_a_group_that_spreads_tuples_stays_whole():
    group = PipeSequential(nn.Linear(4, 4), nn.ReLU())
    flat, _ = sequential(nn.Sequential(group, nn.Linear(4, 2)))
    assert list(flat)[0] is group
