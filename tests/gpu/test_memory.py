"""Memory of a pipe on one CUDA device: bounded by the mode, and given back."""

import gc

import pytest
import torch
from torch import nn

from tests.pipe.models import even_cuts, make_pipe

from .devices import CPU, cuda

WIDTH, ROWS, CHUNKS, STAGES = 512, 2048, 8, 2


def make_layers(device):
    blocks = [
        nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        )
        for _ in range(STAGES)
    ]
    return nn.Sequential(*blocks).to(device)


def peak_bytes(device, mode, own_streams=False):
    """Largest growth during a step, or zero on CPU."""
    layers = make_layers(device)
    pipe = make_pipe(
        layers,
        STAGES,
        CHUNKS,
        mode,
        devices=[torch.device(device)] * STAGES,
        own_streams=own_streams,
    )
    assert even_cuts(len(layers), STAGES) == [0, 1, 2]
    x = torch.randn(ROWS, WIDTH, device=device)
    pipe(x).sum().backward()  # gradients and work spaces are there
    gc.collect()
    if not x.is_cuda:
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    pipe(x).sum().backward()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_except_last_keeps_one_micro_batch_of_activations(devices):
    never = peak_bytes(devices[0], "never")
    kept = peak_bytes(devices[0], "except_last")
    if torch.device(devices[0]).type == "cpu":
        return
    layer_bytes = ROWS * WIDTH * 4  # one layer's activations of the mini-batch
    # `never` keeps eight layers of all rows. `except_last`: eight layers of one
    # micro-batch (twice while it is recomputed), the inputs of two stages, outputs
    # and gradients at the borders.
    assert never > 8 * layer_bytes
    assert kept < never - 2 * layer_bytes, (kept, never)


@pytest.mark.parametrize("own_streams", [False, True], ids=["callers", "own"])
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_steps_and_pipes_leave_no_memory_behind(devices, own_streams):
    device = devices[0]
    x = torch.randn(64, WIDTH, device=device)
    allocated = []
    for _ in range(10):
        layers = make_layers(device)
        pipe = make_pipe(
            layers,
            STAGES,
            4,
            "except_last",
            devices=[torch.device(device)] * STAGES,
            own_streams=own_streams,
        )
        for _ in range(3):
            pipe(x).sum().backward()
        pipe.close()
        del pipe, layers
        gc.collect()
        if x.is_cuda:
            torch.cuda.synchronize(device)
            # One work space per stream and handle, kept by torch for the process.
            torch._C._cuda_clearCublasWorkspaces()
            allocated.append(torch.cuda.memory_allocated(device))
    assert len(set(allocated[2:])) <= 1, allocated
