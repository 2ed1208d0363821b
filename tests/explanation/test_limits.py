"""The limiting resource: what, made twice as good, shortens the step most."""

from dataclasses import replace

import pytest

from pipetransformer.explanation import explain_plan
from pipetransformer.planner import CacheTiers, SearchOptions
from tests.explanation.cases import (
    MEGABYTE,
    a_cluster,
    a_plan,
    a_profile,
    block,
    cached_cluster,
)
from tests.planner import instances


def limits_of(profile, cluster, **options):
    report = explain_plan(a_plan(profile, cluster, **options), profile, cluster)
    gains = [limit.gain_ns for limit in report.limits]
    assert gains == sorted(gains, reverse=True) and gains[-1] >= 0
    return report


def test_the_stage_with_the_heavy_layer_limits():
    report = limits_of(a_profile(4, heavy=2), a_cluster(), num_stages=4)
    assert report.limiting_resource == "stage 2"
    first = report.limits[0]
    assert first.step_ns == report.step_ns - first.gain_ns
    assert "twice as fast" in first.change


def test_a_slow_link_limits():
    slow = a_cluster(device_link_bytes_per_s=10**7)
    report = limits_of(a_profile(), slow, num_stages=4)
    assert report.limiting_resource == "device link"


def test_a_slow_ring_through_the_host_limits():
    for slow in (
        {"replica_link_bytes_per_s": 10**8},
        {"replica_link_bytes_per_s": 10**12, "replica_link_latency_ns": 10**8},
    ):
        host = instances.cluster(4, 2000 * MEGABYTE, **slow)
        report = limits_of(a_profile(), host, num_stages=1, replicas="all")
        assert report.plan.num_replicas == 4
        assert report.limiting_resource == "replica link"
        assert "between replicas of a node" in report.limits[0].change


def test_a_cache_on_the_devices_has_no_rate_to_double():
    options = {"boundary": 2, "cache_tiers": ("device",), "num_samples": 40}
    report = limits_of(a_profile(), cached_cluster(), **options)
    assert report.plan.cache == "device"
    assert "cache" not in {limit.resource for limit in report.limits}


def test_a_slow_network_limits():
    slow = a_cluster(num_nodes=4, network_bytes_per_s=10**8)
    report = limits_of(a_profile(), slow, replicas="all")
    assert report.limiting_resource == "network"
    assert limits_of(a_profile(), slow).plan.num_replicas < 4, "it is better left alone"


def test_what_is_as_large_as_a_field_takes_is_not_made_larger():
    largest = 2**62
    tiers = CacheTiers(
        host_bytes=largest,
        host_bytes_per_s=largest,
        disk_bytes=largest,
        disk_bytes_per_s=largest,
    )
    cluster = a_cluster(
        num_nodes=2,
        device_memory_bytes=largest,
        device_link_bytes_per_s=largest,
        network_bytes_per_s=largest,
        cache=tiers,
    )
    options = {"boundary": 2, "num_stages": 2, "cache_tiers": ("host",)}
    report = limits_of(a_profile(), cluster, **options)
    gains = {limit.resource: limit.gain_ns for limit in report.limits}
    assert gains["memory"] == gains["cache"] == 0


def test_a_long_frozen_prefix_limits():
    profile = instances.profile([block(i, scale=9 if i < 4 else 1) for i in range(6)])
    report = limits_of(profile, a_cluster(), boundary=4)
    assert report.limiting_resource == "prefix"


def test_a_slow_cache_limits():
    tiers = CacheTiers(
        host_bytes=10**9, host_bytes_per_s=10**8, disk_bytes=0, disk_bytes_per_s=0
    )
    layers = [block(i, boundary_bytes_per_sample=5 * MEGABYTE) for i in range(6)]
    report = limits_of(
        instances.profile(layers),
        a_cluster(cache=tiers),
        boundary=4,
        cache_tiers=("host",),
        num_samples=100,
    )
    assert report.limiting_resource == "cache"


def test_memory_limits_where_it_forces_a_longer_pipeline():
    cluster = instances.cluster(4, 40 * MEGABYTE)  # transfers cost nothing
    report = limits_of(a_profile(6), cluster)
    assert report.plan.num_stages > 1  # a bubble that a whole model has not
    memory = next(limit for limit in report.limits if limit.resource == "memory")
    assert memory.gain_ns > 0 and "K=1" in memory.change


def test_memory_gets_no_credit_for_what_planning_again_saves():
    profile, cluster = a_profile(6), a_cluster()
    forced = a_plan(profile, cluster, num_stages=4)  # K=1 is shorter, and fits
    free = SearchOptions(
        global_batch=16, num_stages=4, schedules=("gpipe", "1f1b", "zb-h1")
    )
    assert a_plan(profile, cluster).simulated_step_ns < forced.simulated_step_ns
    report = explain_plan(forced, profile, cluster, options=free)
    memory = next(limit for limit in report.limits if limit.resource == "memory")
    assert memory.gain_ns == 0


def test_without_links_and_caches_only_stages_and_memory_are_tried():
    cluster = instances.cluster(2, 60 * MEGABYTE)
    report = limits_of(a_profile(), cluster, num_stages=2)
    found = {limit.resource for limit in report.limits}
    assert found == {"stage 0", "stage 1", "memory"}


def test_where_nothing_is_gained_nothing_limits():
    free = instances.profile([block(i, times=(0, 0, 0)) for i in range(2)])
    report = limits_of(free, instances.cluster(1, 60 * MEGABYTE))
    assert report.limiting_resource is None
    assert "no single resource" in str(report)


@pytest.mark.parametrize("boundary", [0, 3])
def test_limits_leave_the_profile_and_the_plan_as_they_are(boundary):
    profile, cluster = a_profile(), cached_cluster()
    plan = a_plan(profile, cluster, boundary=boundary)
    before = (plan.to_json(), profile.to_json(), cluster.to_json())
    explain_plan(plan, profile, cluster)
    assert before == (plan.to_json(), profile.to_json(), cluster.to_json())
    assert replace(plan) == plan
