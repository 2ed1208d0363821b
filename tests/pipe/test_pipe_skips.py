"""Skips through a pipeline: numbers, gradients, release."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipetransformer.pipe import Pipe, WithDevice, is_recomputing
from pipetransformer.pipe.skip import Namespace, pop, skippable, stash

from .models import (
    MODES,
    Functional,
    assert_same_training,
    even_cuts,
    grads,
    staged,
)
from .skips import Pop, PopStash, Stash, StashTwo

DISPATCH = ("serial", "threads")


@skippable(pop=["b", "c"])
class Collect(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width).double()

    def forward(self, x):
        b = yield pop("b")
        c = yield pop("c")
        return self.linear(x) + b * c


def chain(width=4):
    """One source for two later layers, one of which is a source itself."""
    torch.manual_seed(1)
    return nn.Sequential(
        StashTwo(width),
        nn.Linear(width, width).double(),
        PopStash(),
        nn.Tanh(),
        Collect(width),
    )


def every_cuts(num_layers):
    for count in range(num_layers):
        for inner in itertools.combinations(range(1, num_layers), count):
            yield [0, *inner, num_layers]


def from_plan(cuts, chunks, mode="never", **options):
    return lambda layers: Pipe.from_plan(
        layers, cuts=cuts, num_microbatches=chunks, checkpoint=mode, **options
    )


def batch(rows=6, width=4):
    torch.manual_seed(2)
    return torch.randn(rows, width, dtype=torch.double, requires_grad=True)


# --- numbers -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", list(every_cuts(5)), ids=str)
def test_gradients_equal_the_plain_models_for_all_cuts(mode, cuts):
    assert_same_training(chain(), from_plan(cuts, 3, mode), batch())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch", DISPATCH)
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_gradients_equal_for_every_number_of_micro_batches(mode, dispatch, chunks):
    options = {"dispatch": dispatch}
    assert_same_training(
        chain(), from_plan([0, 1, 2, 3, 4, 5], chunks, mode, **options), batch()
    )


@pytest.mark.parametrize("mode", MODES)
def test_public_pipe_with_nested_layers(mode):
    first, second, third, fourth, last = chain()
    layers = nn.Sequential(
        nn.Sequential(first, second),
        WithDevice(third, "cpu"),
        WithDevice(fourth, "cpu"),
        last,
    )
    assert Pipe(layers).num_stages == 4
    assert_same_training(
        layers, lambda m: Pipe(m, 3, mode, return_tensors=True), batch()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("cuts", [[0, 2, 5], [0, 1, 2, 4, 5]], ids=str)
def test_schedules_with_loss_give_the_same_gradients(schedule, mode, cuts):
    layers, plain, x = chain(), chain(), batch()
    targets = torch.randn(6, 4, dtype=torch.double)
    pipe = from_plan(cuts, 3, mode, schedule=schedule, loss=nn.MSELoss())(layers)
    loss = pipe(x, targets=targets)
    loss.backward()
    expected = nn.MSELoss()(plain(x), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads(layers), grads(plain))


@pytest.mark.parametrize("mode", MODES)
def test_crossing_pairs_in_namespaces(mode):
    a, b = Namespace(), Namespace()
    layers = nn.Sequential(
        Stash().isolate(a),
        Stash().isolate(b),
        nn.Tanh(),
        Pop().isolate(a),
        Pop().isolate(b),
    )
    assert_same_training(layers, from_plan([0, 1, 2, 3, 4, 5], 2, mode), batch())


@pytest.mark.parametrize("mode", MODES)
def test_skips_past_a_stage_without_gradient_on_the_way(mode):
    # Only the skip carries gradient; what goes along the stages is cut off.
    layers = nn.Sequential(
        Stash(), nn.Linear(4, 4).double(), Functional(lambda x: x.detach()), Pop()
    )
    assert_same_training(layers, from_plan([0, 1, 2, 3, 4], 2, mode), batch())


# --- odd skips ---------------------------------------------------------------


@skippable(stash="skip")
class StashValue(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        yield stash("skip", self.make(x))
        return self.linear(x)


@skippable(pop="skip")
class Use(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use = use

    def forward(self, x):
        return self.use(x, (yield pop("skip")))


def add_first(x, skip):
    return x if skip is None else x + skip


ODD = {
    "none": (lambda x: None, add_first),
    "integer": (lambda x: (x > 0).long(), lambda x, skip: x * (skip + 1)),
    "bool": (lambda x: x > 0, lambda x, skip: torch.where(skip, x, 2 * x)),
    "detached": (lambda x: x.detach() * 2, add_first),
    "unused": (lambda x: x * 2, lambda x, skip: x),
    "cut off": (lambda x: x * 2, lambda x, skip: x + skip.detach()),
    "complex": (lambda x: torch.complex(x, 2 * x), lambda x, skip: x + skip.abs()),
    "itself": (lambda x: x, add_first),
    "zero-dim": (lambda x: x.new_ones(()), add_first),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3]], ids=str)
def test_odd_skips_work_in_forward_and_backward(kind, mode, cuts):
    make, use = ODD[kind]
    layers = nn.Sequential(StashValue(make), nn.Tanh(), Use(use))
    pipe = from_plan(cuts, 2, mode)
    assert_same_training(layers, pipe, batch())
    layers.zero_grad()
    assert_same_training(layers, pipe, batch().detach())


@pytest.mark.parametrize("mode", MODES)
def test_skip_without_gradient_ahead_of_trainable_layers(mode):
    # The stashing stage has nothing to train and takes no gradient at all.
    layers = nn.Sequential(Stash(), nn.Linear(4, 4).double(), Pop())
    assert_same_training(layers, from_plan([0, 1, 2, 3], 2, mode), batch().detach())


@pytest.mark.parametrize("mode", MODES)
def test_layer_with_several_inputs_takes_part(mode):
    @skippable(stash="skip")
    class Two(nn.Module):
        def forward(self, x, y):
            yield stash("skip", y)
            return x * y, y

    layers = nn.Sequential(
        Functional(lambda x: (x, x + 1)), Two(), Functional(torch.add), Pop()
    )
    x = batch()
    pipe = from_plan([0, 1, 2, 3, 4], 2, mode)(layers)
    pipe(x).sum().backward()
    # (x * (x + 1) + (x + 1)) + (x + 1)
    torch.testing.assert_close(x.grad, 2 * x + 3)


def test_broken_inner_pair_is_refused_at_construction():
    with pytest.raises(TypeError, match="no module declared 'skip' as poppable but s"):
        Pipe(nn.Sequential(nn.Sequential(nn.Linear(2, 2), Stash()), nn.ReLU()))


def test_stage_that_breaks_its_promise_is_told_and_the_pipe_stays_usable():
    broken = [True]

    @skippable(stash="skip")
    class Sometimes(nn.Module):
        def forward(self, x):
            if not broken[0]:
                yield stash("skip", x)
            return x

    pipe = from_plan([0, 1, 2, 3], 2)(nn.Sequential(Sometimes(), nn.Tanh(), Pop()))
    with pytest.raises(RuntimeError, match=r"got \['skip'\] not stashed"):
        pipe(batch())
    broken[0] = False
    x = batch()
    torch.testing.assert_close(pipe(x), x.tanh() + x)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))]
)
def test_copies_of_a_pipe_with_skips_train_on_their_own(again):
    ns = Namespace()
    layers = staged(
        nn.Linear(4, 4).double(), Stash().isolate(ns), nn.Tanh(), Pop().isolate(ns)
    )
    pipe, x = Pipe(layers, 2, return_tensors=True), batch()
    expected = pipe(x)
    copied = again(pipe)
    torch.testing.assert_close(copied(x), expected)
    copied(x).sum().backward()
    assert all(p.grad is None for p in pipe.parameters())
    assert all(p.grad is not None for p in copied.parameters())


# --- release -----------------------------------------------------------------


class Watch:
    """Notes at each event which micro-batches' skip tensors still have memory."""

    def __init__(self):
        self.memory = []
        self.events = []

    def layers(self):
        def make(x):
            skip = x * 2
            if not is_recomputing():
                self.memory.append(StorageWeakRef(skip.untyped_storage()))
            return skip

        return nn.Sequential(
            StashValue(make), self.event("between"), Use(add_first), self.event("after")
        )

    def event(self, name):
        def note(x):
            phase = "again" if is_recomputing() else "forward"
            self.events.append((name, phase, self.alive()))
            y = x * 1
            if y.requires_grad:
                y.register_hook(
                    lambda grad: self.events.append((name, "backward", self.alive()))
                )
            return y

        return Functional(note)

    def alive(self):
        return [k for k, memory in enumerate(self.memory) if not memory.expired()]

    def of(self, *names):
        return [alive for name, phase, alive in self.events if (name, phase) == names]


def watched(mode, grad):
    watch = Watch()
    # One dispatcher: cells run in one order.
    pipe = from_plan([0, 1, 2, 3, 4], 3, mode, dispatch="serial")(watch.layers())
    with torch.set_grad_enabled(grad):
        output = pipe(batch())
    return watch, output


@pytest.mark.parametrize(
    ("mode", "grad"), [("never", True), *((m, False) for m in MODES)]
)
def test_skip_is_freed_when_its_popping_stage_is_over(mode, grad):
    watch, output = watched(mode, grad)
    # By the time that the next stage runs micro-batch i, its skip is gone.
    for i, alive in enumerate(watch.of("after", "forward")):
        assert i not in alive
    assert watch.of("between", "forward")[0] != []  # it was there before
    assert watch.alive() == []
    if grad:
        output.sum().backward()
        assert all(not alive for *_, alive in watch.events[-6:])


def test_recomputed_cells_keep_their_skip_until_their_backward():
    watch, output = watched("always", True)
    assert watch.alive() == [0, 1, 2]
    output.sum().backward()
    # Micro-batches come in reverse order; each skip is gone before its gradient
    # reaches the stage before the pop.
    assert watch.of("between", "backward") == [[0, 1], [0], []]
    assert watch.alive() == []


def test_only_the_last_micro_batch_is_freed_early_under_except_last():
    watch, output = watched("except_last", True)
    assert watch.alive() == [0, 1]
    output.sum().backward()
    assert watch.alive() == []


@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 3]], ids=str)
@pytest.mark.parametrize("dispatch", DISPATCH)
def test_failure_between_stash_and_pop_frees_the_skip(cuts, dispatch):
    memory = []

    def make(x):
        memory.append(StorageWeakRef((skip := x * 2).untyped_storage()))
        return skip

    def fail(x):
        raise KeyError("x")

    layers = nn.Sequential(StashValue(make), Functional(fail), Use(add_first))
    pipe = from_plan(cuts, 2, dispatch=dispatch)(layers)
    with pytest.raises(KeyError):
        pipe(batch())
    assert memory and all(reference.expired() for reference in memory)


@pytest.mark.parametrize("mode", MODES)
def test_dropped_result_frees_the_skips(mode):
    watch, output = watched(mode, True)
    del output
    assert watch.alive() == []


class Aside(nn.Module):
    """Dispatches a layer's skips into a dict instead of the pipeline's lanes."""

    def __init__(self, layer, skips):
        super().__init__()
        self.layer = layer
        self.skips = skips

    def forward(self, x):
        return self.layer.dispatch(x, self.skips.__setitem__, self.skips.pop)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch", DISPATCH)
def test_pop_of_what_was_dispatched_aside_is_refused_not_given_none(mode, dispatch):
    # This popping layer would take None for an empty skip and go on.
    layers = nn.Sequential(Aside(Stash(), {}), nn.Tanh(), Pop())
    pipe = from_plan([0, 1, 2, 3], 2, mode, dispatch=dispatch)(layers)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="skip 'skip': expected .* got nothing"):
            pipe(batch())
    layers[0].forward = lambda x: layers[0].layer(x)
    plain = nn.Sequential(Stash(), nn.Tanh(), Pop())
    torch.testing.assert_close(pipe(batch()), plain(batch()))


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_dispatch_both_ends_leave_the_lane_empty(mode):
    skips = {}
    layers = nn.Sequential(Aside(Stash(), skips), nn.Tanh(), Aside(Pop(), skips))
    pipe = from_plan([0, 1, 2, 3], 1, mode, dispatch="serial")(layers)
    x = batch()
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), (2 * x).tanh() + x)


class Residual(nn.Module):
    """Holds a skip of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Stash(), nn.Linear(4, 4), Pop())

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_blocks_of_one_class_each_hold_a_skip(mode, num_stages):
    torch.manual_seed(2)
    model = nn.Sequential(Residual(), nn.Tanh(), Residual(), Residual()).double()
    cuts = even_cuts(len(model), num_stages)
    assert_same_training(model, from_plan(cuts, 2, mode), batch())
