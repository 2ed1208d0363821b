"""What survivors conclude from each other's standings; no processes."""

import dataclasses

import pytest

from pipetransformer.recovery.decision import RankReport, assess


def active(done=7, **changes):
    return dataclasses.replace(
        RankReport(done=done, holds=True, active=True, call="step", script=3, step=5),
        **changes,
    )


def standby(**changes):
    return dataclasses.replace(RankReport(done=0, call="pass", script=3), **changes)


def test_the_source_is_the_first_rank_that_has_done_most():
    verdict = assess({1: active(6), 2: active(7), 3: active(7), 4: standby()})
    assert verdict.source == 2


def test_a_rank_without_whole_state_is_never_the_source():
    verdict = assess({0: active(8, holds=False), 1: active(7), 2: active(7)})
    assert verdict.source == 1
    assert verdict.able == (0, 1, 2)  # it takes the state over


def test_a_rank_with_another_freeze_decision_takes_the_state_over():
    # The decision is taken, and the sums of gradients are reset, before ranks meet.
    verdict = assess({0: active(decided=1), 1: active(decided=2), 2: active(decided=1)})
    assert (verdict.source, verdict.whole) == (0, (0, 2))
    assert verdict.able == (0, 1, 2)


def test_without_a_holder_there_is_no_way_on():
    with pytest.raises(ValueError, match="expected a survivor that holds it, got none"):
        assess({1: standby(), 2: active(holds=False)})


@pytest.mark.parametrize(
    ("call", "waits", "joins"),
    [
        ("step", "pass", True),
        ("epoch", "epoch", True),
        ("evaluate", "evaluate", True),
        ("predict", "predict", True),
        ("predict", "evaluate", False),
        ("close", "pass", False),
        ("boundary", "pass", False),
        ("within", "pass", False),
        ("step", "epoch", False),
        ("finish", "epoch", False),
    ],
)
def test_a_standby_joins_only_where_it_waits_for_what_comes_next(call, waits, joins):
    verdict = assess({0: active(call=call), 1: standby(call=waits)})
    assert verdict.able == ((0, 1) if joins else (0,))


def test_a_standby_that_is_behind_in_the_script_catches_up_first():
    verdict = assess({0: active(), 1: standby(script=2), 2: standby()})
    assert verdict.able == (0, 2)
    assert verdict.script == 2


def test_an_active_rank_without_the_last_operation_goes_on():
    assert assess({0: active(6, step=4), 1: active(7)}).able == (0, 1)


def test_states_of_different_histories_never_mix():
    with pytest.raises(ValueError, match="expected one history"):
        assess({0: active(plan_hash="a"), 1: active(plan_hash="b")})
    with pytest.raises(ValueError, match="expected one history"):
        assess({0: active(step=5), 1: active(step=6)})
    with pytest.raises(ValueError, match="at most one apart"):
        assess({0: active(5), 1: active(7)})


def test_a_commit_that_only_some_have_read_is_one_history():
    verdict = assess({0: active(plan_epoch=2), 1: active(plan_epoch=3, plan_hash="c")})
    assert verdict.source == 0


def test_at_the_end_there_is_nothing_left_to_train():
    assert assess({0: active(call="finish"), 1: standby(call="epoch")}).at_end
    assert not assess({0: active(), 1: standby()}).at_end


def test_standings_survive_their_bytes():
    standing = active(result={"loss": 0.5}, position=3, counts={"rows": 4})
    assert RankReport.from_bytes(standing.to_bytes()) == standing
