"""The judge of two hosts under the default policy: who must finish, who must end."""

import pytest

from tests.distributed.two_hosts import CASES, problems_of


def ranks(*outcomes):
    return [{"rank": n, "outcome": outcome} for n, outcome in enumerate(outcomes)]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_ends_otherwise_than_promised_is_told(name):
    _, survives = CASES[name]
    right, wrong = "finished", "PeerFailure"
    if not survives:
        right, wrong = wrong, right
    assert problems_of(ranks(*4 * [right]), survives=survives) == []
    assert problems_of(ranks(right, wrong, right, right), survives=survives) == [
        f"rank 1: expected {right}, got {wrong}"
    ]
