"""Plans that are prepared while training goes on (`Config.prepare_steps`)."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import pipetransformer as pt
from pipetransformer.report import Phases
from pipetransformer.run.context import Run
from pipetransformer.run.control_log import ControlLog
from pipetransformer.transformation.attempts import Changes
from pipetransformer.transformation.phases import Prepared
from tests.engine.runs import make_run
from tests.engine.scenario import (
    assert_same_across_boundaries,
    config,
    equal,
    is_active,
    make_engine,
    moments,
    schedule,
)
from tests.engine.stand_ins import stand_in
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed

EPOCHS, BATCHES, SAMPLES, AHEAD = 6, 5, 50, 2
# One entry per epoch: the budget forces K=4 unfrozen, and K=1 with 6.
COUNTS = [0, 4, 6, 2, 0, 6]
ELASTIC = config(
    prepare_steps=AHEAD,
    plan=pt.PlanConfig(slot_memory_bytes=27_000, reshape="always"),
)


def train_ahead(rank, settings, counts=COUNTS, epochs=EPOCHS, leave_after=None):
    """Train; evaluate before and after each boundary, on active ranks."""
    engine = make_engine(freeze=schedule(*counts), dtype=torch.float64, config=settings)
    train_set = ToySet(SAMPLES, dtype=torch.float64, vouch=True)
    test_set = ToySet(21, seed=2, dtype=torch.float64, vouch=True)
    before, after, shapes, results = {}, {}, {}, []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(train_set, 12, num_workers=0):
                step = run_of(engine).state.step
                after[step] = engine.evaluate(test_set)["loss"], moments(engine)
                plan = engine.plan
                shapes[step] = plan.num_stages, plan.num_replicas, plan.boundary
                engine.step(batch)
                before[step + 1] = engine.evaluate(test_set)["loss"], moments(engine)
                if batch.index == leave_after:
                    break
            results.append(engine.evaluate(test_set)["loss"])
        last = moments(engine) if is_active(engine) else None
    return {
        "before": before,
        "after": after,
        "shapes": shapes,
        "results": results,
        "last": last,
        "history": engine.history.to_json(),
    }


@pytest.fixture(scope="module")
def elastic():
    return run_ranks(train_ahead, 4, ELASTIC, timeout_s=110)


def test_plans_take_effect_the_same_number_of_steps_later(elastic):
    changes = elastic[0]["history"]["transformations"]
    starts = [epoch * BATCHES for epoch in range(1, EPOCHS)]
    assert [change["step"] for change in changes] == [s + AHEAD for s in starts]
    assert [f["step"] for f in elastic[0]["history"]["freezes"][1:]] == [
        s + AHEAD for s in starts
    ]
    stages = [change["to"]["num_stages"] for change in changes]
    assert stages[1] == 1 and max(stages) == 4


def test_what_happened_ahead_is_no_part_of_the_pause(elastic):
    for change in elastic[0]["history"]["transformations"]:
        phases = change["phases"]
        assert {"ahead", "ahead/decision", "plan", "prepare"} <= set(phases)
        assert not [name for name in phases if name.startswith("prepare/")]
        assert phases["prepare"] + phases["plan"] <= change["pause_seconds"]


def test_every_sample_is_seen_once_in_each_pass(elastic):
    for epoch in elastic[0]["history"]["epochs"]:
        assert epoch["samples"] == epoch["unique_samples"] == SAMPLES
        assert epoch["optimizer_steps"] == BATCHES
    assert len(elastic[0]["history"]["epochs"]) == EPOCHS


def test_loss_and_state_are_bitwise_equal_before_and_after_each_boundary(elastic):
    assert_same_across_boundaries(elastic)


def test_the_lead_drives_under_the_old_plan_until_the_switch(elastic):
    shapes = elastic[0]["shapes"]
    for start in range(BATCHES, EPOCHS * BATCHES, BATCHES):
        held = [shapes[step] for step in range(start - 1, start + AHEAD)]
        assert len(set(held)) == 1
        assert shapes[start + AHEAD] != held[0]


def test_run_equals_one_process_that_prepares_ahead_too(elastic):
    alone = dataclasses.replace(ELASTIC, plan=pt.PlanConfig())
    still = run_ranks(train_ahead, 1, alone, timeout_s=60)[0]
    assert {shape[:2] for shape in still["shapes"].values()} == {(1, 1)}
    for name in ("weights", "tensors"):
        pairs = zip(elastic[0]["last"][name], still["last"][name], strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_pass_that_is_left_early_takes_the_plan_over_at_its_end():
    # The script leaves after batch 0, with the plan due before batch 2.
    results = run_ranks(train_ahead, 4, ELASTIC, [0, 6, 0, 6], 4, 0, timeout_s=110)
    history = results[0]["history"]
    assert [c["step"] for c in history["transformations"]] == [2, 3, 4]
    assert [c["to"]["num_stages"] for c in history["transformations"]] == [1, 4, 1]
    assert [e["optimizer_steps"] for e in history["epochs"]] == [1, 1, 1, 1]
    assert len({tuple(result["results"]) for result in results}) == 1
    weights = [r["last"]["weights"] for r in results]  # every rank is active at last
    assert all(equal(weights[0], other) for other in weights[1:])


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match=r"Config.prepare_steps: expected a number of"):
        pt.Config(prepare_steps=-1)


def accumulate(rank, settings):
    """Step after every second batch; tell where gradients wait, and the changes."""
    engine = make_engine(freeze=schedule(0, 4), config=settings)
    train_set, waiting = ToySet(SAMPLES), []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(train_set, 12, num_workers=0):
                parameter = list(engine.model.parameters())[-1]
                waiting.append(parameter.grad is not None)
                engine.backward(engine.loss(batch))
                if batch.index % 2 == 1 or batch.index == BATCHES - 1:
                    engine.optimizer.step()
                    engine.optimizer.zero_grad(set_to_none=True)
    return waiting, engine.history.to_json()


def test_a_plan_waits_for_the_optimizer_step_of_the_batches_before_it():
    # Due before batch 1 of the second pass, whose gradients join those of batch 0.
    settings = config(prepare_steps=1)
    waiting, history = run_ranks(accumulate, 1, settings, timeout_s=60)[0]
    assert waiting == [False, True, False, True, False] * 2
    first = history["epochs"][0]["optimizer_steps"]
    assert [c["step"] for c in history["transformations"]] == [first + 1]


def train_from_second_epoch(rank, settings):
    engine = make_engine(freeze=schedule(0, 4), config=settings)
    train_set = ToySet(SAMPLES)
    with engine:
        engine.prepare(train_set, 12)
        for epoch in engine.epochs(2):
            if epoch == 0:
                continue
            for batch in engine.batches(train_set, 12, num_workers=0):
                engine.step(batch)
    return engine.history.to_json()


def test_a_decision_of_an_epoch_without_a_pass_before_it_is_carried_out():
    settings = config(prepare_steps=AHEAD)
    history = run_ranks(train_from_second_epoch, 1, settings, timeout_s=60)[0]
    assert [c["step"] for c in history["transformations"]] == [AHEAD]


def refuse_once(rank, settings):
    """Train like `train_ahead`; rank 2 refuses the first change."""
    build, left = Run.build_group, [rank == 2]

    def refuse(run, name, members, **options):
        if len(members) > 1 and left[0]:
            left[0] = False
            raise RuntimeError("no sockets left")
        return build(run, name, members, **options)

    Run.build_group = refuse
    return train_ahead(rank, settings, counts=[0, 6, 6], epochs=3)


@pytest.mark.parametrize("steps", [AHEAD, BATCHES + 1])
def test_a_plan_that_is_aborted_is_tried_again_where_it_was_due(steps):
    settings = dataclasses.replace(ELASTIC, prepare_steps=steps)
    results = run_ranks(refuse_once, 4, settings, timeout_s=110)
    history = results[0]["history"]
    due = BATCHES + min(steps, BATCHES)
    assert [(a["step"], a["culprits"]) for a in history["aborted"]] == [(due, [2])]
    changes = [(c["step"], c["attempt"]) for c in history["transformations"][:1]]
    assert changes == [(due, 1)]
    assert [e["epoch"] for e in history["epochs"]] == [0, 1, 2]
    assert [e["unique_samples"] for e in history["epochs"]] == [SAMPLES] * 3
    assert len({tuple(result["results"]) for result in results}) == 1


def test_what_a_standby_prepared_ahead_is_no_part_of_its_prices():
    phases = Phases()
    phases.seconds.update({"prepare": 3.0, "prepare/group": 1.0})
    proposal = SimpleNamespace(ahead=True, at_switch=lambda message: message)
    run = make_run(control_log=stand_in(ControlLog))
    run.control_log.follow.return_value = {"goes": True}
    changes = Changes(run, None)
    taken = changes._await_switch(Prepared(None, proposal, True, None, False, phases))
    assert taken.phases.seconds == {"ahead": 3.0, "ahead/group": 1.0}
