"""Two hosts that lose each other under "continue": one half may train on, no two.

The run is that of `benchmarks/random_losses.py`, and so are its judge and the log that
each rank leaves; a partition is the loss of all ranks of the half without the store.
They are declared as one node: the batches of a run that loses a node are others.
"""

import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time

from torch.distributed import TCPStore

from faults.loss_job import Job, Strike, collect
from faults.loss_judge import Reference, judge
from faults.loss_worker import WORLD_SIZE, Kind, place_of, run_rank
from faults.small_run import Deadlines
from harness.forked import read_log
from tests.distributed.namespaces import TwoHosts, enter
from tests.support.ranks import Ranks

HOSTS = ((0, 1), (2, 3))
STEPS = 6  # before the link goes
HEARTBEAT_TIMEOUT_S = 4.0
STORE_PORT = 29411
DEADLINE_S = 150.0
DEADLINES = Deadlines(heartbeat=HEARTBEAT_TIMEOUT_S, protocol=30.0, store=60.0)


@dataclasses.dataclass(frozen=True)
class Partition:
    """One way in which the hosts lose each other.

    Attributes:
        name: For people.
        stages: K; with two stages ranks 0 and 2 drive, with one all of them do.
        mute: Hosts whose packets vanish; none: an undisturbed run.
        store_host: Where the store is.
        own_store: It is served by a process that is no rank; else by rank 0.
    """

    name: str
    stages: int
    mute: tuple[int, ...]
    store_host: int = 0
    own_store: bool = False


PARTITIONS = (
    Partition("partition", 2, (0, 1)),
    Partition("partition, every rank active", 1, (0, 1)),
    Partition("partition, store of its own", 2, (0, 1), 0, own_store=True),
    Partition("partition, store with the others", 1, (0, 1), 1, own_store=True),
    Partition("one way, from the store's host", 1, (0,)),
    Partition("one way, to the store's host", 2, (1,)),
)


def serve(_, name):
    """Serve a store on a simulated host until the process is killed."""
    enter(name)
    store = TCPStore(
        "0.0.0.0", STORE_PORT, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    while store.num_keys() >= 0:
        time.sleep(1)


def train(rank, names, partition, folder):
    """Train on a simulated host, and leave a log."""
    enter(names[rank // 2])
    os.environ["MASTER_ADDR"] = TwoHosts.address(partition.store_host)
    if partition.own_store:
        os.environ.update(
            MASTER_PORT=str(STORE_PORT), TORCHELASTIC_USE_AGENT_STORE="True"
        )
    kind = Kind(partition.stages, "epochs")
    run_rank(rank, pathlib.Path(folder), kind, DEADLINES, DEADLINE_S)


def _wait(ready, what):
    end = time.monotonic() + DEADLINE_S / 2
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError(f"partition: expected {what}, got nothing")
        time.sleep(0.02)


def _lines(folder, rank, kind):
    lines = read_log(folder / f"rank-{rank}.jsonl")
    return [line for line in lines if line["kind"] == kind]


def run_partition(partition):
    """Run one case; return its trace, and when the link went and came back.

    The link is whole again as soon as one half has gone on, and the other has ended
    if it can by then: active ranks outlive a store that none of them serves, and wait
    for their group.
    """
    stays, goes = HOSTS[partition.store_host], HOSTS[1 - partition.store_host]
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(TwoHosts())
        if partition.own_store:
            name = hosts.names[partition.store_host]
            stack.enter_context(Ranks(serve, 1, name, timeout_s=DEADLINE_S))
        ranks = stack.enter_context(
            Ranks(
                train,
                WORLD_SIZE,
                hosts.names,
                partition,
                str(folder),
                timeout_s=DEADLINE_S,
            )
        )
        strikes = []
        if partition.mute:
            active = goes[0]  # drives whatever K is
            _wait(lambda: len(_lines(folder, active, "step")) >= STEPS, "steps")
            places = {rank: place_of(folder, rank) for rank in goes}
            at = time.monotonic()
            hosts.swallow(partition.mute)
            _wait(lambda: all(_lines(folder, r, "went on") for r in stays), "a half")
            if not partition.own_store:
                _wait(lambda: all(_lines(folder, r, "outcome") for r in goes), "an end")
            healed = time.monotonic()
            hosts.heal()
            strikes = [Strike(r, "link", at, places[r], healed) for r in goes]
        outcomes = ranks.outcomes()
        errors = ["" if ok else value for _, (ok, value) in sorted(outcomes.items())]
        job = Job(0, Kind(partition.stages, "epochs"), ())
        return collect(folder, job, strikes, errors, {}, [])


def problems_of(trace, reference):
    """Return what is not as promised: by the judge, and of the half that has to end."""
    problems = list(judge(trace, reference, DEADLINES).problems)
    for strike in trace.strikes:
        outcome = trace.outcome(strike.rank)
        if outcome is None or outcome["ended"] != "PeerFailure":
            problems.append(f"rank {strike.rank}: expected to end, got {outcome}")
        # What was under way may be completed: by one step, and only by that.
        late = [s for s in trace.lines(strike.rank, "step") if s["at"] > strike.at]
        if len(late) > 1:
            problems.append(f"rank {strike.rank} made {len(late)} steps alone")
    halves = {rank // 2 for rank in range(WORLD_SIZE) if _trained_on(trace, rank)}
    if trace.strikes and len(halves) != 1:
        problems.append(f"expected one half to train on, got {sorted(halves)}")
    return problems


def _trained_on(trace, rank):
    """Whether a rank made steps after the survivors had gone on."""
    on = [
        line["at"] for r in range(WORLD_SIZE) for line in trace.lines(r, "went on")[:1]
    ]
    return any(s["at"] > max(on) for s in trace.lines(rank, "step")) if on else False


def run_all(partitions=PARTITIONS):
    """Run cases, and before them an undisturbed run for each number of stages.

    Yields ``(partition, trace, reference)``, for `problems_of`.
    """
    references = {}
    for partition in partitions:
        stages = partition.stages
        if stages not in references:
            trace = run_partition(Partition("undisturbed", stages, ()))
            references[stages] = Reference.of(trace)
        yield partition, run_partition(partition), references[stages]
