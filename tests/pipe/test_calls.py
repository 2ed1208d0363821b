"""What a call may be given, and what the layers see of it."""

import collections

import pytest
import torch
from torch import nn

from pipetransformer.pipe import NoChunk, Pipe, WithDevice
from pipetransformer.pipe.input_checks import check_inputs

from .models import (
    MODES,
    Functional,
    assert_same_training,
    dense,
    make_pipe,
    staged,
)

Pair = collections.namedtuple("Pair", "first second")
X = torch.zeros(4, 5, dtype=torch.double)


class Row(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "kwargs", [{}, {"x": 1}, {"x": [X]}, {"x": {"y": X}}, {"x": None}], ids=str
)
def test_keywords_without_a_tensor_are_refused(kwargs):
    pipe = Pipe(dense(), 2)
    with pytest.raises(TypeError, match="inputs: expected at least one tensor among"):
        pipe(**kwargs)


def test_one_tensor_among_positions_or_keywords_is_enough():
    first = Functional(lambda a, b=None: b if a is None else a)
    pipe = Pipe(staged(first, nn.ReLU()), 2, return_tensors=True)
    assert torch.equal(pipe(None, b=X), X) and torch.equal(pipe(X, b=None), X)
    assert torch.equal(pipe(X.as_subclass(Row)), X)
    pipe.close()


INPUTS = {
    "alone": lambda t: ((t,), {}),
    "second": lambda t: ((X, t), {}),
    "keyword": lambda t: ((X,), {"k": t}),
    "list": lambda t: ((X, [1, t]), {}),
    "named tuple in dict": lambda t: ((X,), {"k": {"p": Pair(None, t)}}),
    "zero-dimensional in a tuple": lambda t: ((X, (t.sum(),)), {}),
}


@pytest.mark.parametrize("wrong", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("chunks", [1, 2])
def test_every_tensor_must_be_on_the_first_device(wrong, chunks):
    # meta stands for a second device.
    seen = []
    layers = nn.Sequential(Functional(lambda *a, **k: seen.append(1) or a[0]))
    pipe = Pipe(layers, chunks)
    args, kwargs = wrong(X.to("meta"))
    text = "All inputs should be on the same device as the first partition: .* got meta"
    with pytest.raises(ValueError, match=text):
        pipe(*args, **kwargs)
    assert not seen
    args, kwargs = wrong(X)
    pipe(*args, **kwargs)
    assert seen
    pipe.close()


def test_first_device_is_the_first_stages():
    pipe = Pipe(nn.Sequential(WithDevice(nn.ReLU(), "meta"), nn.Linear(5, 5).double()))
    with pytest.raises(ValueError, match="first partition: expected meta, got cpu"):
        pipe(X)


def test_device_of_tensors_in_other_objects_is_the_users_affair():
    class Box:
        tensor = X.to("meta")

    pipe = Pipe(nn.Sequential(Functional(lambda x, box: x)), 2, return_tensors=True)
    assert torch.equal(pipe(X, Box()), X)
    pipe.close()


@pytest.mark.parametrize("kwargs", [{}, {"k": {"p": [NoChunk(X)]}}], ids=["", "deep"])
def test_no_chunk_is_no_input_and_may_be_anywhere(kwargs):
    with pytest.raises(TypeError, match="expected at least one tensor among them"):
        Pipe(nn.Sequential(Functional(lambda *a, **k: X)), 2)(NoChunk(X), **kwargs)
    elsewhere = NoChunk(X.to("meta"))
    check_inputs((X, elsewhere), {"k": Pair(1, [elsewhere])}, X.device)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_no_chunk_reaches_the_layer_as_its_tensor(chunks, num_stages):
    # A lone stage with one micro-batch is called without the engine.
    def check(x, *args, **kwargs):
        found = [args[0], args[1][0], args[2]["p"].first, kwargs["k"]]
        assert all(type(t) is torch.Tensor and len(t) == 3 for t in found)
        assert (type(args[1]), type(args[2]["p"]), args[3]) == (list, Pair, 7)
        return x + sum(t.sum() for t in found)

    whole = NoChunk(torch.ones(3, requires_grad=True))
    layers = nn.Sequential(Functional(check), nn.Identity())
    pipe = make_pipe(layers, num_stages, chunks)
    y = pipe(X, whole, [whole], {"p": Pair(whole, None)}, 7, k=whole)
    assert torch.equal(y, X + 12)
    y.sum().backward()
    assert torch.equal(whole.tensor.grad, torch.full((3,), 4.0 * X.numel()))
    pipe.close()


@pytest.mark.parametrize(
    "args, kwargs",
    [((torch.tensor(1.0),), {}), ((X, torch.tensor(1.0)), {}), ((X,), {"k": X.sum()})],
    ids=["alone", "second", "keyword"],
)
def test_zero_dimensional_argument_is_refused(args, kwargs):
    pipe = Pipe(nn.Sequential(nn.Linear(5, 5)), 2)
    with pytest.raises(RuntimeError, match="expected tensors with rows along dim"):
        pipe(*args, **kwargs)


def test_empty_pipeline_refuses_what_no_layer_can_take():
    pipe = Pipe(nn.Sequential(), 2)
    with pytest.raises(TypeError, match=r"expected none \(a pipeline without layers\)"):
        pipe(X, k=X)
    with pytest.raises(TypeError, match="expected at least one tensor among them"):
        pipe()


@pytest.mark.parametrize("args", [(X, X), (X, X, X, X)], ids=["few", "many"])
def test_wrong_argument_counts_surface_as_the_layers_own_error(args):
    class Triple(nn.Module):
        def forward(self, a, b, c):
            return a + b + c

    pipe = Pipe(staged(Triple(), nn.ReLU()), 2)
    with pytest.raises(TypeError, match=r"Triple.forward\(\)"):
        pipe(*args)
    pipe.close()


SPREADING = {
    "tuple": lambda x: (x, 2 * x),
    "list": lambda x: [x, 2 * x],
    "three": lambda x: (x, 2 * x, 3 * x),
    "one-element tuple": lambda x: (x,),
    "one-element list": lambda x: [x],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "border"])
@pytest.mark.parametrize("spread", SPREADING.values(), ids=SPREADING.keys())
def test_tuples_and_lists_are_spread_inside_stages_and_at_borders(mode, inside, spread):
    class Sum(nn.Module):
        def forward(self, *inputs):
            assert all(isinstance(item, torch.Tensor) for item in inputs)
            return (sum(inputs) ** 2,)

    layers = [nn.Linear(5, 5, dtype=torch.double), Functional(spread), Sum()]
    module = nn.Sequential(nn.Sequential(*layers)) if inside else staged(*layers)
    pipe = Pipe(module, 2, mode, return_tensors=True)
    assert pipe.num_stages == (1 if inside else 3)
    x = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    (actual,) = pipe(x)
    expected = sum(spread(layers[0](x))) ** 2
    torch.testing.assert_close(actual, expected)
    wanted = [x, *layers[0].parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(actual.sum(), wanted),
        torch.autograd.grad(expected.sum(), wanted),
    )
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_of_several_inputs_gets_its_gradient(mode, count):
    layers = staged(
        Functional(lambda *xs: tuple((k + 1) * x for k, x in enumerate(xs))),
        Functional(lambda *xs: xs[0] if len(xs) == 1 else xs[0] * xs[-1]),
    )
    pipe = Pipe(layers, 2, mode, return_tensors=True)
    assert pipe.num_stages == 2
    xs = [
        torch.randn(4, 3, dtype=torch.double, requires_grad=True) for _ in range(count)
    ]
    y = pipe(*xs)
    grads = torch.autograd.grad(y.sum(), [xs[0], xs[-1]])
    if count == 1:
        torch.testing.assert_close(grads[0], torch.ones_like(xs[0]))
    else:
        torch.testing.assert_close(grads, (count * xs[-1], count * xs[0]))
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
def test_none_and_plain_values_pass_with_backward(mode):
    seen = []

    def note(x, *others):
        seen.append(others)
        return (x * 2, *others)

    layers = staged(Functional(note), Functional(note))
    pipe = Pipe(layers, 2, mode, return_tensors=True)
    values = (None, 3, True, "text", 2.5)
    x = torch.ones(4, 3, requires_grad=True)
    y, *others = pipe(x, *values)
    assert others == [[value] * 2 for value in values]
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 4.0))
    assert set(seen) == {values}
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks, num_stages", [(1, 4), (2, 4), (8, 2), (8, 1), (3, 4)])
def test_any_number_of_microbatches_works_with_any_number_of_stages(
    recwarn, mode, chunks, num_stages
):
    for rows in (0, 1, 5):
        x = torch.randn(rows, 5, dtype=torch.double, requires_grad=True)
        layers = dense(num_stages)
        make = lambda m: Pipe(m, chunks, mode, return_tensors=True)  # noqa: E731
        assert_same_training(layers, make, x).close()
    assert not list(recwarn)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_border_needs_a_tensor_in_every_mode(mode, chunks):
    layers = staged(
        nn.Linear(5, 5, dtype=torch.double), Functional(lambda x: 3), nn.Identity()
    )
    pipe = Pipe(layers, chunks, mode)
    with pytest.raises(TypeError, match="output of stage 1: expected at least one ten"):
        pipe(X)
    pipe.close()


def test_different_row_counts_are_refused_in_keywords_too():
    pipe = make_pipe(nn.Sequential(Functional(lambda a, k: a), nn.ReLU()), 2, 4)
    with pytest.raises(RuntimeError, match="Found different number of chunks"):
        pipe(torch.zeros(4, 2), k=torch.zeros(3, 2))
    pipe.close()
