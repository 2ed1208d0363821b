"""What an explanation of a plan says, against the plan, the profile and the options."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pipetransformer.explanation import (
    Measurement,
    explain_plan,
    hash_notes,
    outline,
)
from pipetransformer.explanation.stages import most_in_flight
from pipetransformer.planner import Plan, replan, search
from pipetransformer.simulator import Event, simulate
from tests.explanation.cases import (
    MILLISECOND,
    a_cluster,
    a_plan,
    a_profile,
    cached_cluster,
)
from tests.explanation.golden import EXPLANATION, PLAN

GOLDEN = Path(__file__).with_name("plan.txt")


def explained(profile=None, cluster=None, **options):
    profile, cluster = profile or a_profile(), cluster or a_cluster()
    plan = a_plan(profile, cluster, **options)
    return explain_plan(plan, profile, cluster)


def a_changed_plan():
    """Frozen layers, a cache, a heavy layer, a change of plan, a measured run."""
    profile, cluster = a_profile(8, heavy=5), cached_cluster()
    plan = replan(
        profile,
        cluster,
        current=a_plan(profile, cluster, num_stages=4, checkpoint="always"),
        boundary=2,
        remaining_steps=1000,
        global_batch=16,
        schedules=("gpipe", "1f1b"),
        cache_tiers=("none", "host"),
        num_samples=1000,
    )
    measured = [
        Measurement(what="step", predicted_ns=120 * MILLISECOND, measured_ns=10**8),
        Measurement(what="pause", predicted_ns=None, measured_ns=10**9),
    ]
    return explain_plan(plan, profile, cluster, measured=measured)


def test_text_is_as_agreed():
    text = str(EXPLANATION).replace(f"{PLAN.plan_hash:016x}", "<plan hash>")
    assert text + "\n" == GOLDEN.read_text()


def test_text_holds_every_promised_part():
    report = a_changed_plan()
    text = str(report)
    for title in (
        "Inputs",
        "Stages",
        "Limiting resource",
        "Candidates",
        "Other ways to run it",
        "Reasons",
        "Transition",
        "Predicted against measured",
    ):
        assert f"\n{title}" in text
    for part in (
        f"{report.plan.profile_hash:016x}",
        report.limiting_resource,
        report.plan.transition.rule,
        *report.plan.reasons,
        *(way.reason for way in report.counterfactuals),
        *(way.title for way in report.counterfactuals),
        *(candidate.lost for candidate in report.plan.candidates),
    ):
        assert part in text


def test_json_holds_every_promised_part():
    values = json.loads(json.dumps(a_changed_plan().to_dict(), allow_nan=False))
    assert set(values) == {
        "version",
        "cache",
        "kind",
        "inputs",
        "plan",
        "step_ns",
        "stages",
        "limiting_resource",
        "limits",
        "candidates",
        "refusals",
        "reasons",
        "counterfactuals",
        "transition",
        "idle_devices",
        "codecs",
        "freezing",
        "measured",
    }
    assert (values["version"], values["kind"]) == (1, "plan")
    assert Plan.from_json(json.dumps(values["plan"])).to_dict() == values["plan"]
    assert values["candidates"] == values["plan"]["candidates"]
    assert [entry["error"] for entry in values["measured"]] == [0.2, None]
    assert [entry["name"] for entry in values["counterfactuals"]] == [
        "paper_static",
        "best_static",
        "plain_ddp",
        "no_cache",
        "serial_prefix",
    ]


@pytest.mark.parametrize("saved", ["", "so far freezing has saved 1.50 s"])
@pytest.mark.parametrize("decisions", [0, 10, 12])
def test_the_last_ten_decisions_are_told_and_what_they_saved(decisions, saved):
    told = [f"point {point}, step 7: 0 of 6 units frozen" for point in range(decisions)]
    plan = a_plan(a_profile(), a_cluster())
    explanation = explain_plan(plan, freezing=told, saved=saved)
    end = [saved] if saved else []
    assert explanation.to_dict()["freezing"] == [*told, *end]
    lines = [line.strip() for line in str(explanation).splitlines()]
    shown = [line for line in lines if line.startswith(("point", "so far"))]
    assert shown == [*told[-10:], *end]
    assert ("2 decisions before these" in lines) == (decisions == 12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_stages_are_those_of_the_plan(schedule, checkpoint):
    profile = a_profile(9, heavy=4)
    cluster = a_cluster(device_memory_bytes=10**9)
    plan = a_plan(
        profile,
        cluster,
        schedules=(schedule,),
        num_stages=3,
        num_microbatches=8,
        checkpoint=checkpoint,
    )
    stages = explain_plan(plan, profile, cluster).stages
    assert [(s.first_layer, s.last_layer + 1) for s in stages] == [*pairwise(plan.cuts)]
    assert tuple(s.device_bytes for s in stages) == plan.bytes_per_stage
    rows = plan.samples_per_microbatch
    for stage in stages:
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        forward = rows * sum(layer.forward_ns[0] for layer in layers)
        assert stage.forward_ns == forward
        assert stage.weight_grad_ns == forward  # as long as forward, in this profile
        assert 0 < stage.input_grad_ns <= forward
        assert stage.recompute_ns == (forward if checkpoint == "always" else 0)
    mean = sum(s.bubble_share for s in stages) / len(stages)
    assert mean == pytest.approx(plan.bubble_fraction, abs=1e-5)


def test_in_flight_follows_the_schedule():
    profile, cluster = a_profile(), a_cluster()

    def in_flight(schedule):
        plan = a_plan(
            profile, cluster, schedules=(schedule,), num_stages=3, num_microbatches=6
        )
        return [s.in_flight for s in explain_plan(plan, profile, cluster).stages]

    assert in_flight("gpipe") == [6, 6, 6]
    assert in_flight("1f1b") == [3, 2, 1]
    assert all(live <= 3 for live in in_flight("zb-h1"))


def test_a_micro_batch_that_ends_when_the_next_begins_is_not_in_flight_with_it():
    times = [("F", 0, 0, 2), ("B", 0, 2, 3), ("F", 1, 3, 4), ("B", 1, 5, 6)]
    events = [
        Event(
            kind=k,
            resource="compute",
            stage=0,
            microbatch=m,
            direction="",
            begin_ns=a,
            end_ns=b,
        )
        for k, m, a, b in times
    ]
    assert most_in_flight(events, 1) == [1]


def test_a_plan_alone_tells_what_it_holds():
    plan = a_plan(a_profile(), a_cluster(), num_stages=3)
    alone = explain_plan(plan)
    assert alone.step_ns == plan.simulated_step_ns
    assert (alone.limits, alone.counterfactuals) == ((), ())
    assert [s.forward_ns for s in alone.stages] == [None] * 3
    text = str(alone)
    assert "Stages" in text and "Candidates" in text and "Reasons" in text
    assert "Idle devices" in text  # one of four
    assert "Limiting resource" not in text


def test_a_plan_written_by_hand_is_explained():
    profile, cluster = a_profile(4), a_cluster()
    plan = Plan(
        boundary=0,
        num_stages=2,
        num_replicas=1,
        num_microbatches=2,
        samples_per_microbatch=8,
        global_batch=16,
        cuts=(0, 1, 4),
    )
    report = explain_plan(plan, profile, cluster)
    assert report.step_ns > 0 and report.limiting_resource == "stage 1"
    assert all(stage.device_bytes for stage in report.stages)
    assert report.inputs.notes == ()
    assert "-" in str(explain_plan(plan))


def test_another_profile_or_cluster_is_noted():
    profile, cluster = a_profile(), a_cluster()
    plan = a_plan(profile, cluster)
    other = a_profile(heavy=0)
    assert hash_notes(plan, profile, cluster) == ()
    assert hash_notes(plan, other, cluster) == (
        "note: the plan was made from another profile",
    )
    roomy = replace(cluster, device_memory_bytes=10**9)
    assert hash_notes(plan, profile, roomy) == (
        "note: the plan was made for another cluster",
    )
    assert "another profile" in str(explain_plan(plan, other, cluster))
    told = explain_plan(plan, profile, roomy, learned=True).inputs.notes
    assert told == (
        "note: times hold what the run has learned since the plan was made",
    )


def test_a_plan_for_another_model_is_refused():
    plan = a_plan(a_profile(6), a_cluster())
    with pytest.raises(ValueError, match="cuts: expected"):
        explain_plan(plan, a_profile(5), a_cluster())


def test_infeasible_lengths_name_layer_and_bytes():
    tight = a_cluster(device_memory_bytes=40 * 10**6)
    report = explained(a_profile(6), tight)
    assert any("miss" in text and "layer" in text for text in report.plan.refusals)
    assert report.plan.refusals[0] in str(report)


def test_outline_is_the_explanation_without_searches():
    profile, cluster = a_profile(), a_cluster()
    plan = a_plan(profile, cluster)
    short = outline(plan, profile, cluster, simulate(plan, profile, cluster))
    assert short.stages == explain_plan(plan, profile, cluster).stages
    assert short.limits == ()


def test_batches_that_share_a_step_are_told():
    profile, cluster = a_profile(), a_cluster()
    plan = search(profile, cluster, global_batch=16, accumulation_steps=4)
    told = "4 batches share an optimizer step and its all-reduce; a step here is one"
    assert told in str(explain_plan(plan, profile, cluster))
    plain = search(profile, cluster, global_batch=16)
    assert "share an optimizer step" not in str(explain_plan(plain, profile, cluster))


def test_equal_arguments_give_equal_explanations():
    assert a_changed_plan() == a_changed_plan()
    assert str(a_changed_plan()) == str(a_changed_plan())
