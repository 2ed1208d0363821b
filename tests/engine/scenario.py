"""Rank functions that drive the engine; imported by the tests of this folder."""

import dataclasses
import multiprocessing
from datetime import timedelta

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pipetransformer as pt
from pipetransformer import autocache, planner
from pipetransformer.state.state import steps_of
from tests.engine.even_profile import even_profile, no_rates
from tests.support.private import model_of, run_of
from tests.support.toy import ToySet, accuracy, toy_model, toy_units

# What the folder's fixture does for the tests' own process, and each rank for itself.
if multiprocessing.parent_process() is not None:
    planner.profile = even_profile
    autocache.measure_rates = no_rates

# Deadlines of a machine that tests keep busy; failures are found within seconds.
QUICK = pt.AutoDPConfig(
    heartbeat_interval=timedelta(milliseconds=200),
    heartbeat_timeout=timedelta(seconds=6),
    protocol_timeout=timedelta(seconds=30),
)


def config(*, plan=None, **changes):
    """Return a quick config in which every rank that can have work has some."""
    plan = dataclasses.replace(plan or pt.PlanConfig(), replicas="all")
    base = pt.Config(seed=3, eval_microbatch_rows=8, autodp=QUICK, plan=plan)
    return dataclasses.replace(base, **changes)


DEFAULTS = config()


def schedule(*counts):
    return pt.freeze.Schedule(list(counts))


def make_engine(
    *,
    freeze,
    dtype=torch.float32,
    dropout=0.0,
    config=None,
    loss=None,
    depth=6,
    callbacks=(),
):
    model = toy_model(depth, dtype=dtype, dropout=dropout)
    return pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5, 0.9),
        loss=loss or nn.CrossEntropyLoss(),
        freeze=freeze,
        units=toy_units(depth),
        config=config or DEFAULTS,
        callbacks=callbacks,
    )


def registered_average(engine):
    """Register a moving average of the weights with an open engine; return it."""
    averaging = get_ema_multi_avg_fn(0.9)
    average = AveragedModel(model_of(engine), multi_avg_fn=averaging)
    engine.register("average", average)
    return average


def moments(engine):
    """Return the optimizer's tensors, learning rate and step, copied."""
    run = run_of(engine)
    state = run.state.optimizer.state_dict()
    tensors = [
        value.clone()
        for index in sorted(state["state"])
        for _, value in sorted(state["state"][index].items())
    ]
    rates = [group["lr"] for group in state["param_groups"]]
    return {
        "tensors": tensors,
        "rates": rates,
        "step": run.state.step,
        "scheduler": steps_of(run.state.scheduler),
        "weights": [p.detach().clone() for p in run.arguments.model.parameters()],
    }


def equal(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def assert_same_across_boundaries(results):
    """Compare, bit by bit, what each rank had after a step and before the next one.

    Args:
        results: Of each rank, lead first: ``before`` and ``after`` map the number of
            steps done to the loss of a fixed set and the `moments`.
    """
    before = results[0]["before"]
    for result in results:
        for step, (loss, state) in result["after"].items():
            if step == 0:
                continue
            loss_before, state_before = before[step]
            assert loss == loss_before
            assert equal(state["tensors"], state_before["tensors"])
            assert equal(state["weights"], state_before["weights"])
            for name in ("rates", "step", "scheduler"):
                assert state[name] == state_before[name]


def is_active(engine):
    return engine.plan is not None


def train(rank, freeze, epochs, options):
    """Train; return losses around each boundary, moments, history and weights."""
    dtype = options.pop("dtype", torch.float32)
    vouch = options.pop("vouch", True)
    batch = options.pop("batch", 12)
    torch.manual_seed(rank)  # ranks must not need equal global generators
    engine = make_engine(freeze=freeze, dtype=dtype, **options)
    train_set = ToySet(50, dtype=dtype, vouch=vouch)
    test_set = ToySet(21, seed=2, dtype=dtype, vouch=vouch)
    before, after, ends, begins, shapes = [], [], [], [], []
    with engine:
        engine.prepare(train_set, batch)
        for _ in engine.epochs(epochs):
            after.append(engine.evaluate(test_set, {"accuracy": accuracy})["loss"])
            begins.append(moments(engine) if is_active(engine) else None)
            shapes.append(engine.plan.num_stages if is_active(engine) else 0)
            for item in engine.batches(train_set, batch):
                engine.step(item)
            before.append(engine.evaluate(test_set, {"accuracy": accuracy})["loss"])
            ends.append(moments(engine) if is_active(engine) else None)
        last = ends[-1]
    return {
        "after": after,
        "before": before,
        "begins": begins,
        "ends": ends,
        "shapes": shapes,
        "history": engine.history.to_json(),
        "last": last,
        "model": [p.detach().clone() for p in model_of(engine).parameters()],
    }


def train_on(devices, folder, epochs):
    """Train two stages on devices, on from what a folder holds; return the weights."""
    settings = config(
        devices=devices,
        plan=pt.PlanConfig(num_stages=2),
        pipe=pt.PipeConfig(num_slots=2),
        checkpoint=pt.CheckpointConfig(directory=folder, resume=True),
    )
    engine = make_engine(freeze=schedule(0, 2), dtype=torch.float64, config=settings)
    data = ToySet(48, dtype=torch.float64)
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(data, 12):
                engine.step(batch)
    return [p.detach() for p in model_of(engine).parameters()]
