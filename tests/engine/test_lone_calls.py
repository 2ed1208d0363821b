"""A call that one rank makes alone ends in one error that says who is where."""

import dataclasses
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
