"""How much slots of a host slow each other: measured with all of them at work."""

import itertools
import os
import signal
import types

import pytest

import pipetransformer as pt
from pipetransformer.transformation import measured_inputs
from pipetransformer.transformation.crowding import keep_busy, measure_cores
from pipetransformer.transformation.measured_inputs import AS_DEVICES
from tests.engine.losses import SURVIVING
from tests.engine.scenario import config, make_engine, schedule
from tests.planner.instances import layer, profile
from tests.support.private import run_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.toy import ToySet

ROWS = 4


class Plane:
    """Stands for the store of a run."""

    def __init__(self, members, *, come=True):
        self.members = tuple(members)
        self.keys, self.asked, self._come = {}, [], come
        self.checks = 0

    def publish(self, key, value):
        self.keys[key] = value

    def read(self, key):
        return self.keys.get(key)

    def check(self):
        self.checks += 1

    def wait_any(self, groups, timeout=None):
        self.asked.append((groups, timeout))
        if not self._come:
            return None
        return next((n for n, g in enumerate(groups) if set(g) <= set(self.keys)), 0)


def run_on(members, *, local=4, rank=0, **options):
    info = types.SimpleNamespace(
        rank=rank, node=rank // local, local_world_size=local, num_nodes=2
    )
    return types.SimpleNamespace(plane=Plane(members, **options), info=info)


def are_busy(plane):
    """Tell whether the lead has asked the others to work at this moment."""
    begun, ended = ([k for k in plane.keys if k.endswith(e)] for e in ("begin", "end"))
    return len(begun) > len(ended)


def work_of(run, alone, together):
    """Work that takes its time, and half as much again before the first turn."""

    def make(rows):
        assert rows == ROWS

        def work():
            if not run.plane.asked:
                return 1.5 * alone
            return together if are_busy(run.plane) else alone

        return work

    return make


@pytest.mark.parametrize(
    ("alone", "together", "usable", "cores"),
    [
        (1.0, 2.0, 2000, 2000),  # four slots on two cores
        (1.0, 1.25, 0, 3200),  # cores for all, but not memory
        (1.0, 1.01, 0, 0),  # nothing is shared
        (1.0, 0.9, 0, 0),
        (1.0, 1.5, 2000, 2000),  # the job has no more
        (1.0, 3.0, 2000, 1333),
        (1.0, 9.0, 2000, 1000),  # one slot always runs
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_cores_follow_from_how_much_slower_it_is(alone, together, usable, cores, known):
    run = run_on(range(4))
    make = work_of(run, 99.0 if known else alone, together)
    found = measure_cores(run, make, ROWS, alone if known else None, usable)
    assert found == cores
    assert run.plane.keys["busy/4/ask"] == b"4"
    assert [keys for (keys,), _ in run.plane.asked] == [
        [f"busy/4/0/{what}/{rank}" for rank in (1, 2, 3)] for what in ("rests", "works")
    ]


def test_short_runs_are_averaged_over_turns_of_the_scheduler():
    """A slot that works undisturbed and then waits has no typical run."""
    made, run = [], run_on(range(4))

    def make(rows):
        alone = itertools.repeat(0.004)
        shared = itertools.cycle([0.004] * 3 + [0.020])
        return lambda: (made.append(1), next(shared if busy() else alone))[1]

    def busy():
        return are_busy(run.plane)

    found = measure_cores(run, make, ROWS, None, 0)
    # Twice as slow, four slots; the last turn may not be a whole one.
    assert found == pytest.approx(2000, rel=0.08)
    assert 100 < len(made) < 200, "four turns of 0.1 s each"


@pytest.mark.parametrize("slow", [range(3), range(1, 5), range(3, 6), range(2, 8)])
def test_a_machine_that_is_slow_for_a_while_is_not_taken_for_crowded(slow):
    """Others share the machine: half a second is a fifth slower than the next."""
    run = run_on(range(2), local=2)

    def turn():
        marks = [k for k in run.plane.keys if k.endswith(("begin", "end"))]
        return len(marks)

    def make(rows):
        return lambda: 0.02 * (1.25 if turn() in slow else 1.0) * (1 + turn() % 2 / 10)

    assert measure_cores(run, make, ROWS, None, 0) == round(2000 / 1.1)


def test_a_lone_slot_measures_nothing():
    def never(rows):
        raise AssertionError("there is nobody else")

    assert measure_cores(run_on([0], local=1), never, ROWS, None, 0) == 0
    assert measure_cores(run_on([0, 4, 5]), never, ROWS, 1.0, 2000) == 2000, (
        "of another node"
    )


def test_ranks_that_do_not_come_are_not_waited_for(caplog):
    run = run_on(range(4), come=False)
    assert measure_cores(run, work_of(run, 1.0, 1.0), ROWS, 1.0, 2000) == 2000
    assert "ranks [1, 2, 3] did not come" in caplog.text
    assert [timeout is not None for _, timeout in run.plane.asked] == [True]


def test_the_lead_prepares_while_the_others_do():
    run, order = run_on(range(2), local=2), []
    run.plane.wait_any = lambda *_, **__: order.append("waited") or 0

    def work():
        order.append("asked" if run.plane.keys else "alone")
        return 1.0

    measure_cores(run, lambda rows: work, ROWS, 0.5, 0)
    assert order == ["asked", "waited", "waited", "asked"]


def test_others_work_in_turns_until_the_profile_is_there():
    run, worked = run_on(range(4), rank=1), []
    keys = run.plane.keys
    run.plane.publish("busy/4/ask", b"4")

    def work():
        worked.append(sorted(k[len("busy/4/") :] for k in keys if k.endswith("s/1")))
        if len(worked) == 4:
            run.plane.publish("busy/4/0/end", b"")
        if len(worked) == 7:
            run.plane.publish("profile", b"")
        return 0.0

    def make(rows):
        assert rows == ROWS
        return work

    for turn in range(2):
        run.plane.publish(f"busy/4/{turn}/begin", b"")
    keep_busy(run, make)
    rests, works = ["0/rests/1"], ["0/rests/1", "0/works/1"]
    second = [*works, "1/rests/1"]
    assert worked == [[], rests, works, works, second] + [
        [*second, "1/works/1"] for _ in range(2)
    ], "told once it is warm"
    assert run.plane.checks == 4, "whether the run has failed"


def test_what_an_attempt_before_has_asked_for_is_not_answered():
    def never(rows):
        raise AssertionError("asked by a lead that was lost")

    run = run_on([1, 2, 3], rank=2)
    run.plane.publish("busy/4/ask", b"4")
    run.plane.publish("profile", b"")
    keep_busy(run, never)
    (((_, (asked,)), _),) = run.plane.asked
    assert asked == "busy/3/ask"


@pytest.mark.parametrize("rank", [4, 1])
def test_another_node_and_a_profile_that_is_there_ask_for_nothing(rank):
    def never(rows):
        raise AssertionError("nothing is to be measured")

    run = run_on([0, 1, 4, 5], rank=rank)
    run.plane.publish("busy/4/ask" if rank == 4 else "profile", b"")
    keep_busy(run, never)


@pytest.mark.parametrize(
    ("each", "share", "rows"),
    [
        (40, 1, 1),
        (4, 1, 4),
        (3, 1, 16),
        (1, 1, 16),
        (40, 3, 1),
        (40, 4, 4),
        (3, 5, 16),
        (40, 99, 16),
        (400, 99, 1),
        (300, 99, 4),
    ],
)
def test_slots_work_on_what_a_step_gives_them_and_can_be_timed(each, share, rows):
    def times(ms):
        return tuple(int(ms * 1e6 * n / 3) for n in (1, 4, 16))

    layers = [layer(i, times=(times(each / 2),) * 3) for i in range(2)]
    found = profile(layers, microbatch_samples=(1, 4, 16))
    assert measured_inputs.rows_that_tell(found, share) == rows


@pytest.mark.parametrize(
    ("each", "rows", "seconds"),
    [
        (60, 16, 0.320),  # what the profile's layers take in a row
        (60, 4, None),  # they were run so with the largest micro-batch
        (50, 16, None),  # the machine may have had another pace by then
    ],
)
def test_what_layers_take_alone_is_not_measured_twice(each, rows, seconds):
    layers = [layer(i, times=((0, 0, int(each * 16e6 / 18)),) * 3) for i in range(2)]
    found = profile(layers, microbatch_samples=(1, 4, 16))
    assert measured_inputs._known_seconds(found, rows) == pytest.approx(seconds)


def planned(rank):
    os.environ.pop(AS_DEVICES)
    with make_engine(freeze=schedule(0), config=config()) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
        cluster = run_of(engine).inputs.cluster
        steps = run_of(engine).costs.steps
    return cluster, steps, [e.unique_samples for e in engine.history.epochs]


@pytest.mark.distributed
def test_a_run_of_a_host_knows_what_its_slots_share():
    clusters, _, seen = zip(*run_ranks(planned, 2), strict=True)
    assert len({cluster.to_json() for cluster in clusters}) == 1, "all plan alike"
    cluster = clusters[0]
    assert cluster.cores_permille == 0 or 1000 <= cluster.cores_permille <= 2000
    assert cluster.replica_link_bytes_per_s and cluster.step_ns
    assert [48, 48] in seen


def test_a_lone_process_with_slots_counts_the_jobs_cores(monkeypatch):
    monkeypatch.delenv(AS_DEVICES)
    monkeypatch.setattr(
        "pipetransformer.transformation.measured_inputs.usable_cores", lambda: 2.0
    )
    settings = config(pipe=pt.PipeConfig(num_slots=4, threads_per_stage=1))
    with make_engine(freeze=schedule(0), config=settings) as engine:
        engine.prepare(ToySet(24), 12)
        assert run_of(engine).inputs.cluster.cores_permille == 2000


def lose_one(rank):
    """Rank 2 dies when it is to keep its slot busy for the lead."""
    os.environ.pop(AS_DEVICES)
    if rank == 2:
        measured_inputs.keep_busy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    settings = config(autodp=SURVIVING, plan=pt.PlanConfig(num_stages=1))
    with make_engine(freeze=schedule(0), config=settings) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(48), 12):
                engine.step(batch)
        return [e.unique_samples for e in engine.history.epochs]


@pytest.mark.distributed
def test_a_rank_that_dies_at_work_for_the_lead_is_survived():
    with Ranks(lose_one, 4) as ranks:
        outcomes = ranks.outcomes([0, 1, 3])
    for _, seen in outcomes.values():
        assert seen == [48, 48]
