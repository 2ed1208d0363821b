"""What a step is made of: order, copies, prefix, all-reduce, cache, memory."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.costs import random_stages, simulate, stage, step, step_ns

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def random_step(rng, schedule=None):
    """Costs with everything in them."""
    stages, first = random_stages(rng, copies=True, max_stages=5)
    num_microbatches = rng.randint(1, 10)
    recomputed = rng.choice([0, 0, num_microbatches - 1, num_microbatches])
    for s in stages:
        s.recompute_ns = s.forward_ns if recomputed and s.has_backward else 0
        s.all_reduce_ns = rng.randint(0, 200) if s.has_backward else 0
        s.network_all_reduce_ns = rng.randint(0, s.all_reduce_ns)
    placement = rng.choice(["replicated", "pipelined"])
    parts = 1 if placement == "replicated" else rng.randint(1, len(stages))
    return step(
        schedule or rng.choice(SCHEDULES),
        stages,
        num_microbatches,
        num_recomputed=recomputed,
        prefix=(placement, [rng.randint(0, 100) for _ in range(parts)]),
        prefix_copy_ns=rng.randint(0, 50),
        cache_read_ns=rng.choice([0, rng.randint(0, 20_000)]),
        cache_wait_ns=rng.choice([0, rng.randint(0, 2_000)]),
    )


def spans(result, kind):
    return [(e.begin_ns, e.end_ns) for e in result.timeline if e.kind == kind]


def times_of(costs, event):
    s = costs.stages[event.stage]
    return {
        "F": s.forward_ns,
        "R": s.recompute_ns,
        "B": s.input_grad_ns + s.weight_grad_ns,
        "I": s.input_grad_ns,
        "W": s.weight_grad_ns,
    }[event.kind]


@pytest.mark.parametrize("seed", range(60))
def test_timeline_conserves_work_and_keeps_order(seed):
    costs = random_step(random.Random(seed))
    result = simulate(costs, keep_timeline=True)
    (pipeline,) = result.pipelines
    busy = [0] * len(costs.stages)
    done = {}
    for event in result.timeline:
        if event.kind in "FRBIW":
            assert event.end_ns - event.begin_ns == times_of(costs, event)
            busy[event.stage] += event.end_ns - event.begin_ns
            kind = "B" if event.kind == "I" else event.kind
            done[kind, event.stage, event.microbatch] = event
    assert busy == pipeline.stage_busy_ns
    for (kind, stage_, microbatch), event in done.items():
        if kind == "F" and stage_ > 0:
            before = done["F", stage_ - 1, microbatch]
            copy_ns = costs.stages[stage_ - 1].forward_copy_ns
            assert event.begin_ns >= before.end_ns + copy_ns
        if kind == "B" and stage_ + 1 < len(costs.stages):
            before = done["B", stage_ + 1, microbatch]
            copy_ns = costs.stages[stage_ + 1].backward_copy_ns
            assert event.begin_ns >= before.end_ns + copy_ns
    num_operations = sum(event.kind in "FBI" for event in result.timeline)
    trained = sum(s.has_backward for s in costs.stages)
    expected = costs.num_microbatches * (len(costs.stages) + trained)
    assert num_operations == expected


@pytest.mark.parametrize("seed", range(60))
def test_every_resource_runs_one_thing_at_a_time(seed):
    result = simulate(random_step(random.Random(seed)), keep_timeline=True)
    ends = {}
    for event in sorted(result.timeline, key=lambda e: (e.begin_ns, e.end_ns)):
        where = event.resource.name
        if where not in ("NETWORK", "CACHE"):
            where = where, event.stage, event.direction
        assert event.begin_ns >= ends.get(where, 0)
        ends[where] = max(event.end_ns, ends.get(where, 0))


@pytest.mark.parametrize("seed", range(40))
def test_step_is_never_shorter_when_anything_takes_longer(seed):
    rng = random.Random(seed)
    costs = random_step(rng)
    before = step_ns(costs)
    stages = costs.stages
    for changed in stages:
        names = [
            name
            for name in dir(changed)
            if name.endswith("_ns") and getattr(changed, name) > 0
        ]
        for name in names:
            value = getattr(changed, name)
            setattr(changed, name, value + rng.randint(1, 300))
            costs.stages = stages
            if name != "network_all_reduce_ns":  # a part of another one
                assert step_ns(costs) >= before
            setattr(changed, name, value)
    costs.stages = stages
    costs.prefix_copy_ns += 100
    assert step_ns(costs) >= before


def test_equal_costs_give_equal_timelines():
    costs = random_step(random.Random(5))
    first, second = (
        [
            (e.kind, e.stage, e.microbatch, e.begin_ns, e.end_ns)
            for e in simulate(costs, keep_timeline=True).timeline
        ]
        for _ in range(2)
    )
    assert first == second
    assert len(first) > 20


def test_replicated_prefix_is_dealt_out_and_copied_to_the_first_device():
    costs = step(
        "gpipe",
        [(10, 10, 10)] * 3,
        7,
        prefix=("replicated", [100]),
        prefix_copy_ns=4,
    )
    result = simulate(costs, keep_timeline=True)
    places = {
        (e.stage, e.microbatch): e.begin_ns for e in result.timeline if e.kind == "P"
    }
    assert places == {(i % 3, i): 100 * (i // 3) for i in range(7)}
    copied = [e.microbatch for e in result.timeline if e.kind == "C"]
    assert sorted(copied) == [1, 2, 4, 5]
    assert result.pipelines[0].begin_ns == 300  # the whole batch first


def test_pipelined_prefix_passes_the_devices_in_turn():
    costs = step(
        "gpipe",
        [(10, 10, 10)] * 3,
        5,
        prefix=("pipelined", [30, 50, 20]),
        prefix_copy_ns=7,
    )
    result = simulate(costs)
    # Three parts and three copies once, then the slowest part four times more.
    assert result.pipelines[0].begin_ns == 100 + 3 * 7 + 4 * 50
    two_parts = step("gpipe", [(10, 10, 10)] * 3, 5, prefix=("pipelined", [30, 50]))
    assert simulate(two_parts).pipelines[0].begin_ns == 80 + 4 * 50


def test_serial_prefix_runs_on_the_first_device_alone():
    for prefix in (("replicated", [100]), ("pipelined", [60, 40])):
        costs = step("gpipe", [(10, 10, 10)] * 2, 5, prefix=prefix, prefix_copy_ns=9)
        result = simulate(costs, prefix_mode="serial", keep_timeline=True)
        assert {e.stage for e in result.timeline if e.kind == "P"} == {0}
        assert result.pipelines[0].begin_ns == 500


def test_gpipe_hides_all_reduces_behind_the_backward_of_earlier_stages():
    def stages(**last):
        return [stage(10, 10, 10), stage(10, 10, 10, **last)]

    hidden = simulate(step("gpipe", stages(all_reduce_ns=20), 4))
    assert hidden.step_ns == step_ns(step("gpipe", stages(), 4))
    assert hidden.exposed_all_reduce_ns == 0
    longer = simulate(step("gpipe", stages(all_reduce_ns=50), 4))
    assert longer.exposed_all_reduce_ns == 30
    for schedule in ("1f1b", "zb-h1"):  # gradients are handed over at the end
        whole = simulate(step(schedule, stages(all_reduce_ns=20), 4))
        assert whole.exposed_all_reduce_ns == 20


def test_stages_take_turns_on_the_network_card_but_not_on_their_links():
    def exposed(**fields):
        stages = [stage(10, 10, 10, all_reduce_ns=100, **fields) for _ in range(4)]
        return simulate(step("1f1b", stages, 4)).exposed_all_reduce_ns

    assert exposed() == 100
    assert exposed(network_all_reduce_ns=100) == 400
    assert exposed(network_all_reduce_ns=30) == 70 + 4 * 30


def test_cache_reads_overlap_with_the_step_and_bound_it():
    short = step("gpipe", [(10, 10, 10)], 4, cache_read_ns=50)
    long = step("gpipe", [(10, 10, 10)], 4, cache_read_ns=500)
    assert step_ns(short) == 120
    assert step_ns(long) == 500


def test_reads_in_line_come_before_everything_else():
    without = step("gpipe", [(10, 10, 10)] * 2, 4, prefix=("replicated", [100]))
    waiting = step(
        "gpipe",
        [(10, 10, 10)] * 2,
        4,
        prefix=("replicated", [100]),
        cache_wait_ns=70,
    )
    assert step_ns(waiting) == step_ns(without) + 70
    result = simulate(waiting, keep_timeline=True)
    assert spans(result, "H") == [(0, 70)]
    assert all(e.begin_ns >= 70 for e in result.timeline if e.kind != "H")


def test_the_process_waits_for_all_gradients():
    stages = [stage(10, 10, 10), stage(10, 10, 10, all_reduce_ns=70)]
    costs = step("gpipe", stages, 2, process_ns=8)
    result = simulate(costs, keep_timeline=True)
    end_of_reduce = max(end for _, end in spans(result, "A"))
    assert spans(result, "O") == [(end_of_reduce, end_of_reduce + 8)]
    assert result.step_ns == end_of_reduce + 8


def test_slowest_replica_decides_when_gradients_are_reduced():
    costs = step("1f1b", [stage(100, 100, 100, all_reduce_ns=50) for _ in range(2)], 4)
    alone = simulate(costs)
    slow = simulate(costs, replicas=[(1500, 1500)])
    assert slow.step_ns == (alone.step_ns - 50) * 3 // 2 + 50
    both = simulate(costs, replicas=[(), (1500, 1500), ()])
    assert both.step_ns == slow.step_ns
    ends = [pipeline.end_ns for pipeline in both.pipelines]
    assert ends == [alone.step_ns - 50, slow.step_ns - 50, alone.step_ns - 50]


@given(st.sampled_from(SCHEDULES), st.integers(1, 7), st.integers(1, 16), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_peak_bytes_are_those_of_the_micro_batches_in_flight(
    schedule, num_stages, num_microbatches, recompute
):
    state, kept, again = 10**9, 1000, 7
    stages = [
        stage(
            1,
            1,
            1,
            state_bytes=state + k,
            kept_bytes=kept,
            recomputed_bytes=again if recompute else 0,
            recompute_ns=1 if recompute else 0,
        )
        for k in range(num_stages)
    ]
    costs = step(
        schedule,
        stages,
        num_microbatches,
        num_recomputed=num_microbatches if recompute else 0,
    )
    (pipeline,) = simulate(costs).pipelines
    for k, peak in enumerate(pipeline.peak_bytes):
        in_flight = min(num_microbatches, num_stages - k)
        if schedule == "gpipe":
            in_flight = num_microbatches
        expected = state + k + in_flight * kept + (again if recompute else 0)
        assert peak == expected


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(4, 8), (8, 16), (8, 8), (1, 3), (3, 2)]
)
def test_zb_h1_keeps_for_weights_within_the_number_of_stages(
    num_stages, num_microbatches
):
    """F to B within K - k micro-batches, F to W within K on every stage."""
    stages = [
        stage(1, 1, 1, kept_bytes=10**6, kept_for_weights_bytes=10**6)
        for _ in range(num_stages)
    ]
    costs = step("zb-h1", stages, num_microbatches)
    (pipeline,) = simulate(costs).pipelines
    most = min(num_microbatches, num_stages)
    assert all(peak <= most * 10**6 for peak in pipeline.peak_bytes)
    assert pipeline.peak_bytes[-1] > 10**6 or num_stages == 1 or most == 1


def test_stage_without_backward_keeps_nothing():
    stages = [
        stage(1, has_backward=False, state_bytes=5, kept_bytes=100),
        stage(1, 1, 1, state_bytes=5, kept_bytes=100),
    ]
    (pipeline,) = simulate(step("gpipe", stages, 6)).pipelines
    assert pipeline.peak_bytes == [105, 605]


@pytest.mark.parametrize("seed", range(30))
def test_of_batches_that_share_a_step_the_last_reduces_and_steps(seed):
    rng = random.Random(seed)
    costs = random_step(rng)
    costs.process_ns = rng.choice([0, rng.randint(1, 500)])
    slow = rng.choice([1000, 1700])
    kinds = dict(replicas=((), [slow] * len(costs.stages)))
    whole = simulate(costs, **kinds)
    batches = rng.randint(2, 9)
    costs.accumulation_steps = batches
    shared = simulate(costs, keep_timeline=True, **kinds)
    reduced = [s.all_reduce_ns for s in costs.stages]
    costs.accumulation_steps, costs.stages = 1, [unreduced(s) for s in costs.stages]
    other = simulate(costs, **kinds)
    assert whole.step_ns == whole.last_step_ns == shared.last_step_ns
    mean = (whole.step_ns + (batches - 1) * other.step_ns) / batches
    assert abs(shared.step_ns - mean) <= 1
    assert bool(spans(shared, "A")) == any(reduced)
    assert bool(spans(shared, "O")) == bool(costs.process_ns)


def unreduced(costs):
    costs.all_reduce_ns = costs.network_all_reduce_ns = 0
    return costs
