import math
import pickle
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from pipetransformer.state.message import decode, encode, named_tensors
from pipetransformer.state.state import (
    TrainingState,
    load_optimizer,
    optimizer_tree,
    pack_optimizer,
)


def test_no_two_tensors_have_the_same_path():
    x = torch.zeros(1)
    tree = {1: x, "1": x, "a": {"b": x, 2: [x]}, "a b": x, "a 2": [x], "'1'": x}
    assert len(named_tensors(tree)) == len(encode(tree)[1]) == 7


def _same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        same = all(_same(left[key], right[key]) for key in left)
        return same and [*map(repr, left)] == [*map(repr, right)]
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return repr(left) == repr(right)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [True, 1, 1.0, -0.0, 0.1 + 0.2, 1e-320, 1 << 70, "a\u00e4\ud800", ""],
        [math.inf, -math.inf, math.nan],
        {"a": (1, [2, ()]), "b": {}, "c": []},
        {0: "int", "0": "text", 1.5: "float", None: "none", (1, "x"): "tuple"},
        {True: 1, "!": "mark", "of": 3},
        {"!": {"!": "tensor", "of": ["float32", 1]}},
        {"milestones": Counter({3: 1, 5: 2}), "o": OrderedDict(a=1), "s": {1, 2}},
        {"of": torch.Size([2, 3]), "d": torch.float16},
    ],
)
def test_trees_come_back_with_their_types(tree):
    message, tensors = encode(tree)
    again, allocated = decode(message)
    assert _same(tree, again)
    assert tensors == allocated == []


def test_tensors_come_back_in_the_order_of_the_text():
    tree = {
        "z": {4: torch.zeros(2, 3), 1: (torch.tensor(1), [torch.zeros(0, 2)])},
        "a": torch.zeros(4, dtype=torch.bfloat16),
        "b": torch.ones(1, dtype=torch.bool),
    }
    message, tensors = encode(tree)
    again, allocated = decode(message)
    assert _same(tree, again)
    assert [id(t) for t in tensors] == [id(t) for t in named_tensors(tree).values()]
    assert [id(t) for t in allocated] == [id(t) for t in named_tensors(again).values()]
    assert list(named_tensors(tree)) == ["z 4", "z 1 0", "z 1 1 0", "a", "b"]
    assert all(map(_same, tensors, allocated))


class _Foreign:
    pass


def test_a_message_runs_no_code():
    message, _ = encode({"x": _Foreign()})
    with pytest.raises(pickle.UnpicklingError):
        decode(message)


class _KeepsFloat32(torch.optim.Optimizer):
    """Keeps the weights of bfloat16 parameters in float32, and counts in int64."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["count"] = torch.zeros(1, dtype=torch.int64)
                state["master"] -= group["lr"] * p.grad.float()
                state["count"] += 1
                p.data.copy_(state["master"])


class _OwnFormat(_KeepsFloat32):
    """Has a state dict of its own form."""

    def state_dict(self):
        return {"masters": [s["master"] for s in self.state.values()]}

    def load_state_dict(self, state_dict):
        params = [p for group in self.param_groups for p in group["params"]]
        for p, master in zip(params, state_dict["masters"], strict=True):
            self.state[p] = {"master": master, "count": torch.zeros(1)}


@pytest.mark.parametrize("factory", [_KeepsFloat32, torch.optim.AdamW, _OwnFormat])
def test_moments_keep_their_dtype_and_bits(factory):
    def state_of(steps):
        torch.manual_seed(steps)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(torch.bfloat16)
        state = TrainingState(model)
        state.build_optimizer(
            list(model.parameters()),
            factory,
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2]),
        )
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            state.optimizer.step()
            state.scheduler.step()
        return state

    source, target = state_of(3), state_of(0)
    message, tensors = encode(optimizer_tree(source))
    tree, allocated = decode(message)
    for given, own in zip(tensors, allocated, strict=True):
        own.copy_(given)
    load_optimizer(target, tree)
    left = named_tensors(optimizer_tree(source))
    right = named_tensors(optimizer_tree(target))
    assert list(left) == list(right)
    assert all(torch.equal(left[n], right[n]) for n in left)
    assert all(left[n].dtype == right[n].dtype for n in left)
    assert target.scheduler.state_dict() == source.scheduler.state_dict()
    assert [*left.values()] == pack_optimizer(source)[1]  # a file has the same
