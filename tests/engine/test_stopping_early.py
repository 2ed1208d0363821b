"""A plain `break` ends a pass or the run, on ranks that stand by, too."""

import dataclasses
import datetime
import time

import pytest
import torch

import pipetransformer as pt
from tests.engine.scenario import config, make_engine, moments, schedule
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed

TWO_STAGES = config(
    plan=pt.PlanConfig(num_stages=2, reshape="never"), pipe=pt.PipeConfig(num_slots=2)
)


def stop_at(rank, epochs, batches):
    """Leave the run after some epochs, and each pass after some batches."""
    engine = make_engine(freeze=schedule(0), config=TWO_STAGES, dtype=torch.float64)
    data, test = ToySet(50, dtype=torch.float64), ToySet(21, dtype=torch.float64)
    seen, best = [], float("inf")
    with engine:
        for epoch in engine.epochs(50):
            for batch in engine.batches(data, 12):
                if batch.index == batches:
                    break
                engine.step(batch)
            loss = engine.evaluate(test)["loss"]
            seen.append(loss)
            if epoch + 1 == epochs or loss > best:
                break
            best = loss
        state = moments(engine) if engine.plan is not None else None
    return seen, state, engine.history.to_json()["epochs"]


@pytest.mark.parametrize("batches", [99, 2, 0])
def test_the_run_ends_everywhere_at_the_epoch_where_the_script_breaks(batches):
    results = run_ranks(stop_at, 4, 3, batches)
    assert sum(state is None for _, state, _ in results) == 2, "nobody stood by"
    seen = results[0][0]
    assert all(losses == seen for losses, _, _ in results)
    assert len(seen) == 3 if batches else len(seen) <= 3
    records = results[0][2]
    taken = min(batches, 5)
    assert [e["optimizer_steps"] for e in records] == [taken] * len(records)
    samples = [0, 12, 24, 36, 48, 50][taken]
    assert [e["unique_samples"] for e in records] == [samples] * len(records)
    alone = stop_at(0, 3, batches)
    assert seen == pytest.approx(alone[0], rel=1e-9)


def train_in(rank, folder, stop=None):
    """Train in float64, up to the end or where `stop` says; return what was seen.

    That is the epochs and batches of this run, and the weights.
    """
    wanted = pt.CheckpointConfig(directory=folder, resume=True, keep=9)
    engine = make_engine(
        freeze=schedule(0, 2),
        dtype=torch.float64,
        config=config(checkpoint=wanted, scheduler_interval="epoch"),
    )
    seen = []
    with engine:
        for epoch in engine.epochs(4):
            for batch in engine.batches(ToySet(50, dtype=torch.float64), 12):
                engine.step(batch)
                seen.append((epoch, batch.index))
                if seen[-1] == stop:
                    break
            if stop is not None and epoch == stop[0]:
                break  # leaves the epochs early
    weights = [p.detach().clone() for p in model_of(engine).parameters()]
    return seen, weights


@pytest.mark.parametrize("stop", [(1, 4), (1, 2)], ids=["whole pass", "within"])
@pytest.mark.parametrize("world", [1, 2])
def test_epochs_that_are_left_early_are_saved_and_gone_on_from(world, stop, tmp_path):
    whole = run_ranks(train_in, world, tmp_path / "whole")[0]
    part = run_ranks(train_in, world, tmp_path / "part", stop)[0]
    names = sorted(path.name for path in (tmp_path / "part").iterdir())
    assert names == ["step-0000000005.pt", f"step-{5 + stop[1] + 1:010d}.pt"]
    rest = run_ranks(train_in, world, tmp_path / "part")[0]
    assert part[0][-1] == stop and part[0] + rest[0] == whole[0]
    for a, b in zip(rest[1], whole[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_run_with_nothing_left_to_do_writes_no_file_at_its_end(tmp_path):
    run_ranks(train_in, 1, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (again,) = run_ranks(train_in, 1, tmp_path)
    assert again[0] == []
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert after == before and len(before) == 4


def busy_at_the_end(rank, seconds):
    autodp = dataclasses.replace(
        config().autodp, group_timeout=datetime.timedelta(seconds=seconds)
    )
    engine = make_engine(freeze=schedule(0), config=config(autodp=autodp))
    data = ToySet(50, dtype=torch.float32)
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(data, 12):
                engine.step(batch)
        active = engine.plan is not None
        if engine.is_main:
            time.sleep(2.5 * seconds)
    return active


def test_a_rank_may_be_busy_at_the_end_for_longer_than_a_collective_may_take():
    assert sum(run_ranks(busy_at_the_end, 2, 3.0)) == 2
