"""Every interleaving of a three-rank decision, with crashes and deadlines.

A state is what the store holds plus what each rank has seen. The model walks all
reachable states of the machine that `Transition` drives.
"""

import copy

import pytest

from pipetransformer.autodp._binding import DecisionMachine

RANKS = (0, 1, 2)


class Rank:
    """One rank's view; `replay` rebuilds the machine, which cannot be copied."""

    def __init__(self, rank, verdict):
        self.rank, self.verdict = rank, verdict
        self.acknowledged = self.crashed = False
        self.events = ()

    def machine(self):
        machine = DecisionMachine(self.rank == 0, list(RANKS))
        for name, *args in self.events:
            getattr(machine, name)(*args)
        return machine

    def key(self):
        return self.rank, self.acknowledged, self.crashed, frozenset(self.events)


def _moves(ranks, store):
    """All states that follow from this one by one step of one rank."""
    for index, rank in enumerate(ranks):
        if rank.crashed:
            continue
        machine = rank.machine()
        for move in _moves_of(rank, machine, store):
            new_ranks, new_store = copy.deepcopy(ranks), dict(store)
            move(new_ranks[index], new_store)
            yield new_ranks, new_store


def _moves_of(rank, machine, store):
    def see(*event):
        return lambda r, _: setattr(r, "events", (*r.events, event))

    def crash(r, _):
        r.crashed = True

    def acknowledge(r, s):
        r.acknowledged = True
        s[f"ack/{r.rank}"] = r.verdict
        r.events = (*r.events, ("on_acknowledge", r.rank, r.verdict))

    if machine.outcome() is not None:
        return
    yield crash
    if not rank.acknowledged:
        yield acknowledge
    if ("on_deadline",) not in rank.events:
        yield see("on_deadline")
    for other in machine.missing():
        if other != rank.rank and f"ack/{other}" in store:
            yield see("on_acknowledge", other, store[f"ack/{other}"])
    if "decision" in store:
        yield see("on_decision", store["decision"])
    proposal = machine.proposal()
    if proposal is not None:

        def propose(r, s):
            decision = s.setdefault("decision", proposal)  # compare_set
            r.events = (*r.events, ("on_decision", decision))

        yield propose


@pytest.mark.parametrize("refusing", [None, 0, 2])
def test_decision_is_one_for_all_ranks_in_every_interleaving(refusing):
    start = [Rank(rank, rank != refusing) for rank in RANKS], {}
    queue, known, outcomes = [start], set(), set()
    while queue:
        ranks, store = queue.pop()
        state = (tuple(r.key() for r in ranks), tuple(sorted(store.items())))
        if state in known:
            continue
        known.add(state)
        seen = {r.machine().outcome() for r in ranks} - {None}
        assert len(seen) <= 1 and seen <= {store.get("decision")}
        if store.get("decision") is True:
            assert all(store.get(f"ack/{rank}") is True for rank in RANKS)
        outcomes |= seen
        following = list(_moves(ranks, store))
        if not following:  # the end: nobody alive is left without the decision
            for rank in ranks:
                assert rank.crashed or rank.machine().outcome() is not None
        queue.extend(following)
    assert outcomes == ({True, False} if refusing is None else {False})


def test_decision_that_changes_is_our_bug():
    machine = DecisionMachine(False, [0, 1])
    machine.on_decision(True)
    machine.on_decision(True)
    with pytest.raises(RuntimeError, match="please report"):
        machine.on_decision(False)
