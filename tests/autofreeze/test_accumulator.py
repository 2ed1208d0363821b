"""Gradients summed over an interval, per unit."""

import math

import pytest
import torch
from torch import nn

from pipetransformer import _C
from pipetransformer.autofreeze import GradientAccumulator

ENDS = (1, 3)


def make_layers(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).to(dtype)


def backward(layers):
    for parameter in layers.parameters():
        parameter.grad = None
    x = torch.randn(5, 3, dtype=next(layers.parameters()).dtype)
    layers(x).square().sum().backward()


def gradients(layers, start, end):
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in layers[start:end].parameters()
        ]
    ).clone()


def test_norms_are_those_of_the_summed_gradient():
    layers = make_layers()
    accumulator = GradientAccumulator(layers, ENDS)
    sums = [torch.zeros(12).double(), torch.zeros(24).double()]
    single = []
    for _ in range(4):
        backward(layers)
        accumulator.accumulate(0)
        sums[0] += gradients(layers, 0, 1)
        sums[1] += gradients(layers, 1, 3)
        single.append(sums[0].norm().item())
    expected = [total.norm().item() for total in sums]
    assert accumulator.norms() == pytest.approx(expected, rel=1e-12)
    # The sum of gradients, not the last one and not a sum of norms.
    assert accumulator.norms()[0] != pytest.approx(single[0])


def test_frozen_units_report_zero_and_hold_no_memory():
    layers = make_layers()
    accumulator = GradientAccumulator(layers, ENDS)
    backward(layers)
    accumulator.accumulate(0)
    assert all(norm > 0 for norm in accumulator.norms())
    accumulator.accumulate(1)
    norms = accumulator.norms()
    assert norms[0] == 0.0
    assert norms[1] == pytest.approx(2 * gradients(layers, 1, 3).norm().item())
    accumulator.accumulate(3)
    assert accumulator.norms() == (0.0, 0.0)


def test_reset_starts_a_new_interval():
    layers = make_layers()
    accumulator = GradientAccumulator(layers, ENDS)
    for _ in range(2):
        backward(layers)
        accumulator.accumulate(0)
        expected = gradients(layers, 0, 1).norm().item()
        assert accumulator.norms()[0] == pytest.approx(expected, rel=1e-12)
        accumulator.reset()
        assert accumulator.norms() == (0.0, 0.0)


def test_parameters_without_gradient_count_as_zero():
    layers = make_layers()
    layers[0].weight.requires_grad_(False)
    backward(layers)
    accumulator = GradientAccumulator(layers, ENDS)
    accumulator.accumulate(0)
    expected = layers[0].bias.grad.norm().item()
    assert accumulator.norms()[0] == pytest.approx(expected, rel=1e-12)


def test_accumulation_leaves_gradients_alone():
    layers = make_layers()
    accumulator = GradientAccumulator(layers, ENDS)
    backward(layers)
    before = gradients(layers, 0, 4)
    accumulator.accumulate(0)
    accumulator.accumulate(0)
    assert torch.equal(gradients(layers, 0, 4), before)


def test_half_precision_gradients_add_up_in_fp32():
    layers = make_layers(torch.bfloat16)
    accumulator = GradientAccumulator(layers, ENDS)
    bias = layers[0].bias
    # In bfloat16, 256 + 1 is 256.
    for value in (256.0, 1.0, 1.0):
        bias.grad = torch.full_like(bias, value)
        accumulator.accumulate(0)
    assert accumulator.norms()[0] == pytest.approx(258.0 * math.sqrt(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_accumulator_goes_on_with_the_sums(dtype):
    layers = make_layers(dtype)
    first = GradientAccumulator(layers, ENDS)
    backward(layers)
    first.accumulate(1)  # without the first unit, which is frozen
    second = GradientAccumulator(layers, ENDS)
    second.load_state_dict(first.state_dict())
    backward(layers)
    first.accumulate(1)
    assert second.norms() != first.norms(), "the sums are copies"
    second.accumulate(1)
    assert second.norms() == first.norms() and second.norms()[0] == 0.0


@pytest.mark.parametrize(("number", "shape"), [(0, (2, 3)), (6, (3, 3))])
def test_sums_of_another_model_are_refused(number, shape):
    accumulator = GradientAccumulator(make_layers(), ENDS)
    with pytest.raises(ValueError, match=f"gradient sum {number}: expected shape "):
        accumulator.load_state_dict({number: torch.zeros(shape)})


def test_l1_norms_are_those_of_the_summed_gradient_by_parameter():
    layers = make_layers()
    accumulator = GradientAccumulator(layers, ENDS)
    sums = [torch.zeros(12).double(), torch.zeros(24).double()]
    for _ in range(3):
        backward(layers)
        accumulator.accumulate(0)
        sums[0] += gradients(layers, 0, 1)
        sums[1] += gradients(layers, 1, 3)
    expected = [total.abs().sum().item() for total in sums]
    assert accumulator.l1_norms() == pytest.approx(expected, rel=1e-12)
    accumulator.accumulate(1)
    assert accumulator.l1_norms()[0] == 0.0, "frozen"
    accumulator.reset()
    assert accumulator.l1_norms() == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_l1_norms_of_low_precision_are_summed_in_fp64(dtype):
    layers = make_layers(torch.float32).to(dtype)
    for parameter in layers.parameters():
        parameter.grad = torch.full_like(parameter, 2.0**-10)
    accumulator = GradientAccumulator(layers, ENDS)
    for _ in range(5):
        accumulator.accumulate(0)
    assert accumulator.l1_norms() == (5 * 12 * 2.0**-10, 5 * 24 * 2.0**-10)


def gappy_layers():
    """Activations in front, between and behind: units of one layer, and a head."""
    torch.manual_seed(0)
    kinds = [nn.Tanh, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear, nn.Tanh, nn.Linear]
    layers = [kind(3, 3) if kind is nn.Linear else kind() for kind in kinds]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("kind", ["norms", "l1_norms"])
def test_units_in_which_nothing_trains_have_the_value_of_one_that_does(kind):
    layers = gappy_layers()
    accumulator = GradientAccumulator(layers, range(1, 7))
    own = GradientAccumulator(nn.Sequential(*(layers[k] for k in (1, 4, 6))), (1, 2))
    backward(layers)
    for each in (accumulator, own):
        each.accumulate(0)
    first, second = getattr(own, kind)()
    assert 0 < first != second > 0
    found = getattr(accumulator, kind)
    assert found() == (first, first, first, first, second, second)
    # Frozen units keep 0, and hand nothing on.
    accumulator.accumulate(2)
    assert found(2) == (0.0, 0.0, *[2 * second] * 4)
    accumulator.accumulate(5)
    assert found(5) == (0.0,) * 6, "nothing is left to train"


def test_a_unit_that_trains_no_more_has_the_value_of_the_one_before():
    layers = gappy_layers()
    accumulator = GradientAccumulator(layers, range(1, 7))
    backward(layers)
    accumulator.accumulate(0)
    first = accumulator.norms()[1]
    layers[4].requires_grad_(False)
    assert accumulator.norms() == (first,) * 6
    layers[1].weight.requires_grad_(False)  # its bias trains
    assert accumulator.norms() == (first,) * 6
    layers[1].bias.requires_grad_(False)
    assert accumulator.norms()[0] == 0.0, "nothing trains"


def test_norms_of_complex_gradients_are_those_of_their_absolute_values():
    layer = nn.Linear(3, 2, dtype=torch.cfloat)
    accumulator = GradientAccumulator(nn.Sequential(layer, nn.Identity()), [1])
    sums = {p: torch.zeros_like(p) for p in layer.parameters()}
    for seed in range(2):
        torch.manual_seed(seed)
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
            sums[parameter] += parameter.grad
        accumulator.accumulate(0)
    whole = (
        torch.cat([each.detach().flatten() for each in sums.values()]).abs().double()
    )
    assert accumulator.norms() == pytest.approx((whole.norm().item(),), rel=1e-6)
    assert accumulator.l1_norms() == pytest.approx((whole.sum().item(),), rel=1e-6)


def test_sums_follow_what_has_a_gradient_from_step_to_step():
    """Boundaries, missing gradients, resets and loads: what is added where."""
    generator = torch.Generator().manual_seed(1)
    layers = make_layers()
    accumulator = GradientAccumulator(layers, ENDS)
    units = [list(layers[:1].parameters()), list(layers[1:3].parameters())]
    expected = {}

    def check():
        for unit, norm in zip(units, accumulator.norms(), strict=True):
            sums = [expected[p] for p in unit if p in expected]
            total = sum(each.square().sum().item() for each in sums)
            assert norm == pytest.approx(math.sqrt(total), rel=1e-12)

    for step in range(40):
        boundary = int(torch.randint(2, (), generator=generator))
        for parameter in layers.parameters():
            has = torch.rand((), generator=generator) < 0.7
            parameter.grad = (
                torch.randn(parameter.shape, generator=generator).double()
                if has
                else None
            )
        accumulator.accumulate(boundary)
        for unit, start in zip(units, (0, 1), strict=True):
            for parameter in unit:
                if start < boundary:
                    expected.pop(parameter, None)
                elif parameter.grad is not None:
                    before = expected.get(parameter, 0.0)
                    expected[parameter] = before + parameter.grad
        check()
        if step % 7 == 3:
            held = {n: v.clone() for n, v in accumulator.state_dict().items()}
            accumulator.reset()
            assert accumulator.norms() == (0.0, 0.0)
            accumulator.load_state_dict(held)
            check()
        if step % 11 == 5:
            accumulator.reset()
            expected.clear()


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_added_has_the_bits_of_torch(dtype, wide):
    """Layouts that one loop takes, and those that it leaves to ATen."""
    torch.manual_seed(0)

    def made(*shape):
        return torch.randn(shape).to(dtype)

    addends = [
        made(3, 5),
        made(5, 3).T,
        made(4, 6)[:, ::2],
        made(0, 4),
        made(7)[3],
        made(300, 300),
        made(2, 3, 4, 5).to(memory_format=torch.channels_last),
        made(1, 5).expand(4, 5),
        torch._neg_view(made(3, 3)),
    ]
    to = torch.float32 if wide and dtype == torch.bfloat16 else dtype
    sums = [torch.zeros(a.shape, dtype=to) for a in addends[:5]]
    sums += [torch.randn(a.shape).to(to) for a in addends[5:]]
    expected = [total + addend for total, addend in zip(sums, addends, strict=True)]
    _C.autofreeze.add_each(sums, addends)
    assert all(map(torch.equal, sums, expected))


def test_sums_and_addends_come_in_pairs():
    one = torch.zeros(2)
    with pytest.raises(ValueError, match="addends: expected 2, one for each sum, got"):
        _C.autofreeze.add_each([one, one], [one])


def test_gradients_with_a_graph_are_added_without_it():
    total, weight = torch.zeros(2), torch.ones(2, requires_grad=True)
    _C.autofreeze.add_each([total], [weight * 2])
    assert total.tolist() == [2.0, 2.0] and not total.requires_grad
