"""Which skips cross stages, and a stage call that takes and gives them."""

import weakref

import pytest
import torch
from torch import nn

from pipetransformer.pipe.skip import Namespace, pop, skippable
from pipetransformer.pipe.skip.stage import with_lanes
from pipetransformer.skip.layout import Lane, inspect_lanes, inspect_skip_layout
from pipetransformer.skip.tracker import current_skip_tracker

from .skips import Pop, Stash, declares


def test_only_pairs_that_cross_stages_have_a_lane():
    stages = [nn.Sequential(Stash(), Pop()), nn.Sequential(nn.ReLU())]
    assert inspect_lanes(stages) == ()
    stages = [nn.Sequential(Stash()), nn.Sequential(nn.ReLU()), nn.Sequential(Pop())]
    assert inspect_lanes(stages) == (Lane(None, "skip", 0, 2),)
    assert inspect_lanes([]) == ()


def test_lanes_come_in_the_order_of_the_stashes():
    ns = Namespace()
    stages = [
        nn.Sequential(declares(["b", "a"]), declares("c")),
        nn.Sequential(declares("d", "a").isolate(ns, only="d")),
        nn.Sequential(nn.Sequential(declares((), ["c", "b"]))),
        nn.Sequential(declares((), "d").isolate(ns)),
    ]
    assert inspect_lanes(stages) == (
        Lane(None, "b", 0, 2),
        Lane(None, "a", 0, 1),
        Lane(None, "c", 0, 2),
        Lane(ns, "d", 1, 3),
    )


def test_layout_is_read_from_either_end():
    ns = Namespace()
    stages = [
        nn.Sequential(Stash().isolate(ns), Stash(), Pop()),
        nn.Sequential(Pop().isolate(ns)),
    ]
    layout = inspect_skip_layout(stages)
    assert layout.requires_copy(ns, "skip") and not layout.requires_copy(None, "skip")
    assert list(layout.copy_policy(0)) == []
    assert list(layout.copy_policy(1)) == [(0, ns, "skip")]


def test_stage_call_takes_and_gives_skips():
    stage = nn.Sequential(Pop(), Stash())
    inside = Lane(None, "skip", 0, 1), Lane(None, "skip", 1, 2)
    call = with_lanes(stage, inside[:1], inside[1:], set())
    before = len(current_skip_tracker())
    output, skips = call((torch.tensor(3.0),), torch.tensor(1.0))
    assert output.item() == 8 and [skip.item() for skip in skips] == [4]
    assert len(current_skip_tracker()) == before


def test_stage_call_passes_keywords_none_and_no_lanes():
    call = with_lanes(lambda x, *, scale: x * scale, (), (), set())
    output, skips = call((), torch.tensor(2.0), scale=3)
    assert output.item() == 6 and skips == ()
    call = with_lanes(Pop(), [Lane(None, "skip", 0, 1)], (), set())
    assert call((None,), torch.tensor(2.0))[0].item() == 2


def test_stage_call_keeps_nothing():
    refs = []

    class Take(nn.Module):
        def forward(self, x):
            refs.append(weakref.ref((yield pop("skip"))))
            return x

    class Look(nn.Module):
        def forward(self, x):
            refs.append(refs[0]() is None)
            return x

    stage = nn.Sequential(skippable(pop="skip")(Take)(), Look(), Stash())
    lanes = [Lane(None, "skip", 0, 1)], [Lane(None, "skip", 1, 2)]
    call = with_lanes(stage, *lanes, set())
    output, skips = call([torch.ones(1)], torch.ones(1))
    assert refs[1] is True  # given in a list, it is free at once
    stashed = weakref.ref(skips[0])
    del output, skips
    assert stashed() is None


def test_pop_from_a_lane_that_nothing_went_into_is_one_of_nothing():
    lane, other = Lane(None, "skip", 0, 1), Lane(None, "other", 0, 1)
    unused = set()
    source = with_lanes(nn.Identity(), (), [lane], unused)
    output, skips = source((), torch.ones(1))
    assert output.item() == 1 and skips == (None,) and unused == {lane}
    with pytest.raises(RuntimeError, match="skip 'skip': expected .* got nothing"):
        with_lanes(Pop(), [lane], (), unused)(skips, torch.ones(1))
    # None that was stashed is something.
    assert with_lanes(Pop(), [lane], (), {other})(skips, torch.ones(1))[0].item() == 1


def test_trackers_of_stage_calls_nest_and_restore_after_a_failure():
    outer = current_skip_tracker()

    def fail(x):
        assert current_skip_tracker() is not outer
        raise KeyError("x")

    with pytest.raises(KeyError):
        with_lanes(fail, (), (), set())((), torch.ones(1))
    assert current_skip_tracker() is outer
