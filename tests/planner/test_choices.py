"""Schedules, placements of the prefix and cache tiers: what each costs and saves."""

import dataclasses
import random
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.planner import (
    CacheTiers,
    InfeasiblePlan,
    prefix_cuts,
    search,
    step_costs,
)
from pipetransformer.simulator import simulate
from tests.planner.instances import (
    all_cuts,
    cluster,
    equal_profile,
    layer,
    profile,
    stage_sums,
)


def find(model, machines, **options):
    return search(model, machines, **{"global_batch": 32, **options})


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        ("gpipe", (8, 8, 8, 8)),
        ("1f1b", (4, 3, 2, 1)),
        # Until I as 1F1B, until W four on every stage, which keep a quarter.
        ("zb-h1", (4, 3.25, 2.5, 1.75)),
    ],
)
def test_stages_keep_the_microbatches_that_their_schedule_has_in_flight(schedule, kept):
    layers = [
        layer(i, activation=400, weight_grad_activation_bytes_per_sample=100)
        for i in range(4)
    ]
    plan = find(
        profile(layers),
        cluster(4),
        num_stages=4,
        num_microbatches=8,
        schedules=(schedule,),
    )
    assert plan.samples_per_microbatch == 4
    assert plan.bytes_per_stage == tuple(int(count * 400 * 4) for count in kept)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_gradients_that_are_there_besides_are_those_of_the_simulated_order(
    schedule, num_replicas
):
    """Sums beside DDP's buckets, a micro-batch's gradients beside the sums."""
    rng = random.Random(11)
    for _ in range(60):
        num_stages = rng.randint(1, 4)
        layers = [
            layer(
                i,
                parameters=rng.randint(0, 200),
                activation=rng.randint(0, 50),
                activation_bytes_per_microbatch=rng.choice([0, 300]),
                shared_activation_bytes=rng.choice([0, 5000]),
            )
            for i in range(num_stages + rng.randint(0, 3))
        ]
        machines = cluster(4, num_nodes=2)
        plan = find(
            profile(layers),
            machines,
            num_stages=num_stages,
            max_replicas=num_replicas,
            replicas="all",
            num_microbatches=rng.choice([1, 2, 4, 8]),
            schedules=(schedule,),
        )
        assert plan.num_replicas == num_replicas
        result = simulate(plan, profile(layers), machines)
        assert result.peak_bytes_per_stage == plan.bytes_per_stage


def test_a_plain_replica_holds_its_gradients_once():
    model = equal_profile(4, parameters=1000)
    alone = dict(num_stages=1, num_microbatches=1, replicas="all")
    for num_replicas in (1, 2):
        plan = find(model, cluster(4), max_replicas=num_replicas, **alone)
        assert plan.bytes_per_stage == (4 * 4 * 1000,)
    pipelined = dict(cuts=(0, 2, 4), replicas="all")
    sizes = {
        (replicas, count): find(
            model,
            cluster(4),
            max_replicas=replicas,
            num_microbatches=count,
            **pipelined,
        ).bytes_per_stage[0]
        for replicas in (1, 2)
        for count in (1, 2)
    }
    assert sizes == {(1, 1): 8000, (1, 2): 10000, (2, 1): 10000, (2, 2): 12000}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_bytes_of_a_call_count_per_micro_batch_and_shared_ones_once(
    schedule, checkpoint
):
    plain = equal_profile(4, activation=8)
    more = equal_profile(
        4,
        activation=8,
        activation_bytes_per_microbatch=1000,
        shared_activation_bytes=10**6,
    )
    fixed = dict(cuts=(0, 2, 4), replicas="all", max_replicas=1, checkpoint=checkpoint)
    for count in (1, 2, 4):
        found = [
            find(
                each, cluster(4), schedules=(schedule,), num_microbatches=count, **fixed
            )
            for each in (plain, more)
        ]
        added = [
            b - a for a, b in zip(*(p.bytes_per_stage for p in found), strict=True)
        ]
        assert [each // 10**6 for each in added] == [2, 2]
        # Those of the micro-batches that a stage holds at once; with recomputation
        # that is one.
        in_flight = [count, count] if schedule == "gpipe" else [min(count, 2), 1]
        if schedule == "zb-h1":  # until W
            in_flight = [min(count, 2)] * 2
        held = [1, 1] if checkpoint == "always" else in_flight
        if schedule == "zb-h1":  # one of them may be recomputed
            held = in_flight
        assert [each % 10**6 for each in added] == [2000 * each for each in held]


def test_equal_steps_give_the_shorter_pipeline():
    # Two stages win nothing with one micro-batch, and copies are free here.
    model = equal_profile(4)
    options = dict(num_microbatches=1, max_replicas=1, replicas="all")
    plan = find(model, cluster(4), **options)
    longer = [each for each in plan.candidates if each.num_stages > 1]
    assert plan.num_stages == 1
    assert longer and longer[0].simulated_step_ns == plan.simulated_step_ns
    assert longer[0].lost.startswith("equal step time: ties go to fewer stages")


def test_cuts_use_what_later_stages_of_1f1b_have_left():
    # Stage 0 keeps four micro-batches of its layers, stage 3 one.
    model = equal_profile(10, activation=100)
    room = 100 * 10
    options = dict(num_microbatches=8, schedules=("1f1b",), global_batch=8)
    plan = find(model, cluster(4, room), num_stages=4, **options)
    sizes = [b - a for a, b in zip(plan.cuts, plan.cuts[1:], strict=False)]
    assert max(plan.bytes_per_stage) <= room < 100 * 10 * 4
    assert [n * (4 - k) * 100 for k, n in enumerate(sizes)] == list(
        plan.bytes_per_stage
    )
    with pytest.raises(InfeasiblePlan, match="K=4 does not fit"):
        find(model, cluster(4, room), num_stages=4, num_microbatches=8, global_batch=32)


def test_less_memory_than_gpipe_needs_gives_1f1b():
    model = equal_profile(8, activation=100)
    options = dict(num_stages=4, num_microbatches=8, schedules=("gpipe", "1f1b"))
    assert find(model, cluster(4), **options).schedule == "gpipe"
    small = find(model, cluster(4, 100 * 2 * 4 * 5), **options)
    assert small.schedule == "1f1b"
    lone = find(
        model,
        cluster(1, 100 * 8 * 8),
        num_microbatches=4,
        schedules=("gpipe", "1f1b", "zb-h1"),
    )
    assert (lone.num_stages, lone.schedule) == (1, "1f1b")


def test_zb_h1_is_tried_for_a_single_micro_batch_of_several_stages():
    model = equal_profile(4, times=(300, 400, 300))
    options = dict(global_batch=8, num_microbatches=1, num_stages=4)
    times = {
        name: find(model, cluster(4), schedules=(name,), **options).simulated_step_ns
        for name in ("gpipe", "1f1b", "zb-h1")
    }
    every = find(model, cluster(4), schedules=("gpipe", "1f1b", "zb-h1"), **options)
    assert times["zb-h1"] < times["gpipe"] == times["1f1b"]
    assert (every.schedule, every.simulated_step_ns) == ("zb-h1", times["zb-h1"])
    assert "1f1b" not in {each.schedule for each in every.candidates}, "as gpipe"


def test_zb_h1_fills_the_bubble_with_weight_gradients():
    model = equal_profile(4, times=(300, 400, 300))  # the first saves 100 of its 400
    options = dict(global_batch=8, num_stages=4, num_microbatches=8)
    plans = {
        name: find(model, cluster(4), schedules=(name,), **options)
        for name in ("gpipe", "1f1b", "zb-h1")
    }
    times = {name: plan.simulated_step_ns for name, plan in plans.items()}
    assert times["zb-h1"] < times["1f1b"] <= times["gpipe"]
    every = find(model, cluster(4), schedules=("zb-h1", "1f1b", "gpipe"), **options)
    assert every.schedule == "zb-h1"
    assert {each.schedule for each in every.candidates} == set(times)
    assert [each.simulated_step_ns for each in every.candidates] == sorted(
        each.simulated_step_ns for each in every.candidates
    )
    assert every.candidates[0].lost == "" and all(
        "slower" in each.lost for each in every.candidates[1:]
    )


def test_bubble_is_that_of_the_simulated_step():
    plan = find(
        equal_profile(8, trainable=True),
        cluster(8),
        num_stages=8,
        num_microbatches=16,
        global_batch=16,
    )
    # 7 / 23, except for what the first stage's missing input gradient leaves idle.
    assert 0.30 < plan.bubble_fraction < 0.33


def test_prefix_is_split_over_the_devices_where_a_copy_on_each_does_not_fit():
    model = equal_profile(8, parameters=100)
    options = dict(boundary=4, num_stages=4, num_microbatches=4, global_batch=4)
    wide = find(model, cluster(4), **options)
    assert wide.prefix == "replicated"
    # A fifth time a layer: the gradients of a micro-batch beside their sums.
    assert wide.bytes_per_stage == (400 + 500,) * 4
    tight = find(model, cluster(4, 600), **options)
    assert tight.prefix == "pipelined"
    assert tight.bytes_per_stage == (100 + 500,) * 4
    # Four chunks in turn: M + K - 1 of them instead of ceil(M / K) whole ones.
    assert tight.predicted_step_ns - wide.predicted_step_ns == (7 - 4) * 10
    with pytest.raises(InfeasiblePlan, match="context and frozen layers alone miss"):
        find(model, cluster(4, 350), prefix_placements=("replicated",), **options)


def test_a_cache_tier_saves_the_prefix_as_far_as_it_holds_the_samples():
    model = equal_profile(8, times=(1000,) * 3, boundary_bytes_per_sample=10)

    def step(tiers, samples=None, cache=None):
        return find(
            model,
            cluster(4, cache=cache),
            boundary=4,
            num_stages=1,
            num_microbatches=1,
            cache_tiers=tiers,
            num_samples=samples,
        )

    rows = 8
    none = step(("none",))
    host = step(("none", "host"))
    assert host.cache == "host"
    assert none.predicted_step_ns - host.predicted_step_ns == rows * 4 * 1000
    half = CacheTiers(host_bytes=10 * 50)
    partly = step(("host",), samples=100, cache=half)
    assert partly.predicted_step_ns - host.predicted_step_ns == rows // 2 * 4 * 1000
    absent = CacheTiers(disk_bytes=1000)
    assert step(("host",), cache=absent).cache == "none"
    assert step(("host", "disk"), cache=absent).cache == "disk"


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("prefix", ["replicated", "pipelined", "filled"])
def test_rows_that_a_cache_misses_count_in_the_mean(tier, prefix):
    # A row a micro-batch: of 1000 samples as many are missed as are not held.
    model = equal_profile(6, times=(1000,) * 3, boundary_bytes_per_sample=10)

    def costs(held):
        machines = cluster(4, cache=CacheTiers(**{f"{tier}_bytes": 10 * held}))
        plan = find(
            model,
            machines,
            boundary=4,
            global_batch=8,
            num_stages=2,
            num_microbatches=4,
            max_replicas=2,
            replicas="all",
            prefix_placements=(prefix,),
            cache_tiers=(tier,),
            num_samples=1000,
        )
        assert (plan.cache, plan.samples_per_microbatch) == (tier, 1)
        found = step_costs(plan, model, machines)
        return sum(found.prefix_ns), plan

    # Less than one record is a tier for no sample.
    for held in (1, 10, 500, 990, 999, 1000, 2000):
        spent, plan = costs(held)
        assert spent == 4 * max(0, 1000 - held), held
        assert plan.lower_bound_ns <= plan.simulated_step_ns
        if prefix != "filled":
            assert plan.simulated_step_ns == plan.predicted_step_ns


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_of_missed_rows_is_between_whole_rows_and_falls_as_more_is_held(seed):
    rng = random.Random(seed)
    samples, rows = rng.choice([1, 7, 97, 1000, 2**40]), rng.randint(1, 12)
    points = (1, 3, 8)
    times = tuple(sorted(rng.randint(0, 10**6) for _ in points))
    layers = [layer(i, times=(times,) * 3) for i in range(3)]
    layers[1] = layer(1, times=(times,) * 3, boundary_bytes_per_sample=1)
    model = profile(layers, microbatch_samples=points)
    link = dict(device_link_bytes_per_s=10**6, device_link_latency_ns=777)

    def costs(held):
        machines = cluster(1, cache=CacheTiers(host_bytes=held), **link)
        plan = find(
            model,
            machines,
            boundary=2,
            global_batch=rows,
            num_microbatches=1,
            cache_tiers=("host",) if held else ("none",),
            num_samples=samples,
        )
        found = step_costs(plan, model, machines)
        (spent,) = found.prefix_ns
        return spent, found.prefix_copy_ns

    whole = [(0, 0)]
    for count in range(1, rows + 1):
        alone = find(
            model,
            cluster(1, **link),
            boundary=2,
            global_batch=count,
            num_microbatches=1,
        )
        found = step_costs(alone, model, cluster(1, **link))
        whole.append((found.prefix_ns[0], found.prefix_copy_ns))
    assert costs(0) == whole[rows] and costs(samples) == (0, 0)
    before = whole[rows]
    for held in sorted({rng.randint(1, samples) for _ in range(8)}):
        now = costs(held)
        missed = Fraction(rows * (samples - held), samples)
        low, part = int(missed), missed - int(missed)
        high = min(low + 1, rows)
        for value, least, most in zip(now, whole[low], whole[high], strict=True):
            mean = least + part * (most - least)
            assert mean <= value <= mean + 2, "rounded up, for each of two layers"
        assert all(a <= b for a, b in zip(now, before, strict=True))
        before = now


def test_what_is_read_counts_in_the_mean_too():
    # A replica has a row of each step: of 10 the host holds 9, or 4 and the disk 5.
    model = equal_profile(4, times=(1000,) * 3, boundary_bytes_per_sample=1000)
    host = dict(host_bytes_per_s=10**9, host_record_ns=500)
    options = dict(
        boundary=2,
        global_batch=1,
        num_stages=1,
        num_microbatches=1,
        max_replicas=1,
        num_samples=10,
    )

    def reads(tier, **fields):
        machines = cluster(1, cache=CacheTiers(**host, **fields))
        plan = find(model, machines, cache_tiers=(tier,), **options)
        found = step_costs(plan, model, machines)
        return found.cache_wait_ns, found.cache_read_ns, sum(found.prefix_ns)

    assert reads("host", host_bytes=9000, host_in_line=True) == (1350, 0, 200)
    assert reads("host", host_bytes=9000) == (0, 1350, 200)
    both = dict(host_bytes=4000, disk_bytes=5000, disk_bytes_per_s=10**7)
    assert reads("disk", host_in_line=True, **both) == (1350, 50_000, 200)
    assert reads("disk", **both) == (0, 50_000, 200)


def test_reads_from_a_slow_tier_bound_the_step():
    model = equal_profile(4, times=(1000,) * 3, boundary_bytes_per_sample=10**6)
    options = dict(boundary=2, num_stages=1, num_microbatches=1)
    slow = CacheTiers(disk_bytes=10**12, disk_bytes_per_s=10**9)
    plan = find(model, cluster(4, cache=slow), cache_tiers=("disk",), **options)
    # 32 rows of a megabyte at a gigabyte per second.
    assert plan.predicted_step_ns == 32 * 10**6 == plan.simulated_step_ns
    both = find(model, cluster(4, cache=slow), cache_tiers=("disk", "none"), **options)
    assert both.cache == "none"


def test_reads_in_line_lengthen_the_step_of_each_replica_by_its_own_rows():
    model = equal_profile(4, times=(1000,) * 3, boundary_bytes_per_sample=1000)
    fields = dict(host_bytes=10**12, host_bytes_per_s=10**9, host_record_ns=500)
    options = dict(boundary=2, num_stages=1, num_microbatches=1, cache_tiers=("host",))
    in_line = CacheTiers(host_in_line=True, **fields)
    for replicas in (1, 2, 4):
        free = find(model, cluster(4), max_replicas=replicas, **options)
        plan = find(model, cluster(4, cache=in_line), max_replicas=replicas, **options)
        # A microsecond for its bytes and half of one for each row.
        wait = 32 // replicas * 1500
        assert plan.predicted_step_ns == free.predicted_step_ns + wait
        assert plan.simulated_step_ns == free.simulated_step_ns + wait
        assert plan.lower_bound_ns == free.lower_bound_ns + wait
    ahead = find(
        model, cluster(4, cache=CacheTiers(**fields)), max_replicas=1, **options
    )
    hidden = find(model, cluster(4), max_replicas=1, **options).predicted_step_ns
    assert ahead.predicted_step_ns == max(hidden, 32 * 1500)
    either = {**options, "cache_tiers": ("host", "none")}
    slow = CacheTiers(host_in_line=True, **{**fields, "host_record_ns": 2500})
    assert find(model, cluster(4, cache=slow), **either).cache == "none"


def test_a_disk_holds_what_the_host_has_no_room_for():
    model = equal_profile(4, times=(1000,) * 3, boundary_bytes_per_sample=1000)
    host = dict(host_bytes_per_s=10**9, host_record_ns=500, host_in_line=True)
    options = dict(
        boundary=2,
        num_stages=1,
        num_microbatches=1,
        max_replicas=1,
        num_samples=32,
        cache_tiers=("disk",),
    )

    def step(slots, on_disk, rate):
        tiers = CacheTiers(
            host_bytes=1000 * slots,
            disk_bytes=1000 * on_disk,
            disk_bytes_per_s=rate,
            **host,
        )
        plan = find(model, cluster(4, cache=tiers), **options)
        assert plan.cache == "disk"
        return plan.predicted_step_ns

    free = find(model, cluster(4), **options).predicted_step_ns
    # All rows are copied in line; the disk's are read alongside the step.
    copied = free + 32 * 1500
    assert step(8, 24, 10**12) == copied
    assert step(8, 99, 10**12) == copied
    assert step(8, 24, 10**7) == max(copied, 24 * 100_000)
    assert step(8, 12, 10**12) == free + 20 * 1500 + 12 * 2 * 1000
    # A disk alone has no copies in line.
    assert step(0, 32, 10**12) == free


def test_only_rows_that_a_tier_serves_are_read_from_it():
    model = equal_profile(4, times=(1000,) * 3, boundary_bytes_per_sample=10**6)
    few = CacheTiers(host_bytes=10**6, host_bytes_per_s=10**9)
    options = dict(boundary=2, num_stages=1, num_microbatches=1, max_replicas=1)
    plan = find(
        model,
        cluster(4, cache=few),
        cache_tiers=("host",),
        num_samples=32,
        **options,
    )
    # One row of 32 is served: a megabyte in a millisecond; the others are computed.
    none = find(model, cluster(4), **options)
    assert none.predicted_step_ns - 2 * 1000 == plan.predicted_step_ns - max(
        0, 10**6 - none.predicted_step_ns + 2 * 1000
    )


def test_both_placements_of_the_prefix_are_compared():
    # A copy on each device fits, but leaves room for lopsided stages only.
    layers = [layer(i, times=(10,) * 3, parameters=200) for i in range(2)]
    layers += [
        layer(i, times=(t,) * 3, parameters=p)
        for i, (t, p) in enumerate([(500, 25), (500, 25), (10, 150)], start=2)
    ]
    options = dict(boundary=2, num_stages=2, num_microbatches=8, global_batch=8)
    machines = cluster(2, 400 + 800)
    replicated = find(
        profile(layers), machines, prefix_placements=("replicated",), **options
    )
    assert replicated.cuts == (2, 4, 5)
    both = find(profile(layers), machines, **options)
    assert (both.cuts, both.prefix) == ((2, 3, 5), "pipelined")
    assert both.simulated_step_ns < replicated.simulated_step_ns


GAPS = dict(boundary=4, num_stages=2, num_microbatches=4, global_batch=4)
BOTH = ("replicated", "filled")


def test_frozen_layers_fill_the_gaps_where_that_is_faster():
    model = equal_profile(8, times=(100,) * 3)
    plan = find(model, cluster(2), prefix_placements=BOTH, **GAPS)
    front = find(model, cluster(2), prefix_placements=("replicated",), **GAPS)
    # Five times two layers each way, less the gradient that the first does not make,
    # behind 4 micro-batches x 4 frozen layers on two devices.
    assert front.simulated_step_ns == 100 * (5 * 6 + 8) - 33
    # All gaps are filled: nothing but work is left, on both devices.
    work = 4 * (100 * 3 * 4 - 33) + 100 * 4 * 4
    assert plan.prefix == "filled"
    assert plan.simulated_step_ns == pytest.approx(work / 2, abs=2)
    assert plan.lower_bound_ns == plan.simulated_step_ns
    times = {each.prefix: each.simulated_step_ns for each in plan.candidates}
    assert times["replicated"] == front.simulated_step_ns
    # Layers that take longer than all gaps delay cells, and the search sees it.
    slow = profile([layer(i, times=((3000 if i < 4 else 100),) * 3) for i in range(8)])
    found = find(slow, cluster(2), prefix_placements=BOTH, **GAPS)
    alone = {
        name: find(slow, cluster(2), prefix_placements=(name,), **GAPS) for name in BOTH
    }
    assert found.simulated_step_ns == min(p.simulated_step_ns for p in alone.values())


def test_there_are_no_gaps_in_one_stage_and_nothing_cached_runs():
    model = equal_profile(8)
    for options in ({"num_stages": 1}, {"cache_tiers": ("host",)}):
        plans = {
            names: find(
                model, cluster(2), **{**GAPS, **options}, prefix_placements=names
            )
            for names in (BOTH, BOTH[:1], BOTH[1:])
        }
        assert [plan.prefix for plan in plans.values()] == [
            "replicated",
            "replicated",
            "filled",  # asked for: a plan keeps its name when a cache comes and goes
        ]
        assert len({plan.simulated_step_ns for plan in plans.values()}) == 1
        assert len({plan.bytes_per_stage for plan in plans.values()}) == 1


def test_filled_gaps_hold_the_next_batchs_activations():
    model = equal_profile(8, boundary_bytes_per_sample=10, parameters=7)
    sizes = {
        name: find(model, cluster(2), prefix_placements=(name,), **GAPS).bytes_per_stage
        for name in BOTH
    }
    more = 4 * 10  # of the whole batch
    assert sizes["filled"] == tuple(n + more for n in sizes["replicated"])
    room = max(sizes["replicated"])
    assert (
        find(model, cluster(2, room), prefix_placements=BOTH, **GAPS).prefix
        == "replicated"
    )


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.integers(1, 1000), min_size=2, max_size=7),
    num_devices=st.integers(1, 4),
    data=st.data(),
)
def test_chunks_of_a_prefix_are_the_fastest_that_keep_tied_layers_together(
    times, num_devices, data
):
    frozen = len(times)
    pairs = st.tuples(st.integers(0, frozen - 2), st.integers(1, frozen - 1))
    tied = [p for p in data.draw(st.lists(pairs, max_size=2)) if p[0] < p[1]]
    layers = [layer(i, times=(t,) * 3) for i, t in enumerate([*times, *[1] * 4])]
    model = profile(layers, tied_layers=tuple(sorted(set(tied))))
    plan = search(
        model,
        cluster(num_devices),
        global_batch=8,
        boundary=frozen,
        num_stages=num_devices,
        num_microbatches=8,
        prefix_placements=("pipelined",),
    )
    allowed = [all(not a < j <= b for a, b in tied) for j in range(frozen + 1)]
    chunks = min(num_devices, 1 + sum(allowed[1:-1]))
    every = all_cuts(frozen, chunks, allowed)
    best = min((max(stage_sums(times, cuts)), cuts) for cuts in every)
    assert prefix_cuts(model, plan) == best[1]


def test_a_device_cache_takes_the_devices_memory():
    model = equal_profile(8, boundary_bytes_per_sample=10, parameters=1)
    options = dict(boundary=4, num_stages=2, num_microbatches=4, num_samples=400)
    tiers = dict(cache_tiers=("none", "device"))
    plan = find(model, cluster(4), **tiers, **options)
    assert plan.cache == "device"
    # 400 samples over four devices, alongside four frozen layers; two active ones
    # whose gradients are there three times: in DDP, as sums, of a micro-batch.
    assert plan.bytes_per_stage == (400 // 4 * 10 + 4 + 2 * (4 + 2),) * 2
    assert find(model, cluster(4, 1000), **tiers, **options).cache == "none"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(schedules=("2f2b",)), "schedules: expected one of .*, got '2f2b'"),
        (dict(schedules=()), "schedules, prefix placements, cache tiers: expected at"),
        (dict(cache_tiers=("tape",)), "cache_tiers: expected one of .*, got 'tape'"),
        (dict(prefix_placements=("x",)), "prefix_placements: expected one of .*'x'"),
        (dict(copies="none"), "copies: expected one of .*, got 'none'"),
        (dict(num_samples=0), "num_samples: expected at least 1, got 0"),
    ],
)
def test_search_refuses_choices_that_do_not_exist(options, text):
    with pytest.raises(ValueError, match=text):
        find(equal_profile(4), cluster(4), **options)


# Imports the package alone: what the test's helpers need takes as long as the search.
_HASH = """
import sys
from pipetransformer.planner import Cluster, Profile, search
plan = search(
    Profile.from_json(sys.argv[1]),
    Cluster.from_json(sys.argv[2]),
    global_batch=96,
    boundary=2,
    schedules=("gpipe", "1f1b", "zb-h1"),
)
sys.stdout.write(f"{plan.plan_hash:016x}")
"""


def test_few_replicas_are_dealt_to_the_nodes_and_reduce_over_the_network():
    model = equal_profile(8, parameters=10**8)
    machines = cluster(8, num_nodes=2, network_bytes_per_s=10**8)
    options = dict(num_stages=4, num_microbatches=4, global_batch=32, replicas="all")
    two = find(model, machines, max_replicas=2, **options)
    four = find(model, machines, **options)
    # One on each node: half of the first stage's 200 MB over the card, twice.
    assert two.num_replicas == 2
    assert two.simulated_step_ns > 2 * 10**9
    assert four.simulated_step_ns == pytest.approx(two.simulated_step_ns, rel=1e-3)


def test_eight_processes_make_the_same_plan():
    times = [(17 * i % 90, 31 * i % 70, 11 * i % 50) for i in range(14)]
    model = profile(
        [layer(i, times=times[i], parameters=i, activation=3) for i in range(14)]
    )
    machines = cluster(8, 2000, device_link_bytes_per_s=10**9)
    command = [sys.executable, "-c", _HASH, model.to_json(), machines.to_json()]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    hashes = [process.communicate(timeout=100)[0] for process in running]
    assert len(set(hashes)) == 1 and len(hashes[0]) == 16


@pytest.mark.parametrize("size", [8, 32, 100])
def test_a_batch_is_not_cut_for_what_rounding_would_save(size):
    """Times of one size alone make those of smaller micro-batches proportional."""
    columns = dict.fromkeys(
        ("forward_ns", "input_grad_ns", "weight_grad_ns"), (100_003,)
    )
    layers = [dataclasses.replace(layer(i), **columns) for i in range(6)]
    model = profile(layers, microbatch_samples=(size,))
    plan = find(model, cluster(1), global_batch=size)
    assert plan.shape == (1, 1, 1)


@pytest.mark.parametrize(
    ("rows", "least", "expected"), [(2, 1, 2), (3, 1, 3), (3, 2, 1)]
)
def test_a_batch_of_fewer_rows_than_stages_is_cut_as_far_as_it_goes(
    rows, least, expected
):
    model = equal_profile(4, parameters=1000)
    machines = cluster(4, 5000)  # one layer with its optimizer's state in each
    plan = find(model, machines, global_batch=rows, min_microbatch_samples=least)
    assert plan.shape == (4, 1, expected)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stage_alone_takes_what_the_simulator_counts(schedule, checkpoint, count):
    """Activations of a micro-batch are gone before its gradients are added."""
    model = equal_profile(4, parameters=10**6, activation=10**5)
    options = dict(num_stages=1, max_replicas=1, replicas="all", checkpoint=checkpoint)
    options |= dict(schedules=(schedule,), num_microbatches=count)
    plan = find(model, cluster(1), **options)
    assert list(plan.bytes_per_stage) == list(
        simulate(plan, model, cluster(1)).peak_bytes_per_stage
    )
