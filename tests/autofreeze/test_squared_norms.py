"""The op squared_norms on CPU and Meta, and its ATen implementation."""

import pytest
import torch

from tests.support.norms import mixed_case, reference


def squared_norms(tensors):
    return torch.ops.pipetransformer.squared_norms(tensors)


def test_squared_norms_equals_the_reference_for_all_dtypes_sizes_and_strides():
    tensors = mixed_case("cpu")
    result = squared_norms(tensors)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, reference(tensors), rtol=1e-12, atol=0.0)


def test_squared_norms_adds_up_in_fp64():
    # In fp32 the sum of 2**24 + 1 ones stops at 2**24; fp16 squares overflow.
    ones = torch.ones(2**24 + 1)
    half = torch.full((4,), 6e4, dtype=torch.float16)
    assert squared_norms([ones, half]).tolist() == [
        2.0**24 + 1,
        4 * half[0].double().item() ** 2,
    ]


def test_squared_norms_repeats_its_bits():
    tensors = mixed_case("cpu")
    assert torch.equal(squared_norms(tensors), squared_norms(tensors))


def test_squared_norms_of_nothing_is_empty():
    result = squared_norms([])
    assert (result.shape, result.dtype) == ((0,), torch.float64)


def test_squared_norms_passes_nan_and_infinity_on():
    result = squared_norms([torch.tensor([1.0, float("nan")]), torch.tensor([-1e400])])
    assert result[0].isnan()
    assert result[1].isinf()


def test_squared_norms_composite_equals_the_kernel():
    tensors = mixed_case("cpu")
    op = torch.ops.pipetransformer.squared_norms.default
    composite = op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, tensors)
    torch.testing.assert_close(composite, squared_norms(tensors), rtol=1e-12, atol=0.0)


def test_squared_norms_infers_shapes_on_meta():
    result = squared_norms(
        [torch.empty(3, 4, device="meta"), torch.empty(0).to("meta")]
    )
    assert (result.shape, result.dtype, result.device.type) == (
        (2,),
        torch.float64,
        "meta",
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_squared_norms_refuses_integers(device):
    tensors = [
        torch.ones(2, device=device),
        torch.ones(2, dtype=torch.int64).to(device),
    ]
    text = r"tensors\[1\]: expected dtype Double, Float, Half or BFloat16, got Long"
    with pytest.raises(ValueError, match=text):
        squared_norms(tensors)


def test_squared_norms_refuses_two_devices():
    text = r"tensors\[1\]: expected device cpu of the first tensor, got meta"
    with pytest.raises(ValueError, match=text):
        squared_norms([torch.ones(2), torch.ones(2, device="meta")])


@pytest.mark.parametrize(
    "tensors", [[torch.ones(2, 3)], [torch.ones(2).bfloat16()] * 2]
)
def test_squared_norms_passes_opcheck(tensors):
    torch.library.opcheck(torch.ops.pipetransformer.squared_norms.default, (tensors,))
