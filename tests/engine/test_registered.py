"""What a script registers goes where the training state goes: to ranks, to files."""

import copy
import logging
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.state.message import decode, encode
from pipetransformer.state.registered import Registered
from tests.engine.scenario import config, make_engine, registered_average, schedule
from tests.support.documents import ROOT, blocks
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

SHRINKING = pt.PlanConfig(slot_memory_bytes=2 * 13_500, reshape="always")


class Counter:
    """Counts steps, as a script may."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "last": (self.count, None)}

    def load_state_dict(self, state):
        self.count, self.last = state["count"], state["last"]


def train(rank, freezes, plan, epochs=3, folder=None, resume=False, stop=None):
    """Train in float64; return the average and the count of each active rank."""
    engine = make_engine(
        freeze=schedule(*freezes),
        dtype=torch.float64,
        config=config(
            plan=plan,
            checkpoint=pt.CheckpointConfig(
                directory=folder, every_steps=2 if folder else None, resume=resume
            ),
        ),
    )
    counter = Counter()
    engine.register("counter", counter)  # before the block or in it
    with engine:
        average = registered_average(engine)
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(ToySet(50, dtype=torch.float64), 12):
                if stop == (epoch, batch.index):
                    return None
                engine.step(batch)
                average.update_parameters(model_of(engine))
                counter.count += 1
        active = engine.plan is not None
        epochs = engine.history.to_json()["epochs"]
        replicas = [e["num_replicas"] for e in epochs]
    found = {n: v.clone() for n, v in average.state_dict().items()}
    return (found, counter.count, replicas) if active else None


@pytest.mark.distributed
def test_replicas_that_join_have_the_average_of_a_run_without_changes():
    results = run_ranks(train, 4, (0, 2, 6), SHRINKING, timeout_s=110)
    (alone,) = run_ranks(train, 1, (0, 2, 6), pt.PlanConfig())
    found, count, replicas = results[0]
    assert replicas[0] == 1 and replicas[-1] == 4, "no replica joined"
    assert count == alone[1] == 15
    for other in results[1:]:
        assert other[1] == count
        assert all(torch.equal(other[0][name], found[name]) for name in found)
    assert found["n_averaged"] == 15
    for name, value in alone[0].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.distributed
def test_a_resumed_run_ends_with_the_average_of_a_whole_one(world, tmp_path):
    plan = pt.PlanConfig(num_stages=1)
    whole = run_ranks(train, world, (0, 3), plan)[0]
    options = {"timeout_s": 110}
    run_ranks(train, world, (0, 3), plan, 3, str(tmp_path), False, (1, 3), **options)
    resumed = run_ranks(train, world, (0, 3), plan, 3, str(tmp_path), True, **options)
    for found, count, _ in resumed:
        assert count == whole[1] == 15
        for name, value in whole[0].items():
            # Records of the cache are computed anew, in other batches.
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_finished_run_that_comes_back_has_what_was_registered(tmp_path):
    plan = pt.PlanConfig(num_stages=1)
    args = 0, (0, 3), plan, 3, str(tmp_path), True
    whole, again = train(*args), train_nothing(*args)
    assert again[1] == whole[1] == 15
    assert whole[0].keys() == again[0].keys()
    assert all(torch.equal(again[0][name], whole[0][name]) for name in whole[0])


def train_nothing(rank, freezes, plan, epochs, folder, resume):
    engine = make_engine(
        freeze=schedule(*freezes),
        dtype=torch.float64,
        config=config(
            plan=plan, checkpoint=pt.CheckpointConfig(directory=folder, resume=resume)
        ),
    )
    counter = Counter()
    engine.register("counter", counter)
    with engine:
        average = registered_average(engine)
        assert list(engine.epochs(epochs)) == []
        assert engine.plan is None
    return average.state_dict(), counter.count


class NeedsOptimizer(Counter):
    """Loads where the engine has an optimizer alone."""

    engine = None

    def load_state_dict(self, state):
        if self.engine is not None:
            self.engine.optimizer.param_groups  # noqa: B018  # raises without a plan
        super().load_state_dict(state)


def test_a_state_that_loads_with_a_plan_alone_waits_for_it(tmp_path, caplog):
    counters = []
    for epochs in (2, 2):
        settings = pt.CheckpointConfig(directory=str(tmp_path), resume=True)
        engine = make_engine(freeze=schedule(0), config=config(checkpoint=settings))
        counters.append(NeedsOptimizer())
        if counters[1:]:
            counters[-1].engine = engine
        engine.register("counter", counters[-1])
        last = Counter()
        engine.register("last", last)  # behind it
        with engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(ToySet(24), 12):
                    engine.step(batch)
                    counters[-1].count += 1
                    last.count += 1
            if counters[1:]:
                assert "is loaded with the first plan (engine.prepare)" in caplog.text
                assert counters[-1].count == 0 and last.count == 4
                engine.prepare(ToySet(24), 12)
    assert [counter.count for counter in counters] == [4, 4]


def test_what_a_finished_run_lacks_is_told(tmp_path):
    train(0, (0, 3), pt.PlanConfig(num_stages=1), 3, str(tmp_path))
    settings = pt.CheckpointConfig(directory=str(tmp_path), resume=True)
    engine = make_engine(
        freeze=schedule(0, 3), dtype=torch.float64, config=config(checkpoint=settings)
    )
    engine.register("another", Counter())
    with pytest.raises(ValueError, match="expected states of what is registered, ano"):
        with engine:
            list(engine.epochs(3))


def with_plateau(rank, freezes, plan, epochs=4, folder=None, resume=False):
    """Train with the guide's ReduceLROnPlateau; return rates and what it counted."""
    page = {"torch": torch}
    codes = [block.code for block in blocks(ROOT / "docs/guide.md", "python")]
    exec(next(code for code in codes if "class Plateau" in code), page)
    engine = make_engine(
        freeze=schedule(*freezes),
        config=config(
            plan=plan,
            scheduler_interval="epoch",
            checkpoint=pt.CheckpointConfig(directory=folder, resume=resume),
        ),
    )
    plateau = page["Plateau"](engine, patience=0, threshold=0.9, factor=0.5)
    rates = []
    with engine:
        engine.register("plateau", plateau)
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
            plateau.step(engine.evaluate(ToySet(12))["loss"])
            if engine.plan is not None:
                rates.append(engine.optimizer.param_groups[0]["lr"])
        active = engine.plan is not None
    found = plateau.state_dict()
    return (rates, found["last_epoch"], found["best"]) if active else None


@pytest.mark.distributed
def test_the_guides_plateau_goes_to_replicas_that_join_and_to_checkpoints(tmp_path):
    shrinks = pt.PlanConfig(num_stages=2, num_microbatches=1)
    whole = run_ranks(with_plateau, 2, (0, 0, 6), shrinks, timeout_s=110)
    rates, steps, best = whole[0]
    assert rates == [0.01, 0.005, 0.0025, 0.00125] and steps == 4
    assert whole[1] == (rates[2:], steps, best), "it joins at the third epoch"
    where, options = str(tmp_path), {"timeout_s": 110}
    run_ranks(with_plateau, 1, (0,), pt.PlanConfig(), 2, where, **options)
    (again,) = run_ranks(
        with_plateau, 1, (0,), pt.PlanConfig(), 4, where, True, **options
    )
    assert again[:2] == (rates[2:], 4)


def names_that_differ(rank):
    engine = make_engine(freeze=pt.freeze.Never())
    with pytest.raises(ValueError) as caught:
        with engine:
            if rank == 1:
                engine.register("counter", Counter())
            engine.prepare(ToySet(12), 4)
    return str(caught.value)


@pytest.mark.distributed
def test_names_that_differ_between_ranks_are_refused_on_all():
    texts = run_ranks(names_that_differ, 3)
    assert set(texts) == {
        'register: expected [] on every rank, as on rank 0, got ["counter"] on rank 1'
    }


def different_averages(rank):
    engine = make_engine(
        freeze=schedule(0, 6), config=config(plan=pt.PlanConfig(num_stages=1))
    )
    with engine:
        average = registered_average(engine)
        average.n_averaged += rank
        engine.prepare(ToySet(12), 4)  # all others take rank 0's
    return int(average.n_averaged)


@pytest.mark.distributed
def test_all_begin_with_what_rank_0_has_registered():
    assert run_ranks(different_averages, 2) == [0, 0]


def refused(kind, text, name, registered, first=None):
    engine = make_engine(freeze=pt.freeze.Never())
    with engine:
        if first is not None:
            engine.register(*first)
        with pytest.raises(kind, match=re.escape(text)):
            engine.register(name, registered)


class Unreadable(Counter):
    def state_dict(self):
        return {"count": Counter()}


def test_what_cannot_be_registered_is_refused():
    refused(TypeError, "register: expected a name of type str, got 3", 3, Counter())
    refused(ValueError, "expected a name of its own, got an empty one", "", Counter())
    text = "register: expected a name of its own, got 'a' twice"
    refused(ValueError, text, "a", Counter(), ("a", Counter()))
    text = (
        "register('a'): expected an object with state_dict and load_state_dict, got a "
        "dict without state_dict and load_state_dict"
    )
    refused(TypeError, text, "a", {})
    text = (
        "register('a'): expected a state of tensors and plain values, got one that "
        "does not travel, of Counter at ['count']"
    )
    refused(TypeError, text, "a", Unreadable())


def test_a_call_out_of_place_is_refused():
    engine = make_engine(freeze=pt.freeze.Never())
    with engine:
        engine.prepare(ToySet(12), 4)
        with pytest.raises(ValueError, match="a call before the first plan, which"):
            engine.register("a", Counter())
    with pytest.raises(ValueError, match="a call inside its with block"):
        engine.register("a", Counter())


def saved(path, *names):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        for name in names:
            engine.register(name, Counter(7))
        engine.prepare(ToySet(12), 4)
        engine.save(path)


def test_a_checkpoint_that_lacks_a_state_is_refused(tmp_path):
    saved(tmp_path / "a.pt", "one")
    text = "a.pt: expected states of what is registered, one, two, got none of two"
    with pytest.raises(ValueError, match=re.escape(text)):
        with make_engine(freeze=pt.freeze.Never()) as engine:
            engine.load(tmp_path / "a.pt")
            engine.register("one", Counter())
            engine.register("two", Counter())
            engine.prepare(ToySet(12), 4)


def test_states_that_nothing_is_registered_for_are_told(tmp_path, caplog):
    saved(tmp_path / "a.pt", "one", "two")
    counter = Counter()
    with (
        caplog.at_level(logging.WARNING),
        make_engine(freeze=pt.freeze.Never()) as engine,
    ):
        engine.register("two", counter)
        engine.load(tmp_path / "a.pt")
        engine.prepare(ToySet(12), 4)
    assert counter.count == 7 and counter.last == (7, None)
    assert "a.pt: states that nothing is registered for are left out: one" in (
        caplog.text
    )


def test_a_state_that_does_not_load_is_named_with_its_file(tmp_path):
    saved(tmp_path / "a.pt", "one")
    with pytest.raises(RuntimeError, match=r"a.pt: expected states of one, got what "):
        with make_engine(freeze=pt.freeze.Never()) as engine:
            engine.register("one", nn.Linear(2, 2))
            engine.load(tmp_path / "a.pt")
            engine.prepare(ToySet(12), 4)


def test_states_of_modules_travel_with_versions_and_tensors_of_their_own():
    registered, norm = Registered(), nn.BatchNorm1d(2)
    registered.add("b", norm)
    registered.add("a", Counter(2))
    message, tensors = encode(registered.tree())
    assert [t.data_ptr() for t in tensors] == [
        t.data_ptr() for t in norm.state_dict().values()
    ]
    tree, allocated = decode(message)
    assert list(tree) == ["a", "b"], "the order must not be that of the calls"
    for given, own in zip(tensors, allocated, strict=True):
        own.copy_(given)
    seen = {}
    other = Registered()
    other.add("a", Counter())
    other.add("b", nn.BatchNorm1d(2))
    other._objects["b"].load_state_dict = seen.update
    norm_state = norm.state_dict()
    other._objects["b"].load_state_dict = lambda s: seen.update(s, meta=s._metadata)
    other.load(tree)
    assert seen.pop("meta") == norm_state._metadata
    assert isinstance(norm_state, OrderedDict) and list(seen) == list(norm_state)


def test_what_the_script_does_twice_after_a_loss_counts_once():
    """A rank that is given the state of one that is ahead goes the same way again."""
    registered, average = Registered(), nn.Linear(2, 2)
    registered.add("average", average)
    given = copy.deepcopy(average.state_dict())  # of the rank that is ahead
    registered.hold()
    with torch.no_grad():
        average.weight.add_(1)  # the script, between two operations
    weight = registered.tree()["average"]["state"]["weight"]
    assert torch.equal(weight, given["weight"]), "what is saved meanwhile"
    registered.settle()
    assert torch.equal(average.weight, given["weight"])
    with torch.no_grad():
        average.weight.add_(1)
    registered.settle()  # nothing is held any more
    assert torch.equal(average.weight, given["weight"] + 1)


def test_a_bare_step_begins_with_the_states_that_are_held():
    with make_engine(freeze=pt.freeze.Never()) as engine:
        counter = Counter()
        engine.register("counter", counter)
        engine.prepare(ToySet(12), 4)
        held = run_of(engine).state.registered
        operations = ("step", "loss", "backward")
        batches = engine.batches(ToySet(12), 4)
        for operation, batch in zip(operations, batches, strict=True):
            loss = engine.loss(batch) if operation == "backward" else None
            counter.count = 7
            held.hold()
            counter.count = 100
            if operation == "step":
                engine.step(batch.inputs, batch.targets)
            elif operation == "loss":
                engine.loss(batch)
            else:
                engine.backward(loss)
            assert counter.count == 7, operation
