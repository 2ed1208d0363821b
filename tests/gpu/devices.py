"""Devices of the tests: CUDA ones, and the CPU as their twin where that makes sense."""

import pytest
import torch


def needs(count):
    """Marks of a test that needs `count` CUDA devices."""
    found = torch.cuda.device_count()
    return (
        pytest.mark.gpu,
        pytest.mark.skipif(
            0 < found < count, reason=f"needs {count} CUDA devices, found {found}"
        ),
    )


def cuda(count=1):
    """Parameter: a list of `count` CUDA devices."""
    return pytest.param(
        [f"cuda:{k}" for k in range(count)], id=f"{count}-gpu", marks=needs(count)
    )


def spread(devices, num_stages):
    """A torch device for each stage: the given ones in turn, neighbours together."""
    return [
        torch.device(devices[k * len(devices) // num_stages]) for k in range(num_stages)
    ]


def place(layers, cuts, devices):
    """Move the layers of each stage to its device."""
    for first, last, device in zip(cuts[:-1], cuts[1:], devices, strict=True):
        for layer in layers[first:last]:
            layer.to(device)
    return layers


CPU = pytest.param(["cpu"], id="cpu-twin")
"""Runs everywhere: what a test does has been run before it meets a GPU."""


def sleep(device, cycles=50_000_000):
    """Keep the current stream of `device` busy for some 30 ms; nothing on CPU."""
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)


def own_streams_of(device):
    """Both settings of `own_streams`, where they differ."""
    return (False,) if torch.device(device).type == "cpu" else (False, True)


def leaf(x, device):
    """A tensor with the same values on `device` that requires grad."""
    return x.detach().clone().to(device).requires_grad_()
