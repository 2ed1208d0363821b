"""From profiles to simulated seconds, errors and their summary; waiting for quiet."""

import dataclasses

import pytest

from harness import quiet
from harness.common import Row
from harness.quiet import others_share, when_quiet
from pipetransformer.planner import LayerProfile, Profile
from simulated.accuracy import ALL, Error, summaries
from simulated.steps import Case, median_profile, plan_of, simulated_s
from simulated.trials import Compared, Subject
from simulator_accuracy import errors_of

MS = 1_000_000


def layer(forward_ms, input_ms, weight_ms, *, trainable=True):
    return LayerProfile(
        name="layer",
        forward_ns=(forward_ms * MS,),
        input_grad_ns=(input_ms * MS,),
        weight_grad_ns=(weight_ms * MS,),
        parameter_bytes=4,
        activation_bytes_per_sample=4,
        weight_grad_activation_bytes_per_sample=4,
        boundary_bytes_per_sample=4,
        trainable=trainable,
        forward_only_ns=(forward_ms * MS,),
    )


def profile(*layers):
    return Profile(name="model", microbatch_samples=(2,), layers=layers)


def test_simulated_step_is_gpipes_closed_form():
    two = profile(layer(3, 4, 2), layer(6, 2, 1))
    case = Case((0, 1, 2), 5, "gpipe")
    # The first layer drops a third of its forward time from the input gradient.
    total, bottleneck = (3 + 3 + 2) + (6 + 2 + 1), 6 + max(3 + 2, 2 + 1)
    assert simulated_s(two, case, 10) == pytest.approx((total + 4 * bottleneck) / 1e3)


def test_simulated_frozen_stage_has_no_backward():
    two = profile(layer(3, 9, 9, trainable=False), layer(6, 3, 1))
    case = Case((0, 1, 2), 2, "gpipe")
    assert simulated_s(two, case, 4) == pytest.approx((3 + 6 + 6 + 2 * (1 + 1)) / 1e3)


def test_plan_holds_what_the_case_says():
    case = Case((0, 1, 3), 4, "zb-h1", "always")
    plan = plan_of(profile(*[layer(1, 1, 1)] * 3), case, 8)
    assert (plan.cuts, plan.num_microbatches) == (case.cuts, 4)
    assert (plan.schedule, plan.checkpoint) == ("zb-h1", "always")
    assert str(case) == "K=2 M=4 zb-h1 always"


def test_median_profile_takes_each_time_apart():
    found = median_profile(
        [profile(layer(*times)) for times in ((1, 9, 5), (2, 7, 4), (9, 8, 6))]
    )
    assert found.layers == (layer(2, 8, 5),)


def test_median_profile_of_different_models_is_refused():
    with pytest.raises(ValueError, match="profiles: expected equal sizes and layers"):
        median_profile([profile(layer(1, 1, 1)), profile(*[layer(1, 1, 1)] * 2)])


def error(subject, kind, value, schedule="gpipe"):
    return Error(
        f"{subject} {schedule}", subject, kind, schedule, "never", 2, 3, 1, value
    )


def test_summary_counts_pipelines_and_takes_sizes_of_errors():
    found = {
        each.group: each
        for each in summaries(
            [
                error("a", "x", -0.04),
                error("a", "x", 0.01, "1f1b"),
                error("b", "y", -0.02),
            ]
        )
    }
    assert list(found) == [ALL, "x", "x, gpipe, never", "x, 1f1b, never", "y"] + [
        "y, gpipe, never"
    ]
    everything = found[ALL]
    assert (everything.pipelines, everything.cases) == (2, 3)
    assert (everything.median, everything.worst) == (0.02, 0.04)
    assert everything.bias == -0.02
    assert found["x"].pipelines == 1
    assert found["x"].median == pytest.approx(0.025)
    assert summaries([]) == []


def rows(measured, simulated, **changes):
    first = Row("p", "step time", "s", measured)
    return dataclasses.replace(first, **changes), Row("p", "simulated", "s", simulated)


def subject():
    return Subject("p", "kind", None, [0], [0], None, (), None)


def test_error_is_that_of_the_median_pair():
    compared = Compared(
        Case((0, 1), 2, "1f1b"), *rows((1.0, 2.0, 4.0), (1.1, 1.8, 4.0))
    )
    ratios, (found,) = errors_of(subject(), [compared], quick=False)
    assert ratios[0].value == pytest.approx(1.0)
    assert found.value == pytest.approx(0.0)
    assert (found.case, found.kind, found.schedule) == ("p", "kind", "1f1b")
    assert found.measured_s == 2.0


def test_failed_repeat_gives_no_error(capsys):
    compared = Compared(
        Case((0, 1), 2, "1f1b"), *rows((1.0,) * 3, (1.0,) * 3, failed=1)
    )
    assert errors_of(subject(), [compared], quick=False) == ([], [])
    assert "refused" in capsys.readouterr().out


class Machine:
    """A clock and processors of which others use a given share, call by call."""

    def __init__(self, monkeypatch, shares):
        self.now = self.busy = self.cpu = 0.0
        self.shares = list(shares)
        monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
        monkeypatch.setattr(quiet, "machine_busy_s", lambda: self.busy)
        monkeypatch.setattr(quiet.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(quiet.time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(quiet.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds

    def measure(self):
        share = self.shares.pop(0)
        self.now += 1.0
        self.cpu += 0.5
        self.busy += 0.5 + 2 * share
        return share


def test_measurement_is_repeated_until_others_are_quiet(monkeypatch):
    machine = Machine(monkeypatch, [0.9, 0.5, 0.1, 0.0])
    found = when_quiet(machine.measure, patience_s=60)
    assert (found.value, [each.value for each in found.dropped]) == (0.1, [0.9, 0.5])
    assert found.dropped[0].why_dropped == "others used 90% of the cores"
    assert found.others_share == pytest.approx(0.1)
    assert (found.sample.wall_s, found.sample.cpu_s) == (1.0, 0.5)


def test_patience_ends_with_the_result_as_it_is(monkeypatch):
    machine = Machine(monkeypatch, [0.9] * 9)
    found = when_quiet(machine.measure, patience_s=5)
    assert found.others_share == pytest.approx(0.9)
    assert 0 < len(found.dropped) < 5
    assert when_quiet(machine.measure, patience_s=0).dropped == ()


def test_share_of_others_is_of_all_cores(monkeypatch):
    monkeypatch.setattr(quiet.os, "cpu_count", lambda: 4)
    assert others_share(3.0, 2.0, 1.0) == pytest.approx(0.25)
    assert others_share(0.5, 2.0, 1.0) == 0.0
    assert others_share(None, 2.0, 1.0) is None
