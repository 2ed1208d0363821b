"""Deferred batch norm: statistics of the mini-batch, whatever cuts it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pipetransformer.pipe import DeferredBatchNorm, accumulator_names

convert = DeferredBatchNorm.convert_deferred_batch_norm


def batch(rows=10, channels=3, *rest, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels, *rest, generator=generator, dtype=torch.double)
    return x * torch.arange(1, channels + 1).view(1, -1, *[1] * len(rest)) + 5


def assert_statistics(layer, plain, x, momentum=0.1):
    """The layer's statistics equal the plain layer's on x, variance biased."""
    count = x.numel() // x.size(1)
    biased = plain.running_var - 1 + momentum  # momentum * var, var unbiased
    biased = (1 - momentum) + biased * ((count - 1) / count)
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, biased)
    assert layer.num_batches_tracked == plain.num_batches_tracked == 1


@pytest.mark.parametrize("shape", [(), (7,), (4, 2)])
def test_statistics_are_those_of_the_whole_mini_batch(shape):
    x = batch(11, 3, *shape)  # 3, 3, 3 and 2 rows
    plain = nn.BatchNorm1d(3) if len(shape) < 2 else nn.BatchNorm2d(3)
    layer = convert(copy.deepcopy(plain.double()), chunks=4)
    plain(x)
    for part in x.chunk(4):
        assert layer.num_batches_tracked == 0
        layer(part)
    assert_statistics(layer, plain, x)


def test_micro_batches_are_normalised_by_their_own_statistics():
    x = batch()
    layer = convert(nn.BatchNorm1d(3).double(), chunks=2)
    parts = [layer(part) for part in x.chunk(2)]
    plain = nn.BatchNorm1d(3).double()
    assert torch.equal(torch.cat(parts), torch.cat([plain(p) for p in x.chunk(2)]))


def test_large_means_do_not_cancel():
    x = (batch() + 1e4).float()
    layer = convert(nn.BatchNorm1d(3, momentum=1.0), chunks=5)
    for part in x.chunk(5):
        layer(part)
    expected = x.double().var(0, correction=0).float()
    torch.testing.assert_close(layer.running_var, expected, rtol=1e-3, atol=0)


def test_cumulative_average_counts_mini_batches():
    layer = convert(nn.BatchNorm1d(3, momentum=None).double(), chunks=2)
    batches = [batch(seed=seed) for seed in range(3)]
    for x in batches:
        for part in x.chunk(2):
            layer(part)
    assert layer.num_batches_tracked == 3
    means = torch.stack([x.mean(0) for x in batches])
    variances = torch.stack([x.var(0, correction=0) for x in batches])
    torch.testing.assert_close(layer.running_mean, means.mean(0))
    torch.testing.assert_close(layer.running_var, variances.mean(0))


def test_eval_uses_and_keeps_running_statistics():
    x = batch()
    plain = nn.BatchNorm1d(3).double()
    plain(x)
    plain.eval()
    layer = convert(copy.deepcopy(plain), chunks=2)
    assert not layer.training and torch.equal(layer(x), plain(x))
    layer.begin()
    layer(x)
    layer.finish()
    assert torch.equal(layer.running_mean, plain.running_mean)
    assert layer.num_batches_tracked == 1


def test_finish_ends_a_short_mini_batch():
    x = batch(4)
    plain = nn.BatchNorm1d(3).double()
    layer = convert(copy.deepcopy(plain), chunks=8)
    plain(x)
    layer.begin()
    for part in x.chunk(2):
        layer(part)
    layer.finish()
    assert_statistics(layer, plain, x)
    layer.finish()  # nothing new
    assert layer.num_batches_tracked == 1


def test_between_begin_and_finish_the_number_of_forwards_is_free():
    x = batch(12)
    plain = nn.BatchNorm1d(3).double()
    layer = convert(copy.deepcopy(plain), chunks=2)
    plain(x)
    layer.begin()
    for part in x.chunk(6):
        layer(part)
    assert layer.num_batches_tracked == 0
    layer.finish()
    assert_statistics(layer, plain, x)


def test_begin_forgets_an_unfinished_mini_batch():
    x = batch()
    plain = nn.BatchNorm1d(3).double()
    layer = convert(copy.deepcopy(plain), chunks=4)
    layer(x + 100)
    layer.begin()
    layer(x)
    layer.finish()
    plain(x)
    assert_statistics(layer, plain, x)


def test_conversion_is_in_place_and_keeps_everything():
    model = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(3, eps=1e-3, momentum=0.3)),
        nn.BatchNorm1d(2, affine=False),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.SyncBatchNorm(2),
        nn.LazyBatchNorm1d(),
        nn.InstanceNorm1d(2, track_running_stats=True),
    )
    calls = []
    inner = model[0][0].eval()
    inner.register_forward_hook(lambda *_: calls.append(1))
    untouched = list(model)[2:]
    parameters, buffers = list(model.parameters()), list(model.buffers())
    names = list(inner.state_dict())
    assert convert(model, chunks=4) is model
    new = model[0][0]
    assert isinstance(new, DeferredBatchNorm) and isinstance(
        model[1], DeferredBatchNorm
    )
    assert all(a is b for a, b in zip(model[2:], untouched, strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    kept = [b for name, b in model.named_buffers() if "sum" not in name]
    assert all(a is b for a, b in zip(buffers, kept, strict=True))
    assert list(inner.state_dict()) == names  # nothing comes to what is replaced
    assert (new.eps, new.momentum, new.training) == (1e-3, 0.3, False)
    assert new.running_mean is inner.running_mean
    new(torch.randn(2, 3, 1, 1))
    assert calls == [1]


def test_converting_again_compares_chunks_by_value():
    many, same = 1000, int("1000")
    assert many is not same
    layer = convert(nn.BatchNorm1d(3), chunks=many)
    model = nn.Sequential(layer)
    convert(model, chunks=same)
    assert model[0] is layer
    convert(model, chunks=3)
    assert model[0] is not layer and model[0].chunks == 3


def test_layer_at_two_places_stays_one():
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    convert(model, chunks=2)
    assert model[0][0] is model[1][0] and isinstance(model[0][0], DeferredBatchNorm)


def test_buffers_stay_on_the_layers_device():
    # CPU twin of a CUDA layer.
    layer = convert(nn.BatchNorm1d(3, device="meta"), chunks=2)
    for _ in range(2):
        assert layer(torch.randn(4, 3, device="meta")).device.type == "meta"
    assert {b.device.type for b in layer.buffers()} == {"meta"}


def test_copies_carry_on_where_the_original_was():
    x = batch()
    layer = convert(nn.BatchNorm1d(3).double(), chunks=2)
    first, second = x.chunk(2)
    layer(first)
    again = copy.deepcopy(layer)
    layer(second)
    again(second)
    assert torch.equal(again.running_mean, layer.running_mean)
    assert again.num_batches_tracked == 1


# --- the accumulators of an unfinished mini-batch ----------------------------

HISTORIC_NAMES = [
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "sum",
    "sum_squares",
]


@pytest.mark.parametrize("kind", [DeferredBatchNorm, nn.BatchNorm1d])
def test_state_has_the_historic_names(kind):
    layer = convert(kind(3))
    assert list(layer.state_dict()) == HISTORIC_NAMES
    assert [len(layer.sum), len(layer.sum_squares)] == [3, 3]
    assert (layer.counter, layer.tracked) == (0, 0)


def test_sums_are_those_of_the_mini_batch_under_way():
    x = batch(9, 3, 4)
    layer = convert(nn.BatchNorm1d(3).double(), chunks=3)
    parts = x.chunk(3)
    for seen in (1, 2):
        layer(parts[seen - 1])
        so_far = torch.cat(parts[:seen])
        torch.testing.assert_close(layer.sum, so_far.sum((0, 2)))
        torch.testing.assert_close(layer.sum_squares, (so_far**2).sum((0, 2)))
        assert (layer.counter, layer.tracked) == (so_far.numel() // 3, seen)
    layer(parts[2])
    assert not layer.sum.any() and not layer.sum_squares.any()
    assert (layer.counter, layer.tracked) == (0, 0)


def test_loading_state_begins_a_new_mini_batch():
    # Of how many values the sums are is in no checkpoint.
    x = batch()
    giver = convert(nn.BatchNorm1d(3).double(), chunks=2)
    giver(x + 100)
    middle = copy.deepcopy(giver.state_dict())
    assert middle["sum"].all()
    taker = convert(nn.BatchNorm1d(3).double(), chunks=2)
    taker(x - 50)
    taker.load_state_dict(middle)
    assert all(torch.equal(v, middle[k]) for k, v in taker.state_dict().items())
    for part in x.chunk(2):
        taker(part)
    plain = nn.BatchNorm1d(3).double()
    plain(x)
    assert_statistics(taker, plain, x)
    assert not taker.sum.any()


def test_reset_of_the_statistics_begins_a_new_mini_batch():
    x = batch()
    layer = convert(nn.BatchNorm1d(3).double(), chunks=2)
    layer(x + 100)
    layer.reset_running_stats()
    assert not layer.sum.any() and not layer.running_mean.any()
    for part in x.chunk(2):
        layer(part)
    plain = nn.BatchNorm1d(3).double()
    plain(x)
    assert_statistics(layer, plain, x)


@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "ours of old"])
def test_state_without_accumulators_loads(deferred):
    # As plain batch norm and the first versions of this layer write it.
    giver = nn.BatchNorm1d(3).double()
    giver(batch())
    state = (convert(copy.deepcopy(giver)) if deferred else giver).state_dict()
    state.pop("sum", None), state.pop("sum_squares", None)
    layer = convert(nn.BatchNorm1d(3).double(), chunks=2)
    layer(batch())  # to be forgotten
    model = nn.Sequential(layer)
    model.load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert torch.equal(layer.running_mean, giver.running_mean)
    assert not layer.sum.any() and not layer.sum_squares.any() and layer.tracked == 0
    assert list(state) == HISTORIC_NAMES[:5]  # the caller's stays as it was


def test_state_without_accumulators_takes_the_place_of_a_meta_layers():
    layer = convert(nn.BatchNorm1d(3, device="meta"), chunks=2)
    layer.load_state_dict(nn.BatchNorm1d(3).double().state_dict(), assign=True)
    assert {(b.device.type, b.dtype) for b in (layer.sum, layer.sum_squares)} == {
        ("cpu", torch.double)
    }
    layer(batch())
    assert layer.sum.all()


def test_state_that_does_not_fit_is_refused():
    layer = DeferredBatchNorm(3)
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for sum:"):
        layer.load_state_dict({**state, "sum": torch.zeros(4)})
    with pytest.raises(RuntimeError, match='Unexpected key.* "sums"'):
        layer.load_state_dict({**state, "sums": torch.zeros(3)})
    with pytest.raises(RuntimeError, match='Missing key.* "running_mean"'):
        layer.load_state_dict({k: v for k, v in state.items() if k != "running_mean"})


def test_pickle_keeps_an_unfinished_mini_batch():
    x = batch()
    layer = convert(nn.BatchNorm1d(3).double(), chunks=2)
    first, second = x.chunk(2)
    layer(first)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again.sum, layer.sum) and again.sum is not layer.sum
    again(second)
    layer(second)
    assert torch.equal(again.running_var, layer.running_var)


def test_names_of_all_accumulators_are_found():
    shared = DeferredBatchNorm(2)
    model = nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(2), shared))
    names = {"0.sum", "0.sum_squares", "1.1.sum", "1.1.sum_squares"}
    assert accumulator_names(model) == names
    assert accumulator_names(shared) == {"sum", "sum_squares"}


def test_empty_micro_batch_does_not_count():
    layer = DeferredBatchNorm(3, chunks=1)
    assert layer(torch.empty(0, 3)).shape == (0, 3)
    assert layer.num_batches_tracked == 0 and torch.equal(
        layer.running_mean, torch.zeros(3)
    )


def test_refusals():
    text = "chunks: expected at least 1, got 0"
    with pytest.raises(ValueError, match=text):
        DeferredBatchNorm(3, chunks=0)
    with pytest.raises(ValueError, match=text):
        convert(nn.Sequential(), 0)
    with pytest.raises(ValueError, match="expected at least two dimensions, got 1"):
        DeferredBatchNorm(3)(torch.ones(3))
