"""A small model on a small cluster, for the tests of explanations and commands."""

from itertools import pairwise

from pipetransformer.planner import CacheTiers, search
from tests.planner import instances

MEGABYTE = 10**6
MILLISECOND = 10**6


def block(index, *, scale=1, **fields):
    """A layer of 1 / 1 / 1 ms per row and 2 MB of parameters."""
    values = dict(
        times=(scale * MILLISECOND,) * 3,
        parameters=2 * MEGABYTE,
        activation=MEGABYTE,
        boundary_bytes_per_sample=MEGABYTE // 10,
    )
    return instances.layer(index, **{**values, **fields})


def a_profile(num_layers=6, *, heavy=None):
    """Equal layers; the one named ``heavy`` takes three times as long."""
    layers = [block(i, scale=3 if i == heavy else 1) for i in range(num_layers)]
    return instances.profile(layers)


def a_cluster(**fields):
    """One node of four devices with links, 60 MB each."""
    values = dict(
        devices_per_node=4,
        device_memory_bytes=60 * MEGABYTE,
        device_link_bytes_per_s=10**9,
        device_link_latency_ns=10_000,
    )
    return instances.cluster(**{**values, **fields})


def cached_cluster(**fields):
    """The same with a host cache large enough for all samples."""
    tiers = CacheTiers(
        host_bytes=10**9,
        host_bytes_per_s=10**9,
        disk_bytes=0,
        disk_bytes_per_s=0,
    )
    return a_cluster(cache=tiers, **fields)


def a_plan(profile, cluster, **options):
    """The plan for 16 rows a step."""
    values = dict(global_batch=16, schedules=("gpipe", "1f1b", "zb-h1"))
    return search(profile, cluster, **{**values, **options})


def stage_sums(values, cuts):
    """Sum of a layer quantity over each stage."""
    return [sum(values[a:b]) for a, b in pairwise(cuts)]
