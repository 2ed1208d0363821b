"""When a policy knows that it will freeze more, or less."""

import pytest

from pipetransformer.autofreeze import AlphaCap, Manual, Never, Progress, Schedule


def answers(policy, num_points):
    """Decisions, and what the policy said after each about the next change."""
    policy.bind(12)
    decisions, changes = [], []
    for point in range(num_points):
        progress = Progress(point, 7 * point)
        decisions.append(policy.decide(progress))
        before = policy.state_dict()
        changes.append(policy.next_change(progress))
        assert policy.state_dict() == before, "asking must change nothing"
    return decisions, changes


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule([0, 0, 3, 3, 3, 1, 1, 12]),
        lambda: AlphaCap(1 / 3, gradient_term=False),
        lambda: AlphaCap(0.05, min_active=2, gradient_term=False),
    ],
    ids=["schedule", "cap", "slow cap"],
)
def test_announced_change_is_the_next_that_happens(make):
    decisions, changes = answers(make(), 80)
    for point, announced in enumerate(changes):
        later = range(point + 1, len(decisions))
        real = next((t for t in later if decisions[t] != decisions[point]), None)
        assert announced == real


def test_paper_pace_is_announced_from_the_start():
    _, changes = answers(AlphaCap(1 / 3, gradient_term=False), 9)
    assert changes == [1, 2, 3, 4, 5, 7, 7, None, None]


@pytest.mark.parametrize(
    "policy",
    [
        Never(),
        Manual(),
        AlphaCap(0.0, gradient_term=False),
        AlphaCap(1 / 3, dry_run=True, gradient_term=False),
        Schedule([0, 3], dry_run=True),
    ],
)
def test_policy_that_cannot_know_announces_nothing(policy):
    assert answers(policy, 2)[1] == [None, None]


def test_gradients_to_come_are_not_guessed():
    policy = AlphaCap(1 / 3, gradient_term=True)
    policy.bind(12)
    policy.decide(Progress(0, 0))
    assert policy.next_change(Progress(0, 0)) is None


def test_entries_below_the_starting_units_change_nothing():
    policy = Schedule([0, 1, 2, 4])
    policy.bind(12, starting_units=2)
    policy.decide(Progress(0, 0))
    assert policy.next_change(Progress(0, 0)) == 3
