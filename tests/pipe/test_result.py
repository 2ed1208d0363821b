"""The result object: a local value that DistributedDataParallel sees through."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import distributed as ddp
from torch.utils import _pytree

from pipetransformer.pipe import Pipe, PipeResult

from .models import MODES, Functional, dense, make_pipe, staged

X = torch.ones(2, 5, dtype=torch.double)


def test_call_returns_the_result_object_unless_told_otherwise():
    layers = dense()
    held = Pipe(layers, 2)(X)
    assert type(held) is PipeResult
    bare = Pipe(layers, 2, return_tensors=True)(X)
    assert torch.equal(held.local_value(), bare)
    assert torch.equal(make_pipe(layers, 2, 2)(X), bare)
    assert type(Pipe(nn.Sequential(), 2)(X)) is PipeResult
    assert type(Pipe(nn.Sequential(nn.ReLU()))(X)) is PipeResult  # the plain path


def test_who_takes_the_result_for_the_output_is_told_where_it_is():
    result = Pipe(dense(), 2)(X)
    told = r"no attribute 'sum'; the output is local_value\(\), and Pipe\(\.\.\., ret"
    with pytest.raises(AttributeError, match=told):
        result.sum()
    assert not hasattr(result, "shape")


def test_return_tensors_is_keyword_only():
    with pytest.raises(TypeError, match="positional argument"):
        Pipe(dense(), 2, "never", False, True, True)


def test_methods_of_the_old_reference_work_locally():
    value = torch.ones(1, requires_grad=True) * 2
    result = PipeResult(value)
    assert result.local_value() is value and result.to_here() is value
    assert result.to_here(timeout=0.5) is value and result.to_here(0.5) is value
    assert result.is_owner() is True


@pytest.mark.parametrize("mode", MODES)
def test_backward_runs_that_of_the_one_tensor_held(mode):
    first = nn.Linear(5, 1, dtype=torch.double)
    layers = staged(
        first,
        Functional(lambda x: (x.argmax(1), "text", x)),
    )
    expected = torch.autograd.grad(first(X[:1]).sum(), first.weight)[0]
    result = Pipe(layers, 2, mode)(X[:1])
    assert result.local_value()[0].dtype == torch.int64
    result.backward(7, retain_graph=True)
    torch.testing.assert_close(first.weight.grad, expected)
    result.backward(dist_autograd_ctx_id=7)
    torch.testing.assert_close(first.weight.grad, 2 * expected)


@pytest.mark.parametrize("mode", MODES)
def test_backward_passes_an_integer_beside_a_float_at_every_border(mode):
    first = nn.Linear(5, 5, dtype=torch.double)
    layers = staged(
        first,
        Functional(lambda x: (x.argmax(1), x)),
        Functional(lambda i, x: (i + 1, x * 3, i > 0)),
        Functional(lambda i, x, b: (b, i, x.gather(1, i[:, None] - 1))),
    )
    value = first(X[:1])
    expected = torch.autograd.grad(3 * value.max(), first.weight)[0]
    pipe = Pipe(layers, 2, mode)
    result = pipe(X[:1])
    assert [t.dtype for t in result.local_value()[:2]] == [torch.bool, torch.int64]
    result.backward()
    torch.testing.assert_close(first.weight.grad, expected)
    pipe.close()


@pytest.mark.parametrize("count", [0, 2])
def test_backward_refuses_none_and_several_tensors(count):
    value = [torch.ones(1, requires_grad=True) for _ in range(count)]
    text = rf"expected one tensor that requires grad in the value, got {count}"
    with pytest.raises(RuntimeError, match=text):
        PipeResult([*value, torch.ones(1)]).backward()


def test_result_is_a_dataclass_whose_tensors_ddp_finds():
    a, b = torch.ones(2), torch.zeros(2)
    result = PipeResult((a, [3, {"b": b}]))
    assert dataclasses.is_dataclass(result)
    found = list(ddp._find_tensors(result))
    assert [id(t) for t in found] == [id(a), id(b)]


def test_result_is_a_pytree_node_that_ddp_rebuilds():
    a, b = torch.ones(2), torch.zeros(2)
    result = PipeResult((a, b))
    leaves, spec, is_rref = ddp._tree_flatten_with_rref(result)
    assert leaves[0] is a and leaves[1] is b and len(leaves) == 2
    assert not is_rref  # a real one would be wrapped again by DDP
    rebuilt = _pytree.tree_unflatten([a + 1, b + 1], spec)
    assert type(rebuilt) is PipeResult
    assert torch.equal(rebuilt.local_value()[1], b + 1)
    assert _pytree.tree_leaves(PipeResult(a))[0] is a


def test_results_compare_by_identity_and_copy():
    result = PipeResult(torch.ones(2))
    assert result == result and result != PipeResult(result.value)
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert other is not result and torch.equal(other.value, result.value)
