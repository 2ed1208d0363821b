"""Changes of plan between two batches, many of them in one run."""

import dataclasses

import pytest
import torch

import pipetransformer as pt
from tests.engine.scenario import (
    assert_same_across_boundaries,
    config,
    is_active,
    make_engine,
    moments,
    schedule,
)
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed

EPOCHS, BATCHES, SAMPLES = 5, 5, 50
# One entry per optimizer step: the budget forces K=4 unfrozen, and K=1 with 6.
COUNTS = [0, 2, 4, 6, 4, 2, 0, 6, 0, 3, 6, 6, 2, 0, 4, 6, 2, 6, 0, 2, 4, 0, 6, 4, 6]
ELASTIC = config(
    freeze_every=1, plan=pt.PlanConfig(slot_memory_bytes=27_000, reshape="always")
)


def train_by_steps(rank, settings):
    """Train; evaluate before and after each step boundary, on active ranks."""
    engine = make_engine(freeze=schedule(*COUNTS), dtype=torch.float64, config=settings)
    train_set = ToySet(SAMPLES, dtype=torch.float64, vouch=True)
    test_set = ToySet(21, seed=2, dtype=torch.float64, vouch=True)
    before, after, shapes = {}, {}, {}
    with engine:
        for _ in engine.epochs(EPOCHS):
            for batch in engine.batches(train_set, 12, num_workers=0):
                step = run_of(engine).state.step
                after[step] = engine.evaluate(test_set)["loss"], moments(engine)
                shapes[step] = engine.plan.num_stages, engine.plan.num_replicas
                engine.step(batch)
                before[step + 1] = engine.evaluate(test_set)["loss"], moments(engine)
        last = moments(engine) if is_active(engine) else None
    return {
        "before": before,
        "after": after,
        "shapes": shapes,
        "last": last,
        "history": engine.history.to_json(),
    }


@pytest.fixture(scope="module")
def elastic():
    return run_ranks(train_by_steps, 4, ELASTIC, timeout_s=110)


def test_the_plan_changes_twenty_times_within_five_passes(elastic):
    changes = elastic[0]["history"]["transformations"]
    assert len(changes) >= 20
    stages = {shape[0] for shape in elastic[0]["shapes"].values()}
    assert {1, 4} <= stages and len(stages) >= 3
    within = [change for change in changes if change["step"] % BATCHES]
    assert len(within) >= 12


def test_each_change_has_its_price_and_groups_are_used_again(elastic):
    history = elastic[0]["history"]
    for change in history["transformations"]:
        phases = change["phases"]
        assert {"plan", "prepare", "move", "rewire"} <= set(phases)
        for name in ("announce", "acknowledge", "decision"):
            assert f"prepare/{name}" in phases
        parts = sum(s for n, s in phases.items() if n.startswith("prepare/"))
        assert 0 < parts <= phases["prepare"] + 1e-6
        assert ("prepare/group" in phases) == (change["group"] != "same")
        assert bool(change["moved_bytes"]) == ("move/hash" in phases)
        joins = change["to"]["num_replicas"] > change["from"]["num_replicas"]
        assert change["moved_bytes"] > 0 or not joins
    changes = [history["first_plan"], *history["transformations"]]
    # A group of one is built without sockets, and is neither kept nor counted.
    connected = [
        (change["to"]["num_stages"], change["to"]["num_replicas"])
        for change in changes
        if change["group"] != "same" and change["to"]["num_replicas"] > 1
    ]
    cached = [change for change in changes if change["group"] == "cached"]
    counters = history["counters"]
    assert counters["groups_built"] == len(set(connected))
    assert counters["groups_reused"] == len(cached) > 0
    assert counters["groups_built"] + counters["groups_reused"] == len(connected)
    assert counters["transformations_committed"] == len(changes)
    assert counters["bytes_moved"] > 0 and counters["transformations_aborted"] == 0
    assert [f["boundary"] for f in history["freezes"]] != []


def test_every_sample_is_seen_once_in_a_pass_of_several_segments(elastic):
    for epoch in elastic[0]["history"]["epochs"]:
        assert epoch["samples"] == epoch["unique_samples"] == SAMPLES
        assert epoch["optimizer_steps"] == BATCHES
        segments = epoch["segments"]
        assert len(segments) > 1
        assert sum(s["samples"] for s in segments) == SAMPLES
        assert sum(s["optimizer_steps"] for s in segments) == BATCHES
        assert segments[-1]["num_stages"] == epoch["num_stages"]


def test_loss_and_state_are_bitwise_equal_before_and_after_each_boundary(elastic):
    assert_same_across_boundaries(elastic)


def test_ranks_join_and_leave_within_a_pass(elastic):
    lead = elastic[0]["shapes"]
    for rank, result in enumerate(elastic):
        for step, (stages, _) in lead.items():
            drives = rank % stages == 0 and rank // stages < 4 // stages
            assert (step in result["shapes"]) == drives


def test_run_equals_one_without_transformations_in_float64(elastic):
    alone = dataclasses.replace(ELASTIC, plan=pt.PlanConfig())
    still = run_ranks(train_by_steps, 1, alone, timeout_s=60)[0]
    assert {shape for shape in still["shapes"].values()} == {(1, 1)}
    for name in ("weights", "tensors"):
        pairs = zip(elastic[0]["last"][name], still["last"][name], strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def freeze_by_hand():
    engine = make_engine(freeze=pt.freeze.Manual(), config=config(freeze_every=2))
    frozen = []
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(48), 8):
                frozen.append(engine.history.transformations[-1:])
                frozen[-1] = frozen[-1][0].after.num_frozen_layers if frozen[-1] else 0
                if batch.index == 0:
                    engine.freeze(3)
                engine.step(batch)
    return frozen


def test_freezing_by_hand_takes_effect_at_the_next_multiple():
    assert freeze_by_hand() == [0, 0, 3, 3, 3, 3]


def test_freeze_every_below_one_step_is_refused():
    with pytest.raises(ValueError, match=r"Config.freeze_every: expected >= 1 step"):
        pt.Config(freeze_every=0)
