"""After ABORT: the same change without the ranks that missed or refused it."""

import dataclasses
import time
from datetime import timedelta

import pytest

import pipetransformer as pt
from pipetransformer.autodp import (
    GroupCache,
    LaunchInfo,
    MissingKeptGroup,
    PlanAgreement,
    Unreachable,
)
from pipetransformer.planner import Plan
from pipetransformer.report import Phases
from pipetransformer.run import context as run_module
from pipetransformer.run.layout import Layout, ranks_of_plan
from pipetransformer.transformation import attempts as retries
from pipetransformer.transformation import phases as transformation
from pipetransformer.transformation.proposal import Proposal
from tests.engine.runs import make_run, plane_of
from tests.engine.scenario import QUICK, config, make_engine, schedule
from tests.engine.stand_ins import stand_in
from tests.support.private import function_at
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

SECOND_PLAN = 2  # plan epoch of the first change after the first plan
PATIENT = dataclasses.replace(QUICK, protocol_timeout=timedelta(seconds=12))


def test_a_retry_leaves_out_everyone_who_missed_or_refused_so_far():
    left_out = retries.left_out((1,), (3,), holders=(0, 2), attempt=1)
    assert left_out == (1, 3)


def test_a_retry_without_a_culprit_tries_with_the_same_ranks():
    assert retries.left_out((), (), holders=(0,), attempt=0) == ()


def test_there_is_no_retry_without_a_holder_of_the_state():
    assert retries.left_out((), (0,), holders=(0,), attempt=0) is None
    assert retries.left_out((0,), (2,), holders=(0, 2), attempt=1) is None


def test_there_are_three_retries_with_longer_and_longer_pauses():
    wanted = [retries.left_out((), (1,), holders=(0,), attempt=n) for n in range(4)]
    assert wanted == [(1,), (1,), (1,), None]
    assert [retries.back_off_s(n) for n in range(3)] == pytest.approx([0.1, 0.2, 0.3])


class Shape:
    def __init__(self, num_stages, num_replicas):
        self.num_stages, self.num_replicas = num_stages, num_replicas


def info(nodes, per_node):
    return LaunchInfo(
        rank=0,
        world_size=nodes * per_node,
        local_rank=0,
        local_world_size=per_node,
        node=0,
        num_nodes=nodes,
        run_id="0",
        launched=True,
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "replicas", "absent", "active"),
    [
        (1, 4, 2, 2, (), (0, 2)),
        (1, 4, 2, 2, (0,), (1, 2)),  # the block's next rank drives it
        (1, 4, 2, 2, (2, 3), (0,)),  # a block without any is left out
        (1, 4, 1, 4, (1,), (0, 2, 3)),
        (1, 4, 1, 2, (0,), (1, 2)),  # a bound on R moves on to other blocks
        (2, 2, 1, 2, (0,), (1, 2)),
        (2, 2, 2, 2, (0, 1), (2,)),
        (1, 5, 2, 2, (3,), (0, 2)),  # K does not divide the world
        (1, 3, 2, 1, (0,), (1,)),
    ],
)
def test_the_first_rank_that_is_there_drives_its_block(
    nodes, per_node, stages, replicas, absent, active
):
    layout = ranks_of_plan(Shape(stages, replicas), info(nodes, per_node), absent)
    assert layout.active == active
    assert layout.nodes == tuple(rank // per_node for rank in active)


@pytest.mark.parametrize(
    ("stages", "replicas", "absent", "holders", "active"),
    [
        (4, 1, (), (2,), (2,)),  # else nobody would know the state
        (2, 2, (), (1, 2), (1, 2)),
        (2, 2, (), (3,), (0, 3)),
        (2, 1, (), (2,), (2,)),  # a bound on R: the block with the state is kept
        (1, 2, (0,), (3,), (1, 3)),
        (1, 4, (), (2, 0), (0, 1, 2, 3)),
    ],
)
def test_a_rank_that_holds_the_state_stays_active(
    stages, replicas, absent, holders, active
):
    shape = Shape(stages, replicas)
    assert ranks_of_plan(shape, info(1, 4), absent, holders).active == active


@pytest.mark.parametrize("source", [1, 2])
def test_the_rank_whose_state_the_others_get_stays_active(source):
    other = 3 - source  # holds it, too, and comes first where nodes take turns
    layout = ranks_of_plan(Shape(1, 1), info(2, 2), (0, 3), (source, other))
    assert layout.active == (source,)


class LateTransition(PlanAgreement):
    """Comes to the second plan only when it has been decided without this rank."""

    def __init__(self, plane, epoch, **options):
        decision = f"decision/{epoch}"
        while epoch == SECOND_PLAN and plane.read(decision) in (None, b"OPEN"):
            time.sleep(0.05)
        super().__init__(plane, epoch, **options)


def out_of_memory(plane, build=run_module.build_group, **arguments):
    if arguments["name"].startswith(f"g/{SECOND_PLAN}"):
        raise MemoryError("no room for the new group")
    return build(plane, **arguments)


def train(rank, culprit, module, name, replacement, autodp=PATIENT):
    original = getattr(module, name)
    if rank == culprit:
        setattr(module, name, replacement)
    plan = pt.PlanConfig(slot_memory_bytes=13_500, reshape="always")
    engine = make_engine(freeze=schedule(0, 6), config=config(plan=plan, autodp=autodp))
    try:
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(ToySet(50, vouch=True), 12):
                    engine.step(batch)
                loss = engine.evaluate(ToySet(21, seed=2, vouch=True))["loss"]
    finally:
        setattr(module, name, original)
    return engine.history.to_json(), loss


def three_runs(rank):
    return {
        "late": train(rank, 2, transformation, "PlanAgreement", LateTransition),
        "refuses": train(rank, 3, run_module, "build_group", out_of_memory),
        "lead refuses": train(rank, 0, run_module, "build_group", out_of_memory),
    }


@pytest.fixture(scope="module")
def runs():
    return run_ranks(three_runs, 4, timeout_s=110)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["late", "refuses"])
def test_a_change_goes_on_without_a_rank_that_missed_or_refused_it(runs, case):
    epochs = runs[0][case][0]["epochs"]
    assert [e["num_replicas"] for e in epochs[:2]] == [1, 3]
    assert [e["num_frozen_layers"] for e in epochs] == [0, 6, 6]
    assert all(e["samples"] == e["unique_samples"] == 50 for e in epochs)
    assert len({result[case][1] for result in runs}) == 1


@pytest.mark.distributed
def test_a_refusal_of_the_only_holder_of_the_state_keeps_the_old_plan(runs):
    epochs = runs[0]["lead refuses"][0]["epochs"]
    assert [e["num_stages"] for e in epochs[:2]] == [4, 4]
    assert [e["num_frozen_layers"] for e in epochs] == [0, 0, 6]  # the next one works
    assert all(e["samples"] == e["unique_samples"] == 50 for e in epochs)


@pytest.mark.distributed
def test_aborted_attempts_are_records_with_their_reason_and_price(runs):
    for case, culprit, reason in (
        ("late", 2, "rank"),  # who noticed first is a matter of time
        ("refuses", 3, "no room for the new group"),
    ):
        history = runs[0][case][0]
        aborted = history["aborted"]
        assert [a["attempt"] for a in aborted] == list(range(len(aborted)))
        assert aborted[0]["to"]["num_frozen_layers"] == 6
        assert aborted[0]["culprits"] == [culprit] and aborted[0]["without"] == []
        assert reason in aborted[0]["reason"]
        assert {"plan", "prepare", "prepare/decision"} <= set(aborted[0]["phases"])
        change, *later = history["transformations"]
        assert change["attempt"] == len(aborted)
        assert change["plan_epoch"] > aborted[-1]["plan_epoch"]
        counters = history["counters"]
        assert counters["transformations_aborted"] == len(aborted)
        assert counters["transformations_committed"] == 2 + len(later)


def connect_never(plane, build=run_module.build_group, **arguments):
    decision = f"decision/{SECOND_PLAN}"
    while arguments["name"].startswith(f"g/{SECOND_PLAN}"):
        if plane.read(decision) not in (None, b"OPEN"):
            raise RuntimeError("came when it was decided")
        time.sleep(0.05)
    return build(plane, **arguments)


def connect_later(plane, build=run_module.build_group, **arguments):
    if arguments["name"].startswith(f"g/{SECOND_PLAN}"):
        time.sleep(1.0)
    return build(plane, **arguments)


def wait_for_one(rank):
    """Rank 3 does not connect; rank 2 begins to, a second after the others."""
    hurried = dataclasses.replace(QUICK, protocol_timeout=timedelta(seconds=8))
    own = {3: connect_never, 2: connect_later}
    replacement = own.get(rank, run_module.build_group)
    return train(rank, rank, run_module, "build_group", replacement, hurried)


@pytest.mark.distributed
def test_who_waited_for_another_in_vain_is_not_left_out_with_it():
    """Members give up early enough to say so, however late each began to connect."""
    history, _ = run_ranks(wait_for_one, 4, timeout_s=110)[0]
    assert [a["culprits"] for a in history["aborted"]] == [[3]]
    assert [e["num_replicas"] for e in history["epochs"][:2]] == [1, 3]
    said = history["aborted"][0]["reason"]
    for waiting in (0, 1):
        assert f"rank {waiting}: Unreachable: active group " in said
    assert "got: nothing from ranks [3]: it was given up" in said


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (Unreachable("active group 'g/3': expected ranks, got: nothing", [1]), True),
        (MissingKeptGroup("group 'g/1': expected a kept one, got none"), True),
        (RuntimeError("expected ranks [0, 1] to connect within 1.0 s"), False),
        (OSError("Too many open files"), False),
    ],
)
def test_the_type_of_an_error_tells_whether_others_are_to_blame(error, waited):
    run = make_run(plane=plane_of())
    run.groups = stand_in(GroupCache)
    run.groups.obtain.side_effect = error
    layout = Layout((0, 1), (0, 0))
    proposal = stand_in(
        Proposal,
        plan_epoch=3,
        plan=stand_in(Plan, num_stages=1),
        layout=layout,
        group="g/3",
        fresh_group="g/3",
    )
    built = function_at("build")(run, None, proposal, lambda: False, Phases())
    assert built == transformation.Built(
        refusal=f"{type(error).__name__}: {error}", waited=waited
    )
