"""Ranks are lost, and the others train on as if nothing had happened."""

import pytest
import torch

from tests.engine.losses import (
    CASES,
    ENDS,
    EPOCHS,
    SECOND_LOSSES,
    lose,
    lose_store,
    sleep_on,
    train_alone,
    undisturbed_key,
)
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost

pytestmark = pytest.mark.distributed

SAMPLES, BATCHES = 50, 5


@pytest.fixture(scope="module")
def undisturbed():
    """Losses and last state of runs of one process, by freeze schedule."""
    keys = {undisturbed_key(case) for case in CASES}
    return run_ranks(train_alone, 1, list(keys), timeout_s=80)[0]


def outcomes_of(fn, survivors, *args):
    with (
        StoreHost() as host,
        Ranks(fn, 4, *args, host.environment, timeout_s=105) as ranks,
    ):
        outcomes = ranks.outcomes(survivors)
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
    return {rank: value for rank, (_, value) in outcomes.items()}


@pytest.mark.parametrize("case", CASES)
def test_survivors_finish_as_if_nothing_had_happened(case, undisturbed):
    _, _, deaths = CASES[case]
    results = outcomes_of(lose, [r for r in range(4) if r not in deaths], case)
    lead = next(value for value in results.values() if value["lead"])
    epochs = lead["history"]["epochs"]
    assert [e["epoch"] for e in epochs] == list(range(EPOCHS))
    for epoch in epochs:
        assert epoch["samples"] == epoch["unique_samples"] == SAMPLES
        assert epoch["optimizer_steps"] == BATCHES
    recoveries = lead["history"]["recoveries"]
    assert sorted(r for record in recoveries for r in record["lost"]) == sorted(deaths)
    for record in recoveries:
        spent = record["phases"]
        assert spent["roll_call"] > 0 and spent["notice"] > 0
        assert spent["notice"] + spent["roll_call"] <= record["pause_seconds"]
    # The pause is the run's and no pass's.
    assert any("recovery" in name for name in lead["history"]["phase_seconds"])
    assert not [n for e in epochs for n in e["phase_seconds"] if "recovery" in n]
    if case in SECOND_LOSSES:
        assert len(recoveries) == 1, "the second loss was to come in a recovery"
    assert len({tuple(value["losses"]) for value in results.values()}) == 1
    told = {}
    for value in results.values():
        for point, loss in value["told"].items():
            assert told.setdefault(point, loss) == loss, "ranks must decide alike"
    each = 2 if "within" in case else 1
    for value in results.values():
        if value["last"]:
            counts = dict.fromkeys(("loss", "eval/loss"), each * EPOCHS)
            assert value["evaluated"] == counts, "each counts once"
    active = [value["last"] for value in results.values() if value["last"]]
    for name in ("weights", "tensors", "average"):
        for state in active:
            pairs = zip(state[name], active[0][name], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), "replicas must be equal"
    if case == "a whole node":
        return  # batches are made up by nodes: one process makes others
    losses, last = undisturbed[undisturbed_key(case)]
    for name in ("weights", "tensors", "average"):
        for a, b in zip(active[0][name], last[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for value in results.values():
        assert value["losses"] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("case", ENDS)
def test_without_a_holder_of_the_state_all_end_with_one_error(case):
    _, _, deaths = ENDS[case]
    left = [rank for rank in range(4) if rank not in deaths]
    with (
        StoreHost() as host,
        Ranks(lose, 4, case, host.environment, timeout_s=105) as ranks,
    ):
        outcomes = ranks.outcomes(left)
    *_, last = deaths
    for ok, value in outcomes.values():
        assert not ok
        assert f"PeerFailure: peer failure: rank {last}, phase 'recovery'" in value
        assert f"expected a survivor that holds it, got none of ranks {left}" in value


def test_a_rank_that_was_stopped_is_fenced_and_saves_nothing(tmp_path):
    results = outcomes_of(sleep_on, range(4), tmp_path)
    assert results.pop(2) == "fenced"
    before, after = (tmp_path / "saved").read_text().splitlines()
    assert before == after != "", "checkpoints, before it woke up and after it ended"
    for weights, history in results.values():
        epochs = history["epochs"]
        assert [e["unique_samples"] for e in epochs] == [SAMPLES] * EPOCHS
        assert [record["lost"] for record in history["recoveries"]] == [[2]]
        assert all(map(torch.equal, weights, results[0][0]))


# With two steps ahead the plan that is due before batch 2 is lost with the store.
@pytest.mark.parametrize(("when", "steps"), [((0, 2), 0), ((1, 1), 2)])
def test_active_ranks_train_on_without_the_store_and_standbys_end(when, steps):
    with (
        StoreHost() as host,
        Ranks(
            lose_store, 4, host.pid, host.environment, when, steps, timeout_s=105
        ) as ranks,
    ):
        outcomes = ranks.outcomes()
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
    active = [outcomes[rank][1] for rank in (0, 2)]
    for history, losses in active:
        assert [e["unique_samples"] for e in history["epochs"]] == [SAMPLES] * EPOCHS
        assert {e["num_frozen_layers"] for e in history["epochs"]} == {0}
        assert losses == active[0][1] and len(losses) == EPOCHS
    for rank in (1, 3):
        assert "phase 'store'" in outcomes[rank][1]
