"""Calls of a pipeline on a pretended accelerator: streams, failures, draws, threads.

Each test runs in a process of its own: the device is registered for good, and must be
before autograd starts its threads.
"""

import itertools

import pytest
import torch
from torch import nn

from pipetransformer.pipe import Pipe
from tests.support.fake_device import build_fake_device, load_fake_device
from tests.support.ranks import run_ranks

from .models import MODES, Functional
from .placed import (
    CUTS,
    MARKS,
    PLACES,
    TIMEOUT_S,
    make_layers,
    make_pipe,
    plain_model,
    rows,
    train,
)

pytestmark = MARKS


@pytest.fixture(scope="module")
def library():
    return str(build_fake_device())


def check_callers_streams(_rank, library):
    fake = load_fake_device(library)
    expected = train(plain_model(), rows())
    for places, own_streams in itertools.product(PLACES[:4], (False, True)):
        pipe = make_pipe(places, "except_last", own_streams=own_streams)
        x = rows(places[0]).requires_grad_()
        fake.synchronize()
        for stream in (0, 40):
            pipe.zero_grad(set_to_none=True)
            x.grad = None
            for device in range(4):
                fake.set_stream(device, stream)
            loss = (pipe(x) ** 2).sum()
            for device in range(4):  # backward is called under other streams
                fake.set_stream(device, 50)
            loss.backward()
            del loss
            # Read on these streams at once: backward has made them wait.
            grads = [x.grad * 1, *(p.grad * 1 for p in pipe.parameters())]
            assert fake.violations() == [], (places, own_streams, stream)
            fake.synchronize()
            for mine, plain in zip(grads, expected, strict=True):
                torch.testing.assert_close(mine.cpu(), plain)
            for device in range(4):
                fake.set_stream(device, 0)


def test_backward_under_other_streams_is_ordered(library):
    run_ranks(check_callers_streams, 1, library, timeout_s=TIMEOUT_S)


def check_failures(_rank, library):
    fake = load_fake_device(library)
    for places, own_streams in itertools.product(PLACES[:4], (False, True)):
        pipe = make_pipe(places, own_streams=own_streams)
        x = rows(places[0])
        train(pipe, x, steps=1)
        calls = []

        def fail(x, calls=calls):
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("stage")
            return x

        pipe.partitions[1][1] = nn.Sequential(pipe.partitions[1][1], Functional(fail))
        with pytest.raises(ValueError, match="stage"):
            pipe(x)
        with torch.no_grad():
            for parameter in pipe.parameters():  # on the caller's streams
                parameter.mul_(0.5)
        train(pipe, x, steps=1)
        assert fake.violations() == [], (places, own_streams)


def test_failed_call_leaves_the_streams_ordered(library):
    run_ranks(check_failures, 1, library, timeout_s=TIMEOUT_S)


def dropout(x, rate):
    return torch.native_dropout(x, rate, True)[0]


def attention(x, rate):  # two operations, one of which calls the other
    fused = torch.ops.aten._scaled_dot_product_flash_attention
    heads = torch.ones_like(x).detach()[None]
    return x * fused(heads, heads, heads, rate)[0][0]


def check_dropout(_rank, library, kernel):
    fake = load_fake_device(library)

    def drop(x):  # without a generator, as CUDA's dropout and fused attention
        return kernel(x, rate)

    outputs = []
    rate = 0.5
    for places, dispatch in itertools.product(
        (PLACES[0], PLACES[1]), ("threads", "serial")
    ):
        layers = nn.Sequential(*(Functional(drop) for _ in range(6)))
        pipe = Pipe.from_plan(
            layers,
            cuts=CUTS,
            num_microbatches=4,
            checkpoint="always",
            devices=[torch.device(place) for place in places],
            dispatch=dispatch,
        )
        before = [fake.generator_position(device) for device in range(4)]
        torch.manual_seed(0)
        x = torch.ones(16, 64, dtype=torch.double).to(places[0]).requires_grad_()
        y = pipe(x)
        y.sum().backward()
        assert [fake.generator_position(device) for device in range(4)] == before
        assert torch.equal(y.detach().cpu() == 0, x.grad.cpu() == 0)
        assert 0 < (x.grad.cpu() != 0).double().mean().item() < 0.5
        outputs.append(y.detach().cpu())
        after = torch.get_rng_state()
        torch.manual_seed(0)
        torch.empty((), dtype=torch.int64).random_()  # one draw, as the call took
        assert torch.equal(torch.get_rng_state(), after)
        rate = 0.0  # called all the same, and drawing nothing
        assert torch.equal(pipe(x).detach().cpu(), x.detach().cpu())
        rate = 0.5
        assert torch.equal(torch.get_rng_state(), after)
        assert [fake.generator_position(device) for device in range(4)] == before
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])
    layer_masks = [outputs[0][:4] != 0, outputs[0][4:8] != 0]
    assert not torch.equal(*layer_masks)


@pytest.mark.parametrize("kernel", [dropout, attention])
def test_kernels_without_generator_draw_as_keyed_and_repeat_their_draws(
    library, kernel
):
    run_ranks(check_dropout, 1, library, kernel, timeout_s=TIMEOUT_S)


def noisy(x, _rate):
    return x + torch.ops.foreign.noise(x.detach())


def check_draws_in_cells(_rank, library, kernel, mode):
    load_fake_device(library)
    layers = nn.Sequential(*(Functional(lambda x: kernel(x, 0.5)) for _ in range(6)))
    pipe = Pipe.from_plan(
        layers,
        cuts=CUTS,
        num_microbatches=2,
        checkpoint=mode,
        devices=[torch.device(place) for place in PLACES[1]],
    )
    x = torch.ones(8, 64, dtype=torch.double, device=PLACES[1][0])
    pipe(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize(
    ("kernel", "mode", "is_told"),
    [(noisy, "always", True), (noisy, "never", False), (dropout, "always", False)],
)
def test_draws_of_other_libraries_in_recomputed_cells_are_told(
    library, capfd, kernel, mode, is_told
):
    run_ranks(check_draws_in_cells, 1, library, kernel, mode, timeout_s=TIMEOUT_S)
    text = capfd.readouterr().err
    assert ("the default generator of fake:" in text) == is_told, text


def check_backward_ends(_rank, library):
    load_fake_device(library)
    expected = train(plain_model(), rows())
    for stages, mode in itertools.product((1, 2, 3), MODES):
        layers = make_layers().to("fake:0")
        cuts = [6 * k // stages for k in range(stages + 1)]
        for num_microbatches in (1, 4):
            pipe = Pipe.from_plan(
                layers,
                cuts=cuts,
                num_microbatches=num_microbatches,
                checkpoint=mode,
                devices=[torch.device("fake:0")] * stages,
            )
            for mine, plain in zip(train(pipe, rows("fake:0")), expected, strict=True):
                torch.testing.assert_close(mine, plain)
            pipe.close()


def test_backward_on_one_device_does_not_wait_for_its_own_thread(library):
    # Autograd runs all nodes with gradients of one device on one thread.
    run_ranks(check_backward_ends, 1, library, timeout_s=TIMEOUT_S)
