"""A disturbed round is dropped for all of its systems, and told why."""

import json

import pytest

from harness.common import MIN_REPEATS, RatioRefused, Repeat, RunFailed, Sample, ratio
from harness.rounds import NO_LIMITS, Limits, Round, judge, run_rounds

LIMITS = Limits(foreign_share=0.03, slow=1.15)
OTHERS = "others used 10.0% of the machine"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def took(seconds, share=0.0):
    foreign_s = None if share is None else 2 * seconds * share
    return Repeat(Sample(seconds, seconds, foreign_s), {"wall time": seconds})


class Script:
    """Plays back repeats, a second of quiet for what is not scripted."""

    def __init__(self, **repeats):
        self._repeats = {system: list(each) for system, each in repeats.items()}
        self.order = []

    def __call__(self, system, turn):
        self.order.append(f"{system}{turn}")
        left = self._repeats.get(system)
        found = left.pop(0) if left else took(1.0)
        if isinstance(found, str):
            raise RunFailed(found)
        return found


def pace_of(*steady):
    return lambda system, repeat: (
        repeat.metrics["wall time"] if system in steady else None
    )


def run(script, *, systems="ab", repeats=3, **options):
    return run_rounds(systems, script, repeats=repeats, limits=LIMITS, **options)


def test_rounds_run_all_systems_in_turn():
    script = Script()
    rounds = run(script)
    assert script.order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    series = rounds.series()
    assert [s.turns for s in series.values()] == [(0, 1, 2)] * 2
    assert str(rounds) == "3 rounds count, 0 dropped"


def test_others_on_the_machine_drop_the_round_of_all_systems():
    script = Script(b=[took(1.0), took(1.0, share=0.1)])
    rounds = run(script)
    assert script.order[6:] == ["a1", "b1"]  # made up for, with the same number
    assert [each.reasons for each in rounds.judged] == [(), (f"b: {OTHERS}",), (), ()]
    for series in rounds.series().values():
        assert (len(series.clean), series.turns) == (3, (0, 1, 2))
        (dropped,) = series.dropped
        assert (dropped.turn, dropped.why) == (1, f"b: {OTHERS}")


def test_a_round_that_slows_one_of_two_systems_is_dropped_though_nobody_was_seen():
    a = [took(1.0), took(1.2, share=None), took(1.0)]
    rounds = run(Script(a=a), pace=pace_of("a", "b"))
    why = "a: 1.20 times its usual time, others 1.00 times"
    assert [each.reasons for each in rounds.dropped] == [(why,)]
    assert rounds.dropped[0].round.turn == 1
    assert rounds.series()["b"].dropped[0].why == why
    assert not run(Script(a=[took(1.0), took(1.14)]), pace=pace_of("a", "b")).dropped


def test_a_machine_that_is_slower_for_a_whole_round_disturbs_no_ratio():
    """Also where the systems' own times differ, and one is a little slower still."""
    a = [took(1.0), took(2.0), took(1.0)]
    b = [took(3.0), took(6.6), took(3.0)]
    assert not run(Script(a=a, b=b), pace=pace_of("a", "b")).dropped


def test_a_single_steady_system_is_held_against_its_median():
    rounds = run(Script(a=[took(1.0), took(1.2)]), pace=pace_of("a"))
    why = "a: 1.20 times its usual time, others 1.00 times"
    assert [each.reasons for each in rounds.dropped] == [(why,)]


def test_a_system_that_chooses_its_plan_is_not_dropped_for_a_slow_choice():
    script = Script(a=[took(1.0), took(9.0)])
    assert not run(script, pace=pace_of("b")).dropped


def test_a_round_is_judged_again_by_those_that_follow():
    paces = [took(2.0), took(1.0)]
    two = [Round(turn, {"a": each}) for turn, each in enumerate(paces)]
    assert [bool(e.reasons) for e in judge(two, LIMITS, pace=pace_of("a"))] == [1, 0]
    rounds = run(Script(a=[took(2.0)]), pace=pace_of("a"))
    assert [each.round.turn for each in rounds.judged] == [0, 1, 2, 0]
    assert [bool(each.reasons) for each in rounds.judged] == [True, False, False, False]


def test_make_ups_are_limited_and_shared_among_the_numbers():
    script = Script(a=[took(1.0, share=0.1)] * 99)
    rounds = run(script, repeats=2, extra=3)
    assert [each.round.turn for each in rounds.judged] == [0, 1, 0, 1, 0]
    series = rounds.series()
    assert (len(series["a"].clean), len(series["a"].dropped)) == (0, 5)
    rows = [series[name].row("wall time", "s") for name in "ab"]
    with pytest.raises(RatioRefused, match=f">= {MIN_REPEATS} clean repeats, got 0"):
        ratio("a / b", *rows, better_than="a")


def test_a_failed_run_stays_and_its_round_is_not_repeated():
    script = Script(b=["broke", took(1.0)])
    rounds = run(script)
    assert len(rounds.judged) == 3
    series = rounds.series()
    assert series["b"].failures == ("broke",) and len(series["a"].clean) == 3
    assert series["b"].turns == (1, 2)


def test_without_limits_every_round_counts():
    script = Script(a=[took(1.0, share=0.9)])
    rounds = run_rounds("a", script, repeats=2, limits=NO_LIMITS, pace=pace_of("a"))
    assert len(rounds.kept) == 2 and rounds.to_json()["limits"] is None


def test_json_keeps_the_dropped_rounds_with_the_reason():
    script = Script(a=[took(1.0, share=0.1)], b=[took(4.0)])
    content = json.loads(json.dumps(run(script, repeats=1).to_json()))
    assert content["limits"] == {"foreign_share": 0.03, "slow": 1.15}
    assert [each["dropped"] for each in content["runs"]] == [[f"a: {OTHERS}"], []]
    assert [each["turn"] for each in content["runs"]] == [0, 0]


@pytest.mark.parametrize(("systems", "repeats"), [("aa", 3), ("ab", 0)])
def test_twins_and_no_rounds_are_refused(systems, repeats):
    with pytest.raises(ValueError, match="run_rounds: expected repeats >= 1"):
        run(Script(), systems=systems, repeats=repeats)
