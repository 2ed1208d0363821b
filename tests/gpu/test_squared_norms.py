"""The op squared_norms on a CUDA device: kernel or ATen, same numbers."""

import pytest
import torch

from tests.support.norms import mixed_case, reference

pytestmark = pytest.mark.gpu


def squared_norms(tensors):
    return torch.ops.pipetransformer.squared_norms(tensors)


def test_squared_norms_cuda_equals_the_reference():
    tensors = mixed_case("cuda")
    result = squared_norms(tensors)
    assert (result.device.type, result.dtype) == ("cuda", torch.float64)
    torch.testing.assert_close(result.cpu(), reference(tensors), rtol=1e-12, atol=0.0)


def test_squared_norms_cuda_takes_more_tensors_than_one_launch():
    tensors = [torch.full((3,), float(i), device="cuda") for i in range(300)]
    expected = [3.0 * i * i for i in range(300)]
    assert squared_norms(tensors).tolist() == expected


def test_squared_norms_cuda_repeats_its_bits():
    tensors = mixed_case("cuda")
    assert torch.equal(squared_norms(tensors), squared_norms(tensors))


def test_squared_norms_cuda_waits_for_the_current_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        big = torch.ones(1 << 24, device="cuda")
        torch.cuda._sleep(50_000_000)
        big.mul_(2.0)
        assert squared_norms([big]).item() == 4.0 * (1 << 24)


def test_squared_norms_cuda_refuses_two_devices_and_integers():
    with pytest.raises(ValueError, match=r"tensors\[1\]: expected device cuda:0"):
        squared_norms([torch.ones(2, device="cuda"), torch.ones(2)])
    with pytest.raises(ValueError, match=r"tensors\[0\]: expected dtype .*, got Int"):
        squared_norms([torch.ones(2, device="cuda", dtype=torch.int32)])


def test_squared_norms_cuda_passes_opcheck():
    op = torch.ops.pipetransformer.squared_norms.default
    torch.library.opcheck(op, ([torch.ones(2, 3, device="cuda")],))
