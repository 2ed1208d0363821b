"""A pipe on CUDA trains as the plain model: gradients, draws, contexts, profiler."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipetransformer.pipe import (
    DeferredBatchNorm,
    Pipe,
    is_recomputing,
)
from tests.pipe.models import MODES, Functional, dense, even_cuts, grads, make_pipe

from .devices import CPU, cuda, own_streams_of, place, spread

ONE = [CPU, cuda()]
SOME = [CPU, cuda(), cuda(2), cuda(3)]


def on_cpu(tensors):
    return [t if t is None else t.cpu() for t in tensors]


def placed(layers, devices, num_stages, num_microbatches=4, mode="never", **options):
    places = spread(devices, num_stages)
    place(layers, even_cuts(len(layers), num_stages), places)
    return make_pipe(
        layers, num_stages, num_microbatches, mode, devices=places, **options
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", SOME)
def test_gradients_equal_the_plain_model(devices, mode):
    for num_stages, chunks, own_streams in itertools.product(
        (1, 2, 3, 4), (1, 3, 8), own_streams_of(devices[0])
    ):
        layers = dense()
        plain = copy.deepcopy(layers)
        pipe = placed(
            layers, devices, num_stages, chunks, mode, own_streams=own_streams
        )
        x = torch.randn(9, 5, dtype=torch.double)
        a = x.clone().requires_grad_()
        b = x.to(devices[0]).requires_grad_()
        for _ in range(2):  # gradients of two steps add up
            (plain(a) ** 2).sum().backward()
            (pipe(b) ** 2).sum().backward()
        torch.testing.assert_close(b.grad.cpu(), a.grad)
        torch.testing.assert_close(on_cpu(grads(layers)), grads(plain))
        pipe.close()


@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2)])
def test_second_backward_and_autograd_grad_work(devices):
    layers = dense()
    pipe = placed(layers, devices, 2, mode="except_last")
    x = torch.randn(8, 5, dtype=torch.double, device=devices[0], requires_grad=True)
    loss = (pipe(x) ** 2).sum()
    first = torch.autograd.grad(loss, [x, *layers.parameters()], retain_graph=True)
    assert all(g is None for g in grads(layers))
    second = torch.autograd.grad(loss, [x, *layers.parameters()])
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("devices", SOME)
def test_recomputation_repeats_the_draws_of_its_forward(devices):
    def drop(x):
        return nn.functional.dropout(x, 0.5)

    layers = nn.Sequential(*(Functional(drop) for _ in range(4)))
    pipe = placed(layers, devices, 4, mode="always")
    x = torch.ones(16, 64, dtype=torch.double, device=devices[0], requires_grad=True)
    y = pipe(x)
    y.sum().backward()
    assert torch.equal(y.detach().cpu() == 0, x.grad.cpu() == 0)
    assert 0 < (x.grad == 0).double().mean().item() < 1


@pytest.mark.parametrize("devices", SOME)
def test_draws_depend_on_the_seed_and_not_on_the_stages(devices):
    def run(num_stages, seed):
        layers = nn.Sequential(
            *(Functional(lambda x: nn.functional.dropout(x, 0.3)) for _ in range(4))
        )
        pipe = placed(layers, devices, num_stages)
        torch.manual_seed(seed)
        return pipe(torch.ones(8, 32, device=devices[0])).cpu()

    reference = run(1, 0)
    for num_stages in (2, 4):
        torch.testing.assert_close(run(num_stages, 0), reference, rtol=0, atol=0)
    assert not torch.equal(run(2, 1), reference)


@pytest.mark.parametrize("devices", ONE)
def test_default_generator_of_the_device_stays_untouched(devices):
    def state():
        if devices[0] == "cpu":
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(devices[0])

    layers = nn.Sequential(*(nn.Dropout(0.5) for _ in range(2)))
    pipe = placed(layers, devices, 2, mode="always")
    pipe.set_draw_position(step=0, first_microbatch=0)
    before = state()
    x = torch.ones(8, 4, device=devices[0], requires_grad=True)
    pipe(x).sum().backward()
    assert torch.equal(state(), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", SOME)
def test_autocast_reaches_every_stage_and_its_recomputation(devices, mode):
    kind = torch.device(devices[0]).type
    seen = []

    def note(x):
        dtype = torch.get_autocast_dtype(kind)
        seen.append((is_recomputing(), torch.is_autocast_enabled(kind), dtype, x.dtype))
        return x

    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), Functional(note)) for _ in range(4))
    )
    plain = copy.deepcopy(layers).to(devices[0])
    pipe = placed(layers, devices, 4, mode=mode)
    x = torch.randn(8, 8, device=devices[0])
    with torch.autocast(kind, dtype=torch.bfloat16):
        expected = plain(x)
        seen.clear()
        actual = pipe(x)
    actual.float().sum().backward()
    assert len(seen) >= 16
    assert {entry[1:] for entry in seen} == {(True, torch.bfloat16, torch.bfloat16)}
    assert any(entry[0] for entry in seen) == (mode != "never")
    torch.testing.assert_close(
        actual.detach().cpu(), expected.detach().cpu(), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("devices", SOME)
def test_stages_run_on_their_device_and_the_callers_stream(devices):
    seen = []

    def note(x):
        if x.is_cuda:
            seen.append((x.device, torch.cuda.current_device()))
            seen.append(torch.cuda.current_stream(x.device).cuda_stream)
        return x

    layers = nn.Sequential(*(Functional(note) for _ in range(4)))
    pipe = placed(layers, devices, 4)
    x = torch.ones(4, 3, device=devices[0])
    if not x.is_cuda:
        assert torch.equal(pipe(x), x)
        return
    stream = torch.cuda.Stream(devices[0])
    stream.wait_stream(torch.cuda.current_stream(devices[0]))
    with torch.cuda.stream(stream):
        pipe(x)
    stream.synchronize()
    assert all(place.index == current for place, current in seen[::2])
    first = [
        s
        for (place, _), s in zip(seen[::2], seen[1::2], strict=True)
        if place == torch.device(devices[0])
    ]
    assert set(first) == {stream.cuda_stream}


@pytest.mark.parametrize("devices", ONE)
def test_four_stages_run_on_four_streams_of_one_device(devices):
    streams = [set() for _ in range(4)]

    def layer(k):
        def note(x):
            if x.is_cuda:
                streams[k].add(torch.cuda.current_stream(x.device).cuda_stream)
            return torch.sin(x) * (k + 1)

        return Functional(note)

    layers = nn.Sequential(*(layer(k) for k in range(4)))
    pipe = placed(layers, devices, 4, 8, "except_last", own_streams=True)
    x = torch.randn(64, 128, dtype=torch.double)
    a, b = x.clone().requires_grad_(), x.to(devices[0]).requires_grad_()
    for _ in range(5):
        a.grad = b.grad = None
        expected, actual = layers(a), pipe(b)
        expected.sum().backward()
        actual.sum().backward()
        torch.testing.assert_close(actual.cpu(), expected)
        torch.testing.assert_close(b.grad.cpu(), a.grad)
    if b.is_cuda:
        assert all(len(used) == 1 for used in streams)
        assert len(set.union(*streams)) == 4
        assert torch.cuda.default_stream().cuda_stream not in set.union(*streams)


@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2)])
def test_profiler_names_every_cell_in_both_passes(devices):
    pipe = placed(dense(), devices, 2, 3)
    x = torch.randn(6, 5, dtype=torch.double, device=devices[0])
    pipe(x).sum().backward()
    activities = [ProfilerActivity.CPU]
    if x.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        pipe(x).sum().backward()
    names = [event.name for event in trace.events() if "CUDA" not in event.name]
    for i, j in itertools.product(range(3), range(2)):
        assert names.count(f"chunk{i}-part{j}") >= 2, names


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", ONE)
def test_deferred_batch_norm_keeps_one_update_per_mini_batch(devices, mode):
    for rows in (16, 3):  # 3: fewer rows than micro-batches
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
        layers = copy.deepcopy(plain).to(devices[0])
        pipe = Pipe(layers, 4, mode, deferred_batch_norm=True, return_tensors=True)
        x = torch.randn(rows * 2, 1, 4, dtype=torch.double).expand(-1, 2, -1)
        x = x.reshape(-1, 4)  # two rows at least in every micro-batch
        pipe(x.to(devices[0])).sum().backward()
        plain(x)
        norm = next(m for m in pipe.modules() if isinstance(m, DeferredBatchNorm))
        assert norm.running_mean.device.type == torch.device(devices[0]).type
        torch.testing.assert_close(norm.running_mean.cpu(), plain[1].running_mean)
        count = len(x)
        biased = (plain[1].running_var - 0.9) * (count - 1) / count + 0.9
        torch.testing.assert_close(norm.running_var.cpu(), biased)
        before = norm.running_mean.clone()
        pipe.eval()
        pipe(x.to(devices[0]))
        assert torch.equal(norm.running_mean, before)
