"""Keeps groups of earlier plans connected, for plans that return to their ranks.

Which group a plan uses is written in the plan: the writer names a kept one, or a new
one. A member that does not hold what was named refuses the plan, so nobody ever uses
an old group while another builds a new one. Each rank keeps the groups that were used
last; the writer is a member of all groups of its own, so what it still has the others
have, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pipetransformer.autodp.group import ActiveGroup

logger = logging.getLogger(__name__)

Build = Callable[[str, Sequence[int]], ActiveGroup]
"""Builds the group of a name and members, as `build_group` does."""


class MissingKeptGroup(RuntimeError):
    """A plan names a kept group that this rank does not hold."""


class GroupCache:
    """The groups that this rank keeps alongside the live one; for one thread.

    Args:
        limit: most groups that are kept; 0: none.
        build: connects a new group.
        generation: the plane's; groups of an earlier one are retired, not used.

    Attributes:
        built: groups that were connected.
        reused: kept groups that came into use again.
    """

    def __init__(self, limit: int, build: Build, generation: Callable[[], int]) -> None:
        self._limit = limit
        self._build = build
        self._generation = generation
        self._kept: dict[str, ActiveGroup] = {}  # the one used last is at the end
        self.built = 0
        self.reused = 0

    def __len__(self) -> int:
        """Return how many groups are kept."""
        return len(self._kept)

    def name_for(
        self, members: Sequence[int], fresh: str, *, num_devices: int = 0
    ) -> str:
        """Return the name of the kept group of `members`, else `fresh`.

        Args:
            members: world ranks in the group's order.
            fresh: the name that a new group has.
            num_devices: of each member, which the group connects.
        """
        self._drop_old()
        wanted = tuple(members), num_devices
        for name, group in reversed(self._kept.items()):
            if (group.members, group.num_devices) == wanted:
                return name
        return fresh

    def obtain(
        self,
        name: str,
        members: Sequence[int],
        fresh: str,
        build: Build | None = None,
    ) -> ActiveGroup:
        """Return the group that a plan names; a kept one stays kept until `take`.

        Args:
            name: from the plan.
            members: world ranks in the group's order.
            fresh: the name that a new group has; another one is a kept group's.
            build: connects a new one; the cache's own by default.

        Raises:
            MissingKeptGroup: there is no kept group of that name and members here.
            RuntimeError: a new one did not connect; see `build_group`.
        """
        self._drop_old()
        kept = self._kept.get(name)
        if kept is not None and kept.members == tuple(members):
            return kept
        if kept is not None or name != fresh:
            raise MissingKeptGroup(
                f"group '{name}': expected a kept one of ranks {list(members)}, got "
                f"{'none' if kept is None else f'one of ranks {list(kept.members)}'}"
            )
        group = (build or self._build)(name, members)
        self.built += group.size > 1
        return group

    def take(self, group: ActiveGroup) -> bool:
        """Note that a plan with `group` was committed: it is live from now on.

        Returns:
            Whether it was a kept one.
        """
        kept = self._kept.pop(group.name, None) is not None
        self.reused += kept
        return kept

    def keep(self, group: ActiveGroup) -> None:
        """Keep a group that is no longer live; the one unused longest goes.

        A group of one costs nothing to build, and one of an earlier generation has
        lost a member: both are retired at once.
        """
        old = group.generation != self._generation()
        if old or self._limit == 0 or group.size == 1:
            group.retire()
            return
        self._kept[group.name] = group
        while len(self._kept) > self._limit:
            oldest = next(iter(self._kept))
            logger.debug("group '%s' was not used for longest", oldest)
            self._kept.pop(oldest).retire()

    def reject(self, group: ActiveGroup) -> None:
        """Retire the group of a plan that was aborted, so that a retry builds anew."""
        self._kept.pop(group.name, None)
        group.retire()

    def drop(self) -> None:
        """Retire every kept group, in the background: at the end, after a failure."""
        while self._kept:
            self._kept.popitem()[1].retire()

    def _drop_old(self) -> None:
        now = self._generation()
        if any(group.generation != now for group in self._kept.values()):
            self.drop()
