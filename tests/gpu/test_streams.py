"""Order and memory on CUDA streams: what would show only on a device that is late."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe
from pipetransformer.testing.ablation import Ablation, ablate
from tests.pipe.models import MODES, Functional

from .devices import CPU, cuda, leaf, sleep, spread

PAIRS = [CPU, cuda(2)]
ROWS, WIDTH = 8, 1 << 12


def two_stages(first, second, devices, *, own_streams=False, mode="never", chunks=4):
    return Pipe.from_plan(
        nn.Sequential(Functional(first), Functional(second)),
        cuts=[0, 1, 2],
        num_microbatches=chunks,
        checkpoint=mode,
        devices=spread(devices, 2),
        own_streams=own_streams,
    )


def synchronize(*devices):
    for device in devices:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)


@pytest.mark.parametrize("copy_streams", [True, False], ids=["copy", "no_copy"])
@pytest.mark.parametrize("devices", PAIRS)
def test_every_tensor_of_a_tuple_waits_for_its_stage(devices, copy_streams):
    def first(x):
        a = x * 2
        sleep(x.device)
        b = x * 3  # written late
        return a, b, (x > 0).long()

    pipe = two_stages(first, lambda a, b, c: a + b * c, devices)
    ablate(pipe, Ablation(copy_streams=copy_streams))
    x = torch.randn(ROWS, WIDTH, dtype=torch.double)
    for _ in range(3):
        y = leaf(x, devices[0])
        out = pipe(y)
        torch.testing.assert_close(out.cpu(), x * 2 + x * 3 * (x > 0))
        out.sum().backward()
        torch.testing.assert_close(y.grad.cpu(), 2 + 3 * (x > 0).double())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", PAIRS)
def test_memory_of_a_border_outlives_a_late_reader(devices, mode):
    """Memory is asked for and written again while the reader is still behind."""

    def first(x):
        return torch.cat([x, x])[len(x) // 2 : len(x) // 2 + len(x)]  # shifted view

    def second(x):
        sleep(x.device)
        return x * 1.0

    pipe = two_stages(first, second, devices, mode=mode)
    x = torch.randn(ROWS, WIDTH, dtype=torch.double)
    half = ROWS // 4 // 2  # rows of a micro-batch, halved
    expected = torch.cat([torch.roll(part, -half, 0) for part in x.chunk(4)])
    for _ in range(3):
        y = leaf(x, devices[0])
        out = pipe(y)
        for _ in range(20):  # takes the blocks that are free, and overwrites them
            torch.full(
                (2 * ROWS // 4, WIDTH),
                float("nan"),
                device=devices[0],
                dtype=torch.double,
            )
            torch.full(
                (ROWS // 4, WIDTH), float("nan"), device=devices[-1], dtype=torch.double
            )
        torch.testing.assert_close(out.cpu(), expected)
        out.sum().backward()
        torch.testing.assert_close(y.grad.cpu(), torch.ones_like(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_memory_between_streams_of_one_device_outlives_a_late_reader(devices, mode):
    def first(x):
        y = torch.cat([x, x])[1 : 1 + len(x)]
        z = torch.full_like(x, float("nan"))  # of the memory an earlier y had
        return y + 0 * torch.zeros_like(z)

    def second(x):
        sleep(x.device, 5_000_000)
        return x * 1.0

    pipe = two_stages(first, second, devices, own_streams=True, mode=mode, chunks=8)
    x = torch.randn(2 * ROWS, WIDTH, dtype=torch.double)
    expected = torch.cat([torch.roll(part, -1, 0) for part in x.chunk(8)])
    for _ in range(3):
        y = leaf(x, devices[0])
        out = pipe(y)
        torch.testing.assert_close(out.cpu(), expected)
        out.sum().backward()
        torch.testing.assert_close(y.grad.cpu(), torch.ones_like(x))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_host_and_device_stages_read_what_is_written(devices, order):
    places = [torch.device((devices[0], "cpu")[k]) for k in order]

    def layer(x):
        y = x * 2
        sleep(y.device)
        return y + 1

    pipe = Pipe.from_plan(
        nn.Sequential(*(Functional(layer) for _ in places)),
        cuts=list(range(len(places) + 1)),
        num_microbatches=4,
        checkpoint="except_last",
        devices=places,
    )
    x = torch.randn(ROWS, WIDTH, dtype=torch.double)
    factor = 2 ** len(places)
    y = leaf(x, places[0])
    out = pipe(y)
    torch.testing.assert_close(out.cpu(), x * factor + factor - 1)
    out.sum().backward()
    torch.testing.assert_close(y.grad.cpu(), torch.full_like(x, factor))


@pytest.mark.parametrize("own_streams", [False, True], ids=["callers", "own"])
@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2)])
def test_callers_streams_are_waited_for_and_wait(devices, own_streams):
    layers = nn.Sequential(*(nn.Linear(64, 64).double() for _ in range(2)))
    plain = copy.deepcopy(layers)
    places = spread(devices, 2)
    for layer, place in zip(layers, places, strict=True):
        layer.to(place)
    pipe = Pipe.from_plan(
        layers,
        cuts=[0, 1, 2],
        num_microbatches=4,
        devices=places,
        own_streams=own_streams,
    )
    x = torch.randn(ROWS, 64, dtype=torch.double)
    plain(x).sum().backward()
    if torch.device(devices[0]).type == "cpu":
        pipe(x).sum().backward()
        torch.testing.assert_close(layers[0].weight.grad, plain[0].weight.grad)
        return
    streams = {d: (torch.cuda.Stream(d), torch.cuda.Stream(d)) for d in set(places)}
    synchronize(*places)
    with (
        torch.cuda.stream(streams[places[1]][0]),
        torch.cuda.stream(streams[places[0]][0]),
    ):
        y = x.to(places[0], non_blocking=True)
        sleep(places[0])
        loss = pipe(y * 1.0).sum()
    with (
        torch.cuda.stream(streams[places[1]][1]),
        torch.cuda.stream(streams[places[0]][1]),
    ):
        loss.backward()
        grads = [p.grad * 1.0 for p in layers.parameters()]
        on_host = [g.cpu() for g in grads[:2]]
    synchronize(*places)
    for mine, parameter in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), parameter.grad)
    torch.testing.assert_close(on_host[0], plain[0].weight.grad)


@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_stages_on_streams_of_their_own_overlap(devices):
    """Stage 1 finishes a micro-batch while stage 0 still works on a later one."""
    marks = {}

    def stage(j):
        def run(x):
            sleep(x.device, 20_000_000)
            if x.is_cuda:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.setdefault(j, []).append(event)
            return x + 1

        return run

    pipe = two_stages(stage(0), stage(1), devices, own_streams=True)
    x = torch.zeros(ROWS, 4, device=devices[0])
    for _ in range(2):
        marks.clear()
        assert torch.equal(pipe(x).cpu(), torch.full((ROWS, 4), 2.0))
    if x.is_cuda:
        # Order of the device's own clock, not a duration.
        assert marks[1][0].elapsed_time(marks[0][-1]) > 0
