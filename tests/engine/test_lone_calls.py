"""A call that one rank makes alone ends in one error that says who is where."""

import dataclasses
import threading
import time
from datetime import timedelta

import pytest

import pipetransformer as pt
from tests.engine.scenario import QUICK, config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

TWO = pt.PlanConfig(num_stages=1, replicas="all")
PATIENT = dataclasses.replace(QUICK, group_timeout=timedelta(seconds=300))

# What the lead does, and what the other rank does at that time.
CASES = {
    "evaluate between passes": ("'evaluate of 21 samples'", "'a change of plan'"),
    "evaluate at the end": ("'evaluate of 21 samples'", "'the end of the run'"),
    "predict at the end": ("'predict of 21 samples'", "'the end of the run'"),
    "evaluate, others predict": (
        "'evaluate of 21 samples'",
        "'predict of 21 samples'",
    ),
    "evaluate another set": ("'evaluate of 21 samples'", "'evaluate of 24 samples'"),
}


def _train(rank, case, policy):
    settings = dataclasses.replace(PATIENT, on_peer_failure=policy)
    engine = make_engine(freeze=schedule(0), config=config(plan=TWO, autodp=settings))
    small = ToySet(21, seed=2)

    def ends():
        if case == "evaluate, others predict":
            return engine.evaluate(small) if rank == 0 else engine.predict(Inputs())
        if case == "evaluate another set":
            return engine.evaluate(small if rank == 0 else ToySet(24, seed=2))
        if rank == 0 and "end" in case:
            return (
                engine.predict(Inputs())
                if "predict" in case
                else engine.evaluate(small)
            )
        return None

    with pytest.raises((RuntimeError, pt.PeerFailure)) as caught, engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)
            if "between" in case and rank == 0:
                engine.evaluate(small)
        ends()
    return str(caught.value)


class Inputs(ToySet):
    """The inputs of 21 samples."""

    def __init__(self):
        super().__init__(21, seed=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "policy"),
    [*((case, "raise") for case in CASES), ("evaluate between passes", "continue")],
)
def test_a_call_of_one_rank_alone_says_where_the_others_are(case, policy):
    first, second = CASES[case]
    got = f"expected every rank to run the same script, got rank 0 at {first}, rank 1"
    for text in run_ranks(_train, 2, case, policy):
        assert f"{got} at {second}" in text, text


# What the other rank does at one batch of a pass, where the two are then.
MISSED = {
    "leaves the pass": ("'the end of a pass'", "'a training step with batch 1'"),
    "leaves out a batch": ("'the end of a pass'", "'a training step with batch 2'"),
    "evaluates alone": (
        "'an evaluation within a pass'",
        "'a training step with batch 1'",
    ),
}


def _miss(rank, case, policy, own):
    settings = dataclasses.replace(PATIENT, on_peer_failure=policy)
    engine = make_engine(freeze=schedule(0), config=config(plan=TWO, autodp=settings))
    with pytest.raises((RuntimeError, pt.PeerFailure)) as caught, engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(ToySet(36), 12):
                if (rank, epoch, batch.index) == (1, 1, 1):
                    if case == "leaves the pass":
                        break
                    if case == "leaves out a batch":
                        continue
                    engine.evaluate(ToySet(21, seed=2))
                if own:
                    engine.backward(engine.loss(batch))
                    engine.update()
                else:
                    engine.step(batch)
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "policy", "own"),
    [
        *((case, "raise", False) for case in MISSED),
        ("leaves the pass", "continue", False),
        ("leaves the pass", "raise", True),
    ],
)
def test_a_rank_that_is_alone_in_a_pass_is_told_long_before_a_deadline(
    case, policy, own
):
    there, here = MISSED[case]
    wanted = (
        "expected every rank to run the same script, got rank 1 at "
        f"{there} and rank 0 at {here}"
    )
    for text in run_ranks(_miss, 2, case, policy, own):
        assert wanted in text, text


def _leave_out(rank, own):
    engine = make_engine(freeze=schedule(0), config=config(plan=TWO))
    with pytest.raises((RuntimeError, pt.PeerFailure)) as caught, engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(36), 12):
                if batch.index == rank:
                    continue
                if own:
                    engine.backward(engine.loss(batch))
                    engine.update()
                else:
                    engine.step(batch)
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("own", [False, True])
def test_ranks_that_leave_out_different_batches_are_told_at_the_end_of_the_pass(own):
    for text in run_ranks(_leave_out, 2, own):
        assert (
            "batches of the pass: expected steps with the same ones on every replica, "
            "got none with batch 0 on rank 0, none with batch 1 on rank 1; leave out"
        ) in text


def _be_slow(rank, seconds):
    """Be slow in turn, between steps and before the end, evaluations included."""
    engine = make_engine(freeze=schedule(0, 2), config=config(plan=TWO))
    data = ToySet(24)
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(data, 12):
                if batch.index % 2 == rank:
                    time.sleep(seconds)
                engine.step(batch)
            if rank == 1:
                time.sleep(seconds)
            engine.evaluate(data)
        watched = [t.name for t in threading.enumerate() if "lone" in t.name]
    left = [t.name for t in threading.enumerate() if "lone" in t.name]
    return len(watched), len(left), len(engine.history.epochs)


@pytest.mark.distributed
def test_ranks_that_are_slow_in_the_same_calls_are_left_alone():
    for result in run_ranks(_be_slow, 2, 5.0):
        assert result == (1, 0, 1)


def _retry_what_has_raised(rank):
    """Catch what an evaluation raises, one rank long after the other."""

    class Late(ToySet):
        def __getitem__(self, index):
            time.sleep(6.0 * rank)
            raise ZeroDivisionError

    engine = make_engine(freeze=schedule(0), config=config(plan=TWO))
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(24), 12):
                if batch.index == 1:
                    with pytest.raises(ZeroDivisionError):
                        engine.evaluate(Late(32))  # some for each rank
                engine.step(batch)
    return len(engine.history.epochs)


@pytest.mark.distributed
def test_a_call_that_has_raised_on_all_ranks_is_not_taken_for_the_one_after_it():
    assert run_ranks(_retry_what_has_raised, 2) == [1, 1]
