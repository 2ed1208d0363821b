"""Guarded: nothing freezes while something is at stake, and what froze thaws again."""

import json
import logging
import math
import random

import pytest

from pipetransformer.autofreeze import (
    FreezeStatistics,
    Guarded,
    LossSum,
    Progress,
    replay,
)


def bound(num_units=12, *, starting_units=0, **settings):
    policy = Guarded(**{"stake": 0.02, **settings})
    policy.bind(num_units, starting_units=starting_units)
    return policy


def decide(policy, point, loss, *, total=None, counts=None, **metrics):
    policy.observe(FreezeStatistics(loss=loss))
    return policy.decide(
        Progress(
            point,
            step=10 * point,
            total_steps=total,
            metrics=metrics,
            evaluations=counts or {},
        )
    )


def row(policy, losses, **options):
    """Return the decisions at points 1, 2, ... after intervals of these losses."""
    return [
        decide(policy, point, loss, **options) for point, loss in enumerate(losses, 1)
    ]


def test_nothing_freezes_while_the_loss_is_above_the_stake():
    losses = [1.0, 0.5, 0.1, 0.03, 0.021, 0.0201]
    assert row(bound(), losses) == [0] * 6


def test_below_the_stake_each_point_freezes_its_share():
    assert row(bound(), [1.0, 0.01, 0.01, 0.01, 0.01, 0.01]) == [0, 6, 9, 11, 11, 11]
    assert row(bound(alpha=1 / 3), [1.0, 0.02, 0.01]) == [0, 4, 7]
    # What is in between stops it where it is.
    assert row(bound(), [1.0, 0.01, 0.03, 0.03, 0.02]) == [0, 6, 6, 6, 9]


def test_the_first_mean_is_the_measure_and_no_later_one():
    # A loss that has gone up since does not make freezing any safer.
    assert row(bound(), [0.5, 2.0, 0.03, 0.01]) == [0, 0, 0, 6]
    assert row(bound(stake=0.5), [1.0, 0.5]) == [0, 6]


def test_the_first_mean_is_over_the_first_tenth_of_the_steps():
    # Finer points make the stake no larger. Point p comes after 10 p steps.
    losses = [4.0, 1.0, 0.5, 0.5, 0.029, 0.031, 0.029]
    assert row(bound(), losses, total=400) == [0, 0, 0, 0, 6, 6, 9]  # of 1.5
    assert row(bound(), losses, total=100) == [0, 0, 0, 0, 6, 9, 11]  # of 4.0
    assert row(bound(), losses) == [0, 0, 0, 0, 6, 9, 11], "no end is known"


def test_a_loss_below_zero_freezes_nothing():
    assert row(bound(), [-1.0, -2.0, -3.0]) == [0, 0, 0]
    assert row(bound(), [1.0, 0.5, -0.1, -5.0]) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "num_units, settings, most",
    [
        (12, {}, 11),
        (24, {}, 21),
        (1, {}, 0),
        (12, {"min_active": 0}, 12),
        (12, {"min_active": 7}, 5),
        (3, {"min_active": 3}, 0),
    ],
)
def test_some_units_stay_active(num_units, settings, most):
    found = row(bound(num_units, **settings), [1.0] + [0.0] * 20)
    assert found[-1] == most
    assert found == sorted(found)


def test_units_that_never_train_are_frozen_from_the_start_and_stay_so():
    policy = bound(12, starting_units=4)
    assert row(policy, [1.0, 1.0, 0.01, 0.01, 1.0, 1.0]) == [4, 4, 8, 10, 4, 4]


def test_nothing_freezes_in_the_first_tenth_of_the_steps():
    # Point p comes after 10 p steps.
    assert row(bound(), [1.0, 0.0, 0.0, 0.0, 0.0], total=400) == [0, 0, 0, 6, 9]


def test_all_units_thaw_when_the_loss_comes_back_and_rest_for_three_points():
    losses = [1.0, 0.01, 0.01, 0.059, 0.061, 0.01, 0.01, 0.01, 0.01, 0.01]
    #                          allowed  back   <-- rest ------>
    assert row(bound(), losses) == [0, 6, 9, 9, 0, 0, 0, 0, 6, 9]


def test_after_the_second_thaw_nothing_freezes():
    losses = [1.0, 0.01, 1.0, *[0.01] * 4, 1.0, *[0.01] * 20]
    found = row(bound(), losses)
    assert found[:9] == [0, 6, 0, 0, 0, 0, 6, 0, 0]
    assert set(found[9:]) == {0}


def test_what_came_back_is_the_first_mean_of_what_follows():
    #                       back   <-- rest -->  2 % of it
    losses = [1.0, 0.02, 2.5, 0.04, 0.04, 0.04, 0.051, 0.049]
    assert row(bound(), losses) == [0, 6, 0, 0, 0, 0, 0, 6]
    # One batch that went wrong is no new task: three times the first mean, no more.
    losses[2], losses[6:] = 500.0, [0.061, 0.059]
    assert row(bound(), losses) == [0, 6, 0, 0, 0, 0, 0, 6]
    # A small return makes the stake no smaller.
    losses[2], losses[6:] = 0.07, [0.021, 0.019]
    assert row(bound(), losses) == [0, 6, 0, 0, 0, 0, 0, 6]


def falling(point):
    """Return a training loss that falls by 30 % from point to point."""
    return 0.7**point


def monitored(values, *, loss=falling, **settings):
    policy = bound(monitor=("m", "min"), **settings)
    return [
        decide(policy, point, loss(point), m=value)
        for point, value in enumerate(values, 1)
    ]


def test_a_metric_that_does_not_improve_lets_units_freeze():
    assert monitored([5, 4, 3, 3.5, 3.2, 3.1]) == [0, 0, 0, 0, 6, 9]
    assert monitored([5, 4, 3, 3.5, 2.9, 3.1]) == [0] * 6, "it has improved again"
    assert monitored([5, 4, 6], patience=1) == [0, 0, 6]


def test_nothing_freezes_unless_the_training_loss_falls_meanwhile():
    """Where both stand still, nothing is known of what is still to be learned."""
    values = [5, 4, 6, 7, 8, 9]
    assert monitored(values, loss=lambda point: 0.5) == [0] * 6
    slow = [1.0, 0.8, 0.7, 0.65, 0.61, 0.59]  # a quarter below the 0.8 is 0.6
    found = monitored(values, loss=lambda point: slow[point - 1])
    assert found == [0, 0, 0, 0, 0, 6]


def test_the_fall_counts_from_the_evaluation_that_was_best_and_not_from_later_points():
    """Here there are four points for each evaluation."""
    policy, found = bound(monitor=("m", "min"), patience=1), []
    for point in range(1, 10):
        evaluation = (point - 1) // 4
        loss, m = 0.9**point, [5, 6, 7][evaluation]
        found.append(decide(policy, point, loss, m=m, counts={"m": evaluation + 1}))
    assert found == [0, 0, 0, 0, 6, 9, 11, 11, 11]


def test_a_loss_that_is_unknown_at_the_best_evaluation_counts_from_the_next_one():
    policy = bound(monitor=("m", "min"), patience=1)
    losses = [1.0, 0.9, math.nan, 0.8, 0.61, 0.59]
    values = [5, 4, 3, 4, 5, 6]
    pairs = enumerate(zip(losses, values, strict=True), 1)
    found = [decide(policy, point, loss, m=m) for point, (loss, m) in pairs]
    assert found == [0, 0, 0, 0, 0, 6]


def test_a_metric_that_has_not_moved_yet_freezes_nothing():
    """As an accuracy while a model says the largest class, whatever it is given."""
    counts = [*range(1, 8)]
    assert counted([0.9] * 7, counts) == [0] * 7
    assert counted([0.9, 0.9, 0.9, 0.91, 0.91, 0.91, 0.91], counts)[4:] == [0, 6, 9]
    assert counted([0.9, 0.9, 0.89, 0.9, 0.88, 0.9, 0.9], counts)[3:5] == [0, 6]


def with_rates(rates, *, total=None):
    """Return decisions under learning rates by point; a monitor freezes from 3 on."""
    policy, found = bound(monitor=("m", "min"), patience=1), []
    for point, rate in enumerate(rates, 1):
        policy.observe(FreezeStatistics(loss=falling(point)))
        progress = Progress(
            point,
            step=10 * point,
            total_steps=total,
            learning_rate=rate,
            metrics={"m": 5 if point < 3 else 5 + point},
        )
        found.append(policy.decide(progress))
    return found


def test_units_thaw_when_the_learning_rate_falls_in_a_step():
    # The value at point 3 is worse than the best one, and so are all after it.
    assert with_rates([1.0] * 6) == [0, 0, 6, 9, 11, 11]
    assert with_rates([1.0, 1.0, 1.0, 0.3, 0.3, 0.3])[2:] == [6, 0, 0, 6]
    assert with_rates([1.0, 1.0, 1.0, 0.4, 0.2, 0.1])[2:] == [6, 9, 11, 11], "slowly"
    # It may fall as often as it does, and thaws as often.
    rates = [1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]
    assert with_rates(rates)[2:] == [6, 0, 0, 6, 0, 0, 6]
    # At the end of a schedule nothing is left to learn again.
    assert with_rates([1.0, 1.0, 1.0, 0.1], total=50)[2:] == [6, 9]
    assert with_rates([1.0, 1.0, 1.0, 0.1], total=60)[2:] == [6, 0]


def test_a_step_of_the_learning_rate_thaws_nothing_where_little_is_left():
    policy, found = bound(), []
    for point, loss in enumerate([1.0, 0.01, 0.01, 0.01, 0.059], 1):
        policy.observe(FreezeStatistics(loss=loss))
        rate = 1.0 if point < 4 else 0.01
        found.append(policy.decide(Progress(point, point, learning_rate=rate)))
    assert found == [0, 6, 9, 11, 11]


def test_larger_values_may_be_the_better_ones():
    policy = bound(monitor=("f1", "max"), patience=1)
    values = enumerate([1, 2, 3, 2.5], 1)
    assert [decide(policy, p, falling(p), f1=v) for p, v in values] == [0, 0, 0, 6]


def test_a_value_that_was_not_evaluated_anew_counts_once():
    assert monitored([5, 6, 6, 6, 6, 7]) == [0, 0, 0, 0, 0, 6]


def counted(values, counts, better="max", **settings):
    policy = bound(monitor=("m", better), **settings)
    pairs = zip(values, counts, strict=True)
    return [
        decide(policy, point, falling(point), m=value, counts={"m": count})
        for point, (value, count) in enumerate(pairs, 1)
    ]


def test_a_plateau_at_one_value_is_noticed_where_evaluations_are_counted():
    values = [0.9, 0.95, 0.95, 0.95, 0.95]
    assert counted(values, [1, 2, 3, 4, 5]) == [0, 0, 0, 6, 9]
    assert counted(values, [1, 2, 3, 3, 4]) == [0, 0, 0, 0, 6], "not anew at point 4"
    assert counted(values, [1, 2, 2, 2, 2]) == [0] * 5
    # Another value without another evaluation is none, as of two between two points.
    assert counted([5, 6, 7], [1, 1, 3], "min", patience=1) == [0, 0, 6]


def test_what_counts_evaluations_replays_and_goes_on_anywhere():
    values, counts = [0.9, 0.95, 0.95, 0.95, 0.95, 0.95], [1, 2, 3, 3, 4, 5]
    whole, decisions, states = bound(monitor=("m", "max")), [], []
    for point, (value, count) in enumerate(zip(values, counts, strict=True), 1):
        loss = falling(point)
        decisions.append(decide(whole, point, loss, m=value, counts={"m": count}))
        states.append(json.loads(json.dumps(whole.state_dict())))
    assert decisions == [0, 0, 0, 0, 6, 9]
    log = json.loads(json.dumps(whole.log))
    assert replay(lambda: Guarded(stake=0.02, monitor=("m", "max")), log) == decisions
    for cut, state in enumerate(states, 1):
        again = bound(monitor=("m", "max"))
        again.load_state_dict(state)
        rest = zip(values[cut:], counts[cut:], strict=True)
        assert decisions[cut:] == [
            decide(again, point, falling(point), m=value, counts={"m": count})
            for point, (value, count) in enumerate(rest, cut + 1)
        ]


def test_logs_and_states_of_older_versions_are_read_as_they_were_written():
    policy = bound(monitor=("m", "min"))
    values = [5, 6, 6, 6, 6, 7, 8]
    decisions = [
        decide(policy, p, falling(p), m=value) for p, value in enumerate(values, 1)
    ]
    assert decisions == [0, 0, 0, 0, 0, 6, 9]
    log = json.loads(json.dumps(policy.log))
    for entry in log:
        del entry["progress"]["evaluations"], entry["state"]["evaluations"]
    assert replay(lambda: Guarded(stake=0.02, monitor=("m", "min")), log) == decisions
    resumed = bound(monitor=("m", "min"))
    resumed.load_state_dict(log[2]["state"])  # it has seen 5 and 6
    # What was evaluated before the checkpoint has no count, what comes after has.
    assert decide(resumed, 3, falling(3), m=6) == 0
    assert decide(resumed, 4, falling(4), m=6, counts={"m": 1}) == 6
    oldest = {**log[2]["state"]}
    del oldest["best_loss"], oldest["moved"], oldest["rate"]
    resumed = bound(monitor=("m", "min"))
    resumed.load_state_dict(oldest)  # the loss counts from here on
    assert decide(resumed, 3, falling(3), m=6) == 0
    assert decide(resumed, 4, falling(4), m=6, counts={"m": 1}) == 6
    with pytest.raises(ValueError, match="policy state: expected the entries"):
        resumed.load_state_dict({"point": 0})


def test_without_the_metric_the_monitor_decides_nothing_and_says_so():
    policy = bound(monitor=("f1", "max"))
    assert row(policy, [1.0, 0.5, 0.5, 0.5]) == [0] * 4
    assert "not evaluated" in policy.log[-1]["why"]
    assert row(bound(monitor=("f1", "max")), [1.0, 0.01]) == [0, 6], "the loss does"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_counts_for_nothing_and_is_warned_of(value, caplog):
    policy = bound(monitor=("m", "max"), patience=1)
    found = [
        decide(policy, point, falling(point), m=value if point != 2 else 0.5)
        for point in range(1, 6)
    ]
    assert found == [0] * 5
    assert "m is no finite number, which counts" in policy.log[-1]["why"]
    (told,) = caplog.records
    assert f"expected finite values, got m={value}" in told.getMessage()


def test_a_monitor_that_no_evaluation_has_is_warned_of_once(caplog):
    policy = bound(monitor=("f1", "max"))
    row(policy, [1.0, 0.5])
    assert not caplog.records, "nothing was evaluated"
    row(bound(monitor=("f1", "max")), [1.0, 0.5, 0.5], accuracy=0.5, recall=0.1)
    (told,) = caplog.records
    assert "metric of engine.evaluate (accuracy, recall), got 'f1'" in told.getMessage()


def test_what_the_monitor_froze_thaws_when_the_loss_rises_by_half():
    policy = bound(monitor=("m", "min"), patience=1)
    given = [(1.0, 5), (0.4, 6), (0.59, 7), (0.61, 8)]
    found = [decide(policy, p, loss, m=m) for p, (loss, m) in enumerate(given, 1)]
    assert found == [0, 6, 9, 0]


def test_what_the_stake_froze_thaws_at_three_times_the_stake_whatever_came_between():
    assert row(bound(), [1.0, 0.01, -5.0, -2.0, 0.059]) == [0, 6, 6, 6, 6]
    assert row(bound(), [1.0, 0.01, -5.0, -2.0, 0.061]) == [0, 6, 6, 6, 0]


def test_that_follows_the_loss_down():
    for back, wanted in ((0.29, 6), (0.31, 0)):
        policy = bound(monitor=("m", "min"), patience=1)
        given = [(1.0, 5), (0.4, 6), (0.2, 4), (back, 3)]
        found = [decide(policy, p, loss, m=m) for p, (loss, m) in enumerate(given, 1)]
        assert found == [0, 6, 6, wanted]
    # No lower than three times the stake.
    policy = bound(monitor=("m", "min"), patience=1)
    given = [(1.0, 5), (0.4, 6), (0.025, 4), (0.059, 3), (0.061, 2)]
    found = [decide(policy, p, loss, m=m) for p, (loss, m) in enumerate(given, 1)]
    assert found == [0, 6, 6, 6, 0]


@pytest.mark.parametrize(
    ("losses", "thaws_above"),
    [
        ([-1.0, -2.0], -1.0),  # by half of its size
        ([-3.0, -1.0, -2.0], -0.5),  # by half of the first mean's
        ([1.0, 0.5, -0.2], 0.3),
        ([-1.0, 0.5, 0.0], 0.5),
        ([1.0, 0.4], 0.6),
    ],
)
def test_a_loss_of_0_or_less_thaws_when_it_rises_by_half_of_a_size(losses, thaws_above):
    def freeze():
        policy = bound(monitor=("m", "max"), patience=1)
        values = [9, *[9 + p for p in range(1, len(losses) - 1)], 0]
        found = [
            decide(policy, p, loss, m=m)
            for p, (loss, m) in enumerate(zip(losses, values, strict=True), 1)
        ]
        assert found == [*[0] * (len(losses) - 1), 6]
        return policy, len(losses) + 1

    policy, point = freeze()
    assert decide(policy, point, thaws_above - 0.01, m=0) >= 6
    policy, point = freeze()
    assert decide(policy, point, thaws_above + 0.01, m=0) == 0


def test_a_loss_below_zero_is_said_to_decide_nothing():
    policy = bound()
    row(policy, [-1.0, -2.0, 0.5])
    why = [entry["why"] for entry in policy.log]
    assert why[0] == "the training loss is -1: below 0 it decides nothing"
    assert why[2] == "the first mean loss is -1: below 0 it decides nothing"
    policy = bound()
    row(policy, [1.0, -0.35])
    assert policy.log[1]["why"] == (
        "the training loss is -0.35: below 0 it decides nothing"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_an_unknown_loss_changes_nothing(loss, caplog):
    policy = bound()
    assert row(policy, [1.0, 0.01]) == [0, 6]
    with caplog.at_level(logging.WARNING):
        assert decide(policy, 3, loss) == 6
    assert decide(policy, 4, 0.01) == 9
    if loss is not None:
        assert "step 30" in caplog.text


def test_the_same_point_repeats_its_answer():
    policy = bound()
    assert row(policy, [1.0, 0.01]) == [0, 6]
    assert decide(policy, 2, 0.01) == 6
    assert decide(policy, 1, 5.0) == 6


def test_it_says_what_decided_and_what_it_would_have_taken():
    policy = bound()
    row(policy, [1.0, 0.05, 0.01, 5.0])
    why = [entry["why"] for entry in policy.log]
    assert "5 % of its first mean, 2 % or less freezes" in why[1]
    assert "1 % of its first mean" in why[2]
    assert "came back to 5, above the 0.06" in why[3]
    held = bound()
    row(held, [1.0, 0.0], total=1000)
    assert "before step 100" in held.log[-1]["why"]


def test_random_runs_keep_the_rules():
    draw = random.Random(5)
    for _ in range(300):
        units = draw.randint(1, 24)
        policy = bound(units, alpha=draw.uniform(0, 0.95))
        first, before, thawed = None, 0, 0
        for point in range(1, 30):
            loss = draw.choice([1.0, 0.1, 0.01, 0.001]) * draw.random()
            first = loss if first is None else first
            now = decide(policy, point, loss)
            if now > before:
                assert loss <= 0.02 * first
                assert now <= units - max(1, units // 8)
                assert thawed <= 1
            elif now < before:
                assert now == 0
                assert loss > 0.02 * first
                first = max(first, min(loss, 3 * first))
                thawed += 1
            before = now


def test_its_log_replays_and_its_state_goes_on_anywhere():
    losses = [1.0, 0.01, 0.01, 1.0, *[0.01] * 5, 0.5]
    settings = {"monitor": ("m", "max"), "patience": 1}
    whole = bound(**settings)
    decisions = [
        decide(whole, p, loss, m=(p * 7) % 5) for p, loss in enumerate(losses, 1)
    ]
    log = json.loads(json.dumps(whole.log))
    assert replay(lambda: Guarded(stake=0.02, **settings), log) == decisions
    for cut in range(1, len(losses)):
        first, second = bound(**settings), bound(**settings)
        for point, loss in enumerate(losses[:cut], 1):
            decide(first, point, loss, m=(point * 7) % 5)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = [
            decide(second, point, loss, m=(point * 7) % 5)
            for point, loss in enumerate(losses[cut:], cut + 1)
        ]
        assert rest == decisions[cut:]


@pytest.mark.parametrize(
    "settings, error, text",
    [
        ({"alpha": 1.0}, ValueError, "alpha"),
        ({"alpha": "1/2"}, TypeError, "alpha: expected a number, got '1/2'"),
        ({"stake": 0.0}, ValueError, "stake: expected a number in (0, 1], got 0.0"),
        ({"stake": True}, TypeError, "stake: expected a number, got True"),
        ({"patience": 0}, ValueError, "patience: expected a count >= 1, got 0"),
        ({"monitor": "loss"}, ValueError, "monitor: expected a metric's name"),
        ({"monitor": ("loss", "low")}, ValueError, "monitor: expected a metric's name"),
        ({"min_active": -1}, ValueError, "min_active"),
        ({"min_active": 13}, ValueError, "min_active"),
    ],
)
def test_wrong_settings_are_refused(settings, error, text):
    with pytest.raises(error) as caught:
        bound(12, **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [("best", 1.0), ("last", [1, 2]), ("first", ["x"]), ("returns_at", math.inf)],
)
def test_a_state_of_wrong_values_is_refused(name, value):
    policy = bound()
    state = {**policy.state_dict(), name: value}
    with pytest.raises((TypeError, ValueError), match=f"policy state {name}"):
        policy.load_state_dict(state)


def test_losses_of_replicas_add_up_to_the_mean_over_all_rows():
    one, other = LossSum(), LossSum()
    one.add(lambda: 2.0, 3)
    one.add(lambda: 4.0, 1)
    other.add(lambda: 1.0, 4)
    parts = [one.own, other.own]
    for each in (one, other):
        each.settle(parts)
    assert one.take() == other.take() == (6 + 4 + 4) / 8
    assert one.own == (0.0, 0.0)
    assert one.take() is None, "a mean is used once"
    one.settle([(0.0, 0.0)])
    assert one.take() is None, "of no rows there is none"


def test_a_loss_is_read_when_the_sum_is_asked_for():
    asked = []

    def loss(value):
        return lambda: asked.append(value) or value

    found = LossSum()
    found.add(loss(2.0), 3)
    assert asked == []
    found.add(loss(4.0), 1)
    assert asked == [2.0], "the one before"
    assert found.own == found.own == (10.0, 4.0) and asked == [2.0, 4.0]
    found.add(loss(8.0), 1)
    assert found.take() is None and found.own == (0.0, 0.0), "begun anew"
    assert asked == [2.0, 4.0]


def test_losses_of_replicas_that_leave_are_gathered_by_one_that_stays():
    one, other = LossSum(), LossSum()
    one.add(lambda: 2.0, 3)
    other.add(lambda: 1.0, 4)
    parts = [one.own, other.own]
    one.gather(parts, keeps=True)
    other.gather(parts, keeps=False)
    assert one.own == (10.0, 7.0) and other.own == (0.0, 0.0)
    one.settle([one.own])
    assert one.take() == 10 / 7
