"""Optimizers and schedulers as people build them, under plans that change."""

import fractions

import numpy
import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config, is_active, moments, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

SAMPLES, BATCH, EPOCHS = 50, 12, 4
FREEZES = (0, 2, 6, 4)  # four stages, then fewer, then more again
ELASTIC = {"slot_memory_bytes": 27_000, "reshape": "always"}
LAST_LAYER = {0: 0, 2: 3, 6: 7, 4: 5}  # first active layer, by frozen units


def grouped(parameters):
    """Weight decay for matrices only, and its own rate for them."""
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.3, "lr": 1e-2},
            {"params": others, "weight_decay": 0.0, "lr": 2e-2},
        ]
    )


def by_epoch(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def by_step(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=20)


def by_epoch_chained(optimizer):
    rates = torch.optim.lr_scheduler
    each = [rates.ExponentialLR(optimizer, 0.5), rates.StepLR(optimizer, 2)]
    return rates.ChainedScheduler(each, optimizer)


def by_step_of_numpy(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + numpy.cos(numpy.pi * step / 20))
    )


SCHEDULERS = {
    "epoch": by_epoch,
    "epoch, chained": by_epoch_chained,
    "step": by_step,
    "step, of numpy": by_step_of_numpy,
}


def engine_of(kind, **settings):
    return pt.PipeTransformer(
        toy_model(dtype=torch.float64),
        optimizer=grouped,
        lr_scheduler=SCHEDULERS[kind],
        loss=nn.CrossEntropyLoss(),
        freeze=schedule(*FREEZES),
        units=toy_units(),
        config=config(scheduler_interval=kind.split(",")[0], **settings),
    )


def train(rank, kind):
    """Train; return rates of each step, ids of the shares, and the last moments."""
    engine = engine_of(kind, plan=pt.PlanConfig(**ELASTIC))
    rates, shares = {}, {}
    with engine:
        for epoch in engine.epochs(EPOCHS):
            for batch in engine.batches(ToySet(SAMPLES, dtype=torch.float64), BATCH):
                groups = engine.optimizer.param_groups
                rates[epoch, batch.index] = [group["lr"] for group in groups]
                shares[epoch, batch.index] = batch.ids.tolist()
                engine.step(batch)
        last = moments(engine) if is_active(engine) else None
    return rates, shares, last, engine.history.to_json()


def plain_loop(order, kind):
    """Return rates of each step, and the weights."""
    model, data = toy_model(dtype=torch.float64), ToySet(SAMPLES, dtype=torch.float64)
    optimizer = grouped(list(model.parameters()))
    scheduler = SCHEDULERS[kind](optimizer)
    rates = {}
    for epoch, frozen in enumerate(FREEZES):
        model.requires_grad_(True)
        model[: LAST_LAYER[frozen]].requires_grad_(False)
        for index in range(5):
            rates[epoch, index] = [group["lr"] for group in optimizer.param_groups]
            ids = sorted(order[epoch, index])
            nn.functional.cross_entropy(model(data.x[ids]), data.y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind.startswith("step"):
                scheduler.step()
        if kind.startswith("epoch"):
            scheduler.step()
    return rates, [p.detach() for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.filterwarnings("error:.*lr_scheduler.*:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_groups_and_rates_are_those_of_a_plain_loop_whatever_the_plan(kind):
    results = run_ranks(train, 4, kind)
    shapes = {(e["num_stages"], e["num_replicas"]) for e in results[0][3]["epochs"]}
    assert len(shapes) >= 2, "the plan was to change"
    order = {}
    for rates, shares, _, _ in results:
        for key, ids in shares.items():
            order.setdefault(key, []).extend(ids)
            assert rates[key] == results[0][0][key]
    assert all(len(set(ids)) == len(ids) for ids in order.values())
    rates, weights = plain_loop(order, kind)
    assert results[0][0] == rates
    for _, _, last, _ in results:
        if last is not None:
            for a, b in zip(last["weights"], weights, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["step", "step, of numpy"])
def test_a_checkpoint_goes_on_at_the_next_steps_rate(tmp_path, kind):
    def rates(engine, resume):
        found = []
        with engine:
            if resume:
                engine.load(tmp_path / "one.pt")
            for epoch in engine.epochs(2):
                for batch in engine.batches(ToySet(SAMPLES, dtype=torch.float64), 25):
                    found.append([g["lr"] for g in engine.optimizer.param_groups])
                    engine.step(batch)
                if epoch == 0:
                    engine.save(tmp_path / "one.pt")
        return found

    assert rates(engine_of(kind), False)[2:] == rates(engine_of(kind), True)


def test_a_checkpoint_of_a_finished_pass_goes_on_at_the_next_epochs_rate(tmp_path):
    engine = engine_of("epoch")
    data = ToySet(SAMPLES, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(data, BATCH):
                engine.step(batch)
            engine.save(tmp_path / "one.pt")  # before the epoch has ended
    resumed = engine_of("epoch")
    with resumed:
        resumed.load(tmp_path / "one.pt")
        for epoch in resumed.epochs(2):
            for _ in resumed.batches(data, BATCH):
                rates = [group["lr"] for group in resumed.optimizer.param_groups]
                found = epoch, rates
                break
    assert found == (1, [0.5e-2, 1e-2])


def test_a_scheduler_that_needs_a_metric_is_refused():
    with pytest.raises(TypeError, match="ReduceLROnPlateau, which needs metrics"):
        pt.PipeTransformer(
            toy_model(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Never(),
        )


def with_fraction(optimizer):
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rate.half = fractions.Fraction(1, 2)
    return rate


class OwnRate:
    """Steps as a scheduler does, and counts nothing."""

    def step(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "text"),
    [
        (
            lambda params: torch.optim.SGD(params, lr=fractions.Fraction(1, 10)),
            None,
            r"^optimizer: expected a state_dict .* got Fraction at \['param_groups'\]",
        ),
        (
            lambda params: torch.optim.SGD(params, lr=0.1),
            with_fraction,
            r"^lr_scheduler: .* Fraction at \['half'\] in that of LambdaLR",
        ),
        (
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda _: OwnRate(),
            r"^lr_scheduler: expected an int last_epoch, .* got None in a OwnRate",
        ),
    ],
    ids=["optimizer", "scheduler", "no epochs"],
)
def test_states_that_nobody_could_read_back_are_refused(optimizer, scheduler, text):
    with pytest.raises(TypeError, match=text):
        pt.PipeTransformer(
            toy_model(),
            optimizer=optimizer,
            lr_scheduler=scheduler,
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Never(),
            config=config(scheduler_interval="epoch"),
        )


class Rateless(torch.optim.Optimizer):
    """Finds its rate itself; ``lr`` is None, as that of relative Adafactor is."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.01 * parameter.grad


class Wrapper(torch.optim.Optimizer):
    """Wraps another one, as published ones do, and calls no ``__init__``."""

    def __init__(self, base):
        self.base, self.defaults = base, base.defaults
        self.param_groups, self.state = base.param_groups, base.state

    def step(self):
        self.base.step()

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)


def wrapped(parameters):
    return Wrapper(torch.optim.SGD(parameters, lr=0.01, momentum=0.9))


@pytest.mark.parametrize("optimizer", [Rateless, wrapped])
def test_optimizers_that_torch_steps_are_stepped(optimizer, tmp_path):
    model, rates = toy_model(dtype=torch.float64), []
    other = Wrapper(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))

    class Rates(pt.report.Callback):
        def on_step(self, step):
            rates.append(step.learning_rate)

    engine = pt.PipeTransformer(
        toy_model(dtype=torch.float64),
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Guarded(dry_run=True),
        callbacks=[Rates(), pt.report.CsvWriter(tmp_path)],
        config=config(plan=pt.PlanConfig(num_stages=1, num_microbatches=1)),
    )
    data, order = ToySet(24, dtype=torch.float64), []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data, 12):
                order.append(batch.ids.tolist())
                engine.step(batch)
        trained = engine.state_dict()
    plain = optimizer(list(model.parameters()))
    for indices in order:
        inputs, targets = zip(*(data[i] for i in indices), strict=True)
        plain.zero_grad()
        outputs = model(torch.stack(inputs))
        nn.functional.cross_entropy(outputs, torch.tensor(targets)).backward()
        plain.step()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained[name], weight)
    assert rates == [None if optimizer is Rateless else 0.01] * 4
    other.step()  # its class is as it was
