"""Where the engine says its time went."""

import logging

import pytest
import torch

import pipetransformer as pt
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy


def phases(rank, stages, cache):
    engine = make_engine(
        freeze=schedule(0, 3),
        config=config(
            plan=pt.PlanConfig(num_stages=stages, num_microbatches=2),
            cache=pt.CacheConfig(enabled=cache),
        ),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(50, vouch=True), batch_size=12):
                engine.step(batch)
            engine.evaluate(ToySet(21, seed=2, vouch=True), {"accuracy": accuracy})
    return engine.history.to_json()


def check_sums(history):
    spent = history["phase_seconds"]
    assert all(seconds >= 0 for seconds in spent.values())
    assert sum(spent.values()) == pytest.approx(history["total_seconds"])
    for epoch in history["epochs"]:
        inside = epoch["phase_seconds"]
        assert sum(inside.values()) == pytest.approx(epoch["seconds"])
        assert {"forward", "backward", "optimizer", "data"} <= set(inside)
        assert all(seconds <= spent[name] for name, seconds in inside.items())
    elapsed = [epoch["elapsed_seconds"] for epoch in history["epochs"]]
    assert elapsed == sorted(elapsed) and elapsed[-1] < history["total_seconds"]


@pytest.mark.distributed
def test_phases_add_up_and_name_what_replicas_wait_for():
    lead, _ = run_ranks(phases, 2, 1, True)
    check_sums(lead)
    for epoch in lead["epochs"]:
        assert epoch["phase_seconds"]["backward/all_reduce"] > 0
        assert len(epoch["worker_seconds"]) == 1
    first, second, third = (epoch["phase_seconds"] for epoch in lead["epochs"])
    assert "forward/prefix" not in first and "forward/cache_read" not in first
    assert second["forward/prefix"] > 0 and second["forward/cache_write"] > 0
    assert third["forward/cache_read"] > 0 and "forward/prefix" not in third
    assert {"connect", "open", "profile", "transformation", "evaluate", "pass"} <= set(
        lead["phase_seconds"]
    )


@pytest.mark.distributed
def test_each_stage_reports_its_processor_time():
    lead, _ = run_ranks(phases, 2, 2, False)
    check_sums(lead)
    for epoch in lead["epochs"]:
        assert len(epoch["worker_seconds"]) == 2
        assert all(seconds > 0 for seconds in epoch["worker_seconds"])
        assert "backward/all_reduce" not in epoch["phase_seconds"]
    assert lead["epochs"][2]["phase_seconds"]["forward/prefix"] > 0  # no cache


def test_a_profiler_sees_steps_and_changes_of_plan_and_the_log_begins_with_the_way(
    caplog, tmp_path
):
    with (
        torch.profiler.profile() as profile,
        caplog.at_level(logging.INFO, logger="pipetransformer"),
        make_engine(freeze=schedule(0, 3), config=config()) as engine,
    ):
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24, vouch=True), batch_size=12):
                engine.step(batch)
        engine.save(tmp_path / "last.pt")
    seen = {event.key: event.count for event in profile.key_averages()}
    assert seen["pt::step"] == seen["pt::forward"] == seen["pt::backward"] == 4
    assert seen["pt::prepare"] == seen["pt::move"] == seen["pt::rewire"] == 2
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert lines[0].startswith("run ")
    assert lines[0].endswith(": 1 ranks, node 0 of 1; no network")
    (change,) = [line for line in lines if "transformation: " in line]
    assert "pause" in change and "prepare" in change and "same group" in change
    counters = engine.history.counters
    assert counters.checkpoints_written == 1 and counters.store_operations > 0
    assert counters.transformations_committed == 2
