"""Groups of earlier plans are kept, found again by all members, and bounded."""

import pytest

from pipetransformer.autodp import GroupCache, MissingKeptGroup


class FakeGroup:
    """Stands in for an active group: it knows its name, members and end."""

    def __init__(self, name, members, generation=0, num_devices=0):
        self.generation = generation
        self.num_devices = num_devices
        self.name = name
        self.members = tuple(members)
        self.size = len(self.members)
        self.retired = 0

    def retire(self):
        self.retired += 1


def make(limit=4):
    return GroupCache(limit, FakeGroup, lambda: 0)


class Rank:
    """One rank's cache and live group, taken through plans as the engine does."""

    def __init__(self, rank, limit):
        self.rank = rank
        self.cache = make(limit)
        self.live = None
        self.seen = []

    def follow(self, epoch, name, members):
        """Take part in a committed plan; returns the group that came into use."""
        group = None
        if self.live is not None and self.live.members == members:
            return self.live
        if self.rank in members:
            group = self.cache.obtain(name, members, f"g/{epoch}")
            self.cache.take(group)
            self.seen.append(group)
        if self.live is not None:
            self.cache.keep(self.live)
        self.live = group
        return group


def plans(ranks, layouts):
    """Let rank 0 write plans over `layouts`; returns the names used."""
    names = []
    for epoch, members in enumerate(layouts, start=1):
        name = ranks[0].cache.name_for(members, f"g/{epoch}")
        used = {rank.follow(epoch, name, members) for rank in ranks}
        names.append(next(group.name for group in used if group is not None))
    return names


def test_a_plan_with_earlier_ranks_uses_their_group_again():
    ranks = [Rank(rank, 4) for rank in range(4)]
    names = plans(ranks, [(0, 2), (0, 1, 2, 3), (0, 2), (0, 1, 2, 3), (0, 2)])
    assert names == ["g/1", "g/2", "g/1", "g/2", "g/1"]
    assert [(r.cache.built, r.cache.reused) for r in ranks] == [
        (2, 3),
        (1, 1),
        (2, 3),
        (1, 1),
    ]
    assert not any(group.retired for rank in ranks for group in rank.seen)


def test_order_of_the_ranks_is_part_of_what_is_found():
    ranks = [Rank(rank, 4) for rank in range(2)]
    assert plans(ranks, [(0, 1), (1, 0), (0, 1)]) == ["g/1", "g/2", "g/1"]


def test_a_group_that_connects_other_devices_is_not_used_again():
    cache = make()
    cache.keep(FakeGroup("g/1", (0, 1), num_devices=2))
    assert cache.name_for((0, 1), "g/2", num_devices=2) == "g/1"
    assert cache.name_for((0, 1), "g/2", num_devices=1) == "g/2"


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_kept_groups_are_bounded_and_members_hold_what_the_writer_names(limit):
    layouts = [(0, 2), (0, 1), (0,), (0, 1, 2), (0, 2), (0, 3), (0, 1), (0, 1, 2)]
    ranks = [Rank(rank, limit) for rank in range(4)]
    names = plans(ranks, layouts * 5)  # a rank without a named group would raise
    for rank in ranks:
        assert len(rank.cache) <= limit
        alive = {g.name for g in rank.seen if not g.retired}
        assert len(alive) == len(rank.cache) + (rank.live is not None)
        rank.cache.drop()
        assert len(rank.cache) == 0
        for group in rank.seen:
            assert group.retired <= 1 and bool(group.retired) == (
                group is not rank.live
            )
    if limit == 0:
        assert names == [f"g/{epoch}" for epoch in range(1, len(names) + 1)]


def test_a_group_of_one_is_not_kept():
    cache = make()
    group = cache.obtain("g/1", (0,), "g/1")
    cache.keep(group)
    assert (len(cache), group.retired, cache.built) == (0, 1, 0)


def test_an_aborted_plan_takes_its_group_along_so_that_a_retry_builds_anew():
    cache = make()
    first = cache.obtain("g/1", (0, 1), "g/1")
    assert not cache.take(first)
    cache.keep(first)
    assert cache.name_for((0, 1), "g/2") == "g/1"
    assert cache.obtain("g/1", (0, 1), "g/2") is first and len(cache) == 1
    cache.reject(first)
    assert first.retired == 1 and cache.reused == 0
    assert cache.name_for((0, 1), "g/3") == "g/3"


def test_a_named_group_that_is_not_here_is_refused():
    cache = make()
    with pytest.raises(
        MissingKeptGroup,
        match=r"'g/1': expected a kept one of ranks \[0, 1\], got n",
    ):
        cache.obtain("g/1", (0, 1), "g/2")
    cache.keep(FakeGroup("g/1", (0, 2)))
    with pytest.raises(MissingKeptGroup, match=r"got one of ranks \[0, 2\]"):
        cache.obtain("g/1", (0, 1), "g/2")


def test_groups_of_an_earlier_generation_are_retired_and_never_found():
    now = [0]
    cache = GroupCache(4, lambda n, m: FakeGroup(n, m, now[0]), lambda: now[0])
    kept, live = (cache.obtain(f"g/{e}", (0, 1, e), f"g/{e}") for e in (2, 3))
    cache.keep(kept)
    now[0] = 1
    cache.keep(live)
    assert (live.retired, len(cache)) == (1, 1)
    assert cache.name_for((0, 1, 2), "g/4") == "g/4"
    assert (kept.retired, len(cache)) == (1, 0)
