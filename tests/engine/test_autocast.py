"""Training steps under torch.autocast: repeatable, and never with old weights."""

import pytest
import torch

import pipetransformer as pt
from pipetransformer.pipe.runner import Runner
from tests.engine.scenario import config, equal, make_engine, schedule
from tests.support.private import model_of
from tests.support.toy import ToySet


def casting():
    return torch.autocast("cpu", torch.bfloat16)


def train(*, slots=1, microbatches=2, checkpoint="never", around_all=False):
    """Train two epochs; return the losses of all steps and the weights."""
    settings = config(
        pipe=pt.PipeConfig(num_slots=slots, checkpoint=checkpoint),
        plan=pt.PlanConfig(num_stages=slots, num_microbatches=microbatches),
    )
    engine = make_engine(freeze=schedule(0, 2), config=settings)
    losses = []
    with engine:
        for _ in engine.epochs(2):
            if around_all:
                with casting():
                    losses += [engine.step(b) for b in engine.batches(ToySet(36), 12)]
                continue
            for batch in engine.batches(ToySet(36), 12):
                with casting():
                    losses.append(engine.step(batch))
        weights = [p.detach().clone() for p in model_of(engine).parameters()]
    return losses + weights


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_runs_are_equal_to_the_bit_whatever_dispatch_the_times_choose(
    monkeypatch, checkpoint
):
    options_of, runs = Runner._options, []
    for forced in ("serial", "threads", "serial"):

        def options(self, *args, forced=forced, **kwargs):
            made = options_of(self, *args, **kwargs)
            assert made.dispatch == "auto"
            made.dispatch = forced
            return made

        monkeypatch.setattr(Runner, "_options", options)
        runs.append(train(slots=2, microbatches=4, checkpoint=checkpoint))
    assert equal(runs[0], runs[1]) and equal(runs[0], runs[2])


@pytest.mark.parametrize("slots, microbatches", [(1, 1), (1, 2), (2, 2)])
def test_a_region_around_all_steps_trains_like_one_around_each(slots, microbatches):
    sizes = {"slots": slots, "microbatches": microbatches}
    assert equal(train(**sizes, around_all=True), train(**sizes))
