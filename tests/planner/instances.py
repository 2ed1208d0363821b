"""Profiles, clusters and brute-force oracles for the planner's tests."""

import random
from itertools import combinations, pairwise

from hypothesis import strategies as st

from pipetransformer.planner import Cluster, LayerProfile, Profile

PLENTY = 1 << 40


def layer(index=0, *, times=(10, 10, 10), parameters=0, activation=0, **fields):
    forward, input_grad, weight_grad = (
        t if isinstance(t, tuple) else (t,) for t in times
    )
    values = dict(
        name=f"{index}.Layer",
        forward_ns=forward,
        input_grad_ns=input_grad,
        weight_grad_ns=weight_grad,
        parameter_bytes=parameters,
        activation_bytes_per_sample=activation,
        weight_grad_activation_bytes_per_sample=activation,
        boundary_bytes_per_sample=0,
    )
    return LayerProfile(**{**values, **fields})


def profile(layers, *, microbatch_samples=(1,), tied_layers=(), skips=()):
    return Profile(
        name="test",
        microbatch_samples=microbatch_samples,
        layers=tuple(layers),
        tied_layers=tied_layers,
        skips=skips,
    )


def equal_profile(num_layers, **fields):
    return profile([layer(i, **fields) for i in range(num_layers)])


def cluster(devices_per_node=4, device_memory_bytes=PLENTY, **fields):
    return Cluster(
        devices_per_node=devices_per_node,
        device_memory_bytes=device_memory_bytes,
        **fields,
    )


def all_cuts(num_layers, num_stages, cut_allowed=None):
    """Every choice of cuts, in lexicographic order."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        if cut_allowed is None or all(cut_allowed[j] for j in inner):
            yield (0, *inner, num_layers)


def stage_sums(costs, cuts):
    return [sum(costs[a:b]) for a, b in pairwise(cuts)]


def random_costs(rng: random.Random, num_layers):
    """One of the shapes that layer costs take in practice."""
    kind = rng.randrange(6)
    if kind == 0:  # uniform
        return [rng.randint(1, 100) for _ in range(num_layers)]
    if kind == 1:  # spread over orders of magnitude
        return [int(rng.lognormvariate(4, 1.5)) for _ in range(num_layers)]
    if kind == 2:  # heavy embedding
        return [rng.randint(200, 900), *(20 for _ in range(num_layers - 1))]
    if kind == 3:  # heavy head
        return [*(20 for _ in range(num_layers - 1)), rng.randint(200, 900)]
    if kind == 4:  # layers that cost nothing
        return [rng.choice([0, 0, 7, 30]) for _ in range(num_layers)]
    costs = [rng.randint(1, 10) for _ in range(num_layers)]  # one outlier
    costs[rng.randrange(num_layers)] = 10_000
    return costs


costs_lists = st.lists(st.integers(0, 1000), min_size=1, max_size=12)
