import os
import threading
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autodp import (
    ControlPlane,
    PeerFailure,
    Unreachable,
    build_group,
    connect,
)
from pipetransformer.autodp import group as group_module
from pipetransformer.autodp.backends import is_absence
from tests.autodp.world import FAST, joined, run_scenarios


def _wrap(model, group):
    return DistributedDataParallel(
        model,
        process_group=group.process_group,
        init_sync=False,
        broadcast_buffers=True,
        gradient_as_bucket_view=True,
        find_unused_parameters=False,
    )


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def _collectives(group):
    mine = torch.tensor([float(group.rank + 1)])
    total = float(sum(range(1, group.size + 1)))
    assert group.all_reduce_(mine.clone()).item() == total
    assert group.all_reduce_(mine.clone(), dist.ReduceOp.MAX).item() == group.size
    assert group.broadcast_(mine.clone(), group.size - 1).item() == group.size
    values = group.all_gather_bytes(b"x" * group.rank)
    assert values == [b"x" * rank for rank in range(group.size)]
    rows = group.all_gather_rows(torch.full((group.rank, 2), float(group.rank)))
    assert [row.shape for row in rows] == [(rank, 2) for rank in range(group.size)]
    assert all((row == rank).all() for rank, row in enumerate(rows))
    assert group.all_gather_rows(torch.ones(0, 3))[0].shape == (0, 3)
    group.barrier()


def test_group_of_one_needs_no_peer():
    with joined() as plane:
        group = build_group(plane, name="g/0", members=[0])
        assert (group.rank, group.size) == (0, 1)
        _collectives(group)
        group.retire()


def test_group_of_one_serves_ddp():
    with joined() as plane:
        group = build_group(plane, name="g/0", members=[0])
        plain, wrapped = _model(), _wrap(_model(), group)
        x = torch.randn(6, 4)
        plain(x).sum().backward()
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(x).sum().backward()
        for ours, theirs in zip(
            wrapped.module.parameters(), plain.parameters(), strict=True
        ):
            assert torch.equal(ours.grad, theirs.grad)


def test_group_names_bad_members():
    with joined() as plane:
        for members in ([], [0, 0], [1], [0, 1]):
            with pytest.raises(ValueError, match="members: expected distinct ranks"):
                build_group(plane, name="g/0", members=members)


def test_collectives_of_a_failed_run_raise_at_once():
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    group = build_group(plane, name="g/0", members=[0])
    plane.fail("user code", "no more")
    with pytest.raises(PeerFailure, match="user code"):
        group.barrier()
    plane.close()


@pytest.mark.parametrize("end", ["finish", "close", "fail"])
def test_group_is_retired_at_any_time(end):
    info, store = connect(FAST)
    plane = ControlPlane(store, info, FAST)
    group = build_group(plane, name="g/0", members=[0])
    if end == "fail":
        plane.fail("user code", "no more")
    else:
        getattr(plane, end)()
    group.retire()
    group.retire()
    plane.close()


def _members_only(plane):
    if plane.rank == 1:
        with pytest.raises(ValueError, match="this rank 1 among them"):
            build_group(plane, name="g/0", members=[2, 0])
        return None
    group = build_group(plane, name="g/0", members=[2, 0])
    _collectives(group)
    group.retire()
    with pytest.raises(RuntimeError, match="got one that was retired"):
        group.barrier()
    return group.rank


def _ddp_step(plane):
    group = build_group(plane, name="g/0", members=range(plane.world_size))
    _collectives(group)
    wrapped = _wrap(_model().double().eval(), group)
    x = torch.randn(9, 4, dtype=torch.float64)
    gradients = []
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(x[3 * plane.rank : 3 * plane.rank + 3]).mean().backward()
        gradients = [p.grad.clone() for p in wrapped.parameters()]
    plain = _model().double().eval()
    plain(x).mean().backward()
    for ours, theirs in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)
    group.retire()


def _build_and_retire(plane):
    def round_(number):
        group = build_group(plane, name=f"g/{number}", members=[0, 1])
        wrapped = _wrap(nn.Linear(2, 1), group)
        wrapped(torch.ones(1, 2)).sum().backward()
        group.retire()

    before = None
    for number in range(50):
        if plane.rank < 2:
            round_(number)
        if number == 4:
            plane.gather("warm", b"", phase="test")
            before = _settled()
    plane.gather("done", b"", phase="test")
    keys = plane.store.list_keys() if hasattr(plane.store, "list_keys") else []
    keys = [key for key in keys if "/g/" in key]
    return before, _settled(), keys


def _resources():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _settled():
    """Resources once the background thread has caught up."""
    seen = []
    for _ in range(50):
        threading.Event().wait(0.02)
        seen.append(_resources())
    return tuple(map(min, zip(*seen, strict=True)))


def _absent_member(plane):
    if plane.rank == 0:
        hurried = replace(FAST, protocol_timeout=timedelta(seconds=1))
        with pytest.raises(
            Unreachable, match=r"expected ranks \[0, 1\] to connect within 1.0 s"
        ):
            build_group(plane, name="g/0", members=[0, 1], config=hurried)
    assert plane.failure is None


def _unreachable(plane):
    """Two of three members wait; each gives up when the other may have, too."""
    hurried = replace(FAST, protocol_timeout=timedelta(seconds=1 + plane.rank))
    refused = None
    if plane.rank < 2:
        with pytest.raises(Unreachable) as caught:
            build_group(plane, name="g/0", members=[2, 1, 0], config=hurried)
        refused = caught.value.members, str(caught.value)
    plane.gather("refused", b"", phase="test")
    return refused


def _given_up(plane):
    text = None
    if plane.rank == 0:  # nobody else comes
        answers = iter([False, True])
        try:
            build_group(
                plane, name="g/8", members=[0, 1], given_up=lambda: next(answers)
            )
        except Unreachable as error:
            text = str(error)
        full = OSError("Too many open files")
        with (
            mock.patch.object(group_module, "make_backends", side_effect=full),
            pytest.raises(
                RuntimeError, match="expected to connect here, got: Too many"
            ),
        ):
            build_group(plane, name="g/7", members=[0, 1])
    group = build_group(plane, name="g/9", members=[0, 1, 2])
    _collectives(group)
    group.retire()
    return text


@pytest.fixture(scope="module")
def results_of():
    scenarios = [_members_only, _ddp_step, _build_and_retire, _absent_member, _given_up]
    return run_scenarios([*scenarios, _unreachable], 3)


@pytest.mark.distributed
def test_group_is_built_by_its_members_only(results_of):
    assert results_of(_members_only) == [1, None, 0]


@pytest.mark.distributed
def test_ddp_over_a_group_averages_like_one_process(results_of):
    results_of(_ddp_step)


@pytest.mark.distributed
def test_groups_built_and_retired_leave_nothing_behind(results_of):
    for before, after, keys in results_of(_build_and_retire):
        assert keys == []
        assert after[0] <= before[0] + 2, "descriptors grew"
        assert after[1] <= before[1] + 1, "threads grew"


@pytest.mark.distributed
def test_group_that_never_meets_is_an_error_and_no_failure(results_of):
    results_of(_absent_member)


@pytest.mark.distributed
def test_group_that_is_given_up_is_an_error_before_its_deadline(results_of):
    texts = results_of(_given_up)
    seconds = FAST.protocol_timeout.total_seconds()
    assert f"expected ranks [0, 1] to connect within {seconds:.1f} s" in texts[0]
    assert texts[0].endswith("got: nothing from ranks [1]: it was given up")
    assert texts[1:] == [None, None]


@pytest.mark.distributed
def test_refused_group_says_who_was_unreachable_and_nobody_else(results_of):
    *waited, absent = results_of(_unreachable)
    assert absent is None
    for seconds, (members, text) in enumerate(waited, start=1):
        assert members == (2,)
        assert f"ranks [2, 1, 0] to connect within {seconds}.0 s, got: nothing " in text
        assert "from ranks [2]: " in text


@pytest.mark.parametrize(
    ("error", "absence"),
    [
        (dist.DistStoreError("store: expected 'g/0/0/1', got nothing"), True),
        (RuntimeError("Gloo connectFullMesh failed with Connect timeout"), True),
        (RuntimeError("Connection reset by peer"), True),
        (OSError("Too many open files"), False),
        (RuntimeError("no interface has the address"), False),
    ],
)
def test_others_are_to_blame_only_where_one_was_absent(error, absence):
    assert is_absence(error) == absence
