"""What steps take over what was expected: learned, agreed on, kept."""

import dataclasses
import types

import pytest

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.planner import (
    HOST_LINK_BYTES_PER_S,
    HOST_ROUND_NS,
    NETWORK_BYTES_PER_S,
    search,
    step_costs,
)
from pipetransformer.report import PlanShape, SegmentRecord
from pipetransformer.run.step_costs import StepFactors, StepLearner, all_reduce_ns
from pipetransformer.transformation.measured_inputs import AS_DEVICES, _host_costs
from tests.engine.scenario import config, make_engine, schedule
from tests.planner.instances import cluster, layer, profile
from tests.support.private import run_of
from tests.support.toy import ToySet

FOUND = profile(
    [
        layer(i, times=(10**6, 10**6, 10**6), parameters=10**6, optimizer_ns=10**5)
        for i in range(4)
    ]
)
HOST = cluster(
    2,
    replica_link_bytes_per_s=10**9,
    replica_link_latency_ns=10**6,
    step_ns=5 * 10**5,
    cores_permille=2000,
)
STEPS = 10


def plan_with(factors=StepFactors(), **options):  # noqa: B008  # frozen
    return search(FOUND, factors.applied(HOST), global_batch=8, **options)


def a_pass(plan, *, pace=1.0, link=1.0, host=1.0, **fields):
    """A segment in which all takes so many times as long as was expected."""
    expected_link = all_reduce_ns(plan, FOUND, HOST) * link
    optimizer = 4 * 10**5 / plan.accumulation_steps
    own = HOST.step_ns * host
    known = plan.simulated_step_ns - all_reduce_ns(plan, FOUND, HOST) - HOST.step_ns
    backward = known - optimizer
    whole = (known + expected_link + own) * pace
    backward += whole - (known + expected_link + own)  # what the model does not know
    phases = {
        "backward": backward,
        "backward/all_reduce": expected_link,
        "optimizer": optimizer,
        "other": own,
    }
    seconds = {name: STEPS * ns / 1e9 for name, ns in phases.items()}
    shape = PlanShape(0, 0, *plan.shape)
    record = SegmentRecord(
        shape, 80, STEPS, sum(seconds.values()), 0.5, 0, 0, seconds, [], 0
    )
    return dataclasses.replace(record, **fields)


def observed(passes, plan, learner=None):
    learner = learner or StepLearner()
    for each in passes:
        learner.observe(each, plan, FOUND, HOST, StepFactors(), STEPS)
    return learner


def test_a_run_as_expected_leaves_the_factors_at_one():
    plan = plan_with(num_stages=1)
    found = observed([a_pass(plan)] * 3, plan).factors
    assert dataclasses.astuple(found) == pytest.approx((1, 1, 1), abs=0.002)


def test_batches_that_share_a_step_leave_the_factors_at_one():
    plan = plan_with(num_stages=1, accumulation_steps=4)
    (stage,) = step_costs(plan, FOUND, HOST).stages
    assert plan.num_replicas == 2
    assert all_reduce_ns(plan, FOUND, HOST) == stage.all_reduce_ns / 4 > 0
    found = observed([a_pass(plan)] * 3, plan).factors
    assert dataclasses.astuple(found) == pytest.approx((1, 1, 1), abs=0.002)


@pytest.mark.parametrize("truth", [0.5, 3.0])
def test_the_link_between_nodes_is_learned_and_planned_with(truth):
    nodes = dataclasses.replace(
        cluster(1, num_nodes=2), network_bytes_per_s=10**9, network_latency_ns=10**6
    )
    plan = search(FOUND, nodes, global_batch=8, replicas="all", num_stages=1)
    expected = all_reduce_ns(plan, FOUND, nodes)
    assert plan.num_replicas == 2 and expected == 4 * 10**6 + 2 * 10**6
    learner = StepLearner()
    for _ in range(6):
        each = a_pass(plan)
        phases = {**each.phase_seconds}
        phases["backward/all_reduce"] = STEPS * truth * expected / 1e9
        each = dataclasses.replace(each, phase_seconds=phases)
        learner.observe(each, plan, FOUND, nodes, StepFactors(), STEPS)
    assert learner.factors.link == pytest.approx(truth, rel=0.03)
    learned = learner.factors.applied(nodes)
    assert all_reduce_ns(plan, FOUND, learned) == pytest.approx(
        truth * expected, rel=0.03
    )


def test_links_between_nodes_are_assumed_where_there_are_several(monkeypatch):
    monkeypatch.delenv(AS_DEVICES, raising=False)

    def costs(kind, nodes):
        run = types.SimpleNamespace(
            slots=types.SimpleNamespace(on_host=kind == "cpu", type=kind),
            info=types.SimpleNamespace(num_nodes=nodes),
        )
        return _host_costs(run, 1500)

    between = {"network_bytes_per_s", "network_latency_ns"}
    for kind in ("cpu", "cuda"):
        assert not between & costs(kind, 1).keys()
    assert costs("cpu", 2)["network_bytes_per_s"] == HOST_LINK_BYTES_PER_S
    assert costs("cpu", 2)["network_latency_ns"] == HOST_ROUND_NS
    assert costs("cuda", 2)["network_bytes_per_s"] == NETWORK_BYTES_PER_S


def test_slots_that_stand_for_devices_pay_nothing_between_nodes(monkeypatch):
    monkeypatch.setenv(AS_DEVICES, "1")
    run = types.SimpleNamespace(
        slots=types.SimpleNamespace(on_host=True),
        info=types.SimpleNamespace(num_nodes=2),
    )
    assert _host_costs(run, 0) == {}


@pytest.mark.parametrize("truth", [0.5, 1.0, 3.0])
def test_each_cost_is_learned_apart(truth):
    plan = plan_with(num_stages=1)
    found = observed([a_pass(plan, link=truth)] * 6, plan).factors
    assert found.link == pytest.approx(truth, rel=0.03)
    assert (found.host, found.pace) == pytest.approx((1, 1), abs=0.05)
    found = observed([a_pass(plan, host=truth)] * 6, plan).factors
    assert found.host == pytest.approx(truth, rel=0.03)
    assert (found.link, found.pace) == pytest.approx((1, 1), abs=0.05)
    found = observed([a_pass(plan, pace=truth)] * 6, plan).factors
    assert found.pace == pytest.approx(truth, rel=0.03)


def test_a_change_of_plan_makes_the_next_pass_count_more():
    first = plan_with(num_stages=1)
    second = plan_with(num_stages=2)
    settled = observed([a_pass(first)] * 8, first)
    steady = observed([a_pass(first, pace=2.0)], first, settled).factors.pace
    settled = observed([a_pass(first)] * 8, first)
    changed = observed([a_pass(second, pace=2.0)], second, settled).factors.pace
    assert 1.0 < steady < changed < 2.0


def test_filling_the_cache_is_no_part_of_a_step():
    plan = plan_with(num_stages=1)
    filling = a_pass(plan)
    phases = {
        **filling.phase_seconds,
        "forward/prefix": 1.0,
        "forward/cache_write": 1.0,
    }
    filling = dataclasses.replace(
        filling, phase_seconds=phases, seconds=filling.seconds + 2.0, cache_misses=80
    )
    found = observed([filling] * 3, plan).factors
    assert dataclasses.astuple(found) == pytest.approx((1, 1, 1), abs=0.002)


def test_the_first_step_of_a_plan_is_no_part_of_the_pace():
    """It is cold, and the pause before it has it already."""
    plan = plan_with(num_stages=1)
    passes = [a_pass(plan)] * 2
    cold, phases = 0.5, {**passes[0].phase_seconds}
    phases["backward"] += cold
    passes[0] = dataclasses.replace(
        passes[0],
        phase_seconds=phases,
        seconds=passes[0].seconds + cold,
        first_step_seconds=cold,
    )
    found = observed(passes, plan).factors
    assert dataclasses.astuple(found) == pytest.approx((1, 1, 1), abs=0.002)


@pytest.mark.parametrize("phase", ["forward/audit", "forward/prefix"])
def test_what_comes_once_in_the_first_step_is_taken_off_once(phase):
    plan = plan_with(num_stages=1)
    each = a_pass(plan)
    cold = dataclasses.replace(
        each,
        phase_seconds={**each.phase_seconds, phase: 0.3},
        seconds=each.seconds + 0.3,
        first_step_seconds=0.3,
        cache_misses=80,
    )
    found = observed([cold, each], plan).factors
    assert dataclasses.astuple(found) == pytest.approx((1, 1, 1), abs=0.002)


def test_a_run_says_what_the_first_step_of_each_plan_took_more():
    engine = make_engine(freeze=schedule(0, 3, 3), config=config())
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(24), 4):
                engine.step(batch)
    extra = [epoch.segments[-1].first_step_seconds for epoch in engine.history.epochs]
    changes = [c.phases.get("first_step", 0.0) for c in engine.history.transformations]
    assert extra[1:] == [*changes, 0.0] and extra[0] >= 0.0 and len(changes) == 1


def test_a_pass_without_steps_says_nothing():
    plan = plan_with(num_stages=1)
    learner = StepLearner()
    learner.observe(a_pass(plan), plan, FOUND, HOST, StepFactors(), 0)
    assert learner.factors == StepFactors()


def test_plans_are_made_with_what_was_learned():
    slow = StepFactors(pace=1.0, link=20.0, host=2.0)
    host = slow.applied(HOST)
    assert host.replica_link_bytes_per_s == 5 * 10**7
    assert host.replica_link_latency_ns == 2 * 10**7
    assert host.step_ns == 10**6
    assert plan_with(num_stages=1).shape == (1, 2, 1)
    assert plan_with(slow).shape[:2] == (2, 1), "one replica reduces nothing"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"pace": 1.0, "link": 1.0}, "steps host: expected a value, got none"),
        ({"pace": 0.0, "link": 1.0, "host": 1.0}, "steps pace: expected 1/64 to 64"),
        ({"pace": 1.0, "link": 1.0, "host": 1e9}, "steps host: expected 1/64 to 64"),
        ({"pace": 1.0, "link": "x", "host": 1.0}, "steps link"),
        (None, "steps"),
    ],
)
def test_malformed_factors_are_refused(content, text):
    with pytest.raises(ValueError, match=text):
        StepFactors.from_dict(content, "steps")
    given = StepFactors(pace=1.25, link=0.5, host=3.0)
    assert StepFactors.from_dict(given.to_dict(), "steps") == given


def test_a_checkpoint_keeps_the_factors_and_a_resumed_run_goes_on_from_them(tmp_path):
    def train(epochs, resume):
        settings = config(
            checkpoint=pt.CheckpointConfig(directory=str(tmp_path), resume=resume)
        )
        with make_engine(freeze=schedule(0), config=settings) as engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(ToySet(50), 12):
                    engine.step(batch)
        return engine.history.epochs

    first = train(3, False)
    assert first[0].pace == 1.0 and first[2].pace != 1.0
    _, content = checkpoint.newest_valid(tmp_path)
    kept = StepFactors.from_dict(content["extra"]["pauses"]["steps"], "kept")
    assert kept.pace != 1.0
    later = train(4, True)
    assert later[-1].pace == kept.pace


@pytest.mark.parametrize(
    ("sizes", "microbatches", "wanted"),
    [
        ((1, 4, 16), None, (1, 4)),
        ((16, 32), None, (2, 8)),  # of a batch of eight rows one size would be left
        ((8,), None, (2, 8)),
        ((8,), 1, (8,)),  # nothing is chosen by it
        ((1,), None, (1,)),
    ],
)
def test_two_sizes_are_profiled_where_micro_batches_are_chosen(
    sizes, microbatches, wanted
):
    plan = pt.PlanConfig(microbatch_samples=sizes, num_microbatches=microbatches)
    with make_engine(freeze=schedule(0), config=config(plan=plan)) as engine:
        engine.prepare(ToySet(24), 8)
        assert run_of(engine).inputs.profile.microbatch_samples == wanted
