"""Random losses: drawn so that they can be repeated, and judged so that it shows."""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from faults.loss_job import Strike, Trace, _Driver, draw_job
from faults.loss_judge import (
    ENDED,
    NOT_OPEN,
    OVER,
    STATE_LOST,
    WENT_ON,
    Reference,
    judge,
)
from faults.loss_worker import BATCH, EPOCHS, WORLD_SIZE
from faults.small_run import SAMPLES, STEPS, Deadlines

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
LAST = EPOCHS * STEPS
VICTIM, STRUCK_AT, ON_AT = 3, 12.5, 15.5


@pytest.mark.distributed
def test_losses_at_random_times_are_survived_and_published(tmp_path):
    path = tmp_path / "random_losses.json"
    script = ROOT / "benchmarks" / "random_losses.py"
    run = subprocess.run(
        [sys.executable, str(script), "--losses=2", "--jobs=1", f"--json={path}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads(path.read_text())
    assert content["failed"] == 0 and len(content["losses"]) >= 2
    for loss in content["losses"]:
        assert loss["outcome"] == WENT_ON and loss["seconds"] > 0, loss
        assert loss["phase"], loss
    assert {row["values_of"] for row in content["rows"]} == {"lost ranks"}
    first, *_ = TABLES["losses"](content)
    assert first.startswith("| signal | outcome | ranks |")


def test_the_table_has_the_times_of_all_outcomes_and_who_was_fenced():
    waited = {"signal": "SIGSTOP", "outcome": NOT_OPEN, "seconds": 30.1}
    content = {
        "summary": {"SIGSTOP": {WENT_ON: 0, NOT_OPEN: 1}},
        "losses": [waited],
        "settings": {"heartbeat timeout": "3 s"},
        "runs": 1,
        "failed": 0,
        "fenced": 2,
        "problems": [],
    }
    _, _, *lines = TABLES["losses"](content)
    assert lines == [
        f"| SIGSTOP | {NOT_OPEN} | 1 | 30.10 | 30.10 |",
        "",
        "1 runs, 0 not as promised; heartbeat timeout 3 s. Ranks that were not struck, "
        "but that the others went on without: 2.",
    ]


def test_a_rank_that_ends_before_anybody_was_struck_hides_behind_no_other_error():
    ended = types.SimpleNamespace(is_alive=lambda: False)
    ranks = types.SimpleNamespace(processes=[ended] * WORLD_SIZE, folder=Path("/"))
    job = draw_job(0, 0, 3.0)
    driver = _Driver(ranks, job, time.monotonic() + 60)
    driver.strike(dataclasses.replace(job.blows[0], after="loss"))
    assert driver.strikes == []


def test_a_number_and_a_seed_make_the_same_run_again():
    jobs = [draw_job(1, number, 3.0) for number in range(200)]
    assert jobs == [draw_job(1, number, 3.0) for number in range(200)]
    assert jobs != [draw_job(2, number, 3.0) for number in range(200)]
    for job in jobs:
        assert 2 <= len(job.blows) < WORLD_SIZE, "somebody is left"
    blows = [blow for job in jobs for blow in job.blows]
    assert {blow.after for blow in blows} == {"start", "plan", "loss", "nothing"}
    assert {(b.signal, b.wakes) for b in blows if b.signal == "SIGSTOP"} == {
        ("SIGSTOP", True),
        ("SIGSTOP", False),
    }


# -- planted traces -------------------------------------------------------------


def mark(step):
    return [float(step), step * 0.5]


def share(step, rank, ranks):
    batch = (step - 1) % STEPS
    ids = range(batch * BATCH, min((batch + 1) * BATCH, SAMPLES))
    place = ranks.index(rank)
    return [i for i in ids if i % len(ranks) == place]


def line(kind, at, **content):
    return {"kind": kind, "at": at, **content}


def ended(phase, at, text="", rank=VICTIM):
    return line("outcome", at, ended="PeerFailure", rank=rank, phase=phase, text=text)


def no_holder(at=16.0, text="", rank=VICTIM):
    return ended("recovery", at, text or NO_HOLDER, rank)


def history():
    epochs = [
        {"epoch": epoch, "samples": SAMPLES, "unique_samples": SAMPLES}
        for epoch in range(EPOCHS)
    ]
    return {"epochs": epochs}


def log_of(rank, strike_at=math.inf):
    """What a rank logs that makes a step per second; VICTIM is struck, or nobody."""
    lost = strike_at < math.inf
    lines = [
        line("joined", 0.05),
        line("first plan", 0.1, lead=rank == 0),
        *([] if rank == 0 else [line("receives", 0.2)]),
        line("plan", 0.3, number=1, drives=True, lead=rank == 0),
    ]
    everyone = list(range(WORLD_SIZE))
    for step in range(1, LAST + 1):
        after = lost and step > strike_at
        ranks = everyone[:-1] if after else everyone
        if rank not in ranks:
            break
        if after and step == math.ceil(strike_at):
            plan = {"number": 2, "drives": True, "lead": rank == 0}
            lines.append(line("plan", ON_AT - 0.1, **plan))
            lines.append(line("went on", ON_AT, generation=1, members=ranks))
        at = step + (ON_AT - strike_at if after else 0)
        ids = share(step, rank, ranks)
        lines.append(
            line("step", at, step=step, ids=ids, hash=str(step), mark=mark(step))
        )
    if rank != VICTIM or not lost:
        end = {"ended": "finished", "lead": rank == 0, "history": history()}
        lines.append(line("outcome", LAST + 10, **end))
    else:
        lines.append(ended("fenced", LAST + 20.5))
    return lines


def trace_of(*strikes):
    lost = strikes[0].at if strikes else math.inf
    ranks = range(WORLD_SIZE - bool(strikes))
    return Trace(
        job=draw_job(0, 0, 3.0),
        strikes=list(strikes),
        logs=[log_of(rank, lost) for rank in range(WORLD_SIZE)],
        errors=[""] * WORLD_SIZE,
        hung={},
        sleepers=[],
        checkpoints={
            f"step-{step}.pt": (step, mark(step))
            for step in range(STEPS, LAST + 1, STEPS)
        },
        weights={rank: [torch.ones(3, dtype=torch.float64)] for rank in ranks},
    )


STRIKE = Strike(VICTIM, "SIGSTOP", STRUCK_AT, "backward", woken_at=LAST + 20.0)
REFERENCE = Reference.of(trace_of())
NO_HOLDER = "ranks [3] lost; training state: expected a survivor that holds it"


def judged(trace):
    deadlines = Deadlines(heartbeat=3.0, protocol=30.0, store=30.0)
    return judge(trace, REFERENCE, deadlines)


def cut(log, at):
    return [each for each in log if each["at"] <= at]


def steps_of(trace, rank):
    return trace.lines(rank, "step")


def weights_off(trace):
    trace.weights[1] = trace.weights[2] = [torch.full((3,), 1.5, dtype=torch.float64)]
    trace.weights[0] = trace.weights[1]


def one_replica_off(trace):
    trace.weights[1] = [trace.weights[1][0] + 1e-12]


def step_off(trace):
    for rank in range(WORLD_SIZE - 1):
        steps_of(trace, rank)[30]["mark"] = [31.0, 15.6]


def replicas_part(trace):
    steps_of(trace, 1)[30]["hash"] = "other"


def sample_twice_in_a_record(trace):
    trace.outcome(2)["history"]["epochs"][4]["unique_samples"] = SAMPLES - 1


def sample_twice_in_a_step(trace):
    ids = steps_of(trace, 0)[30]["ids"]
    ids.append(ids[0])


def sample_lost(trace):
    steps_of(trace, 0)[30]["ids"].pop()


def record_lost(trace):
    trace.outcome(0)["history"]["epochs"].pop(1)


def file_torn(trace):
    trace.checkpoints["step-20.pt"] = None


def file_off(trace):
    trace.checkpoints["step-20.pt"] = 20, mark(21)


def files_missing(trace):
    for step in (10, 20):
        del trace.checkpoints[f"step-{step}.pt"]


def nobody_drives(trace):
    for rank in range(WORLD_SIZE - 1):
        trace.lines(rank, "plan")[-1]["drives"] = False


def all_end(trace):
    for rank in range(WORLD_SIZE - 1):
        trace.logs[rank] = [*cut(trace.logs[rank], 13), no_holder()]
    trace.weights.clear()


def one_ends(trace):
    trace.logs[1] = [*cut(trace.logs[1], 13), no_holder()]
    del trace.weights[1]


def a_survivor_hangs(trace):
    trace.hung[1] = "stacks"


def a_survivor_says_nothing(trace):
    trace.logs[1].pop()


def a_survivor_raises(trace):
    trace.errors[1] = "Traceback\nKeyError: 'x'\n"


def the_sleeper_stays(trace):
    trace.sleepers.append(VICTIM)


def the_sleeper_trains_on(trace):
    for step in (13, 14):
        made = line("step", LAST + 20 + step, step=step, ids=[], hash="h", mark=[0, 0])
        trace.logs[VICTIM].insert(-1, made)


def the_sleeper_finishes(trace):
    trace.logs[VICTIM][-1] = {**trace.outcome(1), "at": LAST + 21.0}
    trace.weights[VICTIM] = [torch.zeros(3, dtype=torch.float64)]


def the_sleeper_says_nothing(trace):
    trace.logs[VICTIM].pop()


def the_sleeper_blames_another(trace):
    trace.outcome(VICTIM)["rank"] = 1


def last_file_missing(trace):
    del trace.checkpoints[f"step-{LAST}.pt"]


def nobody_leads(trace):
    for rank in (0, 1):
        trace.outcome(rank).update(lead=False, history={"epochs": []})


def goes_on_late(trace):
    for rank in range(WORLD_SIZE - 1):
        (on,) = trace.lines(rank, "went on")
        on["at"] = STRUCK_AT + 93


def never_missed(trace):
    for rank in range(WORLD_SIZE - 1):
        log = trace.logs[rank]
        trace.logs[rank] = [each for each in log if each["kind"] != "went on"]


# plant: a word of the problem that must be told.
PLANTS = {
    weights_off: "from the undisturbed run",
    one_replica_off: "finished with different weights",
    step_off: "step 31: rank 0 is off the undisturbed run",
    replicas_part: "step 31: ranks with different weights",
    sample_twice_in_a_record: "rank 2, epoch 4: expected 50 samples once, got 49",
    sample_twice_in_a_step: "step 31: expected samples",
    sample_lost: "step 31: expected samples",
    record_lost: "rank 0: expected records of 8 epochs",
    file_torn: "step-20.pt does not load",
    file_off: "step-20.pt: not the state of step 20",
    files_missing: "checkpoints: expected one per epoch, got none of steps [10, 20]",
    nobody_drives: "ranks [0, 1, 2] finished, and none of them drove",
    all_end: "rank 0 ended though [0, 1, 2] held it: ranks [3] lost",
    one_ends: "rank 1 ended though [0, 1, 2] held it: ranks [3] lost",
    a_survivor_hangs: "hung ranks [1]",
    a_survivor_says_nothing: "rank 1: no outcome",
    a_survivor_raises: "rank 1: KeyError: 'x'",
    the_sleeper_stays: "rank 3 slept on after it was woken",
    the_sleeper_trains_on: "rank 3 made 2 steps after it was woken",
    the_sleeper_finishes: "rank 3: expected PeerFailure when woken, got finished",
    the_sleeper_says_nothing: "rank 3: expected PeerFailure when woken, got None",
    the_sleeper_blames_another: "rank 3: blames rank 1, phase 'fenced'",
    last_file_missing: "checkpoints: expected one per epoch, got none of steps [40]",
    nobody_leads: "ranks [0, 1, 2] finished, and none of them led",
    goes_on_late: "the others went on after 93.0 s, expected at most 8.3 s",
    never_missed: f"{OVER} after 37.5 s, expected at most 5.3 s",
}


def test_a_loss_that_is_survived_has_no_problem():
    verdict = judged(trace_of(STRIKE))
    assert verdict.problems == () and verdict.fenced == ()
    (loss,) = verdict.losses
    assert (loss.outcome, loss.seconds) == (WENT_ON, ON_AT - STRUCK_AT)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_not_as_promised_is_told(plant):
    trace = copy.deepcopy(trace_of(STRIKE))
    plant(trace)
    verdict = judged(trace)
    assert any(PLANTS[plant] in text for text in verdict.problems), verdict.problems


def test_runs_that_ended_though_the_state_was_held_are_named_so():
    trace = copy.deepcopy(trace_of(STRIKE))
    all_end(trace)
    (loss,) = judged(trace).losses
    assert (loss.outcome, loss.seconds) == (ENDED, 16.0 - STRUCK_AT)


def state_lost(end):
    """Standby ranks were being told the state, and end so."""
    trace = copy.deepcopy(trace_of(STRIKE))
    all_end(trace)
    for rank in range(WORLD_SIZE - 1):
        trace.logs[rank] = [each for each in trace.logs[rank] if each["kind"] != "step"]
        trace.logs[rank][-1:] = [line("receives", 13.0), end]
    return dataclasses.replace(trace, checkpoints={})


def test_an_end_without_the_state_is_right():
    verdict = judged(state_lost(no_holder()))
    assert verdict.problems == ()
    assert [loss.outcome for loss in verdict.losses] == [STATE_LOST]


def not_open(end, *, joined):
    """Nobody had come to the first plan, and the survivors end so."""
    trace = copy.deepcopy(trace_of(STRIKE))
    for rank in range(WORLD_SIZE):
        here = [line("joined", 12.0)] if joined or rank != VICTIM else []
        last = ended("connect", LAST + 20.5) if rank == VICTIM else end
        trace.logs[rank] = [*here, last]
    trace.weights.clear()
    return dataclasses.replace(trace, checkpoints={})


MISSED = "no heartbeat after it had joined"
UNKNOWN = "expected all 4 ranks, got: ranks [3] did not join"


@pytest.mark.parametrize(
    ("end", "joined"),
    [
        (ended("connect", 16.0, MISSED), True),
        (ended("heartbeat", 16.0, "no heartbeat"), True),
        (ended("connect", STRUCK_AT + 30.1, UNKNOWN, rank=None), False),
    ],
)
def test_an_end_before_the_run_has_begun_is_right(end, joined):
    verdict = judged(not_open(end, joined=joined))
    assert verdict.problems == ()
    assert [loss.outcome for loss in verdict.losses] == [NOT_OPEN]


NO_WAITING = f"{NOT_OPEN} after 30.1 s, expected at most 6.3 s"


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        (
            not_open(ended("connect", STRUCK_AT + 62, UNKNOWN, None), joined=False),
            f"{NOT_OPEN} after 62.0 s, expected at most 33.0 s",
        ),
        (not_open(ended("connect", 42.6, MISSED), joined=True), NO_WAITING),
        (
            not_open(ended("connect", 16.0, UNKNOWN, None), joined=True),
            "rank 0: blames nobody, phase 'connect'",
        ),
        (
            not_open(ended("connect", 16.0, MISSED, rank=1), joined=True),
            "rank 0: blames rank 1, phase 'connect'",
        ),
        (
            not_open(ended("profile", 16.0, "nonsense"), joined=True),
            "rank 0: blames rank 3, phase 'profile': nonsense",
        ),
        (state_lost(no_holder(rank=1)), "rank 0: blames rank 1, phase 'recovery'"),
        (state_lost(no_holder(rank=None)), "rank 0: blames nobody, phase 'recovery'"),
        (
            state_lost(no_holder(at=STRUCK_AT + 97)),
            f"{STATE_LOST} after 97.0 s, expected at most 9.3 s",
        ),
    ],
)
def test_an_end_that_comes_late_or_blames_another_is_told(trace, problem):
    problems = judged(trace).problems
    assert any(problem in text for text in problems), problems


def test_who_has_joined_is_watched_past_ranks_that_have_not():
    trace = not_open(ended("connect", STRUCK_AT + 30.1, MISSED), joined=True)
    trace.strikes.append(dataclasses.replace(STRIKE, rank=2))
    trace.logs[2] = [ended("connect", LAST + 20.5)]
    assert any(NO_WAITING in text for text in judged(trace).problems)


def test_each_rank_that_is_lost_meanwhile_gives_the_others_more_time():
    trace = copy.deepcopy(trace_of(STRIKE))
    second = dataclasses.replace(STRIKE, rank=2, at=STRUCK_AT + 1)
    for rank in (0, 1):
        trace.lines(rank, "went on")[0].update(at=STRUCK_AT + 9, members=[0, 1])
    trace.strikes.append(second)
    first, other = judged(trace).losses
    assert first.seconds == 9 and first.limit_s == other.limit_s == pytest.approx(14.6)


@pytest.mark.parametrize(
    ("led", "missing", "problems"),
    [(True, 10, []), (True, 15, ["15"]), (True, LAST, ["40"]), (False, 10, ["10"])],
)
def test_a_file_may_miss_where_the_lead_was_lost_at_that_end(led, missing, problems):
    trace = copy.deepcopy(trace_of(dataclasses.replace(STRIKE, at=10.5)))
    for rank in range(WORLD_SIZE):
        trace.lines(rank, "plan")[0]["lead"] = rank == (VICTIM if led else 0)
    del trace.checkpoints[f"step-{missing}.pt"]
    told = [text for text in judged(trace).problems if "checkpoints" in text]
    assert [text[-3:-1] for text in told] == problems


def test_a_rank_that_nobody_missed_is_no_problem():
    trace = copy.deepcopy(trace_of())
    late = dataclasses.replace(STRIKE, at=LAST + 9.0)
    trace.strikes.append(late)
    verdict = judged(trace)
    assert verdict.problems == ()
    assert [loss.outcome for loss in verdict.losses] == [OVER]


def test_a_slow_rank_may_be_fenced_as_long_as_others_finish():
    trace = copy.deepcopy(trace_of(STRIKE))
    trace.logs[1] = [*cut(trace.logs[1], 13), ended("fenced", 16.0, rank=1)]
    del trace.weights[1]
    for rank in (0, 2):  # they go on without it, and do its part
        for step in trace.lines(rank, "step"):
            if step["at"] > ON_AT:
                step["ids"] = share(step["step"], rank, [0, 2])
    verdict = judged(trace)
    assert verdict.problems == () and verdict.fenced == (1,)


def test_an_undisturbed_run_that_is_not_in_order_is_no_reference():
    trace = copy.deepcopy(trace_of())
    trace.logs[2][-1] = no_holder()
    with pytest.raises(ValueError, match="rank 2: expected the end"):
        Reference.of(trace)
