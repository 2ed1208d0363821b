"""The decision about a change of plan: a table, and what holds for every offer."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer import _C

KINDS = _C.planner.TransitionKind
RULES = _C.planner.TransitionRule
RESHAPES = _C.planner.Reshape
MS = 1_000_000

SETTINGS = settings(max_examples=200, derandomize=True, deadline=None)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Defaults of an offer that pays: 20 ms saved 34 times for a pause of 100 ms."""

    kind: object = KINDS.SHAPE
    step_in_force_ns: int | None = 60 * MS
    step_ns: int = 40 * MS
    remaining_steps: int = 34
    pace_permille: int = 1000
    pause_ns: int = 100 * MS
    anyway_ns: int = 0
    hysteresis_permille: int = 250
    since_last_ns: int | None = None
    crowded: bool = False
    reshape: object = RESHAPES.PRICED

    def offer(self):
        offer = _C.planner.Offer()
        for field in dataclasses.fields(self):
            setattr(offer, field.name, getattr(self, field.name))
        return offer


def decide(**changes):
    return _C.planner.decide(Terms(**changes).offer())


@pytest.mark.parametrize(
    ("changes", "accepted", "rule"),
    [
        ({}, True, RULES.PAYS),
        # 680 ms are saved: 544 x 1.25 = 680 is not less.
        ({"pause_ns": 544 * MS}, False, RULES.TOO_DEAR),
        ({"pause_ns": 544 * MS - 1}, True, RULES.PAYS),
        ({"pause_ns": 544 * MS, "hysteresis_permille": 249}, True, RULES.PAYS),
        ({"pause_ns": 600 * MS, "anyway_ns": 57 * MS}, True, RULES.PAYS),
        ({"remaining_steps": 0}, False, RULES.TOO_DEAR),
        ({"remaining_steps": 6}, False, RULES.TOO_DEAR),
        ({"remaining_steps": 7}, True, RULES.PAYS),
        # At half the simulated time 340 ms are saved, at twice 1360.
        ({"pace_permille": 500, "pause_ns": 272 * MS}, False, RULES.TOO_DEAR),
        ({"pace_permille": 500, "pause_ns": 272 * MS - 1}, True, RULES.PAYS),
        ({"pace_permille": 2000, "pause_ns": 1088 * MS - 1}, True, RULES.PAYS),
        # 98 % is short enough, one nanosecond more is not.
        ({"step_in_force_ns": 100 * MS, "step_ns": 98 * MS}, False, RULES.TOO_DEAR),
        (
            {"step_in_force_ns": 100 * MS, "step_ns": 98 * MS, "pause_ns": MS},
            True,
            RULES.PAYS,
        ),
        (
            {"step_in_force_ns": 100 * MS, "step_ns": 98 * MS + 1},
            False,
            RULES.TOO_LITTLE,
        ),
        ({"step_ns": 70 * MS}, False, RULES.TOO_LITTLE),
        ({"step_ns": 0, "step_in_force_ns": 0}, False, RULES.TOO_LITTLE),
        ({"since_last_ns": 1000 * MS}, False, RULES.TOO_SOON),
        ({"since_last_ns": 1000 * MS + 1}, True, RULES.PAYS),
        ({"since_last_ns": 0, "kind": KINDS.CUTS}, True, RULES.PAYS),
        ({"crowded": True}, False, RULES.CROWDED),
        # A plan in force that cannot go on overrides every price.
        (
            {"step_in_force_ns": None, "remaining_steps": 0, "since_last_ns": 0},
            True,
            RULES.CANNOT_STAY,
        ),
        ({"step_in_force_ns": None, "crowded": True}, False, RULES.CROWDED),
        ({"reshape": RESHAPES.NEVER}, False, RULES.NEVER),
        (
            {"reshape": RESHAPES.NEVER, "step_in_force_ns": None},
            True,
            RULES.CANNOT_STAY,
        ),
        (
            {"reshape": RESHAPES.ALWAYS, "remaining_steps": 0, "since_last_ns": 0},
            True,
            RULES.ALWAYS,
        ),
        ({"reshape": RESHAPES.ALWAYS, "step_ns": 59 * MS}, False, RULES.TOO_LITTLE),
    ],
)
def test_each_rule_decides_at_its_limit(changes, accepted, rule):
    verdict = decide(**changes)
    assert (verdict.accepted, verdict.rule) == (accepted, rule)


def test_pay_back_is_the_first_step_that_has_earned_the_added_pause():
    assert decide(pause_ns=100 * MS).pay_back_steps == 5
    assert decide(pause_ns=100 * MS + 1).pay_back_steps == 6
    assert decide(pause_ns=100 * MS, anyway_ns=90 * MS).pay_back_steps == 1
    assert decide(pause_ns=50 * MS, anyway_ns=90 * MS).pay_back_steps == 0
    assert decide(step_ns=60 * MS).pay_back_steps is None
    assert decide(step_in_force_ns=None).pay_back_steps is None


def test_growth_goes_by_the_same_rule():
    # From K=1 to K=4 after an unfreeze: nothing in an offer tells the direction.
    assert decide(step_in_force_ns=90 * MS, step_ns=60 * MS).rule == RULES.PAYS
    assert decide(step_in_force_ns=90 * MS, remaining_steps=2).rule == RULES.TOO_DEAR


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("step_in_force_ns", "step in force"),
        ("step_ns", "step of the new plan"),
        ("remaining_steps", "remaining steps"),
        ("pace_permille", "pace"),
        ("pause_ns", "pause"),
        ("anyway_ns", "pause of the boundary change"),
        ("hysteresis_permille", "hysteresis"),
        ("since_last_ns", "time since the last"),
    ],
)
def test_negative_input_is_refused_by_name(name, what):
    with pytest.raises(ValueError, match=f"^{what}: expected at least 0, got -1$"):
        decide(**{name: -1})


NANOSECONDS = st.one_of(st.integers(0, 10**9), st.integers(0, 2**62))
OFFERS = st.builds(
    Terms,
    kind=st.sampled_from([KINDS.CUTS, KINDS.SHAPE]),
    step_in_force_ns=NANOSECONDS,
    step_ns=NANOSECONDS,
    remaining_steps=st.one_of(st.integers(0, 10**4), st.integers(0, 2**62)),
    pace_permille=st.integers(0, 10_000),
    pause_ns=NANOSECONDS,
    anyway_ns=NANOSECONDS,
    hysteresis_permille=st.integers(0, 5000),
    since_last_ns=st.one_of(st.none(), NANOSECONDS),
    crowded=st.booleans(),
)


@given(OFFERS)
@SETTINGS
def test_nothing_is_accepted_that_costs_more_than_it_gains(terms):
    verdict = _C.planner.decide(terms.offer())
    saved = (terms.step_in_force_ns - terms.step_ns) * terms.pace_permille
    wall = min(saved // 1000, 2**62) if saved > 0 else 0
    gain = wall * terms.remaining_steps
    extra = max(terms.pause_ns - terms.anyway_ns, 0)
    pays = gain * 1000 > (1000 + terms.hysteresis_permille) * extra
    clearly = terms.step_ns * 100 <= terms.step_in_force_ns * 98
    if verdict.accepted:
        assert pays and clearly and not terms.crowded and gain > 0
    soon = terms.kind == KINDS.SHAPE and terms.since_last_ns is not None
    soon = soon and terms.since_last_ns <= 10 * terms.pause_ns
    assert verdict.accepted == (
        pays and clearly and gain > 0 and not terms.crowded and not soon
    )


@given(OFFERS, st.integers(0, 2**61))
@SETTINGS
def test_more_remaining_steps_never_turn_acceptance_into_refusal(terms, more):
    first = _C.planner.decide(terms.offer()).accepted
    longer = dataclasses.replace(terms, remaining_steps=terms.remaining_steps + more)
    assert _C.planner.decide(longer.offer()).accepted >= first


@given(OFFERS, st.integers(0, 5000))
@SETTINGS
def test_more_hysteresis_never_turns_refusal_into_acceptance(terms, more):
    first = _C.planner.decide(terms.offer()).accepted
    stricter = dataclasses.replace(
        terms, hysteresis_permille=terms.hysteresis_permille + more
    )
    assert _C.planner.decide(stricter.offer()).accepted <= first


@given(OFFERS)
@SETTINGS
def test_a_plan_that_cannot_go_on_is_left_unless_the_devices_are_full(terms):
    stuck = dataclasses.replace(terms, step_in_force_ns=None)
    assert _C.planner.decide(stuck.offer()).accepted is not terms.crowded


def best(*all_terms):
    offers = [terms.offer() for terms in all_terms]
    return _C.planner.best_offer(offers, [_C.planner.decide(offer) for offer in offers])


def test_the_offer_that_ends_the_remaining_steps_first_wins():
    cheap = Terms(kind=KINDS.CUTS, step_ns=45 * MS, pause_ns=10 * MS)
    short = Terms(step_ns=40 * MS, pause_ns=170 * MS)
    assert best(short, cheap) == 0  # 1530 against 1540 ms
    few = [dataclasses.replace(t, remaining_steps=31) for t in (short, cheap)]
    assert best(*few) == 1  # 1410 against 1405 ms
    assert best(cheap, cheap) == 0
    assert best(dataclasses.replace(cheap, crowded=True)) is None
    free = [dataclasses.replace(t, reshape=RESHAPES.ALWAYS) for t in few]
    assert best(*free) == 0, "without prices the shortest step wins"
