"""Random losses: drawn so that they can be repeated, and judged so that it shows."""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _loss_job import Strike, Trace, draw_job
from _loss_judge import (
    ENDED,
    NOT_OPEN,
    OVER,
    STATE_LOST,
    WENT_ON,
    Reference,
    judge,
)
from _loss_worker import BATCH, EPOCHS, WORLD_SIZE
from _small_run import SAMPLES, STEPS

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
    first, *_ = TABLES["losses"](content)
    assert first.startswith("| signal | ranks | the others went on |")


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
        line("first plan", 0.1, lead=rank == 0),
        *([] if rank == 0 else [line("receives", 0.2)]),
        line("plan", 0.3, number=1, drives=True),
    ]
    everyone = list(range(WORLD_SIZE))
    for step in range(1, LAST + 1):
        after = lost and step > strike_at
        ranks = everyone[:-1] if after else everyone
        if rank not in ranks:
            break
        if after and step == math.ceil(strike_at):
            lines.append(line("plan", ON_AT - 0.1, number=2, drives=True))
            lines.append(line("went on", ON_AT, generation=1, members=ranks))
        at = step + (ON_AT - strike_at if after else 0)
        ids = share(step, rank, ranks)
        lines.append(
            line("step", at, step=step, ids=ids, hash=str(step), mark=mark(step))
        )
    if rank != VICTIM or not lost:
        lines.append(line("end", LAST + 9, lead=rank == 0))
        lines.append(line("outcome", LAST + 10, ended="finished", history=history()))
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


def ended(phase="heartbeat", at=16.0):
    text = f"peer failure: rank 3, phase '{phase}'"
    return line("outcome", at, ended="PeerFailure", rank=3, phase=phase, text=text)


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
        trace.logs[rank] = [*cut(trace.logs[rank], 13), ended()]
    trace.weights.clear()


def one_ends(trace):
    trace.logs[1] = [*cut(trace.logs[1], 13), ended()]
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
        trace.logs[VICTIM].append(made)


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
    all_end: "rank 0 ended though [0, 1, 2] held it: peer failure",
    one_ends: "rank 1 ended though [0, 1, 2] held it: peer failure",
    a_survivor_hangs: "hung ranks [1]",
    a_survivor_says_nothing: "rank 1: no outcome",
    a_survivor_raises: "rank 1: KeyError: 'x'",
    the_sleeper_stays: "rank 3 slept on after it was woken",
    the_sleeper_trains_on: "rank 3 made 2 steps after it was woken",
}


def test_a_loss_that_is_survived_has_no_problem():
    verdict = judge(trace_of(STRIKE), REFERENCE)
    assert verdict.problems == () and verdict.fenced == ()
    (loss,) = verdict.losses
    assert (loss.outcome, loss.seconds) == (WENT_ON, ON_AT - STRUCK_AT)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_not_as_promised_is_told(plant):
    trace = copy.deepcopy(trace_of(STRIKE))
    plant(trace)
    verdict = judge(trace, REFERENCE)
    assert any(PLANTS[plant] in text for text in verdict.problems), verdict.problems


def test_runs_that_ended_though_the_state_was_held_are_named_so():
    trace = copy.deepcopy(trace_of(STRIKE))
    all_end(trace)
    (loss,) = judge(trace, REFERENCE).losses
    assert (loss.outcome, loss.seconds) == (ENDED, 16.0 - STRUCK_AT)


def test_an_end_without_the_state_is_right():
    trace = copy.deepcopy(trace_of(STRIKE))
    all_end(trace)
    for rank in range(WORLD_SIZE - 1):  # standby ranks that were being told the state
        trace.logs[rank] = [each for each in trace.logs[rank] if each["kind"] != "step"]
        trace.logs[rank].insert(-1, line("receives", 13.0))
    verdict = judge(dataclasses.replace(trace, checkpoints={}), REFERENCE)
    assert verdict.problems == ()
    assert [loss.outcome for loss in verdict.losses] == [STATE_LOST]


def test_an_end_before_the_run_has_begun_is_right():
    trace = copy.deepcopy(trace_of(STRIKE))
    for rank in range(WORLD_SIZE):
        trace.logs[rank] = [] if rank == VICTIM else [ended("connect")]
    trace.weights.clear()
    verdict = judge(dataclasses.replace(trace, checkpoints={}), REFERENCE)
    assert verdict.problems == ()
    assert [loss.outcome for loss in verdict.losses] == [NOT_OPEN]


def test_a_rank_that_nobody_missed_is_no_problem():
    trace = copy.deepcopy(trace_of())
    late = dataclasses.replace(STRIKE, at=LAST + 11.0)
    trace.strikes.append(late)
    verdict = judge(trace, REFERENCE)
    assert verdict.problems == ()
    assert [loss.outcome for loss in verdict.losses] == [OVER]


def test_a_slow_rank_may_be_fenced_as_long_as_others_finish():
    trace = copy.deepcopy(trace_of(STRIKE))
    trace.logs[1] = [*cut(trace.logs[1], 13), ended("fenced")]
    del trace.weights[1]
    for rank in (0, 2):  # they go on without it, and do its part
        for step in trace.lines(rank, "step"):
            if step["at"] > ON_AT:
                step["ids"] = share(step["step"], rank, [0, 2])
    verdict = judge(trace, REFERENCE)
    assert verdict.problems == () and verdict.fenced == (1,)


def test_an_undisturbed_run_that_is_not_in_order_is_no_reference():
    trace = copy.deepcopy(trace_of())
    trace.logs[2][-1] = ended()
    with pytest.raises(ValueError, match="rank 2: expected the end"):
        Reference.of(trace)
