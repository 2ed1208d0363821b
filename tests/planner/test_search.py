"""The search: best step time, memory, hysteresis, prefix, determinism."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.planner import (
    InfeasiblePlan,
    Plan,
    SearchOptions,
    replan,
    search,
    step_costs,
    what_would_fit,
)
from tests.planner.instances import (
    all_cuts,
    cluster,
    equal_profile,
    layer,
    profile,
    random_costs,
    stage_sums,
)


def brute_force(forward, backward, devices, global_batch, fits):
    """Shortest step over K, R and its halves, M in K .. 6K by steps of K, all cuts."""
    best = None
    shapes = [
        (num_stages, (devices // num_stages) >> halvings)
        for num_stages in range(1, min(devices, len(forward)) + 1)
        for halvings in range(devices.bit_length())
    ]
    for num_stages, replicas in shapes:
        for factor in range(1, 7) if replicas else ():
            m = factor * num_stages
            if global_batch % (replicas * m):
                continue
            rows = global_batch // (replicas * m)
            for cuts in all_cuts(len(forward), num_stages):
                if not fits(cuts, global_batch // replicas):
                    continue
                largest = max(stage_sums(forward, cuts)) + max(
                    stage_sums(backward, cuts)
                )
                step = rows * (sum(forward) + sum(backward) + (m - 1) * largest)
                best = step if best is None else min(best, step)
    return best


def test_step_time_equals_brute_force_on_60_random_models():
    rng = random.Random(11)
    for _ in range(60):
        n = rng.randint(2, 8)
        columns = [random_costs(rng, n) for _ in range(3)]
        sizes = [rng.randint(1, 50) for _ in range(n)]
        capacity = int(sum(sizes) * rng.uniform(1.2, 6.0))
        layers = [
            layer(i, times=times, parameters=size, activation=1)
            for i, (*times, size) in enumerate(zip(*columns, sizes, strict=True))
        ]
        forward, input_grad, weight_grad = columns
        first = max(0, input_grad[0] - forward[0] // 3)  # needs no input gradient
        backward = [
            b + w for b, w in zip([first, *input_grad[1:]], weight_grad, strict=True)
        ]

        def fits(cuts, rows, sizes=sizes, capacity=capacity):
            state = stage_sums([4 * size + rows for size in sizes], cuts)
            return max(state) <= capacity

        # 2304 rows: every R * M that is tried divides it.
        options = dict(global_batch=2304)
        expected = brute_force(forward, backward, 4, 2304, fits)
        try:
            plan = search(profile(layers), cluster(4, capacity), **options)
        except InfeasiblePlan:
            assert expected is None
            continue
        # Divisors of the batch between K and 6K are tried as well.
        assert expected is None or plan.predicted_step_ns <= expected
        if plan.num_microbatches % plan.num_stages == 0:
            assert plan.predicted_step_ns == expected


def test_step_time_follows_the_gpipe_formula():
    # Eight equal layers, f=b=w=1000 per row; the first saves a third of f in b.
    plan = search(
        equal_profile(8, times=(1000, 1000, 1000)),
        cluster(4),
        global_batch=8,
        num_stages=4,
        num_microbatches=8,
    )
    total = 8 * 3000 - 333
    assert plan.predicted_step_ns == total + 7 * (2000 + 4000)
    assert plan.cuts == (0, 2, 4, 6, 8)


def test_tight_memory_needs_a_longer_pipeline_and_freezing_shortens_it():
    model = equal_profile(12, parameters=100, activation=100)
    # Bytes per active layer: 400 of state and 100 per row of the replica.
    small = cluster(4, 6500)
    chosen = [search(model, small, global_batch=16, boundary=b) for b in (0, 3, 6)]
    assert [plan.num_stages for plan in chosen] == [4, 2, 1]
    assert [plan.num_replicas for plan in chosen] == [1, 2, 4]
    for plan in chosen:
        assert max(plan.bytes_per_stage) <= 6500


def found_least(found):
    """Return the least room for two stages, by what refusals say is missing."""
    with pytest.raises(InfeasiblePlan, match="K=2 does not fit") as no:
        found(150, num_stages=2)
    missing = int(re.search("miss ([0-9]+) bytes of 150", str(no.value)).group(1))
    assert max(found(150 + missing, num_stages=2).bytes_per_stage) <= 150 + missing
    return 150 + missing


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_smaller_microbatches_are_tried_where_nothing_fits_up_to_6k(checkpoint):
    model = equal_profile(4, activation=100, boundary_bytes_per_sample=1)

    def found(room, **more):
        options = dict(checkpoint=checkpoint, schedules=("gpipe", "1f1b"), **more)
        return search(model, cluster(2, room), global_batch=64, **options)

    assert found(2800).num_microbatches <= 6  # rows of 400 bytes, 32 of them
    for room, shape in ((1100, (1, 2)), (400, (1, 2)), (300, (2, 1))):
        plan = found(room)
        assert (plan.num_stages, plan.num_replicas) == shape
        assert plan.num_microbatches > 6 * plan.num_stages
        assert max(plan.bytes_per_stage) <= room
    with pytest.raises(InfeasiblePlan, match="miss 1 bytes of"):
        found(found_least(found) - 1, num_stages=2)
    with pytest.raises(InfeasiblePlan, match="K=1 does not fit"):
        found(400, num_stages=1, num_microbatches=6)


def test_lengths_that_fit_with_smaller_microbatches_are_not_refused():
    model = equal_profile(24, activation=100, boundary_bytes_per_sample=100)
    options = dict(global_batch=4096, schedules=("gpipe", "1f1b", "zb-h1"))
    plan = search(model, cluster(8, 2600), **options)
    text = " ".join(plan.reasons)
    for num_stages in range(1, 9):
        try:
            alone = search(model, cluster(8, 2600), num_stages=num_stages, **options)
        except InfeasiblePlan:
            continue
        assert alone.num_microbatches > 6 * num_stages
        assert f"K={num_stages} would not fit" not in text
        assert f"K={num_stages} does not fit" not in text


def test_what_could_be_given_up_is_told_where_nothing_fits():
    model = equal_profile(4, activation=100, boundary_bytes_per_sample=1)

    def hint(room, **more):
        options = SearchOptions(global_batch=64, num_stages=2, **more)
        with pytest.raises(InfeasiblePlan) as refused:
            search(model, cluster(2, room), options)
        assert refused.value.hint == ""
        found = what_would_fit(model, cluster(2, room), options)
        told = refused.value.hinting(found)
        assert told.hint == found and str(told).startswith(str(refused.value))
        assert told.refusals == refused.value.refusals and str(told).endswith(found)
        return found

    # GPipe keeps all rows of a stage, whatever M is.
    assert hint(2000).startswith("with schedule='1f1b' K=2 R=1 M=")
    every = ("gpipe", "1f1b", "zb-h1")
    assert hint(280, schedules=every).startswith("with checkpoint='always' K=2 R=1 M=")
    assert hint(2000, num_microbatches=4).startswith(
        "without num_microbatches=4, with schedule='1f1b' K=2 R=1 M="
    )
    assert hint(1500, num_microbatches=8, schedules=("1f1b",)).startswith(
        "without num_microbatches=8 K=2 R=1 M="
    )
    assert hint(100) == ""


def test_devices_left_over_are_named():
    plan = search(equal_profile(12), cluster(4), global_batch=16, num_stages=3)
    assert plan.idle_devices == 1
    assert "1 device idle: K=3 on 4 per node" in plan.reasons
    plan = search(equal_profile(12), cluster(4), global_batch=16, max_replicas=1)
    assert plan.num_replicas == 1


def test_all_replicas_are_those_for_which_a_batch_has_rows():
    """So a run goes on where fewer layers are left than the stages it asked for."""
    model = equal_profile(4)
    every = dict(num_stages=1, replicas="all")

    def replicas(**options):
        return search(model, cluster(4), **every, **options).num_replicas

    assert replicas(global_batch=32, num_microbatches=16) == 2
    assert replicas(global_batch=8, num_microbatches=3) == 2
    assert replicas(global_batch=3) == 3
    assert replicas(global_batch=12, min_microbatch_samples=5) == 2
    assert replicas(global_batch=8, num_microbatches=2) == 4
    with pytest.raises(ValueError, match=r"at most 8 \(the global batch\), got 2 x 8"):
        replicas(global_batch=8, num_microbatches=8, min_replicas=2)
    with pytest.raises(ValueError, match=r"at most 8 \(the global batch\), got 1 x 9"):
        replicas(global_batch=8, num_microbatches=9)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 40), st.integers(1, 3))
def test_no_plan_is_slower_for_having_a_choice_of_replicas(nodes, devices, batch, rows):
    """Replicas are halved from as many as a batch has rows for, not from more."""
    model = equal_profile(6)
    options = dict(global_batch=max(batch, rows), min_microbatch_samples=rows)
    machines = cluster(devices, num_nodes=nodes)
    for stages in {1, min(2, devices)}:
        free, every = (
            search(model, machines, replicas=kind, num_stages=stages, **options)
            for kind in ("auto", "all")
        )
        assert free.simulated_step_ns <= every.simulated_step_ns


def test_devices_stay_idle_where_all_reduce_takes_longer_than_it_saves():
    model = equal_profile(4, times=(1000, 1000, 1000), parameters=10**6)
    link = dict(device_link_bytes_per_s=10**9)
    plan = search(model, cluster(8, **link), global_batch=16)
    every = search(model, cluster(8, **link), global_batch=16, replicas="all")
    assert plan.shape[:2] == (4, 1) and plan.idle_devices == 4
    assert every.simulated_step_ns > plan.simulated_step_ns
    assert plan.reasons[-1] == "4 devices idle: 1 of 2 replicas that there may be"
    one = search(model, cluster(8, **link), global_batch=16, num_stages=4)
    assert "more devices take longer: K=4 R=2" in " ".join(one.reasons)
    options = dict(global_batch=16, num_stages=4, remaining_steps=100)
    stays = replan(model, cluster(8, **link), current=one, boundary=0, **options)
    assert "more devices take longer: K=4 R=2" in " ".join(stays.reasons)
    two = search(model, cluster(8, **link), global_batch=16, min_replicas=2)
    assert two.num_replicas == 2, "others go on where one is lost"
    # Without gradients to add up every device works, and equal plans take more.
    free = search(model, cluster(8), global_batch=16)
    assert free.idle_devices == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_number_of_replicas_that_is_tried_is_faster(seed):
    rng = random.Random(seed)
    layers = [
        layer(i, times=[rng.randint(1, 9) * 1000] * 3, parameters=rng.randint(1, 10**5))
        for i in range(rng.randint(2, 6))
    ]
    machines = cluster(8, device_link_bytes_per_s=10 ** rng.randint(8, 10))
    options = dict(global_batch=32, schedules=("gpipe",))
    found = search(profile(layers), machines, **options)
    for num_stages in range(1, len(layers) + 1):
        most = 8 // num_stages
        for replicas in {most, most // 2, most // 4, most // 8} - {0}:
            other = search(
                profile(layers),
                machines,
                num_stages=num_stages,
                max_replicas=replicas,
                replicas="all",
                **options,
            )
            assert other.num_replicas == replicas
            assert found.simulated_step_ns <= other.simulated_step_ns


@given(st.data())
def test_every_stage_fits_and_every_layer_runs_once(data):
    n = data.draw(st.integers(1, 10))
    layers = [
        layer(
            i,
            times=tuple(data.draw(st.integers(0, 100)) for _ in range(3)),
            parameters=data.draw(st.integers(0, 100)),
            activation=data.draw(st.integers(0, 5)),
        )
        for i in range(n)
    ]
    boundary = data.draw(st.integers(0, n - 1))
    capacity = data.draw(st.integers(1, 3000))
    try:
        plan = search(
            profile(layers), cluster(4, capacity), global_batch=32, boundary=boundary
        )
    except InfeasiblePlan as error:
        assert "K=1 does not fit" in str(error)
        return
    assert plan.cuts[0] == boundary and plan.cuts[-1] == n
    assert max(plan.bytes_per_stage) <= capacity
    assert plan.num_stages * plan.num_replicas + plan.idle_devices == 4
    assert plan.num_replicas * plan.num_microbatches <= 32
    assert Plan.from_json(plan.to_json()) == plan


@given(st.integers(0, 10), st.integers(1, 10_000))
def test_step_time_does_not_grow_with_the_boundary_when_the_prefix_is_cached(
    boundary, time
):
    model = equal_profile(12, times=(time, time, time))
    plans = [
        search(model, cluster(4), global_batch=32, boundary=b, cache_tiers=("host",))
        for b in (boundary, boundary + 1)
    ]
    assert plans[1].predicted_step_ns <= plans[0].predicted_step_ns


def test_equal_input_gives_equal_plan_bytes_and_hash():
    model = equal_profile(9, parameters=7, activation=3)
    plans = [search(model, cluster(4, 900), global_batch=24) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()
    assert plans[0].plan_hash == plans[1].plan_hash
    other = search(model, cluster(4, 901), global_batch=24)
    assert other.plan_hash != plans[0].plan_hash


def test_options_may_be_one_value_or_one_by_one():
    model, machine = equal_profile(8), cluster(4)
    options = SearchOptions(global_batch=32, num_stages=2, schedules=["gpipe"])
    one_by_one = search(
        model, machine, global_batch=32, num_stages=2, schedules=("gpipe",)
    )
    assert search(model, machine, options) == one_by_one
    assert search(model, machine, options, num_stages=4).num_stages == 4
    assert hash(options) and options.schedules == ("gpipe",)  # a value
    with pytest.raises(TypeError, match="num_stages: expected an integer, got True"):
        SearchOptions(global_batch=32, num_stages=True)
    with pytest.raises(TypeError, match="global_batch: expected an integer, got None"):
        SearchOptions(global_batch=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stages'"):
        search(model, machine, options, stages=2)


def test_scaling_all_times_keeps_the_cuts():
    rng = random.Random(5)
    columns = [random_costs(rng, 9) for _ in range(3)]
    for factor in (3, 3000):
        layers = [
            [
                layer(i, times=tuple(scale * t for t in times))
                for i, times in enumerate(zip(*columns, strict=True))
            ]
            for scale in (3, factor)  # a third of the forward time stays whole
        ]
        plans = [search(profile(each), cluster(4), global_batch=48) for each in layers]
        assert plans[0].cuts == plans[1].cuts
        assert plans[0].shape == plans[1].shape


def test_prefix_is_spread_over_the_devices_and_free_when_cached():
    model = equal_profile(8, times=(1000, 1000, 1000))
    options = dict(global_batch=4, boundary=4, num_stages=4, num_microbatches=4)
    cached = search(model, cluster(4), cache_tiers=("host",), **options)
    plain = search(model, cluster(4), **options)
    # Four frozen layers, four micro-batches of one row, on four devices.
    assert plain.predicted_step_ns - cached.predicted_step_ns == 4 * 4 * 1000 // 4


def test_frozen_layers_take_their_weights_on_every_device():
    model = equal_profile(8, parameters=100)
    plan = search(model, cluster(4), global_batch=4, boundary=4, num_stages=2)
    # Of the active ones also: gradients twice more, for DDP and as they pass.
    assert plan.bytes_per_stage == (400 + 2 * 600, 400 + 2 * 600)


def test_layers_the_user_froze_cost_no_backward_and_no_state():
    frozen = dict(trainable=False, parameters=100, activation=9)
    layers = [
        *(layer(i, times=(1000, 1000, 1000), **frozen) for i in range(2)),
        layer(2, times=(1000, 1000, 1000), parameters=100, activation=9),
    ]
    plan = search(
        profile(layers), cluster(1), global_batch=1, num_stages=1, num_microbatches=1
    )
    assert plan.predicted_step_ns == 3000 + 1000 - 333 + 1000
    assert plan.bytes_per_stage == (2 * 100 + 400 + 9,)


def test_recomputation_trades_time_for_memory():
    model = equal_profile(8, activation=100, boundary_bytes_per_sample=10)
    options = dict(global_batch=64, num_stages=4, num_microbatches=8)
    never = search(model, cluster(4), **options)
    always = search(model, cluster(4), checkpoint="always", **options)
    assert always.predicted_step_ns > never.predicted_step_ns
    assert never.bytes_per_stage[1] == 2 * 100 * 64
    assert always.bytes_per_stage[1] == 2 * 100 * 8 + 10 * 64
    one = dict(global_batch=64, num_stages=1, num_microbatches=1)
    lone = search(model, cluster(4), checkpoint="except_last", **one)
    assert lone.predicted_step_ns == search(model, cluster(4), **one).predicted_step_ns


def test_copies_are_charged_once_beside_the_compute_or_to_both_stages():
    model = equal_profile(8, boundary_bytes_per_sample=1000)
    link = dict(device_link_bytes_per_s=10**9, device_link_latency_ns=500)
    options = dict(global_batch=32, num_stages=2, num_microbatches=4, max_replicas=1)
    # 8 rows per micro-batch: 8000 bytes at 1 GB/s, each way.
    copy, rows = 500 + 8000, 8
    saved = rows * 10 // 3  # input gradient of the first layer's first operation
    forward, backward = rows * 4 * 10, rows * 4 * 20
    once = 2 * forward + 2 * backward - saved
    alongside = search(model, cluster(4, **link), **options)
    # The copies are slower than the stages: they set the pace, in both directions.
    assert copy > backward
    assert alongside.predicted_step_ns == once + 2 * copy + 3 * 2 * copy
    serial = search(model, cluster(4, **link), copies="serial", **options)
    assert serial.predicted_step_ns == (
        once + 4 * copy + 3 * (forward + backward + 2 * copy)
    )
    for plan in (alongside, serial):
        assert plan.simulated_step_ns == plan.predicted_step_ns
    free = search(model, cluster(4), **options)
    assert free.predicted_step_ns == once + 3 * (forward + backward)


@pytest.mark.parametrize(("schedule", "hides"), [("gpipe", True), ("1f1b", False)])
def test_the_all_reduce_hides_behind_the_backward_of_earlier_stages(schedule, hides):
    # The second stage alone has parameters; its four layers of a MiB are reduced.
    layers = [
        layer(i, times=(10**5,) * 3, parameters=(i >= 4) * (1 << 20)) for i in range(8)
    ]
    machines = cluster(4, device_link_bytes_per_s=10**9)
    options = dict(num_microbatches=4, schedules=(schedule,), cuts=(0, 4, 8))
    alone = search(profile(layers), machines, global_batch=8, max_replicas=1, **options)
    both = search(profile(layers), machines, global_batch=16, **options)
    assert (both.num_replicas, both.samples_per_microbatch) == (2, 2)
    # Of its bytes two replicas move half over the link twice.
    reduce = 4 * (1 << 20)
    saved = 2 * 10**5 // 3  # of the first layer's input gradient, in 2 rows
    slack = 2 * 8 * 10**5 - saved if hides else 0
    assert both.simulated_step_ns - alone.simulated_step_ns == reduce - slack
    assert both.lower_bound_ns == both.simulated_step_ns or schedule == "1f1b"


@pytest.mark.parametrize("members", [2, 3, 5])
@pytest.mark.parametrize("between", ["device_link", "network"])
def test_each_message_of_a_ring_waits_for_the_one_before(members, between):
    link = {f"{between}_bytes_per_s": 10**9}
    devices = {"device_link": (members, 1), "network": (1, members)}[between]
    model = equal_profile(2, times=(1000,) * 3, parameters=30 * 10**6)
    options = dict(global_batch=30, num_stages=1, num_microbatches=2, replicas="all")

    def reduced(**fields):
        machines = cluster(devices[0], num_nodes=devices[1], **link, **fields)
        plan = search(model, machines, **options)
        assert plan.num_replicas == members
        (stage,) = step_costs(plan, model, machines).stages
        assert plan.simulated_step_ns == plan.predicted_step_ns
        return stage.all_reduce_ns

    messages = 2 * (members - 1)
    assert reduced() == messages * 60 * 10**6 // members
    waits = reduced(**{f"{between}_latency_ns": 10_000}) - reduced()
    assert waits == messages * 10_000
    forever = reduced(**{f"{between}_latency_ns": 2**62})
    assert forever == 2**40, "as long as any transfer may take"


def test_costs_between_and_beyond_the_measured_sizes_are_affine():
    times = ((100, 400, 1200),) * 3
    layers = [layer(0, times=times)]
    model = profile(layers, microbatch_samples=(1, 4, 12))

    def step(rows):
        options = dict(num_stages=1, num_microbatches=1)
        plan = search(model, cluster(1), global_batch=rows, **options)
        return plan.predicted_step_ns

    for rows in (1, 2, 3, 4, 8, 12, 20, 100):
        assert step(rows) == 3 * 100 * rows - 100 * rows // 3


@pytest.mark.parametrize("rows", [7, 30])
def test_uneven_batches_are_predicted_for_the_largest_share(rows):
    plan = search(equal_profile(4), cluster(4), global_batch=rows)
    share = -(-rows // plan.num_replicas)
    assert plan.samples_per_microbatch == -(-share // plan.num_microbatches)
    assert plan.num_replicas * plan.num_microbatches <= rows


def test_batch_norm_gets_two_rows_per_microbatch():
    plan = search(
        equal_profile(4), cluster(4), global_batch=9, min_microbatch_samples=2
    )
    assert 9 // plan.num_replicas // plan.num_microbatches >= 2


def test_describe_names_the_layers_of_each_stage():
    plan = search(
        equal_profile(14),
        cluster(4),
        global_batch=32,
        boundary=4,
        cuts=(4, 9, 13, 14),
        num_microbatches=4,
    )
    assert plan.describe() == "K=3 R=1 M=4 layers 4-8|9-12|13"


def test_ten_thousand_devices_are_planned_like_eight():
    model = equal_profile(24, parameters=10)
    large = cluster(8, num_nodes=1250)
    plan = search(model, large, global_batch=80_000)
    assert plan.num_replicas * plan.num_stages + plan.idle_devices == 10_000
