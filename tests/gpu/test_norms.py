"""The ops squared_norms and l1_norms on a CUDA device: kernel or ATen, same numbers."""

import pytest
import torch

from tests.support.norms import OPS, mixed_case, reference

pytestmark = pytest.mark.gpu


@pytest.fixture(params=OPS)
def name(request):
    return request.param


@pytest.fixture
def norms(name):
    return getattr(torch.ops.pipetransformer, name)


def test_norms_on_cuda_equal_the_reference(norms, name):
    tensors = mixed_case("cuda")
    result = norms(tensors)
    assert (result.device.type, result.dtype) == ("cuda", torch.float64)
    torch.testing.assert_close(
        result.cpu(), reference(name, tensors), rtol=1e-12, atol=0.0
    )


def test_norms_on_cuda_take_more_tensors_than_one_launch(norms, name):
    tensors = [torch.full((3,), float(i), device="cuda") for i in range(300)]
    expected = reference(name, tensors).tolist()
    assert norms(tensors).tolist() == expected


def test_norms_on_cuda_repeats_its_bits(norms):
    tensors = mixed_case("cuda")
    assert torch.equal(norms(tensors), norms(tensors))


def test_norms_on_cuda_wait_for_the_current_stream(norms, name):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        big = torch.ones(1 << 24, device="cuda")
        torch.cuda._sleep(50_000_000)
        big.mul_(2.0)
        expected = 2.0 ** (2 if name == "squared_norms" else 1) * (1 << 24)
        assert norms([big]).item() == expected


def test_norms_on_cuda_refuses_two_devices_and_integers(norms):
    with pytest.raises(ValueError, match=r"tensors\[1\]: expected device cuda:0"):
        norms([torch.ones(2, device="cuda"), torch.ones(2)])
    with pytest.raises(ValueError, match=r"tensors\[0\]: expected dtype .*, got Int"):
        norms([torch.ones(2, device="cuda", dtype=torch.int32)])


def test_norms_on_cuda_pass_opcheck(norms):
    torch.library.opcheck(norms.default, ([torch.ones(2, 3, device="cuda")],))
