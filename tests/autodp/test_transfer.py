import signal
from datetime import timedelta

import pytest
import torch
from torch import nn

from pipetransformer.autodp import (
    broadcast_tensors,
    build_group,
    compare_hashes,
    hash_tensors,
)
from tests.autodp.world import joined, run_scenarios


def _trained(seed, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _state(model, optimizer):
    """Everything that moves: parameters, buffers, moments and step counters."""
    named = list(model.state_dict(keep_vars=True).items())
    for index, state in optimizer.state_dict()["state"].items():
        named += [(f"{index}.{key}", value) for key, value in state.items()]
    return named


def _odd_tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return [
        draw(3),
        torch.tensor(float(seed)),
        torch.empty(0, 4),
        draw(4, 6).t(),
        draw(2, 5).to(torch.bfloat16),
        draw(7) > 0,
        draw(3).to(torch.complex64),
        draw(33).long(),
        torch.full((2,), float("nan")) * seed,
        draw(1000),
        draw(5).to(torch.int8),  # what follows does not lie at its alignment
        draw(3).double(),
        draw(3, 5, 2).to(torch.bfloat16).transpose(0, 2),
        draw(1) > 0,
        draw(2, 0, 3).double(),
        draw(4).to(torch.complex128).conj(),
        draw(300, 300),  # large enough to travel alone
        draw(300, 300).t(),
        draw(100001).to(torch.int8).repeat(3),
        draw(4, 4).requires_grad_(),
    ]


def _move(plane):
    group = build_group(plane, name="g/0", members=[0, 1, 2])
    rank = plane.rank
    model, optimizer = _trained(seed=rank, steps=1 + rank)
    named = _state(model, optimizer)
    parameter = named[0][1]
    before, version = hash_tensors(named), parameter._version
    moved = broadcast_tensors(group, [t for _, t in named], source=1)
    assert moved == sum(t.nbytes for _, t in named)
    assert parameter is model.state_dict(keep_vars=True)["0.weight"]
    assert parameter.requires_grad
    assert rank == 1 or parameter._version > version
    after = hash_tensors(_state(model, optimizer))
    compare_hashes(group, after)
    for bucket_bytes in (1, 100, 5000, 1 << 20):
        tensors = _odd_tensors(rank)
        broadcast_tensors(group, tensors, source=2, bucket_bytes=bucket_bytes)
        for ours, theirs in zip(tensors, _odd_tensors(2), strict=True):
            assert ours.dtype == theirs.dtype
            assert hash_tensors([("t", ours)]) == hash_tensors([("t", theirs)])
    for text in (b"", b"a", bytes(range(256)) * 127, b"long" * 20000):
        assert group.broadcast_bytes(text if rank == 1 else b"no", 1) == text
    group.retire()
    return before, after


def _differ(plane):
    rank = plane.rank
    group = build_group(plane, name="g/0", members=[2, 0, 1])
    # The first tensor that differs, and where, as each rank sees it.
    state = {name: torch.zeros(5, dtype=torch.int8) for name in "abcd"}
    if rank == 1:
        state["b"][4] = 1
        state["d"][0] = 1
    with pytest.raises(RuntimeError) as raised:
        compare_hashes(group, hash_tensors(state.items()))
    where = {0: 1, 1: 2, 2: 1}[rank]
    expected = f"got a different 'b' on rank {where}"
    assert str(raised.value).endswith(expected)
    compare_hashes(group, {"a": 0, "b": (1 << 64) - 1})
    for odd in (1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        with pytest.raises(RuntimeError, match="got a different 'a'"):
            compare_hashes(group, {"a": odd if rank == 2 else 0})
    with pytest.raises(RuntimeError, match="got a different '[ab]'"):
        compare_hashes(group, {"a" if rank else "b": 0})
    group.retire()
    if rank == 2:
        return
    group = build_group(plane, name="g/1", members=[0, 1])
    with pytest.raises(RuntimeError, match=r"expected \d tensors on all replicas"):
        compare_hashes(group, dict.fromkeys("ab"[: 1 + rank], 0))
    if rank == 1:
        with pytest.raises(ValueError, match="expected the dtypes and shapes of"):
            broadcast_tensors(group, [torch.zeros(3)], source=0)
    else:
        broadcast_tensors(group, [torch.zeros(0, 3)], source=0)
    group.retire()


class _Interrupted(Exception):
    pass


def _wait_for_a_late_source(plane):
    def interrupt(number, frame):
        raise _Interrupted

    if plane.rank == 2:
        return
    group = build_group(plane, name="g/0", members=[0, 1])
    if plane.rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(_Interrupted):
            broadcast_tensors(group, [], source=1)
        signal.signal(signal.SIGALRM, before)
        plane.publish("interrupted", b"")
    else:
        plane.wait("interrupted", phase="test", timeout=timedelta(seconds=60))
        broadcast_tensors(group, [], source=1)
    group.barrier()  # behind the broadcast that rank 0 left to itself
    group.retire()


@pytest.fixture(scope="module")
def results_of():
    return run_scenarios([_move, _differ, _wait_for_a_late_source], 3)


@pytest.mark.distributed
def test_signal_reaches_a_rank_that_waits_for_the_source(results_of):
    results_of(_wait_for_a_late_source)


@pytest.mark.distributed
def test_broadcast_moves_weights_buffers_and_moments_bitwise(results_of):
    results = results_of(_move)
    source_before, source_after = results[1]
    assert source_before == source_after
    assert all(after == source_before for _, after in results)
    assert results[0][0] != source_before


@pytest.mark.distributed
def test_replicas_that_differ_are_named(results_of):
    results_of(_differ)


def test_broadcast_of_one_member_keeps_its_tensors():
    with joined() as plane:
        group = build_group(plane, name="g/0", members=[0])
        tensors = _odd_tensors(3)
        broadcast_tensors(group, tensors, source=0)
        for ours, theirs in zip(tensors, _odd_tensors(3), strict=True):
            assert hash_tensors([("t", ours)]) == hash_tensors([("t", theirs)])
        assert broadcast_tensors(group, [], source=0) == 0
        with pytest.raises(ValueError, match="source: expected a member's index"):
            broadcast_tensors(group, tensors, source=1)
        with pytest.raises(ValueError, match="bucket_bytes: expected a positive"):
            broadcast_tensors(group, tensors, source=0, bucket_bytes=0)
        with pytest.raises(ValueError, match="expected dense tensors"):
            broadcast_tensors(group, [torch.eye(2).to_sparse()], source=0)


def test_hash_sees_bits_dtype_and_shape_but_not_strides():
    x = torch.arange(6.0).reshape(2, 3)
    same = {"x": x, "strided": x.t().contiguous().t()}
    assert len(set(hash_tensors(same.items()).values())) == 1
    other = {
        "x": x,
        "flat": x.reshape(6),
        "dtype": x.to(torch.int32).view(2, 3),
        "bits": x.view(torch.int32),
        "zero": torch.zeros(1),
        "minus": -torch.zeros(1),
    }
    hashes = hash_tensors(other.items())
    assert len(set(hashes.values())) == len(hashes)
