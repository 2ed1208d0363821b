"""Which ranks are active under a plan, and which node's devices they drive."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from pipetransformer.autodp import LaunchInfo
from pipetransformer.planner import Plan


@dataclasses.dataclass(frozen=True)
class Layout:
    """The ranks of a plan.

    Attributes:
        active: Active ranks in order; replica r is driven by ``active[r]``.
        nodes: Node index of each active rank.
    """

    active: tuple[int, ...]
    nodes: tuple[int, ...]

    def node_share(self, rank: int) -> tuple[int, int]:
        """Return (replicas on the node of `rank`, index of `rank` among them)."""
        node = self.nodes[self.active.index(rank)]
        peers = [r for r, n in zip(self.active, self.nodes, strict=True) if n == node]
        return len(peers), peers.index(rank)


def ranks_of_plan(
    plan: Plan,
    info: LaunchInfo,
    absent: Collection[int] = (),
    holders: Sequence[int] = (),
) -> Layout:
    """Place the replicas of `plan`: one rank of each block of K drives it.

    That is the first one there, or the first that holds the training state if the
    block has one: the first holder stays active, since the others get its state.

    Pipelines do not cross nodes, replicas do; with a bound on R the replicas are
    dealt to the nodes in turn, so that every node keeps one as long as R allows.

    Args:
        plan: The plan.
        info: The launch's ranks and nodes.
        absent: Ranks that cannot drive: the first other rank of their block does, and
            a block without any is left out. The layout may then have fewer replicas
            than the plan.
        holders: Ranks that hold the training state, the one that gives it first;
            empty: rank 0 alone makes it.
    """
    block = plan.num_stages if info.world_size > 1 else 1
    per_node = max(1, info.local_world_size // block)
    places = []
    for number in range(per_node):
        for node in range(info.num_nodes):
            first = node * info.local_world_size + number * block
            there = [r for r in range(first, first + block) if r not in absent]
            if there:
                held = [r for r in there if r in holders]
                places.append(((held or there)[0], node))
    chosen = places[: plan.num_replicas]
    kept = (place for rank in holders for place in places if place[0] == rank)
    first_holder = next(kept, None)
    if first_holder is not None and first_holder not in chosen:
        chosen[-1:] = [first_holder]
    chosen.sort()
    return Layout(
        active=tuple(rank for rank, _ in chosen),
        nodes=tuple(node for _, node in chosen),
    )


def joiners(old: Layout | None, new: Layout) -> Sequence[int]:
    """Return the ranks that are active in `new` and were not in `old`."""
    before = set(old.active) if old is not None else set()
    return [rank for rank in new.active if rank not in before]
