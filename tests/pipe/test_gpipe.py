"""The pipeline with torchgpipe's interface."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from pipetransformer.pipe import (
    DeferredBatchNorm,
    GPipe,
    from_plain_state_dict,
    is_checkpointing,
    to_plain_state_dict,
)
from pipetransformer.pipe.gpipe import verify_module

from .models import MODES, Functional, dense, grads
from .skips import Pop, Stash


def cpu(count):
    return ["cpu"] * count


def gpipe(layers, balance, **options):
    return GPipe(layers, balance, devices=cpu(len(balance)), **options)


# --- construction ------------------------------------------------------------


def test_attributes_and_defaults():
    model = GPipe(dense(3), [1, 2], devices=cpu(4))
    assert (model.balance, model.chunks, model.checkpoint) == ([1, 2], 1, "except_last")
    assert model.devices == [torch.device("cpu")] * 2  # spare ones are dropped
    assert [len(stage) for stage in model.partitions] == [1, 2]
    assert len(model) == 3 and model[-1] is model.partitions[1][1]
    coerced = GPipe(dense(1), (1,), devices=cpu(1), chunks=4.0, checkpoint="never")
    assert (coerced.balance, coerced.chunks) == ([1], 4)


def test_child_names_are_kept():
    layers = OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2), c=nn.ReLU())
    model = gpipe(nn.Sequential(layers), [1, 2])
    assert list(model.state_dict()) == [
        "partitions.0.a.weight",
        "partitions.0.a.bias",
        "partitions.1.b.weight",
        "partitions.1.b.bias",
    ]
    assert model.partitions[1].c is layers["c"]


def test_state_goes_to_and_from_the_plain_names():
    layers = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=Stash(), c=Pop()))
    model = gpipe(layers, [1, 2])
    state = model.state_dict()
    plain = to_plain_state_dict(model, state)
    assert list(plain) == list(layers.state_dict())
    assert list(from_plain_state_dict(model, plain)) == list(state)


@pytest.mark.parametrize("balance", [None, [], [2], [1, 1], [3, 0], [4, -1]])
def test_balance_errors_recommend_balancing(balance):
    with pytest.raises(ValueError, match=r"with the sum 3, got .*\n*.*") as caught:
        GPipe(dense(3), balance, devices=cpu(2))
    assert "torchgpipe.balance" in str(caught.value)


def test_fewer_devices_than_stages_are_refused():
    with pytest.raises(IndexError, match=r"one per stage \(2\), got too few: 1"):
        GPipe(dense(3), [1, 2], devices=cpu(1))


def test_default_devices_are_all_cuda_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(IndexError, match="got too few: 0"):
        GPipe(dense(3), [3])


def test_stages_are_moved_to_their_devices():
    # CPU twin: meta stands for the other device.
    layers = dense(3)
    model = GPipe(layers, [1, 2], devices=["cpu", "meta"])
    assert [p.device.type for p in model.parameters()][0] == "cpu"
    assert {p.device.type for p in model.partitions[1].parameters()} == {"meta"}
    with pytest.raises(TypeError, match="moving parameters and buffers"):
        model.to("cpu")


def test_refusals_of_the_constructor():
    with pytest.raises(TypeError, match="module must be nn.Sequential to be partit"):
        gpipe(nn.ModuleList(), [])
    with pytest.raises(ValueError, match="chunks: expected at least 1, got 0"):
        gpipe(dense(1), [1], chunks=0)
    with pytest.raises(ValueError, match="checkpoint is not one of"):
        gpipe(dense(1), [1], checkpoint="sometimes")
    with pytest.raises(TypeError, match="declared 'skip' as poppable but it was not"):
        gpipe(nn.Sequential(Pop()), [1])
    with pytest.raises(TypeError, match="expected to be called on Pipe, got GPipe"):
        GPipe.from_plan(dense(1), cuts=[0, 1], num_microbatches=1)


def test_parameter_of_two_children_is_refused():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
        verify_module(nn.Sequential(a, b))
    verify_module(nn.Sequential(nn.Sequential(a, b)))
    with pytest.raises(ValueError, match="duplicate children"):
        gpipe(nn.Sequential(a, a), [1, 1])


def test_deferred_batch_norm_converts():
    layers = nn.Sequential(nn.BatchNorm1d(3))
    model = gpipe(layers, [1], chunks=4, deferred_batch_norm=True)
    assert isinstance(layers[0], DeferredBatchNorm) and layers[0].chunks == 4
    assert model[0] is layers[0]


# --- calls -------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 1, 1]])
@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_equal_the_plain_models(mode, balance, chunks):
    layers = dense(4)
    plain = copy.deepcopy(layers)
    model = gpipe(layers, balance, chunks=chunks, checkpoint=mode)
    x = torch.randn(7, 5, dtype=torch.double)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(model(a), plain(b))
    (model(a) ** 2).sum().backward()
    (plain(b) ** 2).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(grads(layers), grads(plain))


def pair(value):
    assert type(value) is tuple and len(value) == 2
    return value[0] + 1, value[1] * 2


def single(value):
    assert type(value) is tuple and len(value) == 1
    return (value[0] * 3,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[3], [1, 1, 1], [2, 1]])
def test_tuples_reach_the_layers_whole(mode, balance):
    layers = nn.Sequential(*(Functional(pair) for _ in range(3)))
    model = gpipe(layers, balance, chunks=2, checkpoint=mode)
    x = torch.randn(4, 2, requires_grad=True)
    y = torch.randn(4, 3, requires_grad=True)
    out = model((x, y))
    assert type(out) is tuple
    torch.testing.assert_close(out, (x + 3, y * 8))
    (out[0].sum() + out[1].sum()).backward()
    assert torch.equal(x.grad, torch.ones(4, 2))
    assert torch.equal(y.grad, torch.full((4, 3), 8.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[2], [1, 1]])
@pytest.mark.parametrize("chunks", [1, 2])
def test_tuple_of_one_stays_a_tuple(mode, balance, chunks):
    layers = nn.Sequential(Functional(single), Functional(single))
    model = gpipe(layers, balance, chunks=chunks, checkpoint=mode)
    x = torch.randn(4, 2, requires_grad=True)
    out = model((x,))
    assert type(out) is tuple and len(out) == 1
    out[0].sum().backward()
    assert torch.equal(x.grad, torch.full((4, 2), 9.0))


@pytest.mark.parametrize("value", [3, "x", None, [torch.ones(1)], ((torch.ones(1),),)])
def test_only_tensors_and_tuples_of_them_are_taken(value):
    with pytest.raises(TypeError, match="input: expected Tensor or a tuple of them"):
        gpipe(dense(2), [1, 1])(value)


@pytest.mark.parametrize("value", [3, None, [torch.ones(1)], ((torch.ones(1),),)])
def test_only_tensors_and_tuples_of_them_leave_a_stage(value):
    layers = nn.Sequential(Functional(lambda x: value), Functional(lambda x: x))
    with pytest.raises(TypeError, match="output of a stage: expected Tensor or a tu"):
        gpipe(layers, [1, 1])(torch.ones(1))


def test_empty_module_returns_its_input():
    model = GPipe(nn.Sequential(), [], devices=[])
    x = torch.ones(2)
    assert model(x) is x and model((x,)) == (x,)


def test_mode_is_read_on_the_module_itself():
    flags = []

    def note(x):
        flags.append(is_checkpointing())
        return x * 1

    model = gpipe(
        nn.Sequential(Functional(note), nn.ReLU()), [1, 1], checkpoint="always"
    )
    model.partitions[0].eval()
    model(torch.ones(1, requires_grad=True))
    model.eval()
    model.partitions[0].train()
    model(torch.ones(1, requires_grad=True))
    assert flags == [True, False]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[3], [2, 1], [1, 1, 1]])
def test_skips_inside_and_between_stages(mode, balance):
    layers = nn.Sequential(Stash(), nn.Tanh(), Pop())
    model = gpipe(layers, balance, chunks=2, checkpoint=mode)
    x = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    y = (2 * x).tanh()
    torch.testing.assert_close(model(x), y + x)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (1 - y**2) + 1)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_train_on_their_own(again):
    model = gpipe(nn.Sequential(nn.Linear(2, 2), Stash(), Pop()), [1, 2], chunks=2)
    x = torch.randn(4, 2)
    expected = model(x)
    copied = again(model)
    assert (copied.balance, copied.chunks) == ([1, 2], 2)
    torch.testing.assert_close(copied(x), expected)
    copied(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())
