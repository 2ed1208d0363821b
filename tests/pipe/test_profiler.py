"""Every cell runs under a profiler range, in both passes."""

import collections

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from .models import MODES, linears, make_pipe

NUM_STAGES, NUM_MICROBATCHES = 3, 4
CELLS = {
    f"chunk{i}-part{j}" for i in range(NUM_MICROBATCHES) for j in range(NUM_STAGES)
}
NUM_AGAIN = {"never": 0, "except_last": 3, "always": 4}
every_mode = pytest.mark.parametrize("mode", MODES)
every_dispatch = pytest.mark.parametrize("dispatch", ["serial", "threads"])


def make(mode, dispatch, **options):
    layers = nn.Sequential(*linears(NUM_STAGES))
    return make_pipe(
        layers, NUM_STAGES, NUM_MICROBATCHES, mode, dispatch=dispatch, **options
    )


def ranges(function):
    """Ranges of cells that a CPU trace holds, with their numbers."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        result = function()
    names = [event.name for event in trace.events() if event.name.startswith("chunk")]
    return result, collections.Counter(names), trace


def rows():
    return torch.randn(8, 5, dtype=torch.double)


@every_mode
@every_dispatch
def test_each_pass_has_a_range_per_cell(mode, dispatch):
    pipe = make(mode, dispatch)
    loss, forward, _ = ranges(lambda: pipe(rows()).sum())
    assert forward == dict.fromkeys(CELLS, 1)
    _, backward, _ = ranges(loss.backward)
    pipe.close()
    again = {
        f"chunk{i}-part{j}-recompute"
        for i in range(NUM_AGAIN[mode])
        for j in range(NUM_STAGES)
    }
    assert backward == dict.fromkeys(CELLS | again, 1)


@every_dispatch
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_schedules_with_a_loss_have_both_ranges_in_their_call(schedule, dispatch):
    def loss(output, targets):
        return (output * targets).mean()

    pipe = make("never", dispatch, schedule=schedule, loss=loss)
    _, names, _ = ranges(lambda: pipe(rows(), targets=rows()))
    pipe.close()
    cells = {name: count for name, count in names.items() if name in CELLS}
    assert cells == dict.fromkeys(CELLS, 2)
    others = set(names) - CELLS
    assert (schedule == "1f1b") == (not others)
    # A part without the weights' gradients, and those; the lowest stage does both.
    assert others <= {f"{cell}-weights" for cell in CELLS}


@every_dispatch
def test_ranges_hold_the_operations_of_their_cell(dispatch):
    pipe = make("never", dispatch)
    x = rows()

    def step():
        pipe(x).sum().backward()

    _, _, trace = ranges(step)
    pipe.close()
    found = collections.Counter()
    for event in trace.events():
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("chunk"):
            parent = parent.cpu_parent
        if parent is not None:
            found[parent.name, event.name] += 1
    for cell in CELLS:
        assert found[cell, "aten::addmm"] == 1
        # Of the weight, and of the input where there is a stage below.
        assert found[cell, "aten::mm"] == (1 if cell.endswith("part0") else 2)
