"""Costs that make no sense are refused with the field's name."""

import pytest

from tests.simulator.costs import simulate, stage, step

TOO_LONG = 2**53 + 1


def two_stages(**last):
    return [stage(1, 1, 1), stage(1, 1, 1, **last)]


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        (step("gpipe", [], 1), {}, "stages: expected at least 1, got 0"),
        (step("gpipe", two_stages(), 0), {}, "num_microbatches: expected 1 to"),
        (
            step("gpipe", two_stages(), 1, accumulation_steps=0),
            {},
            "accumulation_steps: expected at least 1, got 0",
        ),
        (step("gpipe", two_stages(), 2**22), {}, "num_microbatches: expected 1 to"),
        (
            step("gpipe", two_stages(), 4, num_recomputed=5),
            {},
            "num_recomputed: expected 0 to 4, got 5",
        ),
        (
            step("gpipe", two_stages(has_backward=False), 4),
            {},
            "stage 1 has_backward: expected true as of the stage before it",
        ),
        (step("gpipe", [], 1, prefix=("none", [])), {}, "stages"),
        (
            step("gpipe", two_stages(), 1, prefix=("none", [5])),
            {},
            "prefix_ns: expected 0 to 0 entries, got 1",
        ),
        (
            step("gpipe", two_stages(), 1, prefix=("replicated", [])),
            {},
            "prefix_ns: expected 1 to 1 entries, got 0",
        ),
        (
            step("gpipe", two_stages(), 1, prefix=("pipelined", [1, 2, 3])),
            {},
            "prefix_ns: expected 1 to 2 entries, got 3",
        ),
        (
            step("gpipe", two_stages(), 2**20, prefix=("replicated", [2**52])),
            {},
            "prefix_ns: expected at most 2.60 ns over all",
        ),
        (
            step("gpipe", two_stages(all_reduce_ns=4, network_all_reduce_ns=5), 1),
            {},
            "stage 1 network_all_reduce_ns: expected 0 to 4, got 5",
        ),
        (step("gpipe", two_stages(), 1), {"replicas": []}, "replicas: expected at le"),
        (
            step("gpipe", two_stages(), 1),
            {"replicas": [(1000,)]},
            "speeds of a replica's devices: expected 2 or none, got 1",
        ),
        (
            step("gpipe", two_stages(), 1),
            {"replicas": [(1000, 0)]},
            "speed of a device: expected 1 to 100000 thousandths, got 0",
        ),
        (
            step("gpipe", two_stages(), 1),
            {"replicas": [(), (2000, 2000)], "prefix_mode": "filled"},
            "gaps: expected 1, got 2",
        ),
        (
            step("gpipe", two_stages(), 2),
            {"lists": "0: F0 F1 B0 B1\n"},
            "schedule: expected 2 stages, as the costs, got 1",
        ),
    ],
)
def test_malformed_costs_are_refused(costs, options, message):
    with pytest.raises(ValueError, match=message):
        simulate(costs, **options)


@pytest.mark.parametrize(
    "name",
    [
        "forward_ns",
        "recompute_ns",
        "input_grad_ns",
        "weight_grad_ns",
        "forward_copy_ns",
        "backward_copy_ns",
        "all_reduce_ns",
        "network_all_reduce_ns",
        "state_bytes",
        "kept_bytes",
        "recomputed_bytes",
        "kept_for_weights_bytes",
    ],
)
def test_each_cost_of_a_stage_has_a_range(name):
    for value in (-1, 2**62):
        costs = step("gpipe", two_stages(**{name: value}), 4)
        with pytest.raises(ValueError, match=f"stage 1 {name}: expected 0 to"):
            simulate(costs)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ("0: F0 B0 F1 B1\n1: F1 B1 F0 B0\n", "B0: expected no operations that wait"),
        ("0: F0 F1 B1 B0\n1: F0 F1 B0\n", "B1: expected a B or I of the stage after"),
        ("0: F0 B0\n1: B0 F0\n", "B0: expected the F of its micro-batch before it"),
    ],
)
def test_lists_that_cannot_run_are_refused_with_the_operation(lists, message):
    with pytest.raises(ValueError, match=message):
        simulate(step("gpipe", two_stages(), 2), lists=lists)


def test_largest_costs_are_timed_without_overflow():
    longest = stage(2**53, 2**53, 2**53, state_bytes=2**61, kept_bytes=2**55)
    result = simulate(step("gpipe", [longest], 10))
    assert result.step_ns == 30 * 2**53
    assert result.pipelines[0].peak_bytes == [2**61 + 10 * 2**55]
    with pytest.raises(ValueError, match="at most 2.60 ns together"):
        simulate(step("gpipe", [stage(2**53, 2**53, 2**53)], 100))
