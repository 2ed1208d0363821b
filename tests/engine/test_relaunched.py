"""A process that comes in a lost rank's place is refused, and disturbs nobody."""

import pytest
import torch

from tests.engine.losses import ONE_STAGE, TWO_REPLICAS, train_alone
from tests.engine.relaunched import COUNTS, come_again
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost

pytestmark = pytest.mark.distributed

LONE = "on_peer_failure='continue': the plan has one replica ({}); the run ends if rank"

# Ranks, plan; replicas in each epoch; why a warning says that there is one alone.
CASES = {
    "one is left": (2, ONE_STAGE, [1, 1, 1], "K=1 on 1 of 2 ranks"),
    "an idle rank takes its place": (3, TWO_REPLICAS, [2, 2, 2], None),
    "it was idle": (3, {**ONE_STAGE, "max_replicas": 1}, [1, 1, 1], "max_replicas=1"),
}


@pytest.fixture(scope="module")
def undisturbed():
    key = COUNTS, None, 0
    return run_ranks(train_alone, 1, [key], timeout_s=80)[0][key]


@pytest.mark.parametrize("case", CASES)
def test_a_relaunched_rank_is_told_of_the_run_and_the_others_go_on(
    case, undisturbed, tmp_path
):
    world, plan, replicas, why = CASES[case]
    with (
        StoreHost() as host,
        Ranks(
            come_again,
            world + 1,
            world,
            plan,
            tmp_path,
            host.environment,
            timeout_s=105,
        ) as ranks,
    ):
        outcomes = ranks.outcomes([n for n in range(world + 1) if n != 1])
    assert all(ok for ok, _ in outcomes.values()), outcomes
    late = outcomes.pop(world)[1]
    assert "phase 'connect'" in late and "another run is, or was, on this st" in late
    for number, (_, (losses, last, history, warned)) in outcomes.items():
        assert losses == pytest.approx(undisturbed[0], rel=1e-9)
        if last is not None:
            for mine, other in zip(
                last["weights"], undisturbed[1]["weights"], strict=True
            ):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
        lone = [text for text in warned if "has one replica" in text]
        assert len(lone) == (why is not None and number == 0)
        assert all(text.startswith(LONE.format(why)) for text in lone)
        if number == 0:
            assert [e["num_replicas"] for e in history["epochs"]] == replicas
            assert [record["lost"] for record in history["recoveries"]] == [[1]]
