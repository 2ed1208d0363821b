"""The ops squared_norms and l1_norms on CPU and Meta, and their ATen implementation."""

import pytest
import torch

from tests.support.norms import OPS, mixed_case, reference


@pytest.fixture(params=OPS)
def name(request):
    return request.param


@pytest.fixture
def norms(name):
    return getattr(torch.ops.pipetransformer, name)


def test_norms_equal_the_reference_for_all_dtypes_sizes_and_strides(norms, name):
    tensors = mixed_case("cpu")
    result = norms(tensors)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, reference(name, tensors), rtol=1e-12, atol=0.0)


def test_norms_add_up_in_fp64(norms, name):
    # In fp32 the sum of 2**24 + 1 ones stops at 2**24; in fp16 these overflow.
    ones = torch.ones(2**24 + 1)
    half = torch.full((4,), -6e4, dtype=torch.float16)
    each = OPS[name](half[0].double()).item()
    assert norms([ones, half]).tolist() == [2.0**24 + 1, 4 * each]


def test_norms_repeats_its_bits(norms):
    tensors = mixed_case("cpu")
    assert torch.equal(norms(tensors), norms(tensors))


def test_norms_of_nothing_is_empty(norms):
    result = norms([])
    assert (result.shape, result.dtype) == ((0,), torch.float64)


def test_norms_passes_nan_and_infinity_on(norms):
    result = norms([torch.tensor([1.0, float("nan")]), torch.tensor([-1e400])])
    assert result[0].isnan()
    assert result[1].isinf()


def test_norms_of_the_composite_equal_the_kernel(norms):
    tensors = mixed_case("cpu")
    composite = norms.default._op_dk(
        torch._C.DispatchKey.CompositeExplicitAutograd, tensors
    )
    torch.testing.assert_close(composite, norms(tensors), rtol=1e-12, atol=0.0)


def test_norms_infers_shapes_on_meta(norms):
    result = norms([torch.empty(3, 4, device="meta"), torch.empty(0).to("meta")])
    assert (result.shape, result.dtype, result.device.type) == (
        (2,),
        torch.float64,
        "meta",
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norms_refuses_integers(norms, device):
    tensors = [
        torch.ones(2, device=device),
        torch.ones(2, dtype=torch.int64).to(device),
    ]
    text = r"tensors\[1\]: expected dtype Double, Float, Half or BFloat16, got Long"
    with pytest.raises(ValueError, match=text):
        norms(tensors)


def test_norms_refuses_two_devices(norms):
    text = r"tensors\[1\]: expected device cpu of the first tensor, got meta"
    with pytest.raises(ValueError, match=text):
        norms([torch.ones(2), torch.ones(2, device="meta")])


@pytest.mark.parametrize(
    "tensors", [[torch.ones(2, 3)], [torch.ones(2).bfloat16()] * 2]
)
def test_norms_pass_opcheck(norms, tensors):
    torch.library.opcheck(norms.default, (tensors,))
