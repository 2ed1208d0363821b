"""Every interleaving of a three-rank decision, with crashes and deadlines.

A state is what the store holds plus what each rank has seen. The model walks all
reachable states of the machine that `Transition` drives.
"""

import functools
from typing import NamedTuple

import pytest

from pipetransformer.autodp._binding import DecisionMachine

RANKS = (0, 1, 2)


class Rank(NamedTuple):
    """One rank's view: what its machine was told, in whatever order."""

    rank: int
    crashed: bool = False
    events: frozenset = frozenset()

    def see(self, *event):
        return self._replace(events=self.events | {event})

    @property
    def view(self):
        """(outcome, proposal, missing) of the machine."""
        return _view(self.rank == 0, self.events)


@functools.cache
def _view(writer, events):
    machine = DecisionMachine(writer, list(RANKS))
    for name, *args in sorted(events):
        getattr(machine, name)(*args)
    return machine.outcome(), machine.proposal(), machine.missing()


def _steps(me, store, refusing):
    """All (rank, store) that follow from one step of the rank `me`."""
    outcome, proposal, missing = me.view
    if me.crashed or outcome is not None:
        return
    yield me._replace(crashed=True), store
    own = f"ack/{me.rank}"
    if own not in store:
        verdict = me.rank != refusing
        new = store | {own: verdict}
        yield me.see("on_acknowledge", me.rank, verdict), new
    if ("on_deadline",) not in me.events:
        yield me.see("on_deadline"), store
    for other in missing:
        if other != me.rank and f"ack/{other}" in store:
            yield me.see("on_acknowledge", other, store[f"ack/{other}"]), store
    if "decision" in store:
        yield me.see("on_decision", store["decision"]), store
    if proposal is not None:
        decision = store.get("decision", proposal)  # compare_set
        yield me.see("on_decision", decision), store | {"decision": decision}


@pytest.mark.parametrize("refusing", [None, 0, 2])
def test_decision_is_one_for_all_ranks_in_every_interleaving(refusing):
    queue = [(tuple(Rank(rank) for rank in RANKS), {})]
    known, outcomes = set(), set()
    while queue:
        ranks, store = queue.pop()
        state = ranks, frozenset(store.items())
        if state in known:
            continue
        known.add(state)
        seen = {rank.view[0] for rank in ranks} - {None}
        assert len(seen) <= 1 and seen <= {store.get("decision")}
        if store.get("decision") is True:
            assert all(store.get(f"ack/{rank}") is True for rank in RANKS)
        outcomes |= seen
        ended = True
        for index, rank in enumerate(ranks):
            for after, new_store in _steps(rank, store, refusing):
                ended = False
                queue.append((ranks[:index] + (after,) + ranks[index + 1 :], new_store))
        if ended:  # nobody alive is left without the decision
            assert all(rank.crashed or rank.view[0] is not None for rank in ranks)
    assert len(known) > 1000
    assert outcomes == ({True, False} if refusing is None else {False})


def test_decision_that_changes_is_our_bug():
    machine = DecisionMachine(False, [0, 1])
    machine.on_decision(True)
    machine.on_decision(True)
    with pytest.raises(RuntimeError, match="please report"):
        machine.on_decision(False)
