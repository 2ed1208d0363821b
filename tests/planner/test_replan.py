"""Planning again: what a boundary asks for, and what is worth more than that."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.planner import (
    ChangeTerms,
    InfeasiblePlan,
    PauseModel,
    Plan,
    RunningMean,
    SearchOptions,
    Transition,
    replan,
    search,
)
from pipetransformer.planner.pauses import TERMS, total_ns
from tests.planner.instances import cluster, equal_profile, layer, profile

MS = 1_000_000
# 12 layers of 1 ms forward and 2 ms backward per sample; 4 slots hold 3 layers each
# at M=16, so K=4 at first.
MODEL = equal_profile(12, times=(MS, MS, MS), parameters=1000, activation=500)
SLOTS = cluster(4, 66_000)
FIRST = search(MODEL, SLOTS, global_batch=32)
# Two rows at least: M=24 would save a little by unequal micro-batches.
CACHED = {"cache_tiers": ("host",), "global_batch": 32, "min_microbatch_samples": 2}


def again(boundary, *, current=FIRST, slots=SLOTS, left=34, **options):
    options = {**CACHED, **options}
    return replan(
        MODEL,
        slots,
        current=current,
        boundary=boundary,
        remaining_steps=left,
        **options,
    )


def test_first_plan_is_the_long_pipeline():
    assert FIRST.shape == (4, 1, 16) and FIRST.transition is None


def test_shape_changes_where_that_pays():
    plan = again(6)
    assert plan.shape == (1, 4, 1)
    change = plan.transition
    assert change.kind == "shape" and change.accepted
    assert change.moved_bytes == 12 * 3000
    assert change.pause_ns == sum(change.terms_ns.values()) == 35_360_000
    assert sum(change.anyway_terms_ns.values()) == 20 * MS
    staying = again(6, reshape="never")
    assert change.gain_ns_per_step == staying.simulated_step_ns - plan.simulated_step_ns
    assert change.pay_back_steps == -(-15_360_000 // change.gain_ns_per_step)
    assert plan.reasons[0] == change.rule
    assert "2516.000 ms in the 34 steps left: more than 1.25 x the pause" in change.rule


def test_freeze_is_carried_out_when_the_shape_is_refused():
    plan = again(6, left=0)
    assert (plan.boundary, plan.shape) == (6, FIRST.shape)
    change = plan.transition
    assert not change.accepted and change.offered == "K=1 R=4 M=1"
    assert change.rule.startswith("K=4 R=1 M=16 stays: K=1 R=4 M=1 saves 74.000 ms")
    assert change.expected_terms_ns == change.anyway_terms_ns
    chosen, *others = plan.candidates
    assert (chosen.shape, chosen.cuts, chosen.lost) == (plan.shape, plan.cuts, "")
    assert all(other.lost for other in others)
    faster = [c for c in others if c.simulated_step_ns < plan.simulated_step_ns]
    assert faster and all("not more than 1.25 x" in c.lost for c in faster)


def test_cuts_stay_behind_the_boundary_unless_a_stage_would_be_empty():
    near = again(1, reshape="never")
    assert near.cuts == (1, *FIRST.cuts[1:])
    assert near.transition.kind == "boundary" and near.transition.accepted
    far = again(6, reshape="never")
    assert far.num_stages == 4 and far.cuts[0] == 6
    assert sorted(b - a for a, b in zip(far.cuts, far.cuts[1:], strict=False)) == [
        1,
        1,
        2,
        2,
    ]


def test_nothing_new_changes_nothing():
    same = again(0)
    assert (same.cuts, same.shape) == (FIRST.cuts, FIRST.shape)
    assert same.transition.kind == "none" and same.transition.pause_ns == 0
    assert "no other plan has a shorter step" in same.transition.rule


def test_cuts_move_where_the_shape_stays():
    options = {"global_batch": 32, "num_stages": 4, "num_microbatches": 16}
    uneven = search(MODEL, cluster(4), cuts=(0, 1, 5, 8, 12), **options)
    plan = again(0, current=uneven, slots=cluster(4), **options)
    assert plan.cuts == (0, 3, 6, 9, 12)
    assert plan.transition.kind == "cuts" and plan.transition.accepted
    assert plan.transition.offered == "K=4 R=1 M=16 cut at [3, 6, 9]"
    assert plan.transition.moved_bytes == 0
    assert again(0, current=uneven, slots=cluster(4), left=0, **options).cuts == (
        uneven.cuts
    )


def test_another_place_for_the_same_frozen_layers_has_its_price():
    options = dict(num_stages=2, num_microbatches=2, schedules=("gpipe",), left=10**6)
    asked = dict(global_batch=32, cache_tiers=("none",), **options)
    del asked["left"]
    pipelined = search(
        MODEL, SLOTS, boundary=6, prefix_placements=("pipelined",), **asked
    )
    options["cache_tiers"] = ("none",)
    plan = again(6, current=pipelined, **options)
    assert (plan.prefix, plan.cuts) == ("replicated", pipelined.cuts)
    assert plan.transition.kind == "cuts" and plan.transition.pause_ns > 0
    assert plan.transition.offered == "K=2 R=2 M=2"
    stays = again(6, current=pipelined, **{**options, "left": 0})
    assert stays.prefix == "pipelined" and not stays.transition.accepted
    assert "K=2 R=2 M=2 prefix pipelined stays" in stays.transition.rule
    moved = again(7, current=pipelined, **{**options, "left": 0})
    assert moved.prefix == "replicated"  # these are placed anew in any case


def test_terms_may_be_one_value_or_one_by_one():
    options = SearchOptions(**CACHED)
    terms = ChangeTerms(remaining_steps=34, reshape="never")
    at = {"current": FIRST, "boundary": 6}
    assert replan(MODEL, SLOTS, options, terms, **at) == again(6, reshape="never")
    assert replan(MODEL, SLOTS, options, terms, reshape="priced", **at) == again(6)
    with pytest.raises(TypeError, match="missing .* 'remaining_steps'"):
        replan(MODEL, SLOTS, options, pace=1.0, **at)


def test_less_than_two_percent_is_refused_by_name():
    # 151 layers on 2 stages: 76 and 75 against 77 and 74, one layer of 77 shorter.
    model = equal_profile(151, times=(MS, MS, MS))
    options = {"global_batch": 48, "num_stages": 2, "num_microbatches": 48}
    uneven = search(model, cluster(2), cuts=(0, 74, 151), **options)
    plan = replan(
        model,
        cluster(2),
        current=uneven,
        boundary=0,
        remaining_steps=10**9,
        reshape="always",
        **options,
    )
    gain = plan.transition.gain_ns_per_step
    assert 0 < gain * 50 < plan.simulated_step_ns * 2 and plan.cuts == uneven.cuts
    assert plan.transition.rule.endswith("per step, less than 2 %")


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_more_steps_left_never_turn_a_change_down(left, more, group_ms):
    pauses = PauseModel().observed({"prepare": group_ms / 1000}, kind="shape")
    first = again(6, left=left, pauses=pauses)
    longer = again(6, left=left + more, pauses=pauses)
    assert longer.simulated_step_ns <= first.simulated_step_ns
    if first.transition.accepted and first.transition.kind == "shape":
        change = first.transition
        extra = change.pause_ns - sum(change.anyway_terms_ns.values())
        assert 4 * change.gain_ns_per_step * left > 5 * extra


def test_measured_pauses_and_the_pace_of_steps_change_the_decision():
    slow = PauseModel().observed({"prepare": 2.3}, kind="shape")
    assert again(6, pauses=slow).num_stages == 4
    # Steps take 1.3 times what was simulated, so they save as much more.
    assert again(6, pauses=slow, pace=1.3).num_stages == 1
    assert again(6, pace=0.001).num_stages == 4
    assert again(6, pauses=slow, hysteresis=0).num_stages == 1


def test_shapes_change_no_more_often_than_every_ten_pauses():
    pause = again(6).transition.pause_ns
    early = again(6, elapsed_since_last_ns=10 * pause)
    assert early.num_stages == 4
    assert "not more than 10 pauses of 35.360 ms" in early.transition.rule
    assert again(6, elapsed_since_last_ns=10 * pause + 1).num_stages == 1


def test_always_takes_the_shortest_step_and_never_keeps_the_shape():
    best = search(MODEL, SLOTS, boundary=6, **CACHED)
    free = again(6, left=0, elapsed_since_last_ns=0, reshape="always")
    assert (free.shape, free.cuts) == (best.shape, best.cuts)
    assert free.transition.rule.endswith("changes of plan are not priced")
    kept = again(6, reshape="never")
    assert kept.shape == FIRST.shape and not kept.transition.accepted
    assert "changes of plan are switched off" in kept.transition.rule


def test_device_that_would_hold_both_plans_is_named():
    # Every device holds 3 layers at rest, 9 kB; a new K=1 replica needs 6 frozen
    # layers and 6 active ones, 30 kB.
    small = equal_profile(12, times=(MS, MS, MS), parameters=1000, activation=1)
    tight = cluster(4, 38_000)
    current = search(small, tight, global_batch=32, num_stages=4)
    options = {"current": current, "boundary": 6, "remaining_steps": 10**6, **CACHED}
    plan = replan(small, tight, **options)
    assert plan.num_stages == 2, "the next best, with room"
    offered = [c for c in plan.candidates if c.num_stages == 1]
    assert (
        offered
        and "until the change is done device 1 of node 0 would hold 9000"
        in (offered[0].lost)
    )
    loose = replan(small, cluster(4, 39_100), **options)
    assert loose.num_stages == 1


def test_processes_that_have_the_model_go_on_where_new_replicas_have_no_room():
    small = equal_profile(12, times=(MS, MS, MS), parameters=1000, activation=1)
    tight = cluster(4, 26_000)
    current = search(small, tight, global_batch=32, num_stages=4)
    # One layer is left, so K=4 cannot go on; 9 kB + 15 kB fit, with 25 kB it is one.
    options = {"current": current, "boundary": 11, "remaining_steps": 5, **CACHED}
    assert replan(small, tight, **options).shape[:2] == (1, 4)
    tighter = cluster(4, 23_000)
    assert replan(small, tighter, **options).shape[:2] == (1, 1)
    assert replan(small, tighter, reshape="always", **options).shape[:2] == (1, 4)


def test_plan_that_does_not_fit_any_more_is_left_whatever_it_costs():
    short = again(8)
    assert short.shape[:2] == (1, 4)
    slow = PauseModel().observed({"prepare": 1000.0}, kind="shape")
    grown = again(
        0, current=short, left=0, pauses=slow, elapsed_since_last_ns=0, reshape="never"
    )
    assert grown.shape[:2] == (4, 1)
    assert grown.transition.accepted and grown.transition.pay_back_steps is None
    assert "whatever it costs: K=1 R=4 M=1 cannot go on: " in grown.transition.rule


def test_a_cache_beyond_all_counting_is_the_dearest_there_is():
    model = equal_profile(12, times=(MS, MS, MS), boundary_bytes_per_sample=4)
    linked = cluster(4, 2**62, device_link_bytes_per_s=10**9)
    options = {"global_batch": 32, "cache_tiers": ("none", "device")}
    current = search(model, linked, boundary=6, num_stages=4, **options)
    pauses = PauseModel().observed({"prepare": 4e9}, kind="shape")
    options |= {"current": current, "boundary": 6, "remaining_steps": 10}
    for num_samples in (2**58, 2**59, 2**62):
        plan = replan(model, linked, num_samples=num_samples, pauses=pauses, **options)
        assert plan.num_stages == 4 and not plan.transition.accepted
    with pytest.raises(TypeError, match="cuts: expected layer indices, got 3"):
        replan(model, linked, cuts=3, **options)


def test_pause_whose_terms_are_large_stays_a_number():
    largest = {name: 2**62 for name in TERMS}
    assert total_ns(largest) == 2**62 and total_ns({"move": 3, "rewire": 4}) == 7
    long = RunningMean(sum_ns=2**62, count=1)
    refused = again(6, pauses=PauseModel(group=long, move=long))
    assert refused.num_stages == 4 and refused.transition.pause_ns == 2**62


def test_growth_is_priced_like_everything_else():
    roomy = cluster(4, 10**9, network_bytes_per_s=10**9)
    short = replan(
        MODEL, roomy, current=FIRST, boundary=11, remaining_steps=34, **CACHED
    )
    assert short.shape[:2] == (1, 4)
    # With slow links the all-reduce of four replicas costs more than bubbles do.
    slow = cluster(4, 10**9, device_link_bytes_per_s=100_000)
    options = {"current": short, "boundary": 0, "global_batch": 32}
    grown = replan(MODEL, slow, remaining_steps=10**6, **options)
    kept = replan(MODEL, slow, remaining_steps=0, **options)
    assert grown.num_stages > 1 and grown.transition.accepted
    assert kept.num_stages == 1 and not kept.transition.accepted


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"boundary": 9}, "active layers left: 3"),
        ({"num_stages": 2}, "K=2 is asked for"),
        ({"num_microbatches": 4}, "M=4 is asked for"),
        ({"schedules": ("1f1b",)}, "gpipe is not allowed"),
        ({"cuts": (6, 9, 12)}, "cuts \\[6, 9, 12\\] are asked for"),
    ],
)
def test_plan_that_the_options_forbid_cannot_go_on(options, reason):
    plan = again(**{"boundary": 6, "left": 0, **options})
    assert plan.transition.accepted
    assert plan.transition.rule.endswith(reason.replace("\\", ""))


@pytest.mark.parametrize(
    ("slots", "options", "reason"),
    [
        (cluster(2, 10**6), {}, "devices per node: 2"),
        (
            SLOTS,
            {"global_batch": 3, "min_microbatch_samples": 1},
            "1 x 16 micro-batches of at least 1 rows, global batch: 3",
        ),
        (
            SLOTS,
            {"min_microbatch_samples": 3},
            "1 x 16 micro-batches of at least 3 rows, global batch: 32",
        ),
    ],
)
def test_plan_for_which_the_machine_or_the_batch_is_too_small_cannot_go_on(
    slots, options, reason
):
    plan = again(2, slots=slots, left=0, **options)
    assert plan.transition.accepted and plan.shape != FIRST.shape
    assert plan.transition.rule.endswith(f"K=4 R=1 M=16 cannot go on: {reason}")


def test_replicas_that_lost_their_nodes_cannot_go_on():
    many = cluster(4, 66_000, num_nodes=3)
    current = again(8, slots=many)
    assert current.shape[:2] == (1, 12)
    plan = again(8, current=current, left=0)
    assert plan.num_replicas <= 4 and plan.transition.accepted
    assert plan.transition.rule.endswith("cannot go on: room for replicas: 4")
    assert plan.transition.moved_bytes == 0, "whoever goes on has the model"


def test_replicas_beyond_the_limit_cannot_go_on():
    short = again(8)
    plan = again(8, current=short, max_replicas=2, left=0)
    assert plan.num_replicas <= 2
    assert plan.transition.rule.endswith("at most 2 replicas")


def test_equal_input_gives_equal_plans_and_the_record_survives():
    first, second = again(6), again(6)
    assert first == second and first.plan_hash == second.plan_hash
    read = Plan.from_json(first.to_json())
    assert read == first and read.transition == first.transition
    other = again(6, left=35)
    assert other.plan_hash != first.plan_hash, "the price is part of the plan"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"left": -1}, "remaining_steps: expected 0 to 2"),
        ({"elapsed_since_last_ns": -1}, "elapsed_since_last_ns: expected 0 to 2"),
        (
            {"hysteresis": -0.1},
            "hysteresis: expected a finite number from 0.*, got -0.1",
        ),
        ({"hysteresis": 1001}, "hysteresis: expected at most 1000, got 1001"),
        (
            {"pace": float("nan")},
            "pace: expected a finite number from 0.*, got nan",
        ),
        ({"reshape": "often"}, "reshape: expected one of .*, got 'often'"),
        ({"schedules": ("fast",)}, "schedules: expected one of"),
    ],
)
def test_bad_option_is_refused_by_name(options, text):
    with pytest.raises(ValueError, match=text):
        again(6, **options)


def test_nothing_that_fits_raises_as_a_search_does():
    with pytest.raises(InfeasiblePlan, match="K=1 does not fit"):
        again(6, slots=cluster(4, 1000))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "big"}, "transition kind: expected one of"),
        ({"terms_ns": {"lunch": 1}}, "transition terms_ns: expected known fields only"),
        ({"terms_ns": {"move": -1}}, "transition terms_ns move: expected 0 to 2"),
        ({"gain_ns_per_step": 1.5}, "gain_ns_per_step: expected an integer, got 1.5"),
        ({"pay_back_steps": -1}, "transition pay_back_steps: expected 0 to 2"),
        ({"accepted": 1}, "transition accepted: expected true or false, got 1"),
        ({"rule": None}, "transition rule: expected a string, got None"),
    ],
)
def test_malformed_transition_is_refused(change, text):
    valid = again(6).transition.to_dict()
    with pytest.raises(ValueError, match=text):
        Transition.from_dict({**valid, **change})
    with pytest.raises(ValueError, match="transition kind: expected a value, got none"):
        Transition.from_dict({k: v for k, v in valid.items() if k != "kind"})


def test_plan_and_transition_are_immutable():
    plan = again(6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.transition.accepted = False


def test_a_plan_that_cannot_go_on_finds_what_fewer_replicas_reach():
    """Three replicas would need a device that the old plan fills."""
    rows = [  # parameters, activations and boundary by sample
        (50_000, 100, 1_000),
        (400_000, 5_000, 1_000),
        (1_000, 100, 30_000),
        (0, 5_000, 30_000),
        (1_000, 10_000, 30_000),
        (400_000, 100, 30_000),
    ]
    fields = {"times": (MS, MS, MS)}
    layers = [
        layer(n, parameters=p, activation=a, boundary_bytes_per_sample=b, **fields)
        for n, (p, a, b) in enumerate(rows)
    ]
    model = profile(layers)
    devices = cluster(3, 1_863_200, optimizer_bytes_per_parameter_byte=1.0)
    options = SearchOptions(global_batch=16, schedules=("1f1b",))
    current = search(model, devices, options, num_stages=3)
    terms = ChangeTerms(remaining_steps=10)
    found = replan(model, devices, options, terms, current=current, boundary=2)
    assert found.shape[:2] == (1, 2) and "cannot go on" in found.transition.rule
    # Three fit by themselves, and one alone does not.
    assert search(model, devices, options, boundary=2).shape[:2] == (1, 3)
    with pytest.raises(InfeasiblePlan, match="expected a pipeline that fits"):
        search(model, devices, options, boundary=2, num_stages=1, max_replicas=1)
