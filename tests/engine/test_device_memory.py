"""Devices that run out of memory: another plan instead of an end.

The pretended accelerator refuses allocations above a limit. The planner is told of more
memory than there is, as where something else takes a part of it.
"""

import dataclasses

import pytest
import torch

import pipetransformer as pt
from tests.engine.scenario import QUICK, config, make_engine, schedule
from tests.support.device_ranks import MARKS, NODE, pretend
from tests.support.private import model_of, run_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.toy import ToySet

TIMEOUT_S = 100
BATCH = 48

pytestmark = MARKS


@dataclasses.dataclass(frozen=True)
class Case:
    """When the devices' memory shrinks to how many bytes.

    In training K=1 takes 80 KB of a device, K=2 takes 57 and K=4 takes 45; what is
    frozen but for the head takes less.
    """

    limit: int
    when: object = None  # "profile", or (epoch, batch)
    counts: tuple[int, ...] = (0,)
    stages: int | None = None
    policy: str = "continue"


def train(_rank, libraries, case):
    """Train; return losses, weights, K of each epoch, records and what was reported."""
    fake = pretend(libraries)
    autodp = dataclasses.replace(QUICK, on_peer_failure=case.policy)
    shape = pt.PlanConfig(num_stages=case.stages, reshape="always")
    settings = config(autodp=autodp, devices=NODE, plan=shape)
    engine = make_engine(
        freeze=schedule(*case.counts), dtype=torch.float64, config=settings
    )
    data = ToySet(96, dtype=torch.float64)

    def limit(size):
        for device in range(len(NODE)):
            fake.limit(device, size)

    with engine:
        if case.when == "profile":
            limit(case.limit)
            engine.prepare(data, BATCH)
            limit(0)
        for epoch in engine.epochs(3):
            for batch in engine.batches(data, BATCH):
                if case.when == (epoch, batch.index):
                    limit(case.limit)
                engine.step(batch)
        history = engine.history.to_json()
        profile = run_of(engine).inputs.profile
    fake.synchronize()
    return {
        "weights": [p.detach() for p in model_of(engine).parameters()],
        "history": history,
        "sizes": profile.microbatch_samples,
        "violations": fake.violations(),
    }


@pytest.fixture(scope="module")
def undisturbed(libraries):
    """Weights and losses with all the memory that there is, by schedule."""
    found = {}
    for counts in ((0,), (6, 0)):
        case = Case(limit=0, counts=counts)
        (found[counts],) = run_ranks(train, 1, libraries, case, timeout_s=TIMEOUT_S)
    return found


CASES = {
    "profile": Case(limit=20_000, when="profile"),
    "step": Case(limit=80_000, when=(1, 0)),
    "step, twice": Case(limit=52_000, when=(1, 1)),
    "move": Case(limit=75_000, when=(0, 1), counts=(6, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_another_plan_is_made(libraries, undisturbed, name):
    case = CASES[name]
    results = run_ranks(train, 4, libraries, case, timeout_s=TIMEOUT_S)
    plain, lead = undisturbed[case.counts], results[0]
    epochs = lead["history"]["epochs"]
    shapes = [(e["num_stages"], e["num_replicas"]) for e in epochs]
    recovered = [(r["lost"], r["to"]) for r in lead["history"]["recoveries"]]
    if name == "profile":
        assert lead["sizes"] == (1, 4), "16 rows do not fit"
        assert recovered, "nor does the first plan"
    else:
        assert shapes[0] == (1, 4)
        assert shapes[-1][0] == (4 if name == "step, twice" else 2)
        assert all(lost == [] for lost, _ in recovered)
        assert len(recovered) >= 1
    for result in results:
        assert result["violations"] == []
    for epoch, other in zip(epochs, plain["history"]["epochs"], strict=True):
        assert epoch["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
        assert epoch["samples"] == epoch["unique_samples"] == 96
        assert epoch["optimizer_steps"] == 2
    for one, other in zip(lead["weights"], plain["weights"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_error_says_that_nothing_fits(libraries):
    case = Case(limit=20_000, when=(1, 0))
    with Ranks(train, 4, libraries, case, timeout_s=TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(range(4))
    assert not any(ok for ok, _ in outcomes.values())
    assert any("memory" in text for _, text in outcomes.values())


def test_without_recovery_the_devices_error_ends_the_run(libraries):
    case = Case(limit=60_000, when=(1, 0), policy="raise")
    with Ranks(train, 4, libraries, case, timeout_s=TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(range(4))
    assert not any(ok for ok, _ in outcomes.values())
    assert any("OutOfMemoryError" in text for _, text in outcomes.values())


def train_with_copies(_rank, libraries, shrinks):
    """Train; if `shrinks`, there is memory for the step alone once there are copies."""
    fake = pretend(libraries)
    settings = config(
        devices=NODE[:1],
        plan=pt.PlanConfig(num_stages=1, num_microbatches=2),
        cache=pt.CacheConfig(device_bytes=10**6),
    )
    engine = make_engine(freeze=schedule(4), dtype=torch.float64, config=settings)
    losses, copied = [], []
    with engine:
        for epoch in engine.epochs(5):
            for batch in engine.batches(ToySet(960, dtype=torch.float64), BATCH):
                if shrinks and (epoch, batch.index) == (3, 0):
                    taken = run_of(engine).copied_bytes
                    fake.limit(0, max(fake.memory(0)) - taken // 2)
                losses.append(float(engine.step(batch)))
            copied.append(run_of(engine).copied_bytes)
        limit = run_of(engine).memory_limit
        recovered = [each.lost for each in engine.history.recoveries]
    hits = [each["hits"] for each in engine.history.cache]
    fake.synchronize()
    return losses, copied, hits, limit, recovered, fake.violations()


def test_copies_of_records_go_before_any_plan_takes_less(libraries):
    ((plain, kept, _, _, none, _),) = run_ranks(train_with_copies, 1, libraries, False)
    ((losses, copied, hits, limit, recovered, found),) = run_ranks(
        train_with_copies, 1, libraries, True
    )
    assert none == [] and kept[3] == kept[2] == copied[2] > 0
    assert recovered == [[]] and limit is None
    assert copied[3:] == [0, 0] and hits[1:] == [960] * 4
    assert losses == pytest.approx(plain, rel=1e-9)
    assert found == []
