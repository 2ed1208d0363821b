"""The support modules that cut and put together."""

import pytest
import torch

from pipetransformer.compat.pipeline.sync.microbatch import (
    Batch,
    NoChunk,
    check,
    gather,
    scatter,
)
from pipetransformer.compat.torchgpipe import microbatch as torchgpipe

pytestmark = pytest.mark.compat


def test_one_tensor_is_cut_and_put_together():
    x = torch.arange(7)
    parts = scatter(x, chunks=4)
    assert [len(part.tensor) for part in parts] == [2, 2, 2, 1]
    assert all(part.atomic for part in parts)
    assert torch.equal(gather(parts), x)


def test_other_values_go_to_each_micro_batch():
    x, whole, mark = torch.arange(4), torch.ones(3), object()
    parts = scatter(x, NoChunk(whole), mark, chunks=2)
    assert [len(part) for part in parts] == [3, 3]
    assert all(part[1] is whole and part[2] is mark for part in parts)
    out = gather([part.call(lambda a, b, c: (a, c)) for part in parts])
    assert torch.equal(out[0], x) and out[1] == [mark, mark]


def test_values_are_put_in_place():
    x, y, z = torch.zeros(1), torch.ones(2), torch.ones(3)
    one, two = Batch(x), Batch((x, 1))
    one[0] = y
    two[-1] = z
    assert one.atomic and one.tensor is y and one[0] is y
    assert not two.atomic and two[0] is x and two[1:] == (z,)
    one[:] = [z]
    two[1:] = (y, "more")
    assert one.atomic and one.tensor is z
    assert two.values == (x, y, "more") and len(two) == 3
    two[:] = (z,)
    assert not two.atomic and two.values == (z,)
    assert torch.equal(gather([two, two])[0], torch.ones(6))


@pytest.mark.parametrize(
    ("values", "index", "value", "error", "text"),
    [
        (torch.ones(1), 0, 3, TypeError, r"a tensor among the values, got \['int'\]"),
        (torch.ones(1), 1, torch.ones(1), IndexError, "out of range"),
        (torch.ones(1), slice(None), torch.ones(1), TypeError, "tuple or a list for"),
        (torch.ones(1), slice(None), (torch.ones(1),) * 2, IndexError, "tensor, got 2"),
        (torch.ones(1), slice(None), (), IndexError, "expected one tensor, got 0"),
        ((torch.ones(1), 2), 0, 3, TypeError, "a tensor among the values, got"),
        ((torch.ones(1), 2), 2, torch.ones(1), IndexError, "out of range"),
        ((torch.ones(1), 2), slice(0, 1), [3], TypeError, "a tensor among the values"),
        ((torch.ones(1), 2), slice(0, 1), 3, TypeError, "for a slice, got int"),
    ],
)
def test_values_that_do_not_fit_are_refused_and_change_nothing(
    values, index, value, error, text
):
    batch = Batch(values)
    before = list(batch)
    with pytest.raises(error, match=text):
        batch[index] = value
    assert all(a is b for a, b in zip(batch, before, strict=True))


# --- torchgpipe's: a tuple is one value of tensors ---------------------------


def test_torchgpipe_cuts_and_puts_together():
    x, y = torch.arange(7), torch.arange(14).view(7, 2)
    for value in (x, (x,), (x, y)):
        parts = torchgpipe.scatter(value, 4)
        assert all(isinstance(part, torchgpipe.Batch) for part in parts)
        assert [part.atomic for part in parts] == [value is x] * 4
        again = torchgpipe.gather([part.call(lambda v: v) for part in parts])
        torch.testing.assert_close(again, value, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Found different number of chunks"):
        torchgpipe.scatter((torch.ones(4), torch.ones(1)), chunks=2)


def test_torchgpipe_batch_is_one_value():
    x, y = torch.ones(1), torch.ones(2)
    one, two = torchgpipe.Batch(x), torchgpipe.Batch((x, y))
    assert one.value is one.tensor is one.tensor_or_tensors is x
    assert two.value == two.tensors == two.tensor_or_tensors == (x, y)
    swapped = two.call(lambda pair: (pair[1], pair[0]))
    assert isinstance(swapped, torchgpipe.Batch) and swapped[0] is y
    two[0] = y
    assert two.tensors == (y, y)
    with pytest.raises(AttributeError, match="expected a tuple of tensors, got one"):
        one.tensors  # noqa: B018
    with pytest.raises(AttributeError, match="expected one tensor, got 2 values"):
        two.tensor  # noqa: B018


@pytest.mark.parametrize("value", [3, (torch.ones(1), 3), ((torch.ones(1),),)])
def test_torchgpipe_takes_tensors_only(value):
    with pytest.raises(TypeError, match="input: expected Tensor or a tuple of them"):
        torchgpipe.check(value)
    with pytest.raises(TypeError, match="batch: expected Tensor or a tuple of them"):
        torchgpipe.Batch(torch.ones(1)).call(lambda _: value)
    batch = torchgpipe.Batch((torch.ones(1),))
    with pytest.raises(TypeError, match="batch: expected Tensor or a tuple of them"):
        batch[0] = value[1] if isinstance(value, tuple) and len(value) > 1 else value
    torchgpipe.check(torch.ones(1)), torchgpipe.check((torch.ones(1),) * 2)


def test_refusals():
    with pytest.raises(RuntimeError, match="Found different number of chunks"):
        scatter(torch.ones(4), torch.ones(1), chunks=2)
    with pytest.raises(TypeError, match="one kind at a position, got .*NoneType"):
        gather([Batch((torch.ones(1), None)), Batch((torch.ones(1), torch.ones(1)))])
    with pytest.raises(TypeError, match=r"expected a tensor among the values, got \["):
        Batch((1, "x"))
    with pytest.raises(AttributeError, match="expected one tensor, got 2 values"):
        Batch((torch.ones(1), 2)).tensor  # noqa: B018
    with pytest.raises(TypeError, match="expected a tensor or a tuple, got int"):
        Batch(torch.ones(1)).call(lambda x: 1)


def test_check_looks_for_tensors_and_their_device():
    check(torch.device("cpu"), torch.ones(1), 3)
    with pytest.raises(TypeError, match="expected at least one tensor"):
        check(torch.device("cpu"), 3)
    with pytest.raises(ValueError, match="All inputs should be on the same device"):
        check(torch.device("cpu"), torch.ones(1, device="meta"))
