"""What surrounds the caller surrounds every stage call and its recomputation."""

import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import is_recomputing

from .models import MODES, Functional, grads, linears, make_pipe

DISPATCHES = ("serial", "threads")
every_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)
every_mode = pytest.mark.parametrize("mode", MODES)
NUM_AGAIN = {"never": 0, "except_last": 2, "always": 3}


def autocast_state():
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    }


class Watch:
    """Notes what `look` sees in each call of its layers."""

    def __init__(self, look):
        self.look = look
        self.seen = {False: [], True: []}

    def layers(self, count=2):
        def fn(x):
            self.seen[is_recomputing()].append(self.look())
            return x * 1

        return nn.Sequential(*[Functional(fn) for _ in range(count)])


def rows():
    return torch.ones(3, 2, requires_grad=True)


@every_mode
@every_dispatch
def test_recomputation_has_the_contexts_of_its_forward_not_of_backward(mode, dispatch):
    watch = Watch(lambda: (torch.is_grad_enabled(), autocast_state()))
    pipe = make_pipe(watch.layers(), 2, 3, mode, dispatch=dispatch)
    bf16, half = torch.bfloat16, torch.float16
    with (
        torch.autocast("cpu", dtype=bf16),
        torch.autocast("cuda", dtype=half, enabled=torch.cuda.is_available()),
    ):
        expected = (True, autocast_state())
        y = pipe(rows()).sum()
    assert expected[1]["cpu"] == (True, bf16)
    with torch.no_grad(), torch.autocast("cpu", dtype=half):
        y.backward()
    pipe.close()
    assert watch.seen[False] == [expected] * 6
    assert watch.seen[True] == [expected] * 2 * NUM_AGAIN[mode]


@every_mode
@every_dispatch
def test_autocast_of_backward_does_not_reach_the_recomputation(mode, dispatch):
    watch = Watch(autocast_state)
    pipe = make_pipe(watch.layers(), 2, 3, mode, dispatch=dispatch)
    y = pipe(rows()).sum()
    with torch.autocast("cpu"):
        y.backward()
    pipe.close()
    seen = watch.seen[False] + watch.seen[True]
    assert len(seen) == 6 + 2 * NUM_AGAIN[mode]
    assert not any(state["cpu"][0] for state in seen)


@every_mode
@every_dispatch
def test_no_grad_and_inference_mode_reach_the_stages(mode, dispatch):
    watch = Watch(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    pipe = make_pipe(watch.layers(), 2, 3, mode, dispatch=dispatch)
    with torch.no_grad():
        y = pipe(rows())
    assert y.grad_fn is None and not y.requires_grad and not y.is_inference()
    with torch.inference_mode():
        z = pipe(rows())
    assert z.is_inference()
    pipe.close()
    assert watch.seen == {False: [(False, False)] * 6 + [(False, True)] * 6, True: []}


@every_mode
@every_dispatch
def test_saved_tensor_hooks_are_in_force_in_the_recomputation_too(mode, dispatch):
    # The plain model packs each tensor that is kept for backward.
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(is_recomputing())
        return tensor

    def unpack(tensor):
        unpacked.append(1)
        return tensor

    layers = nn.Sequential(Functional(torch.sin), Functional(torch.cos))
    pipe = make_pipe(layers, 2, 3, mode, dispatch=dispatch)
    x = rows()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = pipe(x).sum()
    again = 2 * NUM_AGAIN[mode]
    forward = packed.count(False)
    assert forward == len(packed) and forward >= 6 - again
    y.backward()
    pipe.close()
    assert packed.count(True) == again and packed.count(False) == forward
    assert len(unpacked) == 6
    plain = x.detach().requires_grad_()
    layers(plain).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


@every_mode
@every_dispatch
def test_offloaded_tensors_give_the_plain_models_gradients(mode, dispatch):
    layers = nn.Sequential(*linears(2), nn.Tanh(), *linears(1))
    plain = copy.deepcopy(layers)
    pipe = make_pipe(layers, 2, 3, mode, dispatch=dispatch)
    x = torch.randn(6, 5, dtype=torch.double)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.device, t.numpy(force=True).copy()),
        lambda kept: torch.from_numpy(kept[1]).to(kept[0]),
    ):
        loss = (pipe(x) ** 2).sum()
    loss.backward()
    (plain(x) ** 2).sum().backward()
    pipe.close()
    torch.testing.assert_close(grads(layers), grads(plain))


def leave_grad_off(x):
    y = x * 1
    torch.set_grad_enabled(False)
    return y


def leave_autocast_on(x):
    y = x * 1
    torch.set_autocast_enabled("cpu", True)
    return y


LEAVING = {"grad mode": leave_grad_off, "autocast": leave_autocast_on}


@every_mode
@every_dispatch
@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING.keys())
def test_context_left_changed_by_a_layer_ends_with_its_cell(mode, dispatch, leave):
    def look():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    watch = Watch(look)
    before, inside, after = watch.layers(3)
    changing = nn.Sequential(inside, Functional(leave))
    pipe = make_pipe(
        nn.Sequential(before, changing, after), 3, 3, mode, dispatch=dispatch
    )
    for _ in range(2):
        x = rows()
        pipe(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3, 2))
        assert look() == (True, False)
    pipe.close()
    seen = watch.seen[False] + watch.seen[True]
    assert set(seen) == {(True, False)} and len(seen) == 6 * (3 + NUM_AGAIN[mode])


@every_dispatch
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@every_mode
def test_contexts_reach_the_cells_of_schedules_with_a_loss(schedule, mode, dispatch):
    watch = Watch(lambda: (torch.is_grad_enabled(), autocast_state()["cpu"]))
    pipe = make_pipe(
        watch.layers(),
        2,
        3,
        mode,
        dispatch=dispatch,
        schedule=schedule,
        loss=lambda y, t: (y * t).mean(),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe(rows(), targets=torch.ones(3, 2)).backward()
    pipe.close()
    seen = watch.seen[False] + watch.seen[True]
    assert set(seen) == {(True, (True, torch.bfloat16))}
    assert len(seen) == 6 + 2 * NUM_AGAIN[mode]
