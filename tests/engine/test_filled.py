"""Frozen layers of the next batch in the pipeline's gaps: the same training."""

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autodp import PeerFailure
from tests.engine.losses import SURVIVING
from tests.engine.scenario import config, is_active, make_engine, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.toy import ToySet, accuracy, toy_model, toy_units

DEADLINE_S = 60
UNCACHED = pt.CacheConfig(enabled=False)


def settings(prefix, *, stages=2, microbatches=4, order="gpipe", **changes):
    return config(
        plan=pt.PlanConfig(
            num_stages=stages, num_microbatches=microbatches, prefix=prefix
        ),
        pipe=pt.PipeConfig(num_slots=2, schedule=order),
        cache=UNCACHED,
        **changes,
    )


def weights(engine):
    return [p.detach().clone() for p in model_of(engine).parameters()]


def close(one, other, tolerance=1e-12):
    return all(
        torch.allclose(a, b, rtol=0, atol=tolerance)
        for a, b in zip(one, other, strict=True)
    )


class RowsOf:
    """Counts the rows that a layer has seen, and in which threads."""

    def __init__(self, layer):
        self.rows, self.threads = 0, set()
        self._lock = threading.Lock()
        layer.register_forward_hook(self._note)

    def _note(self, layer, inputs, output):
        with self._lock:
            self.rows += len(output)
            self.threads.add(threading.get_ident())


def fit(freeze, config, *, epochs=3, size=50, own_loop=False, within=False, loss=None):
    """Train; return weights, losses, rows of the first layer by epoch, and plans."""
    engine = make_engine(freeze=freeze, dtype=torch.float64, config=config, loss=loss)
    data = ToySet(size, dtype=torch.float64)
    seen, rows, plans, metrics = RowsOf(model_of(engine)[0]), [], [], []
    with engine:
        for _ in engine.epochs(epochs):
            before = seen.rows
            for number, batch in enumerate(engine.batches(data, 12)):
                if own_loop:
                    output = engine.model(batch)
                    engine.backward(nn.functional.cross_entropy(output, batch.targets))
                    engine.update()
                else:
                    engine.step(batch)
                if within and number == 1:
                    found = engine.evaluate(ToySet(21, seed=2, dtype=torch.float64))
                    metrics.append(found["loss"])
            rows.append(seen.rows - before)
            plans.append(engine.plan)
        losses = [record.train_loss for record in engine.history.epochs]
        return weights(engine), losses + metrics, rows, plans


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb-h1"])
def test_filled_gaps_train_as_frozen_layers_in_front_of_the_step(order):
    freezes = (0, 2, 4)
    plain = fit(schedule(*freezes), settings("replicated", order=order))
    alone = fit(schedule(*freezes), settings("replicated", stages=1, microbatches=1))
    filled = fit(schedule(*freezes), settings("filled", order=order))
    assert [p.prefix for p in filled[3]] == ["none", "filled", "filled"]
    assert [p.prefix for p in plain[3]] == ["none", "replicated", "replicated"]
    assert close(filled[0], plain[0]) and close(filled[0], alone[0])
    assert filled[1] == pytest.approx(alone[1], rel=1e-12)
    # The last epoch's next batch is not asked for; no sample passes twice.
    assert filled[2][1:] == plain[2][1:]


def test_no_sample_passes_a_frozen_layer_twice():
    _, _, rows, plans = fit(schedule(3), settings("filled"))
    assert plans[0].prefix == "filled"
    # The first pass also measures; 50 samples in batches of 12.
    assert rows[1:] == [50, 50]


def test_the_next_batch_runs_before_this_step_is_over():
    seen, wanted = None, [0]

    class Waits(nn.CrossEntropyLoss):
        def forward(self, outputs, targets):
            limit = time.monotonic() + DEADLINE_S
            while wanted[0] and seen.rows < wanted[0]:
                assert time.monotonic() < limit, "nothing runs ahead"
                time.sleep(0.001)
            return super().forward(outputs, targets)

    engine = make_engine(freeze=schedule(3), loss=Waits(), config=settings("filled"))
    ahead = []
    with engine:
        for epoch in engine.epochs(2):
            if epoch == 1:
                seen = RowsOf(model_of(engine)[0])
            for number, batch in enumerate(engine.batches(ToySet(48), 12)):
                if epoch == 1:
                    wanted[0] = 12 * min(number + 2, 4)  # this batch and the next
                engine.step(batch)
                if epoch == 1:
                    ahead.append(seen.rows)
    assert ahead == [24, 36, 48, 48]
    assert threading.get_ident() not in seen.threads


@pytest.mark.parametrize(
    "changes", [{"accumulation_steps": 2}, {"freeze_every": 3}, {"amp": "bf16"}]
)
def test_other_settings_change_nothing_of_it(changes):
    freezing = (0, 1, 2, 3, 4) if "freeze_every" in changes else (0, 2, 4)
    tolerance = 5e-2 if "amp" in changes else 1e-12
    plain = fit(schedule(*freezing), settings("replicated", **changes))
    filled = fit(schedule(*freezing), settings("filled", **changes))
    assert filled[3][-1].prefix == "filled"
    assert close(filled[0], plain[0], tolerance)
    assert filled[1] == pytest.approx(plain[1], rel=tolerance)
    if "freeze_every" not in changes:
        assert filled[2][1:] == plain[2][1:], "nothing is computed twice"


def test_an_own_loop_and_evaluations_in_between_change_nothing_of_it():
    freeze = (2, 2, 0, 3)  # layers thaw, too
    options = {"epochs": 4, "own_loop": True, "within": True}
    plain = fit(schedule(*freeze), settings("replicated"), **options)
    filled = fit(schedule(*freeze), settings("filled"), **options)
    assert close(filled[0], plain[0])
    assert filled[1] == pytest.approx(plain[1], rel=1e-12)
    assert filled[2][1:] == plain[2][1:], "nothing is computed twice"


class Noisy(nn.Module):
    """Draws random numbers in eval mode, too."""

    def forward(self, x):
        return x + 0.1 * torch.rand_like(x)


@pytest.mark.parametrize("steps", [1, 2])
def test_draws_of_frozen_layers_are_those_of_their_own_step(steps, monkeypatch):
    """Begun ahead or in their step, they are keyed alike, and nothing is redone."""

    def train(ahead):
        model = toy_model(dtype=torch.float64)
        model = nn.Sequential(model[0], Noisy(), *model[1:])
        seen = RowsOf(model[1])
        engine = pt.PipeTransformer(
            model,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            freeze=schedule(2),
            units=[n + 1 for n in toy_units()],
            config=settings("filled", accumulation_steps=steps),
        )
        with monkeypatch.context() as patch, engine:
            if not ahead:
                patch.setattr(
                    "pipetransformer.replica.replica.ActiveModel._run_ahead",
                    lambda *_: None,
                )
            for _ in engine.epochs(2):
                before = seen.rows
                for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                    engine.step(batch)
            assert seen.rows - before == 48
            return weights(engine)

    assert all(map(torch.equal, train(True), train(False)))


def test_a_single_stage_and_cached_activations_have_nothing_to_fill():
    for prefix in ("auto", "filled"):
        lone = settings(prefix, stages=1, microbatches=1)
        _, _, rows, plans = fit(schedule(2), lone)
        assert rows[1:] == [50, 50]
        cached = dataclasses.replace(settings(prefix), cache=pt.CacheConfig())
        _, _, rows, plans = fit(schedule(2), cached)
        names = {"auto": "replicated", "filled": "filled"}
        assert {(p.prefix, p.cache) for p in plans} == {(names[prefix], "host")}
        assert rows[1:] == [0, 0]


def test_the_planner_fills_gaps_where_that_is_faster_and_says_so():
    engine = make_engine(freeze=schedule(3), config=settings("auto"))
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
        plan, text = engine.plan, str(engine.explain())
    assert plan.prefix == "filled"
    assert "prefix filled" in plan.describe()
    assert "4 frozen layers in the bubbles of the step before" in text
    others = {c.prefix: c.simulated_step_ns for c in plan.candidates}
    assert others["replicated"] > plan.simulated_step_ns


def test_what_a_frozen_layer_raises_ahead_comes_with_its_own_step():
    class Fails(nn.Module):
        calls = 0

        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                Fails.calls += 1
            if Fails.calls > 12:
                raise ZeroDivisionError("in a frozen layer")
            return x

    model = toy_model()
    model = nn.Sequential(model[0], Fails(), *model[1:])
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(2),
        units=[n + 1 for n in toy_units()],
        config=settings("filled"),
    )
    with pytest.raises(ZeroDivisionError, match="in a frozen layer"), engine:
        for _ in engine.epochs(9):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)


def changed(engine, batch, how):
    """Change what a step is about to use, once its frozen layers may have run."""
    model = model_of(engine)
    if how == "inputs in place":
        batch.inputs.mul_(2)
    elif how == "other inputs":
        given = 2 * batch.inputs
        return dataclasses.replace(batch, load_inputs=lambda: given)
    elif how == "frozen weights":
        with torch.no_grad():
            model[0].weight.add_(0.25)
    elif how == "weights that come back":
        held = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            time.sleep(0.01)
            for parameter, before in zip(model.parameters(), held, strict=True):
                parameter.copy_(before)
    return batch


@pytest.mark.parametrize(
    "how",
    ["inputs in place", "other inputs", "frozen weights", "weights that come back"],
)
def test_what_is_changed_before_its_step_counts(how):
    def run(prefix):
        engine = make_engine(
            freeze=schedule(3), dtype=torch.float64, config=settings(prefix)
        )
        with engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                    time.sleep(0.005)  # so what runs ahead has run
                    engine.step(changed(engine, batch, how))
            losses = [record.train_loss for record in engine.history.epochs]
            return weights(engine), losses

    plain, filled = run("replicated"), run("filled")
    assert close(filled[0], plain[0])
    assert filled[1] == pytest.approx(plain[1], rel=1e-12)


@pytest.mark.parametrize("lazy", [False, True])
def test_what_loading_raises_comes_in_its_own_step(lazy):
    class Broken(ToySet):
        left = None  # samples that can be loaded

        def __getitem__(self, i):
            return self._inputs(i), self.y[i]

        def _inputs(self, i):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise OSError("cannot be read")
            return super()._inputs(i)

    data, steps = Broken(48, vouch=lazy), 0
    engine = make_engine(freeze=schedule(3), config=settings("filled"))
    with pytest.raises(OSError, match="cannot be read"), engine:
        for epoch in engine.epochs(2):
            data.left = 24 if epoch == 1 else None
            for batch in engine.batches(data, 12):
                engine.step(batch)
                steps += 1
    assert steps == 4 + 2, "the two batches before it"


def test_a_pass_that_is_left_runs_no_further_frozen_layers():
    class Left(Exception):
        pass

    engine = make_engine(freeze=schedule(3), config=settings("filled"))
    model = model_of(engine)
    seen = RowsOf(model[0])
    slow = [
        layer.register_forward_hook(lambda *_: time.sleep(0.002)) for layer in model
    ]
    with pytest.raises(Left), engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
                if epoch == 1:
                    raise Left
    rows = seen.rows
    time.sleep(0.05)
    assert seen.rows == rows
    for hook in slow:
        hook.remove()


def test_time_of_layers_that_ran_ahead_is_not_taken_for_theirs():
    """It would make layers seem free, and their cache worth nothing."""
    engine = make_engine(freeze=schedule(3), config=settings("filled"))
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
        assert run_of(engine).costs.cache.prefix == 1.0
        (segment,) = engine.history.epochs[-1].segments
    assert segment.prefix == segment.to_json()["prefix"] == "filled"


def survive(rank, prefix, dies):
    """Train on two pipelines of two stages; one of them dies in a step."""
    run = dataclasses.replace(settings(prefix, microbatches=2), autodp=SURVIVING)
    engine = make_engine(freeze=schedule(2, 3), dtype=torch.float64, config=run)
    data = ToySet(48, dtype=torch.float64)
    try:
        with engine:
            for epoch in engine.epochs(3):
                for number, batch in enumerate(engine.batches(data, 12)):
                    if dies and rank == 2 and (epoch, number) == (1, 2):
                        os.kill(os.getpid(), signal.SIGKILL)
                    engine.step(batch)
            prefixes = engine.plan.prefix if is_active(engine) else None
            seen = [e.unique_samples for e in engine.history.epochs]
            return (weights(engine), seen, prefixes) if is_active(engine) else None
    except PeerFailure as failure:
        return str(failure)


@pytest.mark.distributed
def test_survivors_of_a_kill_finish_as_if_nothing_had_happened():
    expected, _, _ = run_ranks(survive, 4, "replicated", False)[0]
    whole, _, prefix = run_ranks(survive, 4, "filled", False)[0]
    assert prefix == "filled" and close(whole, expected)
    with Ranks(survive, 4, "filled", True) as ranks:
        outcomes = ranks.outcomes([0, 1, 3])
    own, seen, _ = outcomes[0][1]
    assert close(own, expected) and seen == [48, 48, 48]


def test_metrics_within_a_pass_are_those_of_its_weights():
    def run(prefix):
        engine = make_engine(
            freeze=schedule(3), dtype=torch.float64, config=settings(prefix)
        )
        test, found = ToySet(21, seed=2, dtype=torch.float64), []
        with engine:
            for _ in engine.epochs(1):
                for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                    engine.step(batch)
                    found.append(engine.evaluate(test, {"accuracy": accuracy}))
        return [each["loss"] for each in found]

    assert run("filled") == pytest.approx(run("replicated"), rel=1e-12)


class Scales(nn.Module):
    """Works in place on what it is given."""

    def forward(self, x):
        return x.sub_(1.0).mul_(0.5)


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.003)
        return x


class Spied(nn.Dropout):
    active = 0

    def forward(self, x):
        Spied.active += self.training
        return super().forward(x)


def fit_layers(prefix, boundary, *layers, train=False):
    """Train with those layers in front, frozen from the start; return the weights."""
    torch.manual_seed(0)
    head = (nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    model = nn.Sequential(*[make() for make in layers], *head).double()
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(boundary),
        config=settings(prefix, microbatches=2),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(48, dtype=torch.float64), 12):
                if engine.history.epochs == [] and batch.index == 0:
                    Spied.active = 0  # the profile measures what trains
                if train:
                    model.train()
                engine.step(batch)
        assert engine.plan.prefix == prefix
    return [p.detach().clone() for p in model.parameters()], model


def test_a_first_layer_that_works_in_place_is_run_once_for_a_batch():
    layers = (Scales, lambda: nn.Linear(4, 8), nn.Tanh)
    plain, filled = (fit_layers(p, 3, *layers)[0] for p in ("replicated", "filled"))
    assert close(filled, plain)


def test_train_mode_reaches_no_layer_that_runs_ahead():
    norm = nn.BatchNorm1d(8)
    layers = (lambda: nn.Linear(4, 8), Slow, Slow, Slow, lambda: norm)
    layers += (lambda: Spied(0.5), lambda: nn.Linear(8, 8))
    plain = fit_layers("replicated", 7, *layers)[0]
    filled, model = fit_layers("filled", 7, *layers, train=True)
    assert Spied.active == 0 and norm.num_batches_tracked == 0
    assert close(filled, plain)
    assert model.state_dict().keys() >= {"4.running_mean", "6.weight"}


class Asking(nn.Module):
    """Cannot be made without an argument."""

    def __new__(cls, width):
        return super().__new__(cls)

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.inner(x))


def traced():
    return torch.fx.symbolic_trace(Asking(8))


def compiled():
    return torch.compile(Asking(8), backend="eager")


@pytest.mark.parametrize("make", [lambda: Asking(8), traced, compiled])
def test_modules_of_any_making_run_ahead_and_stay_as_they_are(make):
    plain, expected = fit_layers("replicated", 2, lambda: nn.Linear(4, 8), make)
    filled, model = fit_layers("filled", 2, lambda: nn.Linear(4, 8), make)
    assert close(filled, plain)
    assert model.state_dict().keys() == expected.state_dict().keys()
