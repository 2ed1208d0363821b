"""Skippable layers without a pipeline: declaration, namespaces, stash and pop."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

from pipetransformer.pipe import PipeSequential
from pipetransformer.pipe.skip import Namespace, Skippable, pop, skippable, stash
from pipetransformer.skip.tracker import (
    SkipTracker,
    current_skip_tracker,
    use_skip_tracker,
)

from .skips import Pop, PopStash, Stash, StashTwo


class Yields(nn.Module):
    """A layer whose forward yields what it is given."""

    def __init__(self, *messages):
        super().__init__()
        self.messages = messages

    def forward(self, x):
        yield from self.messages
        return x


def layer_of(stash_names, pop_names, *messages):
    return skippable(stash=stash_names, pop=pop_names)(Yields)(*messages)


@pytest.fixture(autouse=True)
def _own_tracker():
    with use_skip_tracker(SkipTracker()):
        yield


# --- the wrapper -------------------------------------------------------------


def test_wrapper_keeps_the_name_and_shows_the_layer():
    @skippable(stash="x")
    class Layer(nn.Linear):
        """Text."""

    layer = Layer(2, 3, bias=False)
    assert (Layer.__name__, Layer.__doc__, Layer.__module__) == (
        "Layer",
        "Text.",
        __name__,
    )
    assert isinstance(layer, Skippable) and isinstance(layer.module, nn.Linear)
    assert repr(layer) == "@skippable(Layer(in_features=2, out_features=3, bias=False))"
    assert list(layer.state_dict()) == ["module.weight"]
    assert layer.namespaces == {}


def test_only_a_module_class_is_accepted():
    with pytest.raises(TypeError, match="expected a subclass of torch.nn.Module, got"):
        skippable(stash="x")(int)
    with pytest.raises(TypeError, match="expected a subclass of torch.nn.Module, got"):
        skippable()(nn.Linear(2, 2))


def test_str_is_one_name():
    layer = layer_of("skip", "other")
    assert list(layer.stashable()) == [(None, "skip")]
    assert list(layer.poppable()) == [(None, "other")]


def test_isolate_moves_all_names_and_chains():
    ns = Namespace()
    layer = layer_of(["a", "b"], ["c"])
    assert layer.isolate(ns) is layer
    assert list(layer.stashable()) == [(ns, "a"), (ns, "b")]
    assert list(layer.poppable()) == [(ns, "c")]
    assert layer.namespaces == {"a": ns, "b": ns, "c": ns}


def test_isolate_only_moves_some_names_and_later_calls_win():
    first, second = Namespace(), Namespace()
    layer = layer_of(["a", "b"], ["c"])
    layer.isolate(first, only=["a", "c"]).isolate(second, only="c")
    assert list(layer.stashable()) == [(first, "a"), (None, "b")]
    assert list(layer.poppable()) == [(second, "c")]
    assert list(layer.isolate(None).poppable()) == [(None, "c")]
    with pytest.raises(TypeError, match="ns: expected a Namespace or None, got str"):
        layer.isolate("a")


# --- namespaces --------------------------------------------------------------


def test_namespace_is_unique_hashable_and_ordered():
    names = [Namespace() for _ in range(8)]
    assert len(set(names)) == 8
    ordered = sorted(names)
    for a, b in zip(ordered, ordered[1:], strict=False):
        assert a < b and b > a and a <= b and b >= a and a != b
    assert sorted([names[0], None])[0] is None
    assert names[0] != 3
    with pytest.raises(TypeError):
        names[0] < 3  # noqa: B015


def test_namespace_copies_are_equal_not_identical():
    ns = Namespace()
    for other in (copy.copy(ns), copy.deepcopy(ns), pickle.loads(pickle.dumps(ns))):
        assert other == ns and hash(other) == hash(ns) and other is not ns
        assert not other < ns and not ns < other


def test_none_is_the_default_namespace():
    assert isinstance(None, Namespace)
    assert isinstance(Namespace(), Namespace)
    assert not isinstance("x", Namespace)
    assert Namespace() != None  # noqa: E711
    assert not Namespace() < None and Namespace() > None


# --- stash and pop -----------------------------------------------------------


def test_popped_value_is_the_stashed_tensor():
    x = torch.randn(3, requires_grad=True)
    y = nn.Sequential(Stash(), nn.Tanh(), Pop())(x)
    torch.testing.assert_close(y, (2 * x).tanh() + x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (1 - (2 * x).tanh() ** 2) + 1)
    assert len(current_skip_tracker()) == 0


def test_one_layer_may_pop_and_stash():
    popping = skippable(pop=["b", "c"])(Collect)()
    model = nn.Sequential(StashTwo(4), PopStash(), popping)
    x = torch.randn(2, 4, dtype=torch.double)
    b = model[0].module.linear(x)
    torch.testing.assert_close(model(x), x + x.tanh() + b + x * x.tanh())


class Collect(nn.Module):
    def forward(self, x):
        b = yield pop("b")
        c = yield pop("c")
        return x + b + c


def test_namespaces_keep_equal_names_apart():
    outer, inner = Namespace(), Namespace()
    x = torch.ones(1)
    crossing = nn.Sequential(
        Stash().isolate(outer),
        Stash().isolate(inner),
        Pop().isolate(outer),
        Pop().isolate(inner),
    )
    assert crossing(x).item() == 4 + 1 + 2


def test_none_skip_pops_as_none():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((yield pop("x")))
            return x

    x = torch.ones(1, requires_grad=True)
    source = layer_of("x", (), stash("x", None))
    nn.Sequential(source, skippable(pop="x")(See)())(x).backward()
    assert seen == [None] and x.grad.item() == 1


def test_several_inputs_and_keywords_reach_the_layer():
    @skippable(stash="skip")
    class Two(nn.Module):
        def forward(self, x, y, *, scale=1):
            yield stash("skip", y)
            return (x + y) * scale

    pair = PipeSequential(Two(), Pop())
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert pair(one, two, scale=3).item() == 9 + 2


def test_plain_forward_is_allowed_when_nothing_is_declared():
    @skippable()
    class Plain(nn.Linear):
        pass

    x = torch.randn(2, 3)
    layer = Plain(3, 3)
    assert torch.equal(layer(x), layer.module(x))


def test_skip_is_held_by_nobody_after_its_pop():
    died = []

    class Drop(nn.Module):
        def forward(self, x):
            skip = yield pop("skip")
            died.append(weakref.ref(skip))
            return x

    class Look(nn.Module):
        def forward(self, x):
            died.append(died[0]() is None)
            return x

    class Make(nn.Module):
        def forward(self, x):
            yield stash("skip", x + 1)
            return x

    dropping = skippable(pop="skip")(Drop)()
    nn.Sequential(skippable(stash="skip")(Make)(), dropping, Look())(torch.ones(1))
    assert died[1] is True


def test_stashing_layer_does_not_hold_its_tensor_while_it_computes():
    class Make(nn.Module):
        def forward(self, x):
            kept = x + 1
            reference = weakref.ref(kept)
            yield stash("skip", kept)
            del kept
            current_skip_tracker().load(None, "skip")
            assert reference() is None
            return x

    skippable(stash="skip")(Make)()(torch.ones(1))


@pytest.mark.parametrize(
    ("layer", "error", "text"),
    [
        (layer_of((), "x", pop("x")), RuntimeError, "skip 'x': expected .* stashed"),
        (layer_of((), (), stash("x", None)), RuntimeError, "got undeclared 'x'"),
        (layer_of((), (), pop("x")), RuntimeError, "got undeclared 'x'"),
        (layer_of("x", ()), RuntimeError, r"to be stashed, got \['x'\] not stashed"),
        (layer_of((), "x"), RuntimeError, r"to be popped, got \['x'\] not popped"),
        (
            layer_of("x", "x", stash("x", None), pop("x"), pop("x")),
            RuntimeError,
            "popped once, got nothing",
        ),
        (layer_of((), (), 3), TypeError, "to yield stash or pop, got int"),
    ],
)
def test_broken_promises_are_told(layer, error, text):
    with pytest.raises(error, match=text):
        layer(torch.ones(1))


def test_second_pop_in_another_layer_is_refused():
    with pytest.raises(RuntimeError, match="skip 'skip': expected .* popped once"):
        nn.Sequential(Stash(), Pop(), Pop())(torch.ones(1))


def test_plain_forward_with_declarations_is_refused():
    class Plain(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(RuntimeError, match=r"got \['x'\] not stashed"):
        skippable(stash="x")(Plain)()(torch.ones(1))


def test_only_a_tensor_or_none_is_stashed():
    with pytest.raises(TypeError, match="stash 'x': expected a tensor or None, got"):
        stash("x", [torch.ones(1)])


# --- dispatch ----------------------------------------------------------------


def test_dispatch_hands_skips_to_the_callers_functions():
    x = torch.randn(2, 4, dtype=torch.double)
    layer, log = PopStash(), []
    skips = {"a": x + 1}

    def handle_stash(name, tensor):
        log.append(("stash", name))
        skips[name] = tensor

    def handle_pop(name):
        log.append(("pop", name))
        return skips.pop(name)

    output = layer.dispatch(x, handle_stash, handle_pop)
    assert log == [("pop", "a"), ("stash", "c")] and list(skips) == ["c"]
    tracker = SkipTracker()
    tracker.save(None, "a", x + 1)
    with use_skip_tracker(tracker):
        assert torch.equal(output, layer(x))
    assert torch.equal(skips["c"], tracker.load(None, "c"))
    assert len(current_skip_tracker()) == 0


def test_dispatch_leaves_declarations_to_its_caller():
    seen = []
    layer = layer_of("declared", (), stash("other", None), pop("third"))
    x = torch.ones(1)
    output = layer.dispatch(x, lambda *a: seen.append(a), lambda n: seen.append(n))
    assert output is x and seen == [("other", None), "third"]
    plain = skippable(stash="x")(nn.Identity)()
    assert plain.dispatch(x, seen.append, seen.append) is x and len(seen) == 2


def test_dispatch_refuses_other_messages():
    with pytest.raises(TypeError, match="expected forward to yield stash or pop, got"):
        layer_of((), (), 3).dispatch(torch.ones(1), print, print)


@pytest.mark.parametrize("message", [stash("x", None), pop("x")])
def test_failure_of_a_handler_reaches_the_caller_and_ends_the_layer(message):
    # An iterator that is at its end must not pass for the end of the layer.
    ended = []

    class Layer(nn.Module):
        def forward(self, x):
            try:
                yield message
            finally:
                ended.append(True)

    def fail(*_):
        next(iter(()))

    with pytest.raises(StopIteration):
        skippable()(Layer)().dispatch(torch.ones(1), fail, fail)
    assert ended == [True]


def test_dispatch_does_not_hold_a_stashed_tensor_while_the_layer_computes():
    class Make(nn.Module):
        def forward(self, x):
            kept = x + 1
            reference = weakref.ref(kept)
            yield stash("skip", kept)
            del kept
            assert reference() is None
            return x

    skippable(stash="skip")(Make)().dispatch(torch.ones(1), lambda *_: None, print)


# --- copies ------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_wrapped_layers_pickle(protocol):
    ns = Namespace()
    model = nn.Sequential(StashTwo(4).isolate(ns, only="a"), PopStash())
    model[1].isolate(ns, only="a")
    again = pickle.loads(pickle.dumps(model, protocol))
    assert type(again[0]) is StashTwo
    assert type(again[0].module) is type(model[0].module)
    assert list(again[0].stashable()) == [(ns, "a"), (None, "b")]
    x = torch.randn(2, 4, dtype=torch.double)
    assert torch.equal(again(x), model(x))


def test_wrapped_layers_deepcopy():
    @skippable(stash="skip")
    class Local(nn.Linear):
        def forward(self, x):
            yield stash("skip", x)
            return super().forward(x)

    model = nn.Sequential(Local(3, 3), Pop())
    again = copy.deepcopy(model)
    x = torch.randn(2, 3)
    assert torch.equal(again(x), model(x))
    assert again[0].module.weight is not model[0].module.weight


def test_decorating_a_class_from_elsewhere_leaves_it_as_it_is():
    skippable()(nn.Linear)
    assert nn.Linear.__qualname__ == "Linear"
    pickle.dumps(nn.Linear(2, 2))
