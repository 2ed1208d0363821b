"""Copies between host and device, next to a device that is busy."""

import pytest
import torch

from pipetransformer.device import LaterNumber, bring

from .devices import CPU, cuda, sleep

ONE = [CPU, cuda(1)]


def is_busy(device):
    """Whether work that was queued on the current stream is not done."""
    return (
        torch.device(device).type == "cuda"
        and not torch.cuda.current_stream(device).query()
    )


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("devices", ONE)
def test_rows_arrive_while_the_device_is_busy(devices, pinned):
    device = torch.device(devices[0])
    rows = torch.arange(1 << 16, dtype=torch.float32)
    if pinned and device.type == "cuda":
        rows = rows.pin_memory()
    bring(rows, device)  # the first one makes streams
    sleep(device, 500_000_000)
    there = bring(rows, device)
    busy = is_busy(device)
    result = (there * 2).cpu()
    assert busy or device.type == "cpu", "the copy waited for what was queued before"
    torch.testing.assert_close(result, rows * 2)


@pytest.mark.parametrize("devices", ONE)
def test_a_number_is_read_while_the_device_is_busy(devices):
    device = torch.device(devices[0])
    values = torch.arange(8, dtype=torch.float32).to(device)
    assert LaterNumber(values.sum()).read() == 28  # the first one makes streams
    for _ in range(3):
        number = LaterNumber((values * 2).sum())
        sleep(device, 500_000_000)
        assert number.read() == 56
        assert is_busy(device) or device.type == "cpu", "waited for what came later"
        if device.type == "cuda":
            torch.cuda.synchronize(device)
