"""Rank functions that lose a rank or the store; imported by test_survivors."""

import dataclasses
import os
import signal
import time
from datetime import timedelta

import torch

import pipetransformer as pt
from pipetransformer.transformation.phases import Built
from pipetransformer.transformation.rewire import rewire
from tests.engine.scenario import (
    QUICK,
    config,
    is_active,
    make_engine,
    moments,
    registered_average,
    schedule,
)
from tests.support.private import function_at, inject, model_of, policy_of, run_of
from tests.support.toy import ToySet


class Watching(pt.freeze.Schedule):
    """Freezes by a list; is told the mean loss, as policies are that decide by it."""

    needs = frozenset({"loss"})


EPOCHS, BATCH = 3, 12
SURVIVING = dataclasses.replace(
    QUICK, on_peer_failure="continue", heartbeat_timeout=timedelta(seconds=5)
)
TWO_STAGES = {"num_stages": 2, "reshape": "never"}
ONE_STAGE = {"num_stages": 1, "reshape": "never"}
TWO_REPLICAS = {**ONE_STAGE, "max_replicas": 2}  # ranks 0 and 1
# Four stages as long as nothing is frozen, then one.
SHRINKING = {"slot_memory_bytes": 27_000, "reshape": "always"}

# case: (plan, freeze schedule, {rank: where it dies}); see `lose`.
# With two stages ranks 0 and 2 drive, 1 and 3 stand by.
CASES = {
    "member in a step": (TWO_STAGES, (0,), {2: ("step", 1, 2)}),
    "lead in a step": (TWO_STAGES, (0,), {0: ("step", 1, 3)}),
    "standby": (TWO_STAGES, (0,), {3: ("standby", 1)}),
    "in an evaluation": (ONE_STAGE, (0,), {2: ("evaluate", 1)}),
    "in an evaluation within a pass": (ONE_STAGE, (0,), {0: ("within", 1)}),
    "at the end of a pass": (ONE_STAGE, (0,), {1: ("close", 1)}),
    "one after the other": (
        ONE_STAGE,
        (0,),
        {1: ("step", 0, 1), 3: ("between", 1)},
    ),
    "member before the decision": (SHRINKING, (0, 6), {3: ("build", 0)}),
    "new member in the move": (SHRINKING, (0, 6), {2: ("move", 0)}),
    "lead in the move": (ONE_STAGE, (0, 3), {0: ("move", 0)}),
    "new member in the move between two batches": (
        {**SHRINKING, "freeze_every": 2},
        (0, 6),
        {2: ("move", "open")},
    ),
    "lead, when others have joined at an epoch's start": (
        SHRINKING,
        (0, 6),
        {0: ("step", 1, 2)},
    ),
    "lead while a plan is prepared": (
        {**ONE_STAGE, "prepare_steps": 2},
        (0, 3),
        {0: ("step", 1, 1)},
    ),
    "new member between COMMIT and the switch": (
        {**SHRINKING, "prepare_steps": 2},
        (0, 6),
        {2: ("switch", 0)},
    ),
    # Ranks 0 and 2 drive two stages each, then rank 1 joins and leads.
    "lead at the switch": (
        {"slot_memory_bytes": 60_000, "reshape": "always", "prepare_steps": 2},
        (0, 6),
        {0: ("tell", 0)},
    ),
    # Prepared for longer than a pass: the survivors change the plan at its end.
    "new member in the move at the end of a pass": (
        {**SHRINKING, "prepare_steps": 9},
        (0, 6),
        {2: ("move", 0)},
    ),
    # ranks 2 and 3 are a node of their own, whose samples the others finish
    "a whole node": (TWO_STAGES, (0,), {2: ("step", 1, 2), 3: ("standby", 1)}),
}
# Before the first plan is in force rank 0 alone holds the state, and the plan is made
# anew; where others have it already, they go on, and who has not stands by.
CASES.update(
    {
        "another while the lead profiles": (
            ONE_STAGE,
            (0, 3),
            {2: ("first", "profile")},
        ),
        "member before the first plan is decided": (
            ONE_STAGE,
            (0, 3),
            {1: ("first", "build")},
        ),
        "member in the move of the first plan": (
            ONE_STAGE,
            (0, 3),
            {2: ("first", "move")},
        ),
        "standby before the first plan is decided": (
            TWO_STAGES,
            (0,),
            {1: ("first", "decide")},
        ),
    }
)
LATE_LEAD = "member after the first plan, while the lead still builds its pipeline"
CASES[LATE_LEAD] = ONE_STAGE, (0, 3), {3: ("first", "begin pass")}
# One of the survivors cannot connect at the first try.
REFUSED = "member in a step, and the survivors' first plan is refused"
CASES[REFUSED] = ONE_STAGE, (0,), {3: ("step", 1, 2)}
# A second rank is lost while the survivors of the first change their plan.
SECOND_LOSSES = {
    "lead before the decision of the survivors": (
        ONE_STAGE,
        (0,),
        {3: ("step", 1, 2), 0: ("recovery", "build")},
    ),
    "member in the move of the survivors": (
        ONE_STAGE,
        (0,),
        {3: ("step", 1, 2), 1: ("recovery", "move")},
    ),
    "new member in the move of the survivors": (
        TWO_REPLICAS,
        (0,),
        {1: ("step", 1, 2), 2: ("recovery", "move")},
    ),
}
CASES.update(SECOND_LOSSES)
# Nobody is left who holds the state.
ENDS = {
    "the lead in the move of the first plan": (
        ONE_STAGE,
        (0,),
        {0: ("first", "move")},
    ),
    "the only replica": (SHRINKING, (0,), {0: ("step", 1, 2)}),
    # A new member has the weights by then, and not yet what was counted of the pass.
    "the last holder after the move of the survivors": (
        TWO_REPLICAS,
        (0,),
        {1: ("step", 1, 2), 0: ("recovery", "rewire")},
    ),
}


def undisturbed_key(case):
    """Return what tells undisturbed runs apart: the freezes, and where they begin."""
    plan, counts, _ = CASES[case]
    return counts, plan.get("freeze_every"), plan.get("prepare_steps", 0)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_recovery(point):
    """Kill this process when it comes to a point after a loss."""
    go_on = function_at("recover")

    def doomed(*args):
        inject(point, die)
        return go_on(*args)

    inject("recover", doomed)


def rewire_until_a_rank_is_lost(run, *args):
    """Build a pipeline, and hear of a loss before it is in use."""
    inject("rewire", rewire)
    rewire(run, *args)
    end = time.monotonic() + 60
    while run.plane.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    run.plane.check()


def refuse_in_recovery():
    """Refuse the first plan that the survivors of a loss make."""
    go_on, build = function_at("recover"), function_at("build")

    def refuse(*_):
        inject("build", build)
        return Built(refusal="OSError: too many open files")

    def refusing(*args):
        inject("recover", go_on)
        inject("build", refuse)
        return go_on(*args)

    inject("recover", refusing)


class DyingSet(ToySet):
    """Kills its process when it is asked for a sample at the chosen moment."""

    doomed = False

    def __getitem__(self, i):
        if self.doomed:
            die()
        return super().__getitem__(i)


def sets():
    train = ToySet(50, dtype=torch.float64, vouch=True)
    return train, DyingSet(40, seed=2, dtype=torch.float64)


def engine_for(counts, autodp, freeze_every=None, prepare_steps=0, **plan):
    settings = config(
        plan=pt.PlanConfig(**plan),
        autodp=autodp,
        freeze_every=freeze_every,
        prepare_steps=prepare_steps,
    )
    return make_engine(freeze=Watching(counts), dtype=torch.float64, config=settings)


def lose(rank, case, environment):
    """Train in float64 over three epochs; ranks die as the case says."""
    os.environ.update(environment)
    if "node" in case:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    plan, counts, deaths = {**CASES, **ENDS}[case]
    where = deaths.get(rank)
    torch.manual_seed(rank)
    engine, (train_set, test_set) = engine_for(counts, SURVIVING, **plan), sets()
    losses = []
    if where is not None and where[0] == "recovery":
        die_in_recovery(where[1])
    if where is not None and where[0] == "first":
        inject(where[1], die)
    if case == REFUSED and rank == 1:
        refuse_in_recovery()
    if case == LATE_LEAD and rank == 0:
        inject("rewire", rewire_until_a_rank_is_lost)
    with engine:
        average = registered_average(engine)
        engine.prepare(train_set, BATCH)
        if where == ("move", "open"):
            inject("move", die)  # in the first change after the first plan
        for epoch in engine.epochs(EPOCHS):
            if where == ("standby", epoch):
                die()
            if where == ("close", epoch):
                inject("close segment", die)
            for batch in engine.batches(train_set, BATCH):
                if where == ("step", epoch, batch.index):
                    die()
                engine.step(batch)
                average.update_parameters(model_of(engine))
                if "within" in case and batch.index == 2:
                    test_set.doomed = where == ("within", epoch)
                    engine.evaluate(test_set)
            if where == ("between", epoch):
                die()
            if where in (("move", epoch), ("build", epoch)):
                inject(where[0], die)  # in the change that follows
            if where == ("switch", epoch):
                inject("await switch", die)
            if where == ("tell", epoch):
                inject("tell switch", die)
            test_set.doomed = where == ("evaluate", epoch)
            losses.append(engine.evaluate(test_set)["loss"])
        last = moments(engine) if is_active(engine) else None
        lead, evaluated = engine.is_main, dict(run_of(engine).state.evaluated)
    if last is not None:
        last["average"] = list(average.state_dict().values())
    return {
        "losses": losses,
        "last": last,
        "lead": lead,
        "evaluated": evaluated,
        "history": engine.history.to_json(),
        "told": {
            entry["progress"]["epoch"]: entry["statistics"].get("loss")
            for entry in policy_of(engine).log
        },
    }


def train_alone(rank, schedules):
    """Train undisturbed with each schedule."""
    results = {}
    for counts, *steps in schedules:
        engine, (train_set, test_set) = engine_for(counts, QUICK, *steps), sets()
        losses = []
        with engine:
            average = registered_average(engine)
            for _ in engine.epochs(EPOCHS):
                for batch in engine.batches(train_set, BATCH):
                    engine.step(batch)
                    average.update_parameters(model_of(engine))
                losses.append(engine.evaluate(test_set)["loss"])
            last = moments(engine)
        last["average"] = list(average.state_dict().values())
        results[(counts, *steps)] = losses, last
    return results


def lose_store(rank, store_pid, environment, when, prepare_steps):
    """Kill the store's process at (epoch, batch) `when`; report how this rank ends."""
    os.environ.update(environment)
    settings = {**TWO_STAGES, "prepare_steps": prepare_steps}
    engine, (train_set, test_set) = engine_for((0, 3), SURVIVING, **settings), sets()
    losses = []
    try:
        with engine:
            for epoch in engine.epochs(EPOCHS):
                for batch in engine.batches(train_set, BATCH):
                    if rank == 0 and (epoch, batch.index) == when:
                        os.kill(store_pid, signal.SIGKILL)
                    engine.step(batch)
                while epoch == when[0] and not run_of(engine).plane.store_lost:
                    run_of(engine).plane.check()
                    time.sleep(0.05)
                losses.append(engine.evaluate(test_set)["loss"])
    except pt.PeerFailure as failure:
        return str(failure)
    return engine.history.to_json(), losses


def sleep_on(rank, folder, environment):
    """Stop rank 2 in a step; when the others have gone on, wake it and wait for it."""
    os.environ.update(environment)
    checkpoints = folder / "checkpoints"
    settings = config(
        plan=pt.PlanConfig(**ONE_STAGE),
        autodp=SURVIVING,
        checkpoint=pt.CheckpointConfig(directory=str(checkpoints), keep=10),
    )
    engine = make_engine(freeze=schedule(0), dtype=torch.float64, config=settings)
    train_set, _ = sets()
    try:
        with engine:
            for epoch in engine.epochs(EPOCHS):
                if (rank, epoch) == (0, 2):
                    wake(folder)
                for batch in engine.batches(train_set, BATCH):
                    if (rank, epoch, batch.index) == (2, 1, 2):
                        (folder / "asleep").write_text(str(os.getpid()))
                        os.kill(os.getpid(), signal.SIGSTOP)
                    engine.step(batch)
            last = moments(engine)
    except pt.PeerFailure as failure:
        (folder / "awake").write_text(str(failure))
        return failure.phase
    return last["weights"], engine.history.to_json()


def wake(folder):
    """Continue the process that sleeps, and wait until its run has ended.

    Adds what there is of checkpoints, before and after, to ``folder / "saved"``.
    """

    def note():
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        with open(folder / "saved", "a") as file:
            file.write(" ".join(names) + "\n")

    note()
    os.kill(int((folder / "asleep").read_text()), signal.SIGCONT)
    while not (folder / "awake").exists():
        time.sleep(0.05)
    note()
