"""Stages that wait: what they wait for, and how schedules split it."""

import threading

import pytest
import torch
from torch import nn

from simulated import waits
from simulated.steps import SCHEDULES, Case
from simulated.trials import Stepper, Subject
from simulated.waits import (
    HALF_FROZEN,
    UNEQUAL,
    Wait,
    WaitLayer,
    WaitPipeline,
    random_pipelines,
)

WAIT = Wait(forward_s=0.3, input_grad_s=0.5, weight_grad_s=0.8)


@pytest.fixture
def waited(monkeypatch):
    """What is waited for, as (thread, seconds); no time passes."""
    log = []

    def record(seconds):
        if seconds > 0:
            log.append((threading.get_ident(), round(seconds, 9)))

    monkeypatch.setattr(waits, "_wait", record)
    return log


def seconds(log):
    return [entry for _, entry in log]


def test_wait_layer_waits_apart_for_inputs_and_weights(waited):
    layer = WaitLayer(WAIT)
    value = torch.zeros(8, 1, requires_grad=True)
    output = layer(value)
    assert seconds(waited) == [0.3]
    waited.clear()
    torch.autograd.grad(output.sum(), [value])
    assert seconds(waited) == [0.4, 0.1]
    waited.clear()
    torch.autograd.grad(layer(value).sum(), [value, *layer.parameters()])
    assert sorted(seconds(waited)) == [0.1, 0.3, 0.4, 0.4, 0.4]


def test_wait_layer_drops_a_third_of_forward_where_no_input_gradient_is_needed(waited):
    layer = WaitLayer(WAIT)
    layer(torch.zeros(8, 1)).sum().backward()
    assert sorted(seconds(waited)) == [0.3, 0.4, 0.4, 0.4]


def test_wait_is_proportional_to_the_rows(waited):
    layer = WaitLayer(WAIT)
    layer(torch.zeros(12, 1)).sum().backward()
    assert sorted(seconds(waited)) == pytest.approx([0.45, 0.6, 0.6, 0.6])


def pipeline(num_frozen=0, mix="heterogeneous"):
    return WaitPipeline(mix, (WAIT, WAIT), num_frozen, 3)


def stepper(subject, schedule, checkpoint="never"):
    inputs = subject.batch()
    case = Case((0, 1, 2), subject.num_microbatches, schedule, checkpoint)
    return Stepper(
        Subject(
            name="waits",
            kind="waits",
            model=subject.model,
            inputs=inputs,
            targets=torch.zeros_like(inputs),
            loss=nn.functional.mse_loss,
            cases=(case,),
            alone=lambda: None,
        ),
        case,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_waits_for_the_same(waited, schedule):
    run = stepper(pipeline(), schedule)
    assert run.seconds() > 0
    run.close()
    # First stage: no input gradient of the first operation.
    per_microbatch = [0.3, 0.4, 0.4, 0.4] + [0.3, 0.1, 0.4, 0.4, 0.4]
    assert sorted(seconds(waited)) == sorted(3 * per_microbatch)


def test_zero_bubble_splits_the_backward_of_a_waiting_stage(waited):
    run = stepper(pipeline(), "zb-h1")
    run.seconds()
    run.close()
    threads = dict.fromkeys(thread for thread, _ in waited)
    stages = [[s for t, s in waited if t == thread] for thread in threads]
    # The last stage waits for both input gradients before it waits for weights.
    last = next(log for log in stages if 0.1 in log)
    start = last.index(0.1)
    assert last[start - 1 : start + 1] == [0.4, 0.1]
    assert last[: start - 1].count(0.4) == 0


def test_frozen_stage_waits_forward_only(waited):
    run = stepper(pipeline(num_frozen=1, mix=HALF_FROZEN), "1f1b")
    run.seconds()
    run.close()
    assert sorted(seconds(waited)) == sorted(3 * [0.3, 0.3, 0.4, 0.4, 0.4])


def test_recomputation_waits_for_forward_again(waited):
    run = stepper(pipeline(), "gpipe", "always")
    run.seconds()
    run.close()
    assert seconds(waited).count(0.3) == 2 * 2 * 3


def test_random_pipelines_are_those_of_their_seed():
    found = random_pipelines([2, 5], 4, 7)
    assert found == random_pipelines([2, 5], 4, 7)
    assert found != random_pipelines([2, 5], 4, 8)
    assert [p.num_stages for p in found] == [2] * 4 + [5] * 4
    for each in found:
        frozen = 1 <= each.num_frozen < each.num_stages
        assert frozen if each.mix == HALF_FROZEN else each.num_frozen == 0
        assert 2 <= each.num_microbatches <= 2 * each.num_stages
        assert (0 < each.num_larger < each.num_microbatches) == (each.mix == UNEQUAL)
        rows = [len(part) for part in each.batch().tensor_split(each.num_microbatches)]
        assert sorted(set(rows)) == each.sizes()
        for wait in each.waits:
            assert 2e-3 <= wait.forward_s <= 10e-3
            assert wait.input_grad_s >= wait.forward_s / 3
