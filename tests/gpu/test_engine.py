"""The engine with its stages on CUDA devices, against the same run on the host."""

import dataclasses

import pytest
import torch

import pipetransformer as pt
from tests.engine.scenario import config, make_engine, schedule, train, train_on
from tests.support.device_ranks import on_host
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

from .devices import CPU, cuda

TIMEOUT_S = 55
FREEZES, EPOCHS = schedule(0, 2, 4, 6), 4
# The budget forces K=4 unfrozen; freezing lets shorter pipelines fit.
SHRINKING = pt.PlanConfig(slot_memory_bytes=2 * 13_500, reshape="always")
SETTINGS = {
    "plain": {},
    "accumulation": {"accumulation_steps": 3, "clip_grad_norm": 0.5},
    "recomputation": {"pipe": pt.PipeConfig(checkpoint="always")},
    "codec": {"cache": pt.CacheConfig(codec="bf16")},
    "no cache": {"cache": pt.CacheConfig(enabled=False)},
    "within passes": {"freeze_every": 3, "prepare_steps": 1},
}


def train_there(rank, options):
    return on_host(train(rank, FREEZES, EPOCHS, {"dtype": torch.float64, **options}))


def results_of(world_size, settings, devices):
    settings = dataclasses.replace(settings, devices=devices)
    options = {"config": settings}
    return run_ranks(train_there, world_size, options, timeout_s=TIMEOUT_S)


def assert_same_run(there, here):
    for name in ("after", "before"):
        assert there[name] == pytest.approx(here[name], rel=1e-6)
    for mine, plain in zip(there["model"], here["model"], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2)])
def test_one_process_trains_as_on_the_host(devices, stages):
    settings = config(
        plan=pt.PlanConfig(num_stages=stages, num_microbatches=2),
        pipe=pt.PipeConfig(num_slots=stages),
    )
    slots = [devices[k * len(devices) // stages] for k in range(stages)]
    (there,) = results_of(1, settings, slots)
    (here,) = results_of(1, settings, ["cpu"])
    assert_same_run(there, here)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_settings_give_what_they_give_on_the_host(devices, name):
    changes = dict(SETTINGS[name])
    pipe = dataclasses.replace(changes.pop("pipe", pt.PipeConfig()), num_slots=2)
    plan = pt.PlanConfig(num_stages=2, num_microbatches=2)
    settings = config(plan=plan, pipe=pipe, **changes)
    (there,) = results_of(1, settings, devices * 2)
    (here,) = results_of(1, settings, ["cpu"])
    assert_same_run(there, here)


@pytest.mark.distributed
@pytest.mark.parametrize("devices", [CPU, cuda(), cuda(2), cuda(4)])
def test_replicas_grow_as_on_the_host(devices):
    """With one device by gloo, with one for each process by NCCL."""
    settings = config(plan=SHRINKING)
    there = results_of(4, settings, devices)
    here = results_of(4, settings, ["cpu"])
    assert [e["num_stages"] for e in there[0]["history"]["epochs"]] == [4, 4, 2, 1]
    assert_same_run(there[0], here[0])


def train_in_half_precision(_rank, amp, devices):
    settings = config(
        amp=amp,
        devices=devices,
        plan=pt.PlanConfig(num_stages=2),
        pipe=pt.PipeConfig(num_slots=2),
    )
    engine = make_engine(freeze=schedule(0, 2), config=settings)
    data = ToySet(50)
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(data, 12):
                engine.step(batch)
        return [epoch.train_loss for epoch in engine.history.epochs]


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_mixed_precision_learns(devices, amp):
    (losses,) = run_ranks(train_in_half_precision, 1, amp, devices * 2)
    assert losses[-1] < losses[0]


def train_here(_rank, *arguments):
    return train_on(*arguments)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_a_checkpoint_goes_on_elsewhere(devices, to_device, tmp_path):
    places = [["cpu"] * 2, devices * 2]
    first, then = places if to_device else places[::-1]
    run_ranks(train_here, 1, first, str(tmp_path / "moved"), 2)
    (mine,) = run_ranks(train_here, 1, then, str(tmp_path / "moved"), 4)
    (plain,) = run_ranks(train_here, 1, ["cpu"], str(tmp_path / "plain"), 4)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def train_wide(_rank, devices):
    """Layers so wide that a step is the device's work; return each phase's share."""
    torch.manual_seed(0)
    width = 4096 if devices[0] != "cpu" else 256
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    engine = pt.PipeTransformer(
        torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        loss=torch.nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(
            devices=devices, plan=pt.PlanConfig(num_stages=1, num_microbatches=1)
        ),
    )
    rows = 2048
    data = torch.utils.data.TensorDataset(
        torch.randn(rows, width), torch.randint(4, (rows,))
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(data, 256):
                engine.step(batch)
    phases = engine.history.epochs[-1].phase_seconds
    parts = ("forward", "backward", "optimizer")
    seconds = [
        sum(s for name, s in phases.items() if part in name.split("/"))
        for part in parts
    ]
    return [each / sum(seconds) for each in seconds]


@pytest.mark.parametrize("devices", [CPU, cuda()])
def test_phases_tell_where_the_device_was(devices):
    """A backward multiplies twice as often as a forward; the host queues both ahead."""
    (shares,) = run_ranks(train_wide, 1, devices, timeout_s=TIMEOUT_S)
    forward, backward, optimizer = shares
    assert backward > forward > 0 and optimizer > 0.02
