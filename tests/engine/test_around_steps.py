"""What scripts do around steps: before the first, between two, and after one failed."""

import copy
import logging

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config, make_engine
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model

ALONE = pt.PlanConfig(num_stages=1, num_microbatches=1)


def engine_of(model, *, optimizer=None, loss=None, callbacks=(), **changes):
    return pt.PipeTransformer(
        model,
        optimizer=optimizer or (lambda params: torch.optim.SGD(params, lr=0.1)),
        loss=loss or nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        callbacks=callbacks,
        config=config(**{"plan": ALONE, **changes}),
    )


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- draws -------------------------------------------------------------------------


def two_forwards(*, logs=False, **plan):
    """Return the outputs of two forwards of each batch, and the weights at the end."""
    model, found = toy_model(4, dropout=0.5, dtype=torch.float64), []
    settings = dict(plan=pt.PlanConfig(**plan), pipe=pt.PipeConfig(num_slots=2))
    with engine_of(model, **settings) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24, dtype=torch.float64), 12):
                if logs:
                    with torch.no_grad():
                        engine.model(batch)
                one, two = engine.model(batch), engine.model(batch)
                found += [one.detach(), two.detach()]
                engine.backward(engine.loss(batch) + (one - two).square().mean())
                engine.update()
    return found, weights_of(model)


def test_two_forwards_of_a_batch_draw_each_for_themselves():
    found, weights = two_forwards(num_stages=1, num_microbatches=2)
    assert not torch.equal(found[0], found[1])
    again = two_forwards(num_stages=2, num_microbatches=2)
    for one, two in zip(found, again[0], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, again[1], rtol=1e-12, atol=1e-12)


def test_bare_inputs_of_one_step_draw_each_for_themselves():
    with engine_of(toy_model(2, dropout=0.5)) as engine:
        next(engine.batches(ToySet(24), 12))
        same = torch.ones(4, 4)
        assert not torch.equal(engine.model(same), engine.model(same))


def test_a_forward_without_gradients_changes_no_draw():
    plan = dict(num_stages=1, num_microbatches=2)
    assert torch.equal(two_forwards(**plan)[1], two_forwards(logs=True, **plan)[1])


# -- gradients ---------------------------------------------------------------------


def train(model, *, fails_at=None, errors=(), accumulation_steps=1, **changes):
    """Train a pass; return the weights, and how often a step has failed."""
    failed = 0
    changes = {"accumulation_steps": accumulation_steps, **changes}
    with engine_of(model, **changes) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 6):
                if batch.index == fails_at:
                    Failing.on = True
                try:
                    engine.step(batch)
                except errors:
                    failed += 1
                    Failing.on = False
    return weights_of(model), failed


class Failing(torch.autograd.Function):
    """A layer's backward that fails, or gives NaN."""

    on = False

    @staticmethod
    def forward(ctx, x, gives_nan):
        ctx.gives_nan = gives_nan
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Failing.on and not ctx.gives_nan:
            raise RuntimeError("no memory, say")
        return grad * float("nan") if Failing.on else grad, None


class Fails(nn.Module):
    def __init__(self, gives_nan):
        super().__init__()
        self.gives_nan = gives_nan

    def forward(self, x):
        return Failing.apply(x, self.gives_nan)


def failing_model(gives_nan=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Fails(gives_nan), nn.Linear(8, 3))


def test_gradients_from_before_the_run_are_not_added():
    model = toy_model(2)
    clean, data = copy.deepcopy(model), ToySet(24)
    nn.functional.cross_entropy(model(data.x), data.y).backward()
    assert torch.equal(train(model)[0], train(clean)[0])


@pytest.mark.parametrize("gives_nan", [False, True])
def test_a_step_that_fails_leaves_no_gradient_to_the_next(gives_nan):
    error = FloatingPointError if gives_nan else RuntimeError
    options = dict(clip_grad_norm=1.0) if gives_nan else {}
    found, failed = train(
        failing_model(gives_nan), fails_at=3, errors=(error,), **options
    )
    assert failed == 1
    # The batch before was the last that trained.
    model = failing_model(gives_nan)
    with engine_of(model, **options) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 6):
                if batch.index < 3:
                    engine.step(batch)
    assert torch.equal(found, weights_of(model))
    after, failed = train(
        failing_model(gives_nan), fails_at=0, errors=(error,), **options
    )
    assert failed == 1 and after.isfinite().all()


def test_what_a_failed_batch_shares_a_step_with_is_left_with_it(caplog):
    """The first of two batches fails in backward: the second alone trains."""
    found, failed = train(
        failing_model(), fails_at=2, errors=(RuntimeError,), accumulation_steps=2
    )
    assert failed == 1
    assert caplog.text == "", "none before it"
    expected = failing_model()
    train_until(expected, 2)
    data, ids = ToySet(24), {}
    with engine_of(failing_model(), accumulation_steps=2) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(data, 6):
                ids[batch.index] = batch.ids
                engine.step(batch)
    loss = nn.functional.cross_entropy(expected(data.x[ids[3]]), data.y[ids[3]]) / 2
    loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(found, weights_of(expected))


def test_gradients_that_are_dropped_with_a_failed_batch_are_told(caplog):
    model = failing_model()
    found, failed = train(
        model, fails_at=3, errors=(RuntimeError,), accumulation_steps=2
    )
    assert failed == 1 and "without the 1 before it, whose gradients" in caplog.text
    expected = failing_model()
    train_until(expected, 2)
    torch.testing.assert_close(found, weights_of(expected))


def train_until(model, end):
    with engine_of(model, accumulation_steps=2) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 6):
                if batch.index < end:
                    engine.step(batch)


def test_parameters_that_the_optimizer_leaves_out_are_told_and_gather_nothing(caplog):
    model = toy_model(2)
    head = model[-1]
    options = dict(
        optimizer=lambda _: torch.optim.SGD(head.parameters(), lr=0.1),
        clip_grad_norm=0.1,
    )
    with engine_of(model, **options) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
                assert all(p.grad is None for p in model_of(engine).parameters())
    assert "parameters that train are in none of its groups" in caplog.text
    caplog.clear()
    engine_of(toy_model(2))
    assert "in none of its groups" not in caplog.text


def penalised(rank):
    """A batch of which one replica has no row, with a penalty beside its loss."""
    model = toy_model(2, dtype=torch.float64)
    settings = dict(pipe=pt.PipeConfig(num_slots=1))
    with engine_of(model, **settings) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(7, dtype=torch.float64), 3):
                norm = sum(p.square().sum() for p in model.parameters())
                engine.backward(engine.loss(batch) + 0.1 * norm)
                engine.update()
    return weights_of(model)


@pytest.mark.distributed
def test_a_penalty_counts_once_where_a_replica_has_no_rows():
    (alone,) = run_ranks(penalised, 1)
    for found in run_ranks(penalised, 2):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)


# -- modes -------------------------------------------------------------------------


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_evaluations_give_each_module_its_own_mode_back():
    model = normed()
    norm = model[1]
    with engine_of(model) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                norm.eval()
                before = norm.running_mean.clone()
                engine.evaluate(ToySet(8, seed=5))
                assert not norm.training and model[0].training
                engine.step(batch)
                assert torch.equal(norm.running_mean, before)
        model.eval()
        engine.evaluate(ToySet(8, seed=5))
        assert not any(module.training for module in model.modules())
        model.train()
        engine.evaluate(ToySet(8, seed=5))
        assert all(module.training for module in model.modules())


def test_a_mode_that_a_script_sets_in_a_pass_outlives_changes_of_plan():
    model = normed()
    modes = []
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, 1, 0, 1]),
        config=config(plan=ALONE, freeze_every=1),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 6):
                if batch.index == 0:
                    modes.append(model[1].training)
                    model[1].eval()
                engine.step(batch)
                modes.append(model[1].training)
    assert modes == [True, False, False, False, False] * 2
    assert len(engine.history.transformations) >= 3


def test_an_evaluation_that_fails_gives_modes_back_too():
    model = normed()
    with engine_of(model) as engine:
        next(engine.batches(ToySet(24), 12))
        model[1].eval()
        with pytest.raises(ZeroDivisionError):
            engine.evaluate(ToySet(8), {"bad": lambda *_: 1 / 0})
        assert not model[1].training and model[2].training


# -- what is told, and what is refused -----------------------------------------------


class Told(pt.report.Callback):
    def __init__(self):
        self.losses = []

    def on_step(self, step):
        self.losses.append(step.loss)


def test_steps_of_an_own_loop_are_told_with_the_loss_of_its_backward():
    told, losses = Told(), []
    with engine_of(toy_model(2), callbacks=[told]) as engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 6):
                if batch.index == 2:
                    losses.append(engine.step(batch).item())
                    continue
                loss = nn.functional.cross_entropy(engine.model(batch), batch.targets)
                losses.append(loss.item())
                engine.backward(loss)
                engine.update()
    assert told.losses == losses


class Keyed(ToySet):
    def input_key(self, index, epoch):
        return index


@pytest.mark.parametrize("another", [False, True])
def test_another_set_with_keys_of_its_own_is_warned_of(another, caplog):
    first = Keyed(24)
    with caplog.at_level(logging.WARNING), engine_of(toy_model(2)) as engine:
        for epoch in engine.epochs(3):
            data = Keyed(24, seed=epoch) if another else first
            for batch in engine.batches(data, 12):
                engine.step(batch)
    warned = caplog.text.count("a key must be of one content in all sets of a run")
    assert warned == int(another)


def test_a_metric_called_loss_is_refused():
    with engine_of(toy_model(2)) as engine:
        next(engine.batches(ToySet(24), 12))
        text = r"metrics: expected names beside 'loss', which is the loss's, got 'loss'"
        with pytest.raises(ValueError, match=text):
            engine.evaluate(ToySet(8), {"loss": lambda outputs, _: outputs.mean(1)})


def test_a_loss_by_rows_is_refused_in_evaluations_too():
    loss = nn.CrossEntropyLoss(reduction="none")
    engine = make_engine(
        freeze=pt.freeze.Never(), loss=loss, config=config(check_loss=False)
    )
    with engine:
        engine.prepare(ToySet(24), 12)
        text = r"loss: expected a scalar mean over rows, got shape \(8,\)"
        with pytest.raises(ValueError, match=text):
            engine.evaluate(ToySet(8))
