"""The support module that cuts and puts together."""

import pytest
import torch

from pipetransformer.compat.pipeline.sync.microbatch import (
    Batch,
    NoChunk,
    check,
    gather,
    scatter,
)

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
