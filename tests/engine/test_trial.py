"""Plans that no model can tell apart are tried out; what trains is the same."""

import dataclasses

import pytest
import torch

import pipetransformer as pt
from pipetransformer.planner import Trial
from pipetransformer.planner import trial as trials
from pipetransformer.progress.counts import Counts
from pipetransformer.run.measured_costs import MeasuredCosts
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of, run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

pytestmark = pytest.mark.distributed

SAMPLES, BATCH, EPOCHS = 60, 12, 8  # 5 steps a pass, so a turn of 3 crosses its end
# M is forced, so that plans of other K and R are among those that come next.
TRIED = dataclasses.replace(
    config(), plan=pt.PlanConfig(trial_steps=2, num_microbatches=2)
)


def pretend(fast):
    """Let batches take 0.1 s under plans of one shape and 0.2 s under all others.

    Plans that simulate up to four times as long as the shortest count as close to it.
    """

    def batch_seconds(self, per_step):
        shape = self.shape
        mine = shape.num_stages, shape.num_replicas, shape.num_microbatches
        return [0.1 if mine == fast else 0.2] if self._begins else []

    Counts.batch_seconds = batch_seconds
    trials.WITHIN_PERCENT = 300


def train(
    rank,
    settings,
    fast=None,
    freeze=None,
    epochs=EPOCHS,
    stop_after=None,
    prepares=False,
):
    """Train in fp64; return what ran at each step, the weights, and the history."""
    if settings.plan.trial_steps:
        pretend(fast)
    steps, losses = {}, []
    engine = make_engine(
        freeze=freeze or schedule(0), dtype=torch.float64, config=settings
    )
    data = ToySet(SAMPLES, dtype=torch.float64)
    with engine:
        if prepares:
            engine.prepare(data, BATCH)
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(data, BATCH, num_workers=0):
                plan = engine.plan
                steps[run_of(engine).state.step] = plan.shape, plan.boundary
                engine.step(batch)
            losses.append(engine.evaluate(data)["loss"])
            if epoch == stop_after:
                break
        trial = run_of(engine).costs.trial
    return {
        "steps": steps,
        "losses": losses,
        "weights": [p.detach().clone() for p in model_of(engine).parameters()],
        "rules": [
            change["transition"]["rule"]
            for change in engine.history.to_json()["transformations"]
            if change["transition"] is not None
        ],
        "decisions": engine.history.to_json()["decisions"],
        "trial": trial,
    }


def trained(world_size, settings, *args, **options):
    """Train on ranks; return the lead's result, with the steps of all."""
    results = run_ranks(_train, world_size, settings, args, options)
    steps = {}
    for result in results:
        steps.update(result["steps"])
    last = max(steps)  # a rank that stands by knows what the last plan's message said
    trials = [result["trial"] for result in results if last in result["steps"]]
    assert all(trial == trials[0] for trial in trials)
    return {**results[0], "steps": steps}


def _train(rank, settings, args, options):
    return train(rank, settings, *args, **options)


def shapes_of(result):
    return [each.shape for each in result["trial"].candidates]


def assert_trained_alike(result, other):
    torch.testing.assert_close(result["losses"], other["losses"], rtol=1e-9, atol=0)
    for mine, its in zip(result["weights"], other["weights"], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-9)


@pytest.fixture(scope="module")
def plain():
    return trained(2, config())


@pytest.fixture(scope="module")
def tried():
    """The first plan turns out to be the fastest."""
    return trained(2, TRIED)


def test_each_plan_has_its_turn_and_the_training_is_that_of_one_plan(tried, plain):
    shapes = shapes_of(tried)
    assert shapes == [(1, 2, 2), (2, 1, 2), (1, 1, 2)]
    for step, (shape, _) in tried["steps"].items():
        turn = step // 3
        assert shape == (shapes[turn] if turn < len(shapes) else shapes[0])
    assert_trained_alike(tried, plain)


def test_each_turn_is_a_change_of_plan_with_its_reason(tried):
    rules, names = tried["rules"], [each.name for each in tried["trial"].candidates]
    told = [f"trial {i} of 3: {n} for 3 steps" for i, n in enumerate(names, 1)]
    found = ", ".join(f"{name} 200.000 ms" for name in names[1:])
    assert rules == [*told[1:], f"trial: {names[0]} takes 200.000 ms a step, {found}"]


@pytest.mark.parametrize("index", [1, 2])
def test_the_fastest_stays(tried, plain, index):
    fast = shapes_of(tried)[index]
    result = trained(2, TRIED, fast)
    assert shapes_of(result) == shapes_of(tried)
    assert result["trial"].fastest.shape == fast
    last = {shape for step, (shape, _) in result["steps"].items() if step >= 9}
    assert last == {fast}
    assert_trained_alike(result, plain)


def test_a_boundary_that_moves_ends_the_trial_and_what_was_found_counts(plain):
    # Two plans have had their turn when the first layers freeze.
    counts = schedule(0, 2)
    result = trained(2, TRIED, None, counts)
    trial = result["trial"]
    assert trial.ended and trial.boundary == 0
    measured = [each.name for each in trial.candidates if each.name in trial.step_ns]
    assert len(measured) == 2
    frozen = {at for step, (_, at) in result["steps"].items() if step >= 5}
    assert frozen == {3}
    assert_trained_alike(result, trained(2, config(), None, counts))


def test_a_policy_is_told_the_loss_of_all_rows_whatever_is_tried(tried):
    fast = shapes_of(tried)[1]  # rank 1, which had rows of its own, then stands by
    results = [
        trained(2, settings, fast, pt.freeze.Guarded())
        for settings in (TRIED, dataclasses.replace(TRIED, plan=pt.PlanConfig()))
    ]
    found, expected = (
        {
            entry["step"]: entry["statistics"]["loss"]
            for entry in result["decisions"]
            if "loss" in entry["statistics"]
        }
        for result in results
    )
    assert len(expected) >= 5
    assert found == pytest.approx(expected, rel=1e-9)


def test_what_steps_take_after_the_trial_changes_nothing_of_it(tried):
    costs, trial = MeasuredCosts(), tried["trial"]
    fastest = trial.fastest
    costs.trial = dataclasses.replace(trial, step_ns={})
    for each, seconds in zip(trial.candidates, (1.0, 2.0, 3.0), strict=True):
        costs.record_steps(each, [seconds], first_step=0)
    costs.record_steps(fastest, [9.0] * 100, first_step=9)  # the machine is busy now
    told = Trial.from_dict(costs.state()["trial"])
    assert told.fastest == fastest
    assert told.step_ns[fastest.name] == 1_000_000_000


def test_a_run_with_too_few_steps_tries_nothing_out():
    result = trained(2, TRIED, None, epochs=4)  # 20 steps; two turns take 6
    assert result["trial"] is None and result["rules"] == []


def test_a_plan_that_was_made_before_the_epochs_are_known_is_compared(tried):
    result = trained(2, TRIED, prepares=True)
    assert shapes_of(result) == shapes_of(tried)
    assert result["trial"].is_over(9)


def test_one_process_tries_its_own_plans_out(plain):
    settings = dataclasses.replace(TRIED, pipe=pt.PipeConfig(num_slots=2))
    result = trained(1, settings, (1, 1, 2))
    assert shapes_of(result) == [(2, 1, 2), (1, 1, 2)]
    assert result["steps"][EPOCHS * 5 - 1][0] == (1, 1, 2)
    assert_trained_alike(result, plain)


def test_batches_that_share_a_step_are_tried_out_together():
    settings = dataclasses.replace(TRIED, accumulation_steps=2)
    result = trained(2, settings, epochs=14)  # 3 steps a pass, the last of one batch
    shapes = shapes_of(result)
    for step, (shape, _) in result["steps"].items():
        turn = step // 3
        assert shape == (shapes[turn] if turn < len(shapes) else shapes[0])
    plain = trained(2, config(accumulation_steps=2), epochs=14)
    assert_trained_alike(result, plain)


def test_a_resumed_run_knows_what_was_found(tmp_path, tried):
    fast = shapes_of(tried)[2]
    saved = pt.CheckpointConfig(directory=str(tmp_path), every_epochs=1)
    settings = dataclasses.replace(TRIED, checkpoint=saved)
    first = trained(2, settings, fast, stop_after=3)
    resumed = dataclasses.replace(
        settings, checkpoint=dataclasses.replace(saved, resume=True)
    )
    second = trained(2, resumed, fast)
    assert second["trial"] == dataclasses.replace(first["trial"], ended=True)
    assert {shape for shape, _ in second["steps"].values()} == {fast}
    assert second["rules"] == []


def test_a_resumed_run_may_ask_for_another_plan(tmp_path, tried):
    fast = shapes_of(tried)[2]
    saved = pt.CheckpointConfig(directory=str(tmp_path), every_epochs=1)
    settings = dataclasses.replace(TRIED, checkpoint=saved)
    trained(2, settings, fast, stop_after=3)
    other = dataclasses.replace(
        settings,
        plan=pt.PlanConfig(num_microbatches=4, num_stages=2),
        checkpoint=dataclasses.replace(saved, resume=True),
    )
    second = trained(2, other)
    assert {shape for shape, _ in second["steps"].values()} == {(2, 1, 4)}


def test_what_the_last_turn_took_is_in_the_file_of_the_pass_that_ends_with_it(tmp_path):
    saved = pt.CheckpointConfig(directory=str(tmp_path), every_epochs=1)
    # Three turns of five steps each: a pass a turn.
    plan = dataclasses.replace(TRIED.plan, trial_steps=4)
    settings = dataclasses.replace(TRIED, plan=plan, checkpoint=saved)
    trained(2, settings, (1, 1, 2), epochs=14, stop_after=3)
    resumed = dataclasses.replace(
        settings, checkpoint=dataclasses.replace(saved, resume=True)
    )
    second = trained(2, resumed, (1, 1, 2), epochs=14)
    assert len(second["trial"].step_ns) == 3
    assert second["trial"].fastest.shape == (1, 1, 2)


def test_a_resumed_run_begins_anew_what_was_not_ended(tmp_path):
    saved = pt.CheckpointConfig(directory=str(tmp_path), every_epochs=1)
    settings = dataclasses.replace(TRIED, checkpoint=saved)
    first = trained(2, settings, stop_after=0)  # the file is of step 5
    assert first["trial"].begun == 0 and not first["trial"].is_over(5)
    resumed = dataclasses.replace(
        settings, checkpoint=dataclasses.replace(saved, resume=True)
    )
    second = trained(2, resumed)
    assert second["trial"].begun == 5 and second["trial"].is_over(40)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: pt.PlanConfig(trial_steps=-1), "expected a number of steps from 0"),
        (
            lambda: pt.PlanConfig(trial_steps=2, reshape="never"),
            "expected 0 with reshape='never', got 2",
        ),
        (
            lambda: pt.Config(plan=pt.PlanConfig(trial_steps=2), prepare_steps=1),
            "expected 0 with prepare_steps, got 2",
        ),
    ],
)
def test_settings_that_leave_no_room_for_it_are_refused(settings, message):
    with pytest.raises(ValueError, match=r"PlanConfig\.trial_steps: ") as error:
        settings()
    assert message in str(error.value)
