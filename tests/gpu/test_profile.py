"""A profile measured on a CUDA device, by events."""

import pytest
import torch
from torch import nn

from pipetransformer import planner

pytestmark = pytest.mark.gpu
SIZES = (1, 64)


def test_times_are_the_devices_and_grow_with_the_work():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8192), nn.Linear(8192, 8192))
    measured = planner.profile(
        model.cuda(),
        torch.randn(4096, 64, device="cuda"),
        microbatch_samples=(1, 4096),
        repeats=3,
    )
    small, _, large = measured.layers
    assert min(small.forward_ns) > 0
    # 137 GFLOP against 17 MFLOP: more than the launch of a kernel.
    assert large.forward_ns[1] > small.forward_ns[1]
    assert large.input_grad_ns[1] > 0 and large.weight_grad_ns[1] > 0


def test_the_device_and_the_model_are_left_as_found():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    state = torch.cuda.get_rng_state()
    current = torch.cuda.current_stream()
    planner.profile(
        model, torch.randn(64, 8, device="cuda"), microbatch_samples=SIZES, repeats=1
    )
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.current_stream() == current
    assert all(p.grad is None for p in model.parameters())
