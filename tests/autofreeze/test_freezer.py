"""Freezing changes flags only; unfreezing brings everything back."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.autofreeze import LayerFreezer


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Linear(4, 4),
        nn.Linear(4, 2),
    )


def train_step(layers, optimizer):
    layers(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_frozen_layer_has_no_gradient_no_mask_and_eval_mode():
    layers = make_layers()
    freezer = LayerFreezer(layers)
    layers(torch.randn(8, 4)).sum().backward()
    freezer.apply(2)
    frozen, active = layers[:2], layers[2:]
    assert not any(m.training for layer in frozen for m in layer.modules())
    assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())
    assert all(layer.training for layer in active)
    assert all(p.grad is not None and p.requires_grad for p in active.parameters())
    freezer.assert_consistent()


def test_frozen_layer_keeps_batch_norm_statistics_and_drops_nothing_out():
    layers = make_layers()
    LayerFreezer(layers).apply(2)
    before = layers[1][1].running_mean.clone()
    x = torch.randn(8, 4)
    assert torch.equal(layers[:2](x), layers[:2](x))
    assert torch.equal(layers[1][1].running_mean, before)


def test_unfreeze_restores_the_users_mask_and_the_mode():
    layers = make_layers()
    layers[0][0].weight.requires_grad_(False)
    mask = [p.requires_grad for p in layers.parameters()]
    freezer = LayerFreezer(layers)
    for boundary in (3, 1, 4, 0):
        freezer.apply(boundary)
        freezer.assert_consistent()
    assert [p.requires_grad for p in layers.parameters()] == mask
    assert all(m.training for m in layers.modules())


def test_parameter_shared_by_frozen_layers_keeps_its_mask():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers[1].weight = layers[0].weight
    freezer = LayerFreezer(layers)
    freezer.apply(2)
    freezer.apply(2)
    freezer.apply(0)
    assert all(p.requires_grad for p in layers.parameters())


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_freeze_unfreeze_freeze_keeps_moments_and_weights_bitwise(make_optimizer):
    layers = make_layers()
    optimizer = make_optimizer(layers.parameters())
    freezer = LayerFreezer(layers)
    train_step(layers, optimizer)
    freezer.apply(2)
    weights = [p.detach().clone() for p in layers[:2].parameters()]
    states = [copy.deepcopy(optimizer.state[p]) for p in layers[:2].parameters()]
    for boundary in (2, 0, 2):
        freezer.apply(boundary)
        if boundary:
            train_step(layers, optimizer)
        for p, weight, state in zip(
            layers[:2].parameters(), weights, states, strict=True
        ):
            assert torch.equal(p, weight)
            for name, value in state.items():
                assert torch.equal(
                    torch.as_tensor(optimizer.state[p][name]), torch.as_tensor(value)
                )
    freezer.apply(0)
    train_step(layers, optimizer)
    assert not torch.equal(layers[0][0].weight, weights[0])


def test_train_leaves_frozen_layers_in_eval():
    layers = make_layers()
    freezer = LayerFreezer(layers)
    freezer.apply(2)
    freezer.train(False)
    assert not any(layer.training for layer in layers)
    freezer.train()
    assert [layer.training for layer in layers] == [False, False, True, True]
    freezer.train(False)
    freezer.apply(0)
    assert not any(layer.training for layer in layers)


def test_apply_refuses_a_boundary_outside_the_model():
    text = r"boundary: expected a count in \[0, 4\], got 5"
    with pytest.raises(ValueError, match=text):
        LayerFreezer(make_layers()).apply(5)


@pytest.mark.parametrize(
    "spoil, text",
    [
        (
            lambda layer: layer[0].bias.requires_grad_(True),
            "frozen layer 1: expected requires_grad off for 0.bias, got on",
        ),
        (
            lambda layer: setattr(layer[0].bias, "grad", torch.zeros(4)),
            "frozen layer 1: expected no gradient of 0.bias, got one",
        ),
        (
            lambda layer: layer[1].train(),
            "frozen layer 1: expected module 1 in evaluation mode, got training mode",
        ),
    ],
)
def test_assert_consistent_names_what_was_switched_on(spoil, text):
    layers = make_layers()
    freezer = LayerFreezer(layers)
    freezer.apply(2)
    spoil(layers[1])
    with pytest.raises(RuntimeError, match=text):
        freezer.assert_consistent()
