"""What is tried out, in which order, and what is made of what was measured."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.planner import (
    ChangeTerms,
    InfeasiblePlan,
    SearchOptions,
    Trial,
    corrected,
    replan,
    search,
    try_out,
)
from tests.planner.instances import cluster, equal_profile

MS = 1_000_000
MODEL = equal_profile(8, times=(MS, MS, MS), parameters=1000, activation=500)
SLOTS = cluster(2)
OPTIONS = SearchOptions(global_batch=16)
FIRST = search(MODEL, SLOTS, OPTIONS)
TERMS = ChangeTerms(remaining_steps=100)


def close(*steps_ns):
    """The first plan among candidates of M = 1, 2, ... with these simulated steps."""
    mine = FIRST.candidates[0]
    return dataclasses.replace(
        FIRST,
        simulated_step_ns=steps_ns[0],
        candidates=tuple(
            dataclasses.replace(mine, num_microbatches=m, simulated_step_ns=ns)
            for m, ns in enumerate(steps_ns, 1)
        ),
        plan_hash=-1,
    )


def trial(*steps_ns, steps=3, begun=0, total=10_000):
    return Trial.begin(close(*steps_ns), steps, begun=begun, total_steps=total)


def names(tried):
    return [each.num_microbatches for each in tried.candidates]


def test_plans_within_a_tenth_of_the_shortest_are_tried_and_four_at_most():
    assert names(trial(1000, 1050, 1100, 1101)) == [1, 2, 3]
    assert names(trial(1000, 1001, 1002, 1003, 1004)) == [1, 2, 3, 4]
    assert trial(1000, 1101) is None  # there is nothing to compare


def test_other_cuts_of_a_shape_are_not_tried():
    plan = close(1000, 1010)
    twice = dataclasses.replace(
        plan,
        candidates=(plan.candidates[0], plan.candidates[0], plan.candidates[1]),
        plan_hash=-1,
    )
    assert names(Trial.begin(twice, 3, total_steps=1000)) == [1, 2]


def test_a_trial_takes_a_quarter_of_the_run_at_most():
    # Each of the plans takes 3 steps and one more.
    assert names(trial(1000, 1000, 1000, 1000, total=64)) == [1, 2, 3, 4]
    assert names(trial(1000, 1000, 1000, 1000, total=63)) == [1, 2, 3]
    assert names(trial(1000, 1000, 1000, 1000, total=32)) == [1, 2]
    assert trial(1000, 1000, 1000, 1000, total=31) is None
    assert names(trial(1000, 1000, 1000, 1000, total=None)) == [1, 2, 3, 4]


def test_each_has_its_turn_and_then_the_fastest_runs():
    tried = trial(1000, 1001, 1002, begun=5)
    wanted = [tried.wanted(step).num_microbatches for step in range(5, 5 + 12)]
    assert wanted == [1] * 4 + [2] * 4 + [3] * 4
    assert [step for step in range(40) if tried.turns_at(step)] == [9, 13, 17]
    assert [step for step in range(40) if tried.is_over(step)] == list(range(17, 40))
    seconds = {each.name: [0.3, 0.1, 0.2] for each in tried.candidates}
    seconds[tried.candidates[1].name] = [0.1, 9.0, 0.1]
    found = tried.measured(seconds)
    assert found.wanted(17).num_microbatches == 2
    assert found.rule(17) == (
        "trial: K=1 R=2 M=2 takes 100.000 ms a step, K=1 R=2 M=1 200.000 ms, "
        "K=1 R=2 M=3 200.000 ms"
    )
    assert found.rule(9) == "trial 2 of 3: K=1 R=2 M=2 for 4 steps"


def test_the_searchs_own_choice_stays_where_nothing_was_measured():
    tried = trial(1000, 1001)
    assert tried.wanted(100) == tried.candidates[0]
    assert tried.rule(100) == "trial: no step was measured"
    assert tried.factors({each.name: 1000 for each in tried.candidates}) == {}


def test_a_trial_that_has_ended_has_no_more_turns():
    ended = dataclasses.replace(trial(1000, 1001), ended=True)
    assert not any(ended.turns_at(step) for step in range(40)) and ended.is_over(0)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=4))
def test_factors_give_what_was_measured_against_the_first(taken_us):
    tried = trial(*(1_000_000 + i for i in range(len(taken_us))))
    found = tried.measured(
        {
            each.name: [us / 1e6]
            for each, us in zip(tried.candidates, taken_us, strict=True)
        }
    )
    first, *others = tried.candidates
    now = {each.name: 2 * each.simulated_step_ns for each in tried.candidates}
    factors = found.factors(now)
    for each, us in zip(tried.candidates, taken_us, strict=True):
        expected = us / taken_us[0] * now[first.name] / now[each.name]
        assert factors[each.name] == pytest.approx(expected, abs=6e-4)
    del now[first.name]  # it does not fit any more: the next one is compared with
    assert found.factors(now)[others[0].name] == 1.0
    best = min(range(len(taken_us)), key=taken_us.__getitem__)
    assert found.fastest == tried.candidates[best]


def test_it_comes_back_from_json_and_refuses_what_is_malformed():
    tried = trial(1000, 1001).measured({"K=1 R=2 M=1": [0.5], "other": [0.1]})
    told = json.loads(json.dumps(tried.to_dict()))
    assert Trial.from_dict(told) == tried
    assert tried.step_ns == {"K=1 R=2 M=1": 500_000_000}
    for field, value, message in (
        ("candidates", told["candidates"][:1], "candidates: expected 2 to 4, got 1"),
        ("candidates", told["candidates"] * 3, "candidates: expected 2 to 4, got 6"),
        ("steps", 0, "trial steps: expected"),
        ("step_ns", {"K=9 R=9 M=9": 5}, "trial step_ns: "),
        ("step_ns", {"K=1 R=2 M=1": 0}, "trial step_ns of K=1 R=2 M=1: expected"),
        ("ended", 1, "trial ended: expected"),
    ):
        with pytest.raises(ValueError) as error:
            Trial.from_dict({**told, field: value})
        assert message in str(error.value)


def test_a_correction_chooses_the_plan_that_it_makes_the_shortest():
    def again(candidate):
        return search(MODEL, SLOTS, OPTIONS.exactly(candidate))

    chosen, second, *_ = FIRST.candidates
    assert corrected(FIRST, {}, again) is FIRST
    assert corrected(FIRST, {"K=9 R=9 M=9": 0.1}, again) is FIRST
    plan = corrected(FIRST, {second.name: 0.5}, again)
    assert (plan.name, plan.cuts) == (second.name, second.cuts)
    assert plan.simulated_step_ns == round(second.simulated_step_ns * 0.5)
    assert plan.bytes_per_stage == again(second).bytes_per_stage
    assert plan.reasons[0].startswith(f"{second.name} has the shortest step by what")
    steps = [each.simulated_step_ns for each in plan.candidates]
    assert steps == sorted(steps) and len(steps) == len(FIRST.candidates)
    assert plan.candidates[0].lost == "" and all(c.lost for c in plan.candidates[1:])
    stays = corrected(FIRST, {second.name: 1.5}, again)
    assert stays.run == FIRST.run and stays.reasons == FIRST.reasons
    assert stays.simulated_step_ns == chosen.simulated_step_ns


def test_planning_again_counts_by_what_was_found():
    other = next(c for c in FIRST.candidates if c.shape != FIRST.shape)
    known = {other.name: 0.5}
    options = dict(current=FIRST, boundary=0, global_batch=16, remaining_steps=10**6)
    assert replan(MODEL, SLOTS, **options).run == FIRST.run
    plan = replan(MODEL, SLOTS, factors=known, **options)
    assert plan.shape == other.shape and plan.transition.accepted
    saved = FIRST.simulated_step_ns - round(other.simulated_step_ns * 0.5)
    assert plan.transition.gain_ns_per_step == saved
    slow = {FIRST.name: 1.01}  # too little to change anything
    assert replan(MODEL, SLOTS, factors=slow, **options).run == FIRST.run


def test_a_factor_must_be_a_number():
    with pytest.raises(ValueError, match="factor of K=1 R=1 M=1: expected"):
        ChangeTerms(remaining_steps=1, factors={"K=1 R=1 M=1": float("nan")})


@pytest.mark.parametrize("index", range(len(FIRST.candidates)))
def test_what_is_tried_out_runs_whatever_it_costs(index):
    candidate = FIRST.candidates[index]
    terms = dataclasses.replace(TERMS, elapsed_since_last_ns=0)
    plan = try_out(
        MODEL,
        SLOTS,
        OPTIONS,
        terms,
        candidate,
        current=FIRST,
        boundary=0,
        rule="trial 2 of 3",
    )
    assert (plan.name, plan.cuts) == (candidate.name, candidate.cuts)
    assert plan.transition.accepted and plan.transition.rule == "trial 2 of 3"
    assert plan.reasons[0] == "trial 2 of 3"
    assert plan.candidates[0].name == candidate.name
    compared = {(each.name, each.cuts) for each in plan.candidates}
    assert compared >= {(each.name, each.cuts) for each in FIRST.candidates[:-1]}
    same = plan.run == FIRST.run
    assert same or plan.transition.pause_ns > 0


def test_what_does_not_fit_is_not_tried_out():
    wide = next(c for c in FIRST.candidates if c.num_replicas == 2)

    def plan(options=OPTIONS, slots=SLOTS, candidate=wide):
        return try_out(
            MODEL,
            slots,
            options,
            TERMS,
            candidate,
            current=FIRST,
            boundary=0,
            rule="trial",
        )

    assert plan().num_replicas == 2
    assert plan(dataclasses.replace(OPTIONS, max_replicas=1)) is None
    assert plan(slots=cluster(1)) is None
    with pytest.raises(InfeasiblePlan):
        search(MODEL, cluster(2, 100), OPTIONS)
    assert plan(slots=cluster(2, 100)) is None
