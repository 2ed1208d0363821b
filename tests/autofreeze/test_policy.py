"""What holds for every policy: binding, log, replay, dry run, errors."""

import json
import logging
import threading

import numpy
import pytest
import torch

from pipetransformer.autofreeze import (
    AlphaCap,
    AutoFreeze,
    FreezeStatistics,
    Guarded,
    Manual,
    Never,
    Plasticity,
    Policy,
    Progress,
    Schedule,
    replay,
    told,
)
from tests.support.documents import ROOT, blocks

NORMS = [(5.0, 4.0, 3.0, 2.0, 1.0, 9.0), (0.0, 4.0, 3.0, 2.0, 7.0, 9.0)]
FACTORIES = {
    "never": Never,
    "manual": Manual,
    "schedule": lambda: Schedule([0, 2, 1, 6]),
    "cap": lambda: AlphaCap(1 / 3, gradient_term=False),
    "gradient": lambda: AlphaCap(1 / 3, gradient_term=True, min_active=1),
    "dry": lambda: AlphaCap(1 / 3, dry_run=True, gradient_term=False),
    "autofreeze": lambda: AutoFreeze(25),
    "plasticity": lambda: Plasticity(window=2, tolerance=0.5, patience=1),
    "guarded": lambda: Guarded(stake=0.3, monitor=("a", "max"), patience=1),
}
LOSSES = [1.0, 1.0, 0.2, 0.25, 5.0]


def run(policy, num_points=5):
    decisions = []
    for point in range(num_points):
        if isinstance(policy, Manual):
            policy.freeze(point % 3)
        norms = NORMS[point % 2]
        policy.observe(FreezeStatistics(norms, norms, LOSSES[point], norms))
        decisions.append(
            policy.decide(Progress(point, 7 * point, 35, 1e-3, {"a": 0.5}))
        )
    return decisions


@pytest.fixture(params=FACTORIES)
def factory(request):
    return FACTORIES[request.param]


def test_policy_replays_its_log_read_from_json(factory):
    policy = factory()
    policy.bind(6)
    decisions = run(policy)
    log = json.loads(json.dumps(policy.log))
    assert [entry["decision"] for entry in log] == decisions
    assert replay(factory, log) == decisions
    assert replay(factory, log[3:]) == decisions[3:]


def test_policy_state_round_trips(factory):
    policy, other = factory(), factory()
    policy.bind(6)
    other.bind(6)
    run(policy, 3)
    state = json.loads(json.dumps(policy.state_dict()))
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_policy_logs_every_input():
    policy = AlphaCap(0.5, gradient_term=True)
    policy.bind(6)
    policy.observe(FreezeStatistics(NORMS[0], loss=0.25))
    policy.decide(Progress(1, 7, 35, 1e-3, {"accuracy": 0.5}))
    assert policy.log == [
        {
            "num_units": 6,
            "starting_units": 0,
            "state": {"frozen": 0.0, "num_frozen": 0, "point": 0},
            "progress": {
                "epoch": 1,
                "step": 7,
                "total_steps": 35,
                "learning_rate": 1e-3,
                "metrics": {"accuracy": 0.5},
                "evaluations": {},
            },
            "statistics": {"gradient_norms": list(NORMS[0]), "loss": 0.25},
            "wanted": 3,
            "decision": 3,
            "why": "cap and smallest gradient norm allow 3 units",
        }
    ]


def test_a_cap_that_is_no_whole_number_is_said_to_be_rounded_up():
    # Without it "5 of 7 units frozen: the cap stands at 4.926 units" looks wrong.
    policy = AlphaCap(1 / 3, gradient_term=False)
    policy.bind(7)
    for point in range(4):
        frozen = policy.decide(Progress(point, 7 * point, 35, 1e-3, {}))
    assert frozen == 5
    assert policy.log[-1]["why"] == "the cap stands at 4.926 units, rounded up"


def test_a_log_of_gradient_norms_alone_is_replayed():
    policy = AlphaCap(1 / 3)
    policy.bind(6)
    decisions = run(policy)
    for entry in policy.log:
        entry["gradient_norms"] = entry.pop("statistics")["gradient_norms"]
        del entry["why"]
    assert replay(lambda: AlphaCap(1 / 3), policy.log) == decisions


def test_no_decision_goes_below_the_starting_units(factory):
    policy = factory()
    policy.bind(6, starting_units=3)
    decisions = run(policy)
    assert min(decisions) == decisions[0] == 3
    log = json.loads(json.dumps(policy.log))
    assert replay(factory, log) == decisions


def test_what_is_foreseen_is_what_is_decided_later(factory):
    policy = factory()
    policy.bind(6, starting_units=1)
    before = [policy.decide(Progress(0, 0, 35, 1e-3, {"a": 0.5}))]
    state, log = policy.state_dict(), list(policy.log)
    seen = policy.foresee(Progress(0, 0, 35, 1e-3, {"a": 0.5}), 4, steps=7)
    assert (policy.state_dict(), policy.log) == (state, log)
    assert (seen is None) == bool(policy.needs)
    if seen is not None:
        later = [
            policy.decide(Progress(point, 7 * point, 35, 1e-3, {"a": 0.5}))
            for point in range(1, 5)
        ]
        assert seen == later and len(before + later) == 5


class Unkept(Schedule):
    """Remembers more than its state tells."""

    def __init__(self, counts):
        super().__init__(counts)
        self.asked = []

    def _choose(self, progress, stats):
        self.asked.append((progress.epoch, progress.step))
        return super()._choose(progress, stats)


def test_what_is_foreseen_changes_nothing_at_all():
    policy = Unkept([0, 2, 4])
    policy.bind(6)
    policy.decide(Progress(0, 0))
    assert policy.foresee(Progress(0, 0), 2, steps=7) == [2, 4]
    assert policy.asked == [(0, 0)]


def test_what_cannot_be_copied_is_not_foreseen(caplog):
    policy = Schedule([0, 2])
    policy.bind(6)
    policy.lock = threading.Lock()
    with caplog.at_level(logging.INFO):
        assert policy.foresee(Progress(0, 0), 1) is None
    assert "not foreseen, as it cannot be copied" in caplog.text


def test_the_cap_freezes_its_share_of_what_trains():
    policy = AlphaCap(1 / 3, gradient_term=False)
    policy.bind(12, starting_units=6)
    decisions = [policy.decide(Progress(point, point)) for point in range(4)]
    assert decisions == [6, 8, 10, 11]  # of 6 units: 2, 3 1/3, 4 2/9


def test_a_log_without_starting_units_is_replayed():
    policy = Schedule([0, 2])
    policy.bind(6)
    run(policy)
    for entry in policy.log:
        del entry["starting_units"]
    assert replay(lambda: Schedule([0, 2]), policy.log) == [0, 2, 2, 2, 2]


def test_policy_refuses_more_starting_units_than_units():
    text = r"starting_units: expected a count in \[0, 6\], got 7"
    with pytest.raises(ValueError, match=text):
        Never().bind(6, starting_units=7)


def test_policy_uses_statistics_once():
    policy = AlphaCap(0.5, gradient_term=True)
    policy.bind(6)
    policy.observe(FreezeStatistics(NORMS[0]))
    policy.decide(Progress(1, 1))
    with pytest.raises(ValueError, match="gradient_norms: expected 6 values"):
        policy.decide(Progress(2, 2))


def test_dry_run_freezes_nothing_and_logs_what_it_would(caplog):
    policy = AlphaCap(1 / 3, dry_run=True, gradient_term=False)
    policy.bind(12)
    with caplog.at_level(logging.INFO):
        decisions = [policy.decide(Progress(point, point)) for point in range(4)]
    assert decisions == [0, 0, 0, 0]
    assert [entry["wanted"] for entry in policy.log] == [0, 4, 7, 9]
    assert "dry run at step 2: would freeze 7 of 12 units" in caplog.text


def test_schedule_follows_the_list_and_keeps_the_last_value():
    policy = Schedule([0, 6, 6, 8])
    policy.bind(12)
    decisions = [policy.decide(Progress(point, point)) for point in range(6)]
    assert decisions == [0, 6, 6, 8, 8, 8]


def test_schedule_refuses_bad_counts():
    with pytest.raises(ValueError, match="counts: expected at least one count, got"):
        Schedule([])
    with pytest.raises(ValueError, match="counts: expected a count >= 0, got -1"):
        Schedule([0, -1])
    with pytest.raises(TypeError, match=r"counts: expected an int, got 1\.5"):
        Schedule([0, 1.5])
    with pytest.raises(TypeError, match=r"evaluation point T at place T, got dict"):
        Schedule({1: 3})
    text = r"counts: expected a count in \[0, 4\], got 5"
    with pytest.raises(ValueError, match=text):
        Schedule([0, 5]).bind(4)


def test_manual_freezes_and_unfreezes_on_request():
    policy = Manual()
    policy.bind(4)
    decisions = []
    for request in (3, 1):
        policy.freeze(request)
        decisions.append(policy.decide(Progress(len(decisions), 0)))
    assert decisions == [3, 1]


def test_manual_refuses_more_units_than_there_are():
    text = r"num_frozen: expected a count in \[0, 4\], got 5"
    bound = Manual()
    bound.bind(4)
    with pytest.raises(ValueError, match=text):
        bound.freeze(5)
    early = Manual()
    early.freeze(5)
    with pytest.raises(ValueError, match=text):
        early.bind(4)


def test_policy_refuses_to_decide_unbound():
    with pytest.raises(ValueError, match=r"policy: expected bind\(num_units\) first"):
        Never().decide(Progress(0, 0))


@pytest.mark.parametrize("units", [6, 12])
def test_policy_refuses_a_second_model(units):
    policy = Never()
    policy.bind(12)
    with pytest.raises(ValueError, match="policy: expected a new one .* to 12 units"):
        policy.bind(units)


def test_policy_refuses_statistics_of_another_model():
    policy = AlphaCap(0.5, gradient_term=True)
    policy.bind(3)
    text = "gradient_norms: expected 3 values, one per unit, got 6"
    with pytest.raises(ValueError, match=text):
        policy.observe(FreezeStatistics(NORMS[0]))


def test_policy_refuses_l1_norms_of_another_model():
    policy = AutoFreeze()
    policy.bind(3)
    text = "gradient_l1: expected 3 values, one per unit, got 6"
    with pytest.raises(ValueError, match=text):
        policy.observe(FreezeStatistics(gradient_l1=NORMS[0]))


def test_policy_refuses_to_need_what_nobody_measures():
    class Curious(Never):
        needs = frozenset({"loss", "weather"})

    text = r"policy needs: expected a set of \[.*\], got \[.weather.\]"
    with pytest.raises(ValueError, match=text):
        Curious().bind(6)


def test_a_decision_is_told_with_its_place_and_reason():
    policy = Guarded(dry_run=True)
    policy.bind(12)
    for point, loss in enumerate([1.0, 0.001], 1):
        policy.observe(FreezeStatistics(loss=loss))
        policy.decide(Progress(point, 7 * point))
    assert [told(decision) for decision in policy.log] == [
        "point 1, step 7: 0 of 12 units frozen: the training loss is 100 % of its "
        "first mean, 0.5 % or less freezes",
        "point 2, step 14: 0 of 12 units frozen (6 wanted): the training loss is 0.1 % "
        "of its first mean, 0.5 % or less freezes",
    ]
    never = Never()
    never.bind(3)
    never.decide(Progress(0, 0))
    assert told(never.log[0]) == "point 0, step 0: 0 of 3 units frozen"


def test_policy_refuses_a_state_of_another_policy():
    schedule = Schedule([0])
    schedule.bind(6)
    cap = AlphaCap(0.5, gradient_term=False)
    cap.bind(6)
    text = r"policy state: expected the entries \[\] of Schedule, got \['frozen'"
    with pytest.raises(ValueError, match=text):
        schedule.load_state_dict(cap.state_dict())
    with pytest.raises(TypeError, match="policy state point: expected an int, got 1.5"):
        cap.load_state_dict({**cap.state_dict(), "point": 1.5})


def test_progress_refuses_a_negative_count():
    with pytest.raises(ValueError, match="epoch: expected a count >= 0, got -1"):
        Progress(-1, 0)


def test_policy_repr_makes_the_same_policy(factory):
    policy = factory()
    known = (AlphaCap, AutoFreeze, Guarded, Manual, Never, Plasticity, Schedule)
    names = {cls.__name__: cls for cls in known}
    again = eval(repr(policy), names)
    assert repr(again) == repr(policy)
    for one in (policy, again):
        one.bind(6)
    assert run(again) == run(policy)


def test_policy_repr_shows_every_setting():
    assert repr(AlphaCap(0.25, min_active=2)) == (
        "AlphaCap(alpha=0.25, gradient_term=True, min_active=2, dry_run=False)"
    )


def test_policy_of_the_documentation_works_and_replays():
    (block,) = blocks(ROOT / "docs" / "adding-a-policy.md", "python")
    names = {}
    exec(block.code, names)
    policy = names["AfterWarmUp"](7)
    policy.bind(6)
    decisions = run(policy)
    assert decisions == [0, 1, 2, 3, 4]
    log = json.loads(json.dumps(policy.log))
    assert replay(lambda: names["AfterWarmUp"](7), log) == decisions


class Choosing(Policy):
    """Chooses what it is told to."""

    def __init__(self, chosen):
        super().__init__()
        self._chosen = chosen

    def _choose(self, progress, stats):
        return self._chosen


@pytest.mark.parametrize(
    ("chosen", "kind", "text"),
    [
        (None, TypeError, "expected an int, got None"),
        (2.0, TypeError, "expected an int, got 2.0"),
        (-1, ValueError, r"expected a count in \[0, 6\], got -1"),
        (7, ValueError, r"expected a count in \[0, 6\], got 7"),
    ],
)
def test_what_a_policy_chooses_must_be_a_number_of_units(chosen, kind, text):
    policy = Choosing(chosen)
    policy.bind(6, starting_units=2)
    with pytest.raises(kind, match=rf"^Choosing, units to freeze at point 3: {text}$"):
        policy.decide(Progress(3, 21))
    assert policy.log == []


class Own(Policy):
    """Freezes what it is told, and remembers what it is told."""

    def __init__(self, chosen=0, held=0, needs=()):
        super().__init__()
        self.chosen, self.held, self.needs = chosen, held, needs

    def _choose(self, progress, stats):
        return self.chosen

    def _get_state(self):
        return {"held": self.held}

    def _set_state(self, state):
        self.held = state["held"]


@pytest.mark.parametrize("needs", [["loss"], ("loss",), {"loss"}])
def test_needs_may_be_any_collection_of_names(needs):
    policy = Own(needs=needs)
    policy.bind(4)
    assert policy.needs == frozenset({"loss"})


@pytest.mark.parametrize(
    ("needs", "got"),
    [
        ("loss", "'loss'"),
        (None, "None"),
        ([["loss"]], r"\[\['loss'\]\]"),
        ([1], r"\[1\]"),
    ],
)
def test_what_is_no_collection_of_names_is_refused(needs, got):
    with pytest.raises(ValueError, match=rf"needs: expected a set of .*, got {got}$"):
        Own(needs=needs).bind(4)


def test_numbers_of_numpy_are_numbers():
    held = {"a": [numpy.float32(0.5)], "b": numpy.int64(3)}
    policy = Own(chosen=numpy.int64(2), held=held)
    policy.bind(4)
    assert policy.decide(Progress(1, 10)) == 2
    assert json.loads(json.dumps(policy.log))[0]["state"]["held"] == {
        "a": [0.5],
        "b": 3,
    }
    with pytest.raises(TypeError, match="expected an int, got True"):
        decide_once(Own(chosen=True))


def decide_once(policy):
    policy.bind(4)
    return policy.decide(Progress(1, 10))


@pytest.mark.parametrize("held", [torch.ones(2), object(), {1: 2}, numpy.ones(2)])
def test_a_state_that_no_message_holds_is_refused_by_name(held):
    text = "Own state, held: expected (numbers, .* got (Tensor|object|nd)|texts .* 1)"
    with pytest.raises(TypeError, match=text):
        decide_once(Own(held=held))


def test_a_replay_does_not_warn_again(caplog):
    policy = Guarded(stake=0.3, monitor=("misspelt", "max"))
    policy.bind(6)
    for point, loss in enumerate([1.0, float("nan"), 0.5], 1):
        policy.observe(FreezeStatistics(loss=loss))
        policy.decide(Progress(point, 7 * point, metrics={"a": 0.5}))
    assert len(caplog.records) == 2
    caplog.clear()
    replay(lambda: Guarded(stake=0.3, monitor=("misspelt", "max")), policy.log)
    assert not caplog.records
