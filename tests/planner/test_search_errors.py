"""What the search refuses, by text."""

import random
import re

import pytest

from pipetransformer.planner import CacheTiers, InfeasiblePlan, search
from tests.planner.instances import cluster, equal_profile, layer, profile


def find(model=None, machines=None, **options):
    model = model or equal_profile(8)
    return search(model, machines or cluster(4), **{"global_batch": 32, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            dict(num_stages=9),
            r"num_stages: expected at most 8 \(active layers\), got 9",
        ),
        (
            dict(num_stages=3, boundary=6),
            r"num_stages: expected at most 2 \(active layers\), got 3",
        ),
        (
            dict(num_stages=5),
            r"num_stages: expected at most 4 \(devices per node\), got 5",
        ),
        (dict(num_stages=0), "num_stages: expected at least 1, got 0"),
        (
            dict(num_stages=1, num_microbatches=33),
            r"replicas x micro-batches: expected at most 32 \(the global batch\), got "
            "1 x 33",
        ),
        (dict(num_microbatches=0), "num_microbatches: expected at least 1, got 0"),
        (dict(min_replicas=0), "min_replicas: expected at least 1, got 0"),
        (dict(max_replicas=0), "max_replicas: expected at least 1, got 0"),
        (dict(global_batch=2**23), "global_batch: expected at most 4194304, got 8388"),
        (dict(num_stages=2**70), r"num_stages: expected at most 2\*\*62, got 1180"),
        (dict(global_batch=0), "global_batch: expected at least 1, got 0"),
        (
            dict(min_microbatch_samples=0),
            "min_microbatch_samples: expected at least 1, got 0",
        ),
        (
            dict(boundary=8),
            r"boundary: expected 0 to 7 \(the last layer stays active\), got 8",
        ),
        (dict(boundary=-1), "boundary: expected 0 to 7 .*, got -1"),
        (
            dict(cuts=[0, 5, 5, 8]),
            "forced cuts: expected increasing layer indices, got 5 after 5",
        ),
        (
            dict(cuts=[0, 4, 9]),
            "forced cuts: expected the ends 0 and 8, got 0 and 9",
        ),
        (
            dict(cuts=[1, 4, 8]),
            "forced cuts: expected the ends 0 and 8, got 1 and 8",
        ),
        (
            dict(cuts=[0]),
            "forced cuts: expected at least the ends 0 and 8, got 1 indices",
        ),
        (
            dict(cuts=[0, 4, 8], num_stages=3),
            r"forced cuts: expected 4 indices \(num_stages \+ 1\), got 3",
        ),
        (
            dict(cuts=[0, 1, 2, 3, 4, 8]),
            r"num_stages: expected at most 4 \(devices per node\), got 5",
        ),
        (
            dict(checkpoint="sometimes"),
            "checkpoint: expected one of .*, got 'sometimes'",
        ),
    ],
)
def test_search_refuses_options_that_no_plan_satisfies(options, text):
    with pytest.raises(ValueError, match=text):
        find(**options)


def test_search_refuses_a_forced_cut_between_layers_that_share_a_parameter():
    model = profile([layer(i) for i in range(8)], tied_layers=((2, 6),))
    text = (
        "forced cut at layer 5: expected no parameter shared across it, got one "
        "shared by layers 2 and 6"
    )
    with pytest.raises(ValueError, match=text):
        find(model, cuts=[0, 5, 8])
    assert find(model, cuts=[0, 2, 7, 8]).cuts == (0, 2, 7, 8)


def test_search_refuses_a_boundary_between_layers_that_share_a_parameter():
    model = profile([layer(i) for i in range(8)], tied_layers=((0, 7),))
    text = "boundary 3: expected no parameter shared across it, got one shared by"
    with pytest.raises(ValueError, match=text):
        find(model, boundary=3)


def test_search_never_cuts_between_layers_that_share_a_parameter():
    model = profile([layer(i) for i in range(8)], tied_layers=((1, 6),))
    plan = find(model, num_stages=3)
    assert plan.cuts == (0, 1, 7, 8)
    whole = profile([layer(i) for i in range(8)], tied_layers=((0, 7),))
    assert find(whole).num_stages == 1
    text = "K=2 does not fit: layers that share a parameter leave too few cuts"
    with pytest.raises(InfeasiblePlan, match=text):
        find(whole, num_stages=2)


def test_search_refuses_a_boundary_that_a_skip_goes_past():
    model = profile([layer(i) for i in range(8)], skips=((2, 5), (4, 6)))
    text = "boundary 5: expected no skip past it, got one from layer 2 to layer 5"
    with pytest.raises(ValueError, match=text):
        find(model, boundary=5)
    allowed = [0, 1, 2, 7]
    assert [b for b in range(8) if model.may_be_boundary(b)] == allowed
    for boundary in range(8):
        if boundary in allowed:
            assert find(model, boundary=boundary).boundary == boundary
        else:
            with pytest.raises(ValueError, match="expected no skip past it"):
                find(model, boundary=boundary)


def test_search_cuts_between_layers_that_a_skip_joins():
    model = profile([layer(i) for i in range(8)], skips=((0, 7),))
    assert find(model, num_stages=4).cuts == (0, 2, 4, 6, 8)
    assert find(model, cuts=[0, 5, 8]).cuts == (0, 5, 8)


def test_infeasible_memory_names_length_layer_and_missing_bytes():
    layers = [layer(i, parameters=100) for i in range(4)]
    layers[2] = layer(2, parameters=1000)
    # The large layer alone needs 4 * 1000 bytes of state, and as much as its weights
    # while the gradients of a micro-batch are added to the others'.
    text = (
        "K=4 does not fit: layers 2-2 miss 2000 bytes of 3000, the largest is layer 2 "
        r"\(2.Layer\)"
    )
    with pytest.raises(InfeasiblePlan, match=text) as caught:
        find(profile(layers), cluster(4, 3000))
    for num_stages in (1, 2, 3, 4):
        assert f"K={num_stages} does not fit" in str(caught.value)


def test_missing_bytes_are_exactly_what_is_missing():
    rng = random.Random(5)
    for _ in range(150):
        layers = [
            layer(
                i,
                parameters=rng.choice([0, 2, 40, 150, 260]),
                activation=rng.choice([0, 20, 35]),
                boundary_bytes_per_sample=rng.choice([0, 2, 34, 53]),
            )
            for i in range(6)
        ]
        options = dict(
            num_stages=rng.choice([2, 3]),
            num_microbatches=rng.choice([1, 2, 4]),
            checkpoint=rng.choice(["never", "always"]),
            max_replicas=rng.choice([1, 2]),
            replicas="all",
            schedules=(rng.choice(["gpipe", "1f1b"]),),
            global_batch=16,
        )

        def fits(room, layers=layers, options=options):
            return find(profile(layers), cluster(8, room), **options)

        with pytest.raises(InfeasiblePlan, match=r"miss \d+ bytes") as caught:
            fits(30)
        missing = int(re.search(r"miss (\d+) bytes", str(caught.value))[1])
        fits(30 + missing)
        with pytest.raises(InfeasiblePlan):
            fits(30 + missing - 1)


def test_infeasible_prefix_names_what_is_frozen():
    model = equal_profile(8, parameters=100)
    text = "K=1 does not fit: context and frozen layers alone miss 301 bytes of 400"
    with pytest.raises(InfeasiblePlan, match=text):
        find(model, cluster(4, 400, context_bytes=1), boundary=7)


def test_infeasible_forced_cuts_name_their_stage():
    model = equal_profile(8, parameters=100)
    text = "K=2 does not fit: layers 1-7 miss 1500 bytes of 2000"
    with pytest.raises(InfeasiblePlan, match=text):
        find(model, cluster(4, 2000), cuts=[0, 1, 8])


def test_infeasible_batch_names_replicas_and_microbatches():
    text = (
        "K=1 does not fit: replicas x micro-batches: expected at least {} for each at "
        "a global batch of 3, got "
    )
    with pytest.raises(InfeasiblePlan, match=text.format("a row") + "4 x 1; fewer "):
        find(global_batch=3, num_stages=1, min_replicas=4)
    rows = r"4 rows \(batch norm, or as asked\)"
    with pytest.raises(InfeasiblePlan, match=text.format(rows) + "1 x 1$"):
        find(global_batch=3, num_stages=1, min_microbatch_samples=4)
    assert find(global_batch=3, num_stages=1).num_replicas == 3


def test_sums_that_could_overflow_are_refused():
    huge = profile([layer(i, times=(2**60,) * 3) for i in range(4)])
    text = "profile times: expected sums that fit 62 bits, got larger ones"
    with pytest.raises(ValueError, match=text):
        find(huge)
    heavy = profile([layer(i, parameters=2**60) for i in range(4)])
    text = "profile bytes: expected sums that fit 62 bits, got larger ones"
    with pytest.raises(ValueError, match=text):
        find(heavy)


def test_a_link_or_tier_that_is_far_too_slow_is_avoided_not_refused():
    model = equal_profile(4, boundary_bytes_per_sample=2**30, parameters=2**30)
    slow = cluster(
        4,
        2**50,
        device_link_bytes_per_s=1,
        cache=CacheTiers(host_bytes=2**50, host_bytes_per_s=1),
    )
    plan = find(model, slow, boundary=2, cache_tiers=("none", "host"), max_replicas=1)
    assert (plan.num_stages, plan.cache) == (1, "none")
    assert plan.simulated_step_ns < 2**40
    forced = find(model, slow, num_stages=2, num_microbatches=2)
    assert 2**40 < forced.simulated_step_ns < 2**62


def test_a_plan_has_a_limited_number_of_cells():
    text = r"num_microbatches: expected at most 131072 \(cells of a plan / num_stages\)"
    with pytest.raises(ValueError, match=text):
        find(global_batch=2**22, num_stages=4, num_microbatches=2**18)


def test_sizes_of_tiers_do_not_overflow():
    huge = CacheTiers(host_bytes=2**62, host_bytes_per_s=1)
    model = equal_profile(8, boundary_bytes_per_sample=1)
    plan = find(
        model,
        cluster(4, num_nodes=2, cache=huge),
        boundary=4,
        cache_tiers=("host",),
        num_samples=2**61,
    )
    assert plan.simulated_step_ns < 2**62


@pytest.mark.parametrize(
    ("cuts", "error", "text"),
    [
        ([0, "a", 8], TypeError, r"cuts\[1\]: expected an integer, got 'a'"),
        ([0, True, 8], TypeError, r"cuts\[1\]: expected an integer, got True"),
        (8, TypeError, "cuts: expected layer indices, got 8"),
        ([0, 2**70, 8], ValueError, r"cuts\[1\]: expected at most 2\*\*62, got 1180"),
    ],
)
def test_search_refuses_cuts_that_are_no_integers(cuts, error, text):
    with pytest.raises(error, match=text):
        find(cuts=cuts)


def test_frozen_layers_need_a_place():
    text = "expected 'replicated', 'pipelined' or 'filled' for 2 frozen layers"
    with pytest.raises(ValueError, match=text):
        find(boundary=2, prefix_placements=("none",))
    plan = find(boundary=2, prefix_placements=("none", "pipelined"))
    assert plan.prefix == "pipelined"
    assert find(prefix_placements=("none",)).prefix == "none"


@pytest.mark.parametrize("value", [1.0, "1", True])
def test_search_refuses_counts_that_are_no_integers(value):
    with pytest.raises(TypeError, match="num_stages: expected an integer, got"):
        find(num_stages=value)
