"""A pipeline computes what the plain model computes."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, Workers

from .models import MODES, Functional, assert_same_training, dense, grads, make_pipe


@pytest.fixture(scope="module")
def workers():
    with Workers(5) as workers:
        yield workers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_gradients_equal_the_plain_models(workers, mode, num_microbatches, num_stages):
    x = torch.randn(9, 5, dtype=torch.double, requires_grad=True)
    assert_same_training(
        dense(),
        lambda m: make_pipe(m, num_stages, num_microbatches, mode, workers=workers),
        x,
    )


@pytest.mark.parametrize("mode", MODES)
def test_public_constructor_makes_a_stage_of_every_cpu_child(mode):
    x = torch.randn(7, 5, dtype=torch.double, requires_grad=True)
    pipe = assert_same_training(
        dense(), lambda m: Pipe(m, 4, mode, return_tensors=True), x
    )
    assert pipe.num_stages == 4
    assert next(iter(pipe.state_dict())) == "partitions.0.0.weight"
    pipe.close()


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_rows_works_without_warning(workers, recwarn, rows, mode):
    x = torch.randn(rows, 5, dtype=torch.double, requires_grad=True)
    assert_same_training(
        dense(), lambda m: make_pipe(m, 3, 4, mode, workers=workers), x
    )
    assert not list(recwarn)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_parameter_shared_by_stages_gets_one_summed_gradient(workers, mode, num_stages):
    layers = dense()
    layers[3][0].weight = layers[0][0].weight
    x = torch.randn(6, 5, dtype=torch.double)
    calls = []
    layers[0][0].weight.register_post_accumulate_grad_hook(calls.append)
    plain = nn.Sequential(*layers)
    expected = torch.autograd.grad((plain(x) ** 2).sum(), list(layers.parameters()))
    pipe = make_pipe(layers, num_stages, 3, mode, workers=workers)
    (pipe(x) ** 2).sum().backward()
    torch.testing.assert_close(grads(layers), list(expected))
    assert len(calls) == 1


@pytest.mark.parametrize("mode", MODES)
def test_post_accumulate_hooks_fire_once_per_backward(workers, mode):
    layers = dense()
    fired = {name: 0 for name, _ in layers.named_parameters()}
    for name, parameter in layers.named_parameters():

        def count(_, name=name):
            fired[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    pipe = make_pipe(layers, 3, 4, mode, workers=workers)
    for step in (1, 2):
        pipe(torch.randn(8, 5, dtype=torch.double)).sum().backward()
        assert set(fired.values()) == {step}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_tensor_hooks_of_parameters_see_the_whole_gradient_once(
    workers, mode, retain_graph
):
    # Cause of the test: autograd runs such a hook in every cell that asks for the
    # parameter's gradient, so a clamp was applied to parts and then to the sum.
    layers = dense()
    layers[3][0].weight = layers[0][0].weight
    x = torch.randn(6, 5, dtype=torch.double)
    seen = []

    def clamp(grad):
        seen.append(grad)
        return grad.clamp(-0.1, 0.1) * 2

    for parameter in layers.parameters():
        parameter.register_hook(clamp)
    (layers(x) ** 2).sum().backward()
    expected = grads(layers)
    layers.zero_grad()
    count = len(seen)
    seen.clear()
    loss = (make_pipe(layers, 4, 3, mode, workers=workers)(x) ** 2).sum()
    loss.backward(retain_graph=retain_graph)
    assert len(seen) == count
    torch.testing.assert_close(grads(layers), expected)
    layers.zero_grad()
    if retain_graph:
        loss.backward()
        torch.testing.assert_close(grads(layers), expected)


@pytest.mark.parametrize("mode", MODES)
def test_tensor_hook_that_fails_leaves_the_hooks_in_place(workers, mode):
    layers = dense()
    armed = [True]

    def fail(grad):
        if armed[0]:
            raise ValueError("hook")

    layers[2][0].weight.register_hook(fail)
    calls = []
    layers[0][0].weight.register_hook(calls.append)
    pipe = make_pipe(layers, 4, 2, mode, workers=workers)
    x = torch.randn(4, 5, dtype=torch.double)
    loss = pipe(x).sum()
    with pytest.raises(ValueError, match="hook"):
        loss.backward()
    armed[0] = False
    pipe(x).sum().backward()  # the failed graph is still alive
    assert len(calls) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_frozen", [1, 2, 3])
def test_frozen_front_keeps_nothing_and_gets_no_gradient(workers, mode, num_frozen):
    layers = dense()
    layers[:num_frozen].requires_grad_(False)
    recomputed = []
    layers[0].register_forward_pre_hook(
        lambda *_: recomputed.append(torch.is_grad_enabled())
    )
    x = torch.randn(6, 5, dtype=torch.double)
    assert_same_training(layers, lambda m: make_pipe(m, 4, 3, mode, workers=workers), x)
    assert len(recomputed) == 3 + 1  # the pipe's forward and the plain model's
    assert all(p.grad is None for p in layers[:num_frozen].parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_stage_without_parameters_passes_gradients(workers, mode, position):
    layers = list(dense(3))
    layers.insert(position, Functional(torch.sin))
    x = torch.randn(6, 5, dtype=torch.double, requires_grad=True)
    assert_same_training(
        nn.Sequential(*layers),
        lambda m: make_pipe(m, 4, 3, mode, workers=workers),
        x,
    )


@pytest.mark.parametrize("mode", MODES)
def test_middle_stage_that_detaches_gives_front_no_gradient(workers, mode):
    layers = dense()
    layers.insert(2, Functional(torch.detach))
    x = torch.randn(6, 5, dtype=torch.double)
    pipe = make_pipe(layers, 5, 3, mode, workers=workers)
    pipe(x).sum().backward()
    assert all(p.grad is None for p in layers[:2].parameters())
    assert all(p.grad is not None for p in layers[3:].parameters())


@pytest.mark.parametrize("mode", MODES)
def test_in_place_layer_at_a_border(workers, mode):
    layers = dense()
    layers.insert(2, nn.ReLU(inplace=True))
    layers[1].append(nn.Linear(5, 5, dtype=torch.double))
    x = torch.randn(6, 5, dtype=torch.double)
    pipe = Pipe.from_plan(
        layers,
        cuts=[0, 2, 5],
        num_microbatches=3,
        checkpoint=mode,
        workers=workers,
    )
    if mode == "never":
        assert_same_training(layers, lambda m: pipe, x)
        return
    loss = pipe(x).sum()
    with pytest.raises(
        RuntimeError,
        match="a leaf Variable that requires grad .*used in an in-place operation",
    ):
        loss.backward()
    assert pipe(x).shape == (6, 5)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("first", [None, nn.Identity, nn.Flatten])
def test_first_layer_that_works_in_place_trains_as_plain(workers, num_stages, first):
    """Rows of one tensor: what one micro-batch saved is not what another changes."""
    layers = dense()
    layers.insert(0, nn.LeakyReLU(0.3, inplace=True))
    cuts = [0, 1, len(layers)]
    if first is not None:  # hands on a view of the rows, over the border
        layers.insert(0, first())
        cuts[-1] += 1
    x = torch.randn(8, 5, dtype=torch.double)
    plain = copy.deepcopy(layers)
    cuts = cuts if num_stages == 2 else [0, cuts[-1]]
    pipe = Pipe.from_plan(layers, cuts=cuts, num_microbatches=4, workers=workers)
    ours, theirs = x.clone(), x.clone()
    pipe(ours).pow(2).sum().backward()
    plain(theirs).pow(2).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(grads(layers), grads(plain))
    # Whoever changes the whole input before backward is refused, as ever.
    loss = pipe(ours).pow(2).sum()
    ours.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_change_of_rows_that_overlap_is_refused(workers):
    layers = dense()
    layers.insert(0, nn.LeakyReLU(0.3, inplace=True))
    x = torch.randn(12, dtype=torch.double).unfold(0, 5, 1)
    pipe = make_pipe(layers, 1, 8, workers=workers)
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_in_place_change_of_an_input_without_gradient_is_refused(workers, num_stages):
    layers = dense()
    layers.insert(0, Functional(lambda t: t.mul_(2)))
    pipe = make_pipe(layers, num_stages, 2, "always", workers=workers)
    loss = pipe(torch.randn(4, 5, dtype=torch.double)).sum()
    with pytest.raises(
        RuntimeError, match="expected to be unchanged since its forward"
    ):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_second_backward_with_retain_graph_gives_equal_numbers(workers, mode):
    layers = dense()
    pipe = make_pipe(layers, 3, 4, mode, workers=workers)
    loss = (pipe(torch.randn(8, 5, dtype=torch.double)) ** 2).sum()
    loss.backward(retain_graph=True)
    first = grads(layers)
    layers.zero_grad()
    loss.backward()
    torch.testing.assert_close(grads(layers), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad_of_some_parameters_leaves_grad_fields_alone(workers):
    layers = dense()
    plain = copy.deepcopy(layers)
    x = torch.randn(8, 5, dtype=torch.double)
    pipe = make_pipe(layers, 4, 4, workers=workers)
    (actual,) = torch.autograd.grad(pipe(x).sum(), [layers[2][0].weight])
    (expected,) = torch.autograd.grad(plain(x).sum(), [plain[2][0].weight])
    torch.testing.assert_close(actual, expected)
    assert all(p.grad is None for p in layers.parameters())


def test_double_backward_is_refused(workers):
    pipe = make_pipe(dense(), 2, 2, workers=workers)
    x = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    with pytest.raises(RuntimeError, match="expected create_graph=False"):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("mode", MODES)
def test_custom_python_function_works_in_stages(workers, mode):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    layers = dense()
    layers.insert(1, Functional(Square.apply))
    layers.insert(4, Functional(Square.apply))
    x = torch.randn(6, 5, dtype=torch.double, requires_grad=True)
    assert_same_training(layers, lambda m: make_pipe(m, 3, 3, mode, workers=workers), x)


def test_sparse_embedding_gradients_add_up(workers):
    layers = nn.Sequential(
        nn.Embedding(11, 5, sparse=True, dtype=torch.double), *dense(2)
    )
    plain = copy.deepcopy(layers)
    x = torch.randint(11, (8, 3))
    make_pipe(layers, 3, 4, workers=workers)(x).sum().backward()
    plain(x).sum().backward()
    assert layers[0].weight.grad.is_sparse
    torch.testing.assert_close(
        layers[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense()
    )


def test_optimizer_steps_follow_the_plain_model(workers):
    layers = dense()
    plain = copy.deepcopy(layers)
    pipe = make_pipe(layers, 4, 4, "except_last", workers=workers)
    ours = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(5):
        x = torch.randn(8, 5, dtype=torch.double)
        for model, optimizer in ((pipe, ours), (plain, theirs)):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(list(layers.parameters()), list(plain.parameters()))


def test_gradients_are_bitwise_the_same_in_every_run(workers):
    layers = dense(dtype=torch.float)
    x = torch.randn(16, 5)
    seen = []
    for _ in range(3):
        layers.zero_grad()
        make_pipe(layers, 4, 8, workers=workers)(x).sum().backward()
        seen.append(grads(layers))
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=0, atol=0)
