"""Ranks that are at different calls are told so, and take nobody's words for theirs."""

import types

import pytest

from pipetransformer.autodp import build_group, gather_at
from tests.autodp.world import joined
from tests.support.ranks import run_ranks

CALLS = ["evaluate of 3 samples", "a change of plan"]


def _gathers(rank):
    told = []
    with joined() as plane:
        group = build_group(plane, name="g/0", members=[0, 1])
        told += gather_at(group, "a freeze decision", b"x\0" * rank)
        for exchange in (
            lambda: gather_at(group, CALLS[rank], b"{}"),
            lambda: gather_at(group, CALLS[0], b"") if rank == 0 else group.barrier(),
            lambda: (
                gather_at(group, CALLS[0], b"")
                if rank == 0
                else group.all_gather_bytes(b"\x80" * 99)
            ),
        ):
            try:
                told.append(exchange())
            except RuntimeError as error:
                told.append(str(error))
        group.barrier()
        group.retire()
    return told


@pytest.mark.distributed
def test_ranks_at_different_calls_are_told_where_each_of_them_is():
    first, second = run_ranks(_gathers, 2)
    assert first[:2] == second[:2] == [b"", b"x\0"]
    others = ["'a change of plan'", "'the end of the run'", "another call"]
    expected = [
        "calls of the active ranks: expected every rank to run the same script, got "
        f"rank 0 at 'evaluate of 3 samples', rank 1 at {other}; call what ranks do "
        "together, such as evaluate, on all of them"
        for other in others
    ]
    assert first[2:] == expected
    assert second[2:4] == expected[:2]


def test_what_a_stranger_calls_its_call_is_shown_without_escapes():
    said = [b"here\0", b"\x1b[2J" * 5 + b"\0", b"\xff" * 99]
    group = types.SimpleNamespace(members=(0, 4, 7), all_gather_bytes=lambda _: said)
    with pytest.raises(RuntimeError) as caught:
        gather_at(group, "here", b"")
    text = str(caught.value)
    assert "rank 0 at 'here', rank 4 at '" in text and "rank 7 at another call" in text
    assert "\x1b" not in text
