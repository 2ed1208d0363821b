"""What changes owner between two plans, and what the pause then takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer import _C
from pipetransformer.planner import Cluster
from pipetransformer.planner.native import cluster as _native_cluster
from pipetransformer.planner.native import profile as _native_profile
from pipetransformer.planner.pauses import (
    PauseModel,
    RunningMean,
    native_model,
    terms_of,
)
from tests.planner.instances import equal_profile

KINDS = _C.planner.TransitionKind
MS = 1_000_000
# Eight layers of 100 bytes of weights; with Adam 300 bytes have an owner.
PROFILE = equal_profile(8, parameters=100)


def cluster(devices=4, memory=10_000, **options):
    return Cluster(devices_per_node=devices, device_memory_bytes=memory, **options)


def placed(cuts, replicas=1, microbatches=4, state=None):
    stages = len(cuts) - 1
    shape = _C.planner.Shape(stages, replicas, microbatches)
    frozen = 100 * cuts[0]
    sizes = [frozen + 400 * (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    return _C.planner.Placement(shape, list(cuts), state or sizes)


def moves(before, after, machines=None):
    return _C.planner.moves(
        _native_profile(PROFILE), _native_cluster(machines or cluster()), before, after
    )


FOUR = placed((0, 2, 4, 6, 8))


@pytest.mark.parametrize(
    ("after", "same_order", "kind"),
    [
        (FOUR, True, KINDS.NONE),
        (FOUR, False, KINDS.CUTS),
        (placed((1, 2, 4, 6, 8)), True, KINDS.BOUNDARY),
        (placed((1, 3, 4, 6, 8)), True, KINDS.CUTS),
        (placed((2, 3, 4, 6, 8)), True, KINDS.CUTS),  # the old first stage is empty
        (placed((0, 2, 4, 6, 8), microbatches=8), True, KINDS.CUTS),
        (placed((0, 4, 8), replicas=1), True, KINDS.SHAPE),
        (placed((0, 2, 4, 6, 8), replicas=2), True, KINDS.SHAPE),
    ],
)
def test_the_class_of_a_change_is_that_of_what_differs(after, same_order, kind):
    assert _C.planner.transition_kind(FOUR, after, same_order) == kind


def test_cuts_are_clipped_unless_a_stage_would_be_empty():
    clipped = _C.planner.clipped_cuts
    assert clipped([0, 2, 4, 6, 8], 1) == [1, 2, 4, 6, 8]
    assert clipped([0, 2, 4, 6, 8], 2) is None
    assert clipped([3, 4, 6, 8], 0) == [0, 4, 6, 8], "an unfreeze fills the first"
    assert clipped([0, 8], 8) is None


def test_layers_that_change_device_take_weights_and_moments_along():
    # Layers 2 and 3 go from device 1 to 0; 4 to 7 from 2 and 3 to 1.
    assert moves(FOUR, placed((0, 4, 8))).device_bytes == 6 * 300
    assert moves(FOUR, FOUR).device_bytes == 0
    # Layers 0 and 1 froze: they leave the pipeline.
    assert moves(FOUR, placed((2, 4, 6, 8))).device_bytes == 6 * 300


def test_new_replicas_need_the_whole_model_and_old_ones_nothing():
    grown = moves(FOUR, placed((4, 6, 8), replicas=2))
    assert grown.replica_bytes == 8 * 300
    shrunk = moves(placed((4, 6, 8), replicas=2), FOUR)
    assert shrunk.replica_bytes == 0
    # K=2 drives from devices 0, 2, 4, 6; K=3 from 0 and 3: one joins though R falls.
    eight = cluster(8)
    assert (
        moves(
            placed((0, 4, 8), replicas=4), placed((0, 3, 6, 8), replicas=2), eight
        ).replica_bytes
        == 8 * 300
    )


def test_replicas_on_further_nodes_are_reached_over_the_network():
    two = cluster(4, num_nodes=2)
    joined = moves(placed((0, 4, 8), replicas=1), placed((0, 4, 8), replicas=2), two)
    assert joined.across_nodes and joined.replica_bytes == 8 * 300
    inside = moves(placed((0, 4, 8), replicas=1), placed((0, 4, 8), replicas=2))
    assert not inside.across_nodes


def test_a_device_that_would_hold_both_plans_is_named():
    # Device 2 holds layers 4 and 5 at rest, 2 x 300, and gets the frozen front, 4 x
    # 100, with layers 4 and 5 and their gradients, 2 x 400.
    after = placed((4, 6, 8), replicas=2)
    assert moves(FOUR, after, cluster(memory=1800)).crowded is None
    crowded = moves(FOUR, after, cluster(memory=1799)).crowded
    assert (crowded.node, crowded.device) == (0, 2)
    assert (crowded.old_bytes, crowded.new_bytes) == (600, 1200)


def test_idle_devices_and_kept_processes_are_not_crowded():
    # Two of four devices were idle: the new replica gets those.
    before = placed((0, 4, 8), replicas=1)
    after = placed((0, 4, 8), replicas=2)
    assert moves(before, after, cluster(memory=1)).crowded is None
    # The same process re-cuts its own layers.
    assert moves(after, FOUR, cluster(memory=1)).crowded is None


def test_placement_of_other_stages_is_refused():
    bad = _C.planner.Placement(_C.planner.Shape(2, 1, 1), [0, 8], [1])
    with pytest.raises(ValueError, match="new plan: expected cuts and bytes of 2"):
        moves(FOUR, bad)


GROWN = moves(FOUR, placed((4, 6, 8), replicas=2))


def pause(model=None, kind=KINDS.SHAPE, moved=GROWN, machines=None, cache_bytes=0):
    predicted = _C.planner.predicted_pause(
        native_model(model or PauseModel()),
        _native_cluster(machines or cluster()),
        kind,
        moved,
        cache_bytes,
    )
    assert sum(terms_of(predicted).values()) == predicted.total_ns
    return terms_of(predicted)


def test_nothing_changes_in_no_time():
    assert sum(pause(kind=KINDS.NONE).values()) == 0


def test_each_term_starts_from_a_default_and_a_new_group_takes_longer():
    shape, cuts = pause(), pause(kind=KINDS.CUTS, moved=moves(FOUR, FOUR))
    assert shape["prepare"] > cuts["prepare"] > 0
    assert shape["rewire"] == cuts["rewire"] > 0 and cuts["first_step"] > 0
    # 2400 bytes at 100 MB/s, the rate of processes without a known link.
    assert shape["move"] == 24_000 and cuts["move"] == 0


def test_known_links_price_what_travels_over_them():
    linked = cluster(device_link_bytes_per_s=10**9, device_link_latency_ns=500)
    moved = moves(FOUR, placed((4, 6, 8), replicas=2), linked)
    # 4 layers change device in the process, 8 go to the new replica.
    assert moved.device_bytes == 4 * 300
    assert pause(moved=moved, machines=linked)["move"] == 1200 + 500 + 2400 + 500
    assert pause(machines=linked, cache_bytes=1000)["cache"] == 1000 + 500
    assert pause(cache_bytes=1000)["cache"] == 0


def test_state_travels_like_gradients_between_processes_that_share_a_host():
    host = cluster(replica_link_bytes_per_s=10**9, replica_link_latency_ns=500)
    assert pause(machines=host)["move"] == 2400 + 500
    linked = cluster(device_link_bytes_per_s=10**8, replica_link_bytes_per_s=10**9)
    moved = moves(FOUR, placed((4, 6, 8), replicas=2), linked)
    assert pause(moved=moved, machines=linked)["move"] == 10 * (1200 + 2400)


def test_terms_follow_the_mean_of_what_was_measured():
    model = PauseModel()
    model = model.observed(
        {"prepare": 0.030, "move": 0.012, "rewire": 0.008, "plan": 9.0},
        kind="shape",
        moved_bytes=1200,
    )
    model = model.observed(
        {"prepare": 0.010, "move": 0.036, "rewire": 0.010, "first_step": 0.001},
        kind="shape",
        moved_bytes=2400,
    )
    model = model.observed({"prepare": 0.004, "move": 0.007}, kind="boundary")
    terms = pause(model)
    assert terms["prepare"] == 20 * MS
    compared = 7 * MS  # where nothing was handed over
    assert terms["move"] == 32 * MS + compared, "48 ms for 3600 bytes; 2400 travel"
    stays = pause(model, kind=KINDS.BOUNDARY, moved=moves(FOUR, FOUR))
    assert stays["move"] == compared
    # What comes later is a hand-over and a comparison.
    later = model.observed({"move": 0.007 + 0.036}, kind="shape", moved_bytes=2400)
    assert later.move == model.move.observed(36 * MS, 2400)
    assert terms["rewire"] == 9 * MS
    assert terms["first_step"] == MS
    assert pause(model, kind=KINDS.BOUNDARY)["prepare"] == 4 * MS


@given(
    st.lists(st.integers(0, 10**15), min_size=1, max_size=20),
    st.integers(1, 10**9),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_running_mean_is_exact_and_independent_of_order(values, per):
    def mean_of(numbers):
        mean = RunningMean()
        for number in numbers:
            mean = mean.observed(number, per)
        return mean

    assert mean_of(values) == mean_of(sorted(values, reverse=True))
    assert mean_of(values) == RunningMean(sum_ns=sum(values), count=per * len(values))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: RunningMean(sum_ns=-1), "pause sum_ns: expected 0 to 2"),
        (lambda: RunningMean(count=1.5), "pause count: expected an integer, got 1.5"),
        (lambda: RunningMean().observed(-1), "expected at least 0 ns per at least 1"),
        (lambda: RunningMean().observed(1, 0), "expected at least 0 ns per at least 1"),
        (
            lambda: RunningMean(sum_ns=2**62).observed(1),
            "expected sums of 0 to 2.62, got 1 after",
        ),
        (
            lambda: PauseModel().observed({"rewire": float("nan")}, kind="cuts"),
            "pause rewire: expected a finite number from 0.*, got nan",
        ),
        (lambda: PauseModel.from_dict([]), "pauses: expected an object, got list"),
        (
            lambda: PauseModel.from_dict({**PauseModel().to_dict(), "version": 2}),
            "pauses version: expected 1, got 2",
        ),
        (
            lambda: PauseModel.from_dict(
                {**PauseModel().to_dict(), "move": {"sum_ns": 1}}
            ),
            "pauses move count: expected a value, got none",
        ),
    ],
)
def test_malformed_measurements_are_refused(build, text):
    with pytest.raises(ValueError, match=text):
        build()


def test_model_survives_its_own_format():
    model = PauseModel().observed({"rewire": 0.25, "move": 1}, kind="cuts")
    assert PauseModel.from_dict(model.to_dict()) == model
    before = {k: v for k, v in PauseModel().to_dict().items() if k != "compare"}
    assert PauseModel.from_dict(before) == PauseModel(), "of an older checkpoint"
    assert model.move == RunningMean(), "no bytes, no rate"
