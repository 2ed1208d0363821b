"""Backward on CUDA ends: cells, waiting nodes and autograd's device threads.

Autograd runs every node that gets a CUDA gradient on that device's one thread. A pipe
whose nodes wait there for cells which need the same thread hangs, on CUDA only. So each
case runs in a process of its own, with a deadline and stacks when it is missed.
"""

import copy
import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.pipe import Workers
from tests.pipe.models import MODES, dense, even_cuts, grads, make_pipe
from tests.support.default_group import default_group
from tests.support.ranks import run_ranks

from .devices import CPU, cuda, own_streams_of, place, spread

DEADLINE_S = 50  # below the limit of a test in tools/gpu_check.sh: stacks come first


def train_all(rank, device, num_stages, under_ddp):
    if not under_ddp:
        return train_stages(device, num_stages, False)
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    with default_group(rank, 1, backend=backend):
        return train_stages(device, num_stages, True)


def train_stages(device, num_stages, under_ddp):
    torch.manual_seed(0)
    places = spread([device], num_stages)
    with Workers(num_stages) as workers:
        for mode, num_microbatches, own_streams, dispatch in itertools.product(
            MODES, (1, 4), own_streams_of(device), ("serial", "threads")
        ):
            layers = dense()
            plain = dense()
            plain.load_state_dict(layers.state_dict())
            place(layers, even_cuts(4, num_stages), places)
            pipe = make_pipe(
                layers,
                num_stages,
                num_microbatches,
                mode,
                devices=places,
                workers=workers,
                own_streams=own_streams,
                dispatch=dispatch,
            )
            model = DistributedDataParallel(pipe) if under_ddp else pipe
            x = torch.randn(8, 5, dtype=torch.double)
            a, b = x.clone().requires_grad_(), x.to(device).requires_grad_()
            for _ in range(2):
                plain.zero_grad()
                pipe.zero_grad()
                a.grad = b.grad = None
                (plain(a) ** 2).mean().backward()
                (model(b) ** 2).mean().backward()
            torch.testing.assert_close(b.grad.cpu(), a.grad)
            torch.testing.assert_close([g.cpu() for g in grads(layers)], grads(plain))


@pytest.mark.distributed
@pytest.mark.parametrize("under_ddp", [False, True], ids=["alone", "ddp"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_backward_of_stages_on_one_device_ends(devices, num_stages, under_ddp):
    run_ranks(
        train_all,
        1,
        devices[0],
        num_stages,
        under_ddp,
        timeout_s=DEADLINE_S,
        fresh=devices[0] != "cpu",
    )


def train_from_a_custom_function(_rank, device):
    """Backward of a pipe inside a backward, on autograd's device thread."""
    places = spread([device], 2)
    layers = dense(2).to(device)
    pipe = make_pipe(layers, 2, 4, "always", devices=places)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                pipe(y).sum().backward()
            return grad * y.grad

    x = torch.randn(8, 5, dtype=torch.double, device=device, requires_grad=True)
    Inner.apply(x).sum().backward()
    y = x.detach().requires_grad_()
    layers(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    # The other way round: a custom Function in a stage, which needs the interpreter.
    layers = torch.nn.Sequential(*dense(2), torch.nn.Identity()).to(device)
    inner = make_pipe(layers, 2, 4, "always", devices=places)
    Inner.apply(inner(x)).sum().backward()


@pytest.mark.distributed
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_backward_inside_a_backward_ends(devices):
    run_ranks(
        train_from_a_custom_function,
        1,
        devices[0],
        timeout_s=DEADLINE_S,
        fresh=devices[0] != "cpu",
    )


def step_all(_rank, devices):
    for schedule, mode, own_streams in itertools.product(
        ("1f1b", "zb-h1"), MODES, own_streams_of(devices[0])
    ):
        layers, plain = dense(), dense()
        plain.load_state_dict(layers.state_dict())
        places = spread(devices, 4)
        place(layers, even_cuts(4, 4), places)
        pipe = make_pipe(
            layers,
            4,
            6,
            mode,
            devices=places,
            schedule=schedule,
            loss=torch.nn.functional.mse_loss,
            own_streams=own_streams,
        )
        x, y = (torch.randn(13, 5, dtype=torch.double) for _ in range(2))
        expected = torch.nn.functional.mse_loss(plain(x), y)
        expected.backward()
        actual = pipe(x.to(places[0]), targets=y)
        (actual * 3).backward()
        torch.testing.assert_close(actual.detach().cpu(), expected.detach())
        torch.testing.assert_close([g.cpu() / 3 for g in grads(layers)], grads(plain))


@pytest.mark.distributed
@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2)])
def test_steps_with_a_loss_end_and_match_the_plain_model(devices):
    run_ranks(step_all, 1, devices, timeout_s=DEADLINE_S, fresh=devices[0] != "cpu")


def attend_all(_rank, device, dtype):
    """Fused attention: on CUDA an operation that calls another, and both may draw."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.MATH]
    if torch.device(device).type == "cuda":
        backends += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        if dtype != torch.float32:
            backends.append(SDPBackend.FLASH_ATTENTION)
    for rate, mode in itertools.product((0.0, 0.1), MODES):
        for backend in backends:
            torch.manual_seed(0)
            layers = torch.nn.Sequential(
                *(
                    torch.nn.TransformerEncoderLayer(
                        64, 2, 64, dropout=rate, batch_first=True
                    )
                    for _ in range(4)
                )
            ).to(device, dtype)
            plain = copy.deepcopy(layers)
            pipe = make_pipe(layers, 2, 4, mode, devices=spread([device], 2))
            x = torch.randn(8, 16, 64, device=device, dtype=dtype)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            try:
                with sdpa_kernel(backend):
                    expected = plain(a)
            except RuntimeError as error:  # this device or dtype has no such kernel
                assert "No available kernel" in str(error), error
                continue
            with sdpa_kernel(backend):
                actual = pipe(b)
                assert torch.isfinite(actual).all()
                actual.float().pow(2).sum().backward()
                if rate == 0.0:
                    expected.float().pow(2).sum().backward()
                    bound = {"rtol": 0.05, "atol": 0.05 * float(a.grad.abs().max())}
                    torch.testing.assert_close(b.grad, a.grad, **bound)
                else:  # the same draws again, whatever was drawn in between
                    grad, b.grad = b.grad, None
                    pipe.set_draw_position(step=0, first_microbatch=0)
                    first = pipe(b)
                    torch.rand(8, device=device)
                    pipe.set_draw_position(step=0, first_microbatch=0)
                    assert torch.equal(pipe(b), first)
                    assert torch.isfinite(grad).all()


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_fused_attention_ends(devices, dtype):
    run_ranks(
        attend_all,
        1,
        devices[0],
        dtype,
        timeout_s=DEADLINE_S,
        fresh=devices[0] != "cpu",
    )
