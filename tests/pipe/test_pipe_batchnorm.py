"""Batch norm in a pipeline: deferred and plain."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.pipe import (
    DeferredBatchNorm,
    GPipe,
    Pipe,
    from_plain_state_dict,
    to_plain_state_dict,
)
from tests.support.default_group import default_group
from tests.support.ranks import run_ranks

from .models import MODES
from .test_batchnorm import assert_statistics, batch


def network():
    torch.manual_seed(3)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(3), nn.ReLU()).double()  # 4 stages


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
    assert_no_sums(pipe)
    fails[0] = False
    pipe(x)
    assert_counted(layers, x)


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b", "loss": nn.MSELoss()}])
def test_layers_count_outside_the_pipe_after_a_failed_call(options):
    layers, x = network(), batch(8)
    handle = layers[3].register_forward_pre_hook(lambda *_: {}["x"])
    pipe = deferred(layers, 4, **options)
    with pytest.raises(KeyError):
        pipe(x, **({"targets": x} if options else {}))
    handle.remove()
    for part in x.split(2):
        layers(part)
    assert_no_sums(pipe)
    assert_counted(layers, x)


@pytest.mark.parametrize("mode", MODES)
def test_plain_batch_norm_counts_each_micro_batch_once(mode):
    plain, x = network(), batch(8)
    layers = copy.deepcopy(plain)
    loop(plain, x, 2)
    Pipe(layers, 4, mode, return_tensors=True)(x).sum().backward()
    assert layers[1].num_batches_tracked == 4
    torch.testing.assert_close(layers.state_dict(), plain.state_dict())


def assert_no_sums(model):
    sums = [b for name, b in model.named_buffers() if "sum" in name.split(".")[-1]]
    assert len(sums) == 4 and not any(b.any() for b in sums)


@pytest.mark.parametrize("mode", MODES)
def test_accumulators_are_zero_between_calls(mode):
    pipe = deferred(network(), 3, mode)
    names = {"partitions.1.0.sum", "partitions.3.0.sum_squares"}
    assert names <= set(pipe.state_dict())
    assert_no_sums(pipe)
    for rows in (8, 4):  # of 4 rows there are two micro-batches
        output = pipe(batch(rows))
        assert_no_sums(pipe)
        output.sum().backward()
        assert_no_sums(pipe)
    pipe.eval()
    pipe(batch(4))
    assert_no_sums(pipe)


def test_accumulators_of_a_loaded_state_do_not_outlast_a_call():
    # torch's Pipe left them open after a mini-batch of few rows.
    pipe, x = deferred(network(), 4), batch(8)
    pipe.load_state_dict(
        {
            name: torch.ones_like(value) if "sum" in name else value
            for name, value in pipe.state_dict().items()
        }
    )
    layers = copy.deepcopy(nn.Sequential(*pipe))
    pipe(x).sum().backward()
    assert_no_sums(pipe)
    assert_counted(nn.Sequential(layers[0], pipe[1]), x)


def test_gpipe_names_of_the_accumulators():
    named = nn.Sequential()
    named.add_module("dense", nn.Linear(3, 4))
    named.add_module("norm", nn.BatchNorm1d(4))
    model = GPipe(named, [1, 1], devices=["cpu"] * 2, deferred_batch_norm=True)
    names = list(model.state_dict())
    assert names[-2:] == ["partitions.1.norm.sum", "partitions.1.norm.sum_squares"]


def test_plain_names_have_no_accumulators():
    plain, layers = network(), network()
    pipe = deferred(layers, 4)
    pipe(batch(8)).sum().backward()
    state = to_plain_state_dict(pipe, pipe.state_dict())
    plain.load_state_dict(state, strict=True)
    layers.load_state_dict(state, strict=True)
    assert list(state) == list(plain.state_dict())
    torch.testing.assert_close(plain[1].running_mean, layers[1].running_mean)
    other = deferred(network(), 2)
    other.load_state_dict(from_plain_state_dict(other, plain.state_dict()), strict=True)
    # With them as well, as the converted Sequential has them.
    full = from_plain_state_dict(other, layers.state_dict())
    assert list(full) == list(other.state_dict())
    other.load_state_dict(full, strict=True)
    torch.testing.assert_close(other[4].running_var, layers[4].running_var)


def _under_ddp(rank):
    with default_group(rank, 2):
        return _train_under_ddp(rank)


def _train_under_ddp(rank):
    layers = network()
    pipe = deferred(layers, 4)
    if rank == 0:
        layers[1].sum.fill_(1e3)
    model = DistributedDataParallel(pipe)
    for seed in (rank, 10 + rank):
        model(batch(8, seed=seed)).sum().backward()
    pipe.close()
    return {name: buffer.tolist() for name, buffer in pipe.named_buffers()}


@pytest.mark.distributed
def test_ddp_sends_statistics_and_no_sums():
    # DDP sends rank 0's buffers before each call: after it a rank's statistics are
    # rank 0's of the first call, with its own of the second. Sums that were loaded
    # there go to all, and count nowhere.
    ranks = run_ranks(_under_ddp, 2)
    for rank, buffers in enumerate(ranks):
        layers = network()
        pipe = deferred(layers, 4)
        for seed in (0, 10 + rank):
            pipe(batch(8, seed=seed))
        expected = dict(pipe.named_buffers())
        assert list(buffers) == list(expected)
        for name, value in expected.items():
            given = torch.tensor(buffers[name], dtype=value.dtype)
            torch.testing.assert_close(given, value, msg=name)
