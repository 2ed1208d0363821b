"""Freezing is the policy's, shapes are a matter of price; ranks decide identically."""

import types

import pytest
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.planner import PauseModel
from pipetransformer.run.arguments import Workload
from pipetransformer.run.measured_costs import MeasuredCosts, PricingInputs, kind_of
from pipetransformer.run.step_costs import StepFactors
from pipetransformer.state.state import TrainingState
from pipetransformer.transformation.plan_search import remaining_steps
from tests.engine.runs import make_run
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

# Two ranks need K=2 unfrozen; with 4 layers frozen K=1 fits, alongside the old one too.
TIGHT = {"slot_memory_bytes": 34_000}


def train(rank, freeze, epochs, options):
    """Train; return the history, and the plans that this rank ran under."""
    tamper = options.pop("tamper", None)
    plans = []
    with make_engine(freeze=freeze, **options) as engine:
        for _ in engine.epochs(epochs):
            if engine.plan is not None:
                plans.append(engine.plan.plan_hash)
            for batch in engine.batches(ToySet(50), 12):
                engine.step(batch)
            if tamper is not None:
                seconds = tamper * rank
                prices = run_of(engine).costs
                prices.pauses = PauseModel().observed(
                    {"prepare": seconds, "rewire": seconds}, kind="shape"
                )
                prices.learner.follow(StepFactors(pace=2.0 + rank, link=1.0 + rank))
        pauses = run_of(engine).costs.pauses.to_dict()
    return engine.history.to_json(), plans, pauses


@pytest.mark.distributed
def test_ranks_that_measure_different_pauses_decide_as_the_lead_does():
    options = {"config": config(), "tamper": 100.0}
    results = run_ranks(train, 2, schedule(0, 2, 3), 3, options)
    lead, other = (plans for _, plans, _ in results)
    # The hash of a plan holds the price; a rank that used its own would be found.
    assert lead == other and len(lead) == 2  # there is none before the first pass
    changes = results[0][0]["transformations"]
    assert [c["transition"]["anyway_terms_ns"]["rewire"] for c in changes] == [0, 0]


@pytest.mark.distributed
def test_refused_shape_is_recorded_with_its_rule_and_the_freeze_goes_on():
    dear = {"config": config(plan=pt.PlanConfig(**TIGHT, hysteresis=1000.0))}
    history = run_ranks(train, 2, schedule(0, 3), 3, dear)[0][0]
    assert [e["boundary"] for e in history["epochs"]] == [0, 4, 4]
    assert [e["num_stages"] for e in history["epochs"]] == [2, 2, 2]
    (change,) = history["transformations"]
    assert not change["transition"]["accepted"]
    refused = history["refusals"]
    assert [r["epoch"] for r in refused] == [1, 2], "asked anew in every epoch"
    for record in refused:
        assert record["transition"]["kind"] == "shape"
        assert "not more than 1001 x the pause" in record["transition"]["rule"]
    assert refused[0]["transition"]["rule"] in change["reason"]


def test_freezing_is_carried_out_even_where_no_shape_may_change():
    # Two blocks fit a slot alongside what is frozen: K=3, and then one active layer.
    options = {
        "config": config(
            plan=pt.PlanConfig(slot_memory_bytes=18_000, reshape="never"),
            pipe=pt.PipeConfig(num_slots=3),
        )
    }
    history, _, _ = train(0, schedule(0, 2, 4, 6, 1), 5, options)
    epochs, changes = history["epochs"], history["transformations"]
    assert [e["num_frozen_layers"] for e in epochs] == [0, 2, 4, 6, 1]
    assert [e["num_stages"] for e in epochs] == [3, 3, 3, 1, 3]
    for change, must in zip(changes, (False, False, True, True), strict=True):
        assert ("whatever it costs" in change["reason"]) == must


def test_summary_holds_predicted_and_measured_side_by_side():
    options = {"config": config(pipe=pt.PipeConfig(num_slots=2))}
    history, _, pauses = train(0, schedule(0, 2), 2, options)
    for epoch in history["epochs"]:
        assert epoch["predicted_step_ns"] > 0
        steps = epoch["optimizer_steps"]
        assert epoch["measured_step_ns"] == round(1e9 * epoch["seconds"] / steps)
    assert history["first_plan"]["transition"] is None
    (change,) = history["transformations"]
    predicted = change["transition"]
    expected = predicted["terms_ns" if predicted["accepted"] else "anyway_terms_ns"]
    assert set(expected) == {"prepare", "move", "rewire", "first_step", "cache"}
    assert {"prepare", "move", "rewire", "first_step"} <= set(change["phases"])
    assert predicted["remaining_steps"] == 5, "50 samples in batches of 12, one epoch"
    # The first plan takes what only a start takes: its pause is not learned from.
    assert pauses["rewire"]["count"] == 1
    assert pauses["first_step"]["count"] == 2


def test_engine_explains_its_plan_beside_what_was_measured():
    settings = config(pipe=pt.PipeConfig(num_slots=2))
    with make_engine(freeze=schedule(0, 2), config=settings) as engine:
        with pytest.raises(ValueError, match="expected an active rank, got a standby"):
            engine.explain()
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(50), 12):
                engine.step(batch)
        explanation = engine.explain()
        assert explanation.plan == engine.plan
    told = explanation.to_dict()
    measured = {entry["what"].partition(" (")[0] for entry in told["measured"]}
    assert {"step of epoch 0", "step of epoch 1", "pause before epoch 1"} <= measured
    assert told["counterfactuals"]
    assert explanation.plan.transition.rule in str(explanation)


def test_measured_pauses_survive_a_checkpoint(tmp_path):
    saved = config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path)))
    _, _, pauses = train(0, schedule(0, 2), 2, {"config": saved})
    path, content = checkpoint.newest_valid(tmp_path)
    kept = content["extra"]["pauses"]
    del kept["steps"]
    assert PauseModel.from_dict(kept).rewire.count == 1
    resumed = config(
        checkpoint=pt.CheckpointConfig(directory=str(tmp_path), resume=True)
    )
    _, _, later = train(0, schedule(0, 2, 2, 3), 4, {"config": resumed})
    assert later["rewire"]["count"] == pauses["rewire"]["count"] + 1


@pytest.mark.distributed
def test_time_since_the_last_shape_survives_a_checkpoint(tmp_path):
    saved = config(
        checkpoint=pt.CheckpointConfig(directory=str(tmp_path), resume=True),
        plan=pt.PlanConfig(**TIGHT, reshape="always"),
    )
    freeze, options = schedule(0, 3), {"config": saved}
    first, _, _ = run_ranks(train, 2, freeze, 2, options)[0]
    assert [e["num_stages"] for e in first["epochs"]] == [2, 1]
    _, content = checkpoint.newest_valid(tmp_path)
    before = content["extra"]["reshaped_ns_ago"]
    assert before > 0
    freeze = schedule(0, 3)
    run_ranks(train, 2, freeze, 3, options)
    _, content = checkpoint.newest_valid(tmp_path)
    # The first plan of a run restarts no clock, and no shape changed since.
    assert content["extra"]["reshaped_ns_ago"] > before


def test_checkpoint_without_a_new_shape_starts_no_clock(tmp_path):
    saved = config(checkpoint=pt.CheckpointConfig(directory=str(tmp_path)))
    train(0, schedule(0), 1, {"config": saved})
    _, content = checkpoint.newest_valid(tmp_path)
    assert content["extra"]["reshaped_ns_ago"] is None


@pytest.mark.parametrize("elapsed", [-1, 1.5, True, "1"])
def test_malformed_time_since_the_last_shape_is_refused(elapsed):
    with pytest.raises(ValueError, match="reshaped_ns_ago: expected nanoseconds"):
        MeasuredCosts().load_elapsed(elapsed)


def test_clock_goes_on_from_the_run_before():
    hour = 3600 * 10**9
    prices = MeasuredCosts()
    prices.load_elapsed(hour)
    group = types.SimpleNamespace(rank=0, all_gather_bytes=lambda value: [value])
    assert prices.agree(group, 0, cache_slots=0).elapsed_ns >= hour
    prices.record({"rewire": 0.1}, kind="shape", moved_bytes=0, first=False)
    assert prices.elapsed_ns() < hour
    prices.load_elapsed(None)
    assert prices.elapsed_ns() is None


def run_at(policy, *, epoch, epochs=10, batches=7, batch=0, every=None):
    """Return what `remaining_steps` reads of a run."""
    step = epoch * batches + batch
    state = TrainingState(None, epoch=epoch, step=step, batch=batch)
    state.decided_epoch = epoch if every is None else step // every
    run = make_run(
        config=pt.Config(freeze_every=every),
        policy=policy,
        model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(13))),
        total_epochs=epochs,
        workload=Workload(batches, 1, batches, False, lambda rows: None),
        state=state,
    )
    for point in range(state.decided_epoch + 1):
        policy.decide(pt.freeze.Progress(point, 0))
    return run


@pytest.mark.parametrize(
    ("policy", "epoch", "epochs", "expected"),
    [
        (pt.freeze.Never(), 3, 10, 7 * 7),
        (pt.freeze.Schedule([0, 0, 5]), 0, 10, 2 * 7),
        (pt.freeze.Schedule([0, 0, 5]), 2, 10, 8 * 7),
        (pt.freeze.Schedule([0] * 20 + [5]), 3, 10, 7 * 7),
        (pt.freeze.AlphaCap(1 / 3, gradient_term=False), 5, 10, 2 * 7),
        (pt.freeze.AlphaCap(1 / 3, gradient_term=False), 9, 10, 7),
    ],
)
def test_a_gain_lasts_until_the_next_freeze_or_the_end(policy, epoch, epochs, expected):
    assert remaining_steps(run_at(policy, epoch=epoch, epochs=epochs)) == expected


def test_a_gain_lasts_until_the_step_of_the_next_freeze():
    policy = pt.freeze.Schedule([0, 0, 5])
    run = run_at(policy, epoch=0, batches=7, batch=6, every=5)  # step 6: point 1
    assert remaining_steps(run) == 2 * 5 - 6
    run = run_at(pt.freeze.Never(), epoch=1, epochs=2, batches=7, batch=3, every=5)
    assert remaining_steps(run) == 4


def test_ranks_plan_by_what_the_lead_has_learned_of_steps():
    told = []

    def gather(value):
        told.append(value)
        return [told[0]]

    lead, other = MeasuredCosts(), MeasuredCosts()
    first = types.SimpleNamespace(rank=0, all_gather_bytes=gather)
    second = types.SimpleNamespace(rank=1, all_gather_bytes=gather)
    lead.learner.follow(StepFactors(pace=1.5, link=3.0))
    other.learner.follow(StepFactors(pace=0.5))
    known = StepFactors(pace=1.5, link=3.0)
    assert lead.agree(first, 3, cache_slots=7) == PricingInputs(
        PauseModel(), None, 3, known, 7
    )
    assert other.agree(second, 3, cache_slots=7).steps == known == other.steps
    assert other.learner.factors == StepFactors(pace=0.5), "its own are its own"


def test_only_a_new_shape_starts_the_clock():
    group = types.SimpleNamespace(rank=0, all_gather_bytes=lambda value: [value])
    prices = MeasuredCosts()
    for kind, first in (("shape", True), ("boundary", False), ("cuts", False)):
        prices.record({"rewire": 0.1}, kind=kind, moved_bytes=0, first=first)
        assert prices.agree(group, 0, cache_slots=0).elapsed_ns is None
    prices.record({"rewire": 0.1}, kind="shape", moved_bytes=0, first=False)
    pricing = prices.agree(group, 0, cache_slots=0)
    assert pricing.elapsed_ns is not None and pricing.elapsed_ns >= 0
    assert PricingInputs.from_bytes(pricing.to_bytes()) == pricing


def test_kinds_are_told_by_what_ran_before():
    def plan(shape, boundary):
        return types.SimpleNamespace(shape=shape, boundary=boundary)

    before = plan((4, 1, 8), 0)
    assert kind_of(None, before) == "shape"
    assert kind_of(before, plan((2, 2, 4), 2)) == "shape"
    assert kind_of(before, plan((4, 1, 8), 2)) == "boundary"
    assert kind_of(before, plan((4, 1, 4), 0)) == "cuts"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reshape": "often"}, "PlanConfig.reshape: expected 'priced', 'always' or"),
        ({"hysteresis": -1}, "PlanConfig.hysteresis: expected a number from 0 to 1000"),
        ({"hysteresis": float("nan")}, "PlanConfig.hysteresis: expected a number"),
    ],
)
def test_bad_setting_is_refused_by_name(options, text):
    with pytest.raises(ValueError, match=text):
        pt.PlanConfig(**options)
