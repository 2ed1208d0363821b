"""Batch norm in a pipeline: deferred and plain."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import DeferredBatchNorm, GPipe, Pipe

from .models import MODES
from .test_batchnorm import assert_statistics, batch


def network():
    torch.manual_seed(3)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(3), nn.ReLU()).double()


def deferred(layers, chunks, mode="except_last", **options):
    return Pipe(layers, chunks, mode, True, return_tensors=True, **options)


def loop(model, x, rows):
    """The micro-batch loop on plain layers: what the pipeline is to equal."""
    return torch.cat([model(part) for part in x.split(rows)])


def assert_counted(layers, x):
    """The first norm saw all of x once, as a plain one that gets it whole."""
    plain = nn.BatchNorm1d(4).double()
    hidden = layers[0](x).detach()
    plain(hidden)
    assert_statistics(layers[1], plain, hidden)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "chunks"), [(8, 4), (4, 3)])
def test_running_statistics_are_those_of_the_mini_batch(mode, rows, chunks):
    # 4 rows in 3 micro-batches are only two: the update comes all the same.
    layers, x = network(), batch(rows)
    deferred(layers, chunks, mode)(x).sum().backward()
    assert_counted(layers, x)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_equal_the_loops_after_a_step(mode):
    plain, x = network(), batch(8)
    layers = copy.deepcopy(plain)
    pipe = deferred(layers, 4, mode)
    for model, output in ((plain, loop(plain, x, 2)), (layers, pipe(x))):
        (output**2).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(list(layers.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_schedules_with_loss_count_once(mode, schedule):
    layers, x = network(), batch(8)
    pipe = deferred(layers, 4, mode, schedule=schedule, loss=nn.MSELoss())
    pipe(x, targets=torch.zeros(8, 3).double()).backward()
    assert_counted(layers, x)


def test_gpipe_and_one_stage_count_once():
    layers, x = network(), batch(8)
    options = {"devices": ["cpu"], "deferred_batch_norm": True}
    GPipe(layers, [6], chunks=4, **options)(x).sum().backward()
    assert_counted(layers, x)
    layers = network()
    GPipe(layers, [6], chunks=1, checkpoint="never", **options)(x)
    assert_counted(layers, x)


def test_eval_mode_survives_conversion_and_updates_nothing():
    layers = network()
    layers[1].eval()
    pipe = deferred(layers, 2)
    assert isinstance(layers[1], DeferredBatchNorm)
    assert not layers[1].training and layers[4].training
    pipe(batch(4))
    assert (layers[1].num_batches_tracked, layers[4].num_batches_tracked) == (0, 1)
    pipe.eval()
    pipe(batch(4))
    assert layers[4].num_batches_tracked == 1


def test_failed_call_leaves_nothing_behind():
    layers, x = network(), batch(8)
    fails = [True]

    def check(module, inputs):
        if fails[0] and torch.equal(inputs[0], x[2:4]):
            raise KeyError("x")

    layers[0].register_forward_pre_hook(check)
    pipe = deferred(layers, 4)
    with pytest.raises(KeyError):
        pipe(x)
    fails[0] = False
    pipe(x)
    assert_counted(layers, x)


@pytest.mark.parametrize("mode", MODES)
def test_plain_batch_norm_counts_each_micro_batch_once(mode):
    plain, x = network(), batch(8)
    layers = copy.deepcopy(plain)
    loop(plain, x, 2)
    Pipe(layers, 4, mode, return_tensors=True)(x).sum().backward()
    assert layers[1].num_batches_tracked == 4
    torch.testing.assert_close(layers.state_dict(), plain.state_dict())
