"""Each optimizer step counts once, and as a batch only where one is in hand."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.state.state import TrainingState
from tests.engine.scenario import config, make_engine
from tests.support.private import run_of
from tests.support.toy import ToySet, toy_model

DATA = ToySet(24)


def train(engine, epochs, steps_before=0):
    """Return the batches of each pass, after so many steps on bare inputs."""
    seen = []
    for _ in engine.epochs(epochs):
        for _ in range(steps_before):
            engine.step(DATA.x[:4], DATA.y[:4])
        indices = []
        for batch in engine.batches(DATA, 4):
            engine.step(batch)
            indices.append(batch.index)
        seen.append(indices)
    return seen


@pytest.mark.parametrize("steps", [3, 9])
def test_steps_outside_of_a_pass_take_no_batch_from_the_next_one(steps):
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        engine.prepare(DATA, 4)
        assert train(engine, 2, steps_before=steps) == [[*range(6)]] * 2
        assert run_of(engine).state.step == 2 * (6 + steps)


def test_a_step_before_the_rest_of_a_resumed_pass_takes_no_batch_from_it(tmp_path):
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        for batch in engine.batches(DATA, 4):
            engine.step(batch)
            if batch.index == 2:
                engine.save(tmp_path / "saved.pt")
                break
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        engine.load(tmp_path / "saved.pt")
        engine.prepare(DATA, 4)
        assert train(engine, 1, steps_before=2) == [[3, 4, 5]]


def test_steps_on_bare_inputs_within_a_pass_are_those_of_its_batches():
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        for batch in engine.batches(DATA, 4):
            for half in (slice(2), slice(2, 4)):
                engine.step(batch.inputs[half], batch.targets[half])
            assert run_of(engine).state.batch == batch.index + 1


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer as libraries do: without the base's constructor."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.base, self.defaults = base, dict(base.defaults)
        self.param_groups, self.state = base.param_groups, defaultdict(dict)

    def step(self, closure=None):
        return self.base.step(closure)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


class Derived(torch.optim.SGD):
    """Steps by its base's step, whose class is prepared for hooks, too."""

    def step(self, closure=None):
        return super().step(closure)


def wrapped(parameters):
    class Fresh(Wrapper):  # torch prepares a class once: no other test has had it
        def step(self, closure=None):
            return self.base.step(closure)

    return Fresh(torch.optim.AdamW(parameters))


def derived(parameters):
    torch.optim.SGD(parameters)  # which prepares the base
    return Derived(parameters)


@pytest.mark.parametrize("rates", [None, torch.optim.lr_scheduler.StepLR])
@pytest.mark.parametrize("optimizer", [wrapped, derived])
def test_optimizers_as_people_write_them_count_every_step_once(optimizer, rates):
    engine = pt.PipeTransformer(
        toy_model(1),
        optimizer=optimizer,
        lr_scheduler=rates and (lambda built: rates(built, 1)),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    )
    counts = []
    with engine:
        for batch in engine.batches(DATA, 4):
            engine.step(batch)
            counts.append(run_of(engine).state.step)
    assert counts == [1, 2, 3, 4, 5, 6]


def test_a_step_that_broke_off_does_not_keep_later_ones_from_counting():
    def fail(*_):
        raise ZeroDivisionError

    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    state = TrainingState(nn.Sequential())
    state.build_optimizer([weight], torch.optim.SGD, None)
    state.hand_out(0)
    handle = state.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        state.optimizer.step()
    handle.remove()
    state.hand_out(1)
    state.optimizer.step()
    assert (state.step, state.batch) == (1, 2)


class Failing(torch.optim.SGD):
    """Fails once, as where memory is short."""

    fails = True

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise MemoryError("once")
        return super().step(closure)


def test_a_step_that_failed_and_was_taken_again_counts_once():
    engine = pt.PipeTransformer(
        toy_model(1),
        optimizer=lambda parameters: Failing(parameters, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(),
    )
    with engine:
        for batch in engine.batches(DATA, 4):
            engine.backward(engine.loss(batch))
            if batch.index == 0:
                with pytest.raises(MemoryError):
                    engine.update()
            engine.update()
            state = run_of(engine).state
            assert (state.step, state.batch) == (batch.index + 1, batch.index + 1)
            assert state.can_be_saved


def test_a_batch_of_several_backwards_and_one_step_counts_once():
    losses = []
    with make_engine(freeze=pt.freeze.Guarded(), depth=1) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(DATA, 4):
                engine.backward(engine.loss(batch) + 3.0)
                engine.optimizer.zero_grad()
                losses.append(engine.loss(batch))
                engine.backward(losses[-1])
                engine.update()
    for epoch, record in enumerate(engine.history.epochs):
        assert (record.samples, record.unique_samples) == (24, 24)
        assert record.optimizer_steps == 6
        mean = sum(loss.item() for loss in losses[6 * epoch :][:6]) / 6
        assert record.train_loss == pytest.approx(mean)


def test_batches_of_a_step_of_ones_own_count_each():
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(DATA, 4):
                engine.backward(engine.loss(batch))
                if batch.index % 2:
                    engine.update()
    (record,) = engine.history.epochs
    assert (record.samples, record.optimizer_steps) == (24, 3)
