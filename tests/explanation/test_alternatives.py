"""The other ways to run a model: judged by the same model, never better than chosen."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.explanation import explain_plan
from pipetransformer.explanation.alternatives import paper_cuts
from pipetransformer.planner import SearchOptions, paper, search
from tests.explanation.cases import (
    MEGABYTE,
    a_cluster,
    a_plan,
    a_profile,
    block,
    cached_cluster,
)
from tests.planner import instances

EVERY = SearchOptions(
    global_batch=16,
    schedules=("gpipe", "1f1b", "zb-h1"),
    cache_tiers=("none", "host"),
)


def ways(plan, profile, cluster, **options):
    shown = replace(SearchOptions.shown_by(plan), **options)
    report = explain_plan(plan, profile, cluster, options=shown)
    return {entry.name: entry for entry in report.counterfactuals}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    scales=st.lists(st.integers(1, 5), min_size=3, max_size=6),
    memory=st.integers(20, 80),
    boundary=st.integers(0, 2),
)
def test_chosen_is_never_longer_than_what_the_search_may_choose(
    scales, memory, boundary
):
    profile = instances.profile([block(i, scale=s) for i, s in enumerate(scales)])
    cluster = cached_cluster(device_memory_bytes=memory * MEGABYTE)
    try:
        plan = a_plan(
            profile, cluster, boundary=boundary, cache_tiers=EVERY.cache_tiers
        )
    except ValueError:
        return  # nothing fits: nothing to explain
    found = explain_plan(plan, profile, cluster, options=EVERY).counterfactuals
    times = {way.name: way.step_ns for way in found if way.step_ns is not None}
    assert plan.simulated_step_ns <= times["no_cache"]
    assert plan.simulated_step_ns <= times["serial_prefix"]
    if boundary == 0:  # then the static ways are among those searched
        assert times["best_static"] == plan.simulated_step_ns
        assert all(plan.simulated_step_ns <= step for step in times.values())
    for name in ("paper_static", "plain_ddp"):
        if name in times:
            assert times["best_static"] <= times[name]


def test_static_ways_freeze_nothing():
    profile, cluster = a_profile(6), a_cluster(device_memory_bytes=10**9)
    found = ways(a_plan(profile, cluster, boundary=4), profile, cluster)
    whole = search(profile, cluster, global_batch=16, num_stages=1, num_microbatches=1)
    assert found["plain_ddp"].step_ns == whole.simulated_step_ns
    assert found["plain_ddp"].plan.startswith("K=1 R=4 M=1 layers 0-5")
    assert found["paper_static"].plan.startswith("K=4 R=1 M=16 ")
    assert "layers 0-" in found["best_static"].plan


def test_plain_ddp_that_does_not_fit_names_layer_and_bytes():
    profile, cluster = a_profile(6), a_cluster(device_memory_bytes=30 * MEGABYTE)
    way = ways(a_plan(profile, cluster), profile, cluster)["plain_ddp"]
    assert (way.step_ns, way.peak_bytes, way.plan) == (None, None, "")
    assert way.reason.startswith("K=1 does not fit: layers 0-5 miss ")
    assert "the largest is layer" in way.reason


def test_the_paper_cannot_cut_a_shared_parameter():
    layers = [block(i) for i in range(4)]
    profile = instances.profile(layers, tied_layers=((0, 3),))
    cluster = a_cluster(device_memory_bytes=10**9)
    way = ways(a_plan(profile, cluster), profile, cluster)["paper_static"]
    assert way.step_ns is None and "share" in way.reason


def test_a_batch_too_small_for_the_papers_micro_batches_is_named():
    profile, cluster = a_profile(6), a_cluster(device_memory_bytes=10**9)
    plan = search(profile, cluster, global_batch=8)
    way = ways(plan, profile, cluster)["paper_static"]
    assert way.step_ns is None and "16" in way.reason


def test_no_cache_is_the_plan_without_the_tiers():
    profile, cluster = a_profile(6), cached_cluster()
    options = dict(boundary=4, num_samples=100)
    plan = a_plan(profile, cluster, cache_tiers=("none", "host"), **options)
    assert plan.cache == "host"
    without = a_plan(profile, cluster, **options)
    way = ways(plan, profile, cluster)["no_cache"]
    assert way.step_ns == without.simulated_step_ns > plan.simulated_step_ns


def test_a_serial_prefix_waits_for_one_device():
    profile, cluster = a_profile(8), a_cluster()
    plan = a_plan(profile, cluster, boundary=4, num_stages=4)
    way = ways(plan, profile, cluster)["serial_prefix"]
    # 16 rows through 4 frozen layers of 1 ms a row: on one device in place of four.
    assert way.step_ns - plan.simulated_step_ns == pytest.approx(48e6, rel=0.1)


def test_ways_that_change_nothing_say_so():
    profile, cluster = a_profile(6), a_cluster()
    plan = a_plan(profile, cluster)
    found = ways(plan, profile, cluster)
    for name in ("no_cache", "serial_prefix"):
        assert found[name].step_ns == plan.simulated_step_ns
        assert found[name].reason.startswith("the plan ")


def test_limits_of_the_caller_hold_for_the_ways_too():
    profile, cluster = a_profile(6), a_cluster(device_memory_bytes=10**9)
    plan = a_plan(profile, cluster, max_replicas=1)
    found = ways(plan, profile, cluster, max_replicas=1)
    assert all(" R=1 " in way.plan for way in found.values())


def test_paper_cuts_cover_every_layer_and_leave_no_stage_empty():
    sizes = [100, 1, 1, 1, 50, 1]
    layers = [block(i, parameters=4 * 10**6 * s) for i, s in enumerate(sizes)]
    profile = instances.profile(layers)
    counts = paper.greedy_partition([s * 10**6 for s in sizes], 6)
    cuts = paper_cuts(profile, 6)
    assert cuts[0] == 0 and cuts[-1] == 6
    assert all(a < b for a, b in zip(cuts, cuts[1:], strict=False))
    assert len(cuts) - 1 == sum(count > 0 for count in counts)
