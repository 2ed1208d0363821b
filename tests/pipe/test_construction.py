"""What the public constructor makes of a Sequential: stages, devices, names."""

import copy
import inspect

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe, PipeSequential, WithDevice
from pipetransformer.pipe.batchnorm import DeferredBatchNorm
from pipetransformer.pipe.skip import skippable

from .models import Functional, assert_same_training, dense, make_pipe, staged

CPU, META = torch.device("cpu"), torch.device("meta")


def meta():
    return nn.Linear(5, 5, device="meta")


def layout(pipe):
    return [
        (device.type, *(type(layer).__name__ for layer in stage))
        for device, stage in zip(pipe.devices, pipe.partitions, strict=True)
    ]


def test_defaults_and_order_of_the_old_signature():
    names = list(inspect.signature(Pipe).parameters)
    assert names[:4] == ["module", "chunks", "checkpoint", "deferred_batch_norm"]
    kinds = {p.kind for p in list(inspect.signature(Pipe).parameters.values())[4:]}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)))
    assert (pipe.chunks, pipe.checkpoint) == (1, "except_last")
    named = Pipe(module=dense(), chunks=3, checkpoint="never")
    assert (named.chunks, named.checkpoint) == (3, "never")


@pytest.mark.parametrize(
    "chunks, checkpoint, module, error, text",
    [
        ("many", "x", None, ValueError, "invalid literal"),
        (0, "x", None, ValueError, "chunks: expected at least 1, got 0"),
        (0.9, "x", None, ValueError, "chunks: expected at least 1, got 0"),
        (1, "x", None, ValueError, "checkpoint is not one of"),
        (1, "never", None, TypeError, "module must be nn.Sequential to be part"),
    ],
)
def test_checks_come_in_their_order(chunks, checkpoint, module, error, text):
    with pytest.raises(error, match=text):
        Pipe(module, chunks, checkpoint)


def test_duplicate_children_are_found_before_their_devices():
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="got the same object as '0' and '2'"):
        Pipe(nn.Sequential(both, nn.ReLU(), both))
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="module with duplicate children"):
        Pipe(nn.Sequential(WithDevice(layer, "cpu"), WithDevice(layer, "meta")))
    assert layer.weight.device == CPU  # refused before anything was moved


def test_skips_that_do_not_fit_are_refused_before_devices():
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    popper = skippable(pop="left")(Functional)(lambda x: x)
    text = "'1' declared 'left' as poppable but it was not stashed"
    for make in (Pipe, lambda m: make_pipe(m, 1, 1)):
        with pytest.raises(TypeError, match=text):
            make(nn.Sequential(both, popper))


@pytest.mark.parametrize("defer", [True, False])
def test_batch_norms_are_converted_in_the_callers_sequential(defer):
    inner = nn.Sequential(nn.BatchNorm1d(5), nn.ReLU())
    layers = nn.Sequential(nn.BatchNorm1d(5), inner)
    weight = layers[0].weight
    pipe = Pipe(layers, 4, "never", defer)
    kind = DeferredBatchNorm if defer else nn.BatchNorm1d
    for norm in (layers[0], inner[0]):
        assert type(norm) is kind and getattr(norm, "chunks", 4) == 4
    assert pipe[0] is layers[0] and pipe[1] is inner[0]
    assert layers[0].weight is weight


def test_parameter_shared_on_one_device_trains():
    layers = dense(2)
    layers[1][0].weight = layers[0][0].weight
    x = torch.randn(4, 5, dtype=torch.double)
    assert_same_training(layers, lambda m: Pipe(m, 2, return_tensors=True), x).close()


def test_parameter_shared_across_devices_is_refused_and_nothing_moves():
    # CPU twin: a WithDevice is what makes one parameter belong to two devices.
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    text = "duplicate parameters on distinct devices .* got cpu and meta"
    with pytest.raises(ValueError, match=text):
        Pipe(nn.Sequential(a, WithDevice(b, "meta")))
    assert b.weight is a.weight and b.weight.device == CPU


def test_every_cpu_child_with_parameters_is_a_stage_and_other_neighbours_merge():
    layers = [nn.ReLU(), nn.Linear(5, 5), meta(), meta(), nn.Linear(5, 5), nn.Tanh()]
    layers += [nn.Linear(5, 5), WithDevice(nn.Tanh(), "cpu"), nn.ReLU()]
    assert layout(Pipe(nn.Sequential(*layers))) == [
        ("cpu", "ReLU"),
        ("cpu", "Linear"),
        ("meta", "Linear", "Linear"),
        ("cpu", "Linear", "Tanh"),
        ("cpu", "Linear"),
        ("cpu", "Tanh", "ReLU"),
    ]
    inner = [nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2)]
    expected = [("cpu", "Linear", "ReLU")] * 2
    assert layout(Pipe(nn.Sequential(*inner))) == expected


def test_child_without_parameters_joins_the_stage_before_it():
    stages = layout(Pipe(nn.Sequential(meta(), nn.ReLU(), nn.Tanh(), meta())))
    assert stages == [("meta", "Linear", "ReLU", "Tanh", "Linear")]
    layers = [nn.ReLU(), nn.Sequential(nn.Tanh()), nn.Linear(5, 5), nn.Dropout()]
    pipe = Pipe(nn.Sequential(*layers, nn.Sequential(nn.ReLU(), nn.Tanh())))
    assert layout(pipe) == [
        ("cpu", "ReLU", "Tanh"),
        ("cpu", "Linear", "Dropout", "ReLU", "Tanh"),
    ]
    names = [stage.plain_names for stage in pipe.partitions]
    assert names == [("0", "1.0"), ("2", "3", "4.0", "4.1")]


class Still(nn.Module):
    """Has a buffer, no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x):
        return self.scale * x


@pytest.mark.parametrize("checkpoint", ["except_last", "always", "never"])
def test_activation_in_place_behind_a_layer_works_with_every_checkpointing(checkpoint):
    layers = nn.Sequential(
        nn.Conv1d(2, 3, 1),
        nn.BatchNorm1d(3, affine=False),
        nn.ReLU(inplace=True),
        Still(),
        nn.Conv1d(3, 2, 1),
        nn.ReLU(inplace=True),
    )
    layers[1].eval()  # micro-batches have statistics of their own
    x = torch.randn(6, 2, 4, requires_grad=True)
    make = lambda m: Pipe(m, 3, checkpoint, return_tensors=True)  # noqa: E731
    pipe = assert_same_training(layers, make, x)
    assert pipe.num_stages == 2
    pipe.close()


def test_buffers_are_ignored_when_devices_are_looked_for():
    child = nn.Linear(5, 5)
    child.register_buffer("table", torch.zeros(3, device="meta"))
    alone = nn.Module()
    alone.register_buffer("table", torch.zeros(3))
    pipe = Pipe(nn.Sequential(child, meta(), alone))
    assert pipe.devices == [CPU, META]
    assert (child.table.device, alone.table.device) == (META, CPU)  # none was moved


def test_with_device_places_and_merges_a_child_without_parameters():
    # CPU twin of two devices: meta stands for the accelerator.
    layers = nn.Sequential(
        nn.Linear(5, 5),
        WithDevice(nn.ReLU(), "meta"),
        meta(),
        WithDevice(nn.Tanh(), CPU),
    )
    assert layout(Pipe(layers)) == [
        ("cpu", "Linear"),
        ("meta", "ReLU", "Linear"),
        ("cpu", "Tanh"),
    ]


def test_with_device_moves_its_child_and_is_unwrapped():
    child = nn.Linear(5, 5)
    wrapped = WithDevice(child, "meta")
    assert (wrapped.module, wrapped.device) == (child, META)
    assert torch.equal(wrapped(torch.ones(1, 5)), child(torch.ones(1, 5)))
    pipe = Pipe(nn.Sequential(wrapped, WithDevice(nn.Sequential(nn.ReLU()), "meta")))
    assert pipe.partitions[0][0] is child and child.weight.device == META
    assert list(pipe.state_dict()) == ["partitions.0.0.weight", "partitions.0.0.bias"]
    assert layout(pipe) == [("meta", "Linear", "ReLU")]


def test_with_device_overrides_a_child_on_two_devices():
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert Pipe(nn.Sequential(WithDevice(both, "meta"))).devices == [META]


class OwnForward(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class NoForward(nn.Sequential):
    pass


def hooked():
    inner = nn.Sequential(nn.Linear(5, 5).double(), nn.Tanh())
    inner.register_forward_hook(lambda module, args, output: 2 * output)
    return inner


def patched():
    inner = nn.Sequential(nn.Linear(5, 5).double(), nn.Tanh())
    inner.forward = lambda x: 2 * inner[0](x)
    return inner


def with_parameter():
    inner = nn.Sequential(nn.Linear(5, 5).double(), nn.Tanh())
    inner.register_parameter("scale", nn.Parameter(torch.ones(())))
    return inner


@pytest.mark.parametrize(
    "inner, num_layers",
    [
        (NoForward(nn.Linear(5, 5).double(), nn.Tanh()), 2),
        (OwnForward(nn.Linear(5, 5).double(), nn.Tanh()), 1),
        (hooked(), 1),
        (patched(), 1),
        (with_parameter(), 1),
    ],
    ids=["plain", "own forward", "hook", "patched", "parameter"],
)
def test_inner_sequential_is_flattened_only_if_nothing_is_lost(inner, num_layers):
    layers = nn.Sequential(inner, nn.Linear(5, 5).double())
    x = torch.randn(4, 5, dtype=torch.double)
    expected = layers(x)
    pipe = Pipe(layers, 2, return_tensors=True)
    assert [len(stage) for stage in pipe.partitions] == [num_layers, 1]
    assert len(list(pipe.parameters())) == len(list(layers.parameters()))
    torch.testing.assert_close(pipe(x), expected)
    pipe.close()


def test_flattening_stops_after_one_level():
    inner = nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Tanh())
    assert layout(Pipe(nn.Sequential(inner))) == [("cpu", "Sequential", "Tanh")]


def test_stages_are_called_as_modules_so_their_hooks_fire_per_microbatch():
    pipe = Pipe(staged(nn.Linear(5, 5), nn.ReLU()), 4, "always")
    calls = []
    stage = pipe.partitions[1]
    assert type(stage) is PipeSequential
    stage.register_forward_hook(lambda *_: calls.append(1))
    result = pipe(torch.ones(8, 5)).local_value()
    assert len(calls) == 4
    result.sum().backward()
    assert len(calls) == 8
    pipe.close()


def test_pipe_sequential_takes_several_inputs_and_spreads_tuples_and_lists():
    layers = PipeSequential(
        Functional(lambda a, b, *, scale: (a * scale, b)),
        Functional(lambda a, b: [a, b, a]),
        Functional(lambda a, b, c: (a + b + c,)),
        Functional(lambda a: a),
    )
    a, b = torch.ones(2), torch.full((2,), 10.0)
    assert torch.equal(layers(a, b, scale=3), 6 * a + b)
    assert copy.deepcopy(layers)(a, b, scale=3).shape == (2,)
    assert PipeSequential()(a) is a and PipeSequential()(a, b) == (a, b)
    with pytest.raises(TypeError, match=r"expected none .* layer .* got \['scale'\]"):
        PipeSequential()(a, scale=3)


def test_inner_pipe_sequential_draws_as_one_layer():
    # An index of its own would repeat the draws of the pipeline's first layer.
    layers = staged(
        nn.Dropout(0.5), Functional(torch.ones_like), PipeSequential(nn.Dropout(0.5))
    )
    pipe = Pipe(layers, 1, return_tensors=True)
    kept = []
    for stage in (0, 2):
        pipe.partitions[stage].register_forward_hook(
            lambda module, args, output: kept.append(output != 0)
        )
    pipe(torch.ones(400, 1))
    assert len(kept) == 2 and not torch.equal(kept[0], kept[1])
    pipe.close()
