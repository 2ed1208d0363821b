"""The rivals outside the engine train the same model on the same batches."""

import argparse

import pytest
import torch
from _plain_loops import run_ddp, run_pipe
from _systems import SYSTEMS
from _table1_worker import run_engine
from _work import LayerCounter
from _workload import Settings, build_model

import pipetransformer as pt
from tests.support.ranks import run_ranks

TINY = Settings(width=8, heads=1)


def tiny_model():
    torch.manual_seed(0)
    return build_model(TINY)


def arguments(**changes):
    options = {
        "seed": 5,
        "epochs": 1,
        "slots": 2,
        "alpha": 1 / 3,
        "microbatches": None,
        "slot_memory": None,
        "baseline_pipe": None,
    }
    return argparse.Namespace(**{**options, **changes})


def counted(model):
    return LayerCounter(list(model)[1:-1])


def train_both(rank):
    mine, theirs = tiny_model(), tiny_model()
    counters = counted(mine), counted(theirs)
    engine = run_engine(SYSTEMS["best-static"], mine, arguments(), counters[0])
    plain = run_ddp(theirs, arguments())
    weights = [[p.detach() for p in model.parameters()] for model in (mine, theirs)]
    rows = [counter.rows() for counter in counters]
    return weights, rows, engine.to_json(), plain.to_json()


@pytest.mark.distributed
def test_plain_ddp_trains_what_the_engine_trains():
    lead, other = run_ranks(train_both, 2, timeout_s=100)
    (mine, theirs), _, engine, plain = lead
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    keys = ("samples", "optimizer_steps", "num_frozen_layers")
    for key in keys:
        assert engine["epochs"][0][key] == plain["epochs"][0][key], key
    assert abs(engine["final_accuracy"] - plain["final_accuracy"]) < 2 / 719
    assert plain["final_accuracy"] == other[3]["final_accuracy"]
    # Both count the same work: 12 blocks, every training and test sample once.
    for which in (0, 1):
        parts = [result[1][which] for result in (lead, other)]
        assert sum(part["trained"] for part in parts) == 12 * 1078
        assert sum(part["forward"] for part in parts) == 12 * 719
    assert set(plain["phase_seconds"]) >= {"data", "forward", "backward", "evaluate"}
    assert plain["epochs"][0]["elapsed_seconds"] <= plain["total_seconds"]


class Joined(torch.nn.Module):
    """Our own pipeline behind the interface of `--baseline-pipe`."""

    def __init__(self, model, num_stages, chunks):
        super().__init__()
        half = len(model) // num_stages
        self.pipe = pt.Pipe.from_plan(
            model,
            cuts=[0, half, len(model)],
            num_microbatches=chunks,
        )

    def forward(self, inputs):
        return self.pipe(inputs)


class Reference:
    """What old pipelines return: a handle to the outputs."""

    def __init__(self, outputs):
        self.outputs = outputs

    def local_value(self):
        return self.outputs


def joined(model, *, num_stages, chunks):
    return Joined(model, num_stages, chunks)


def referring(model, *, num_stages, chunks):
    pipe = Joined(model, num_stages, chunks)
    return lambda inputs: Reference(pipe(inputs))


@pytest.mark.parametrize("name", ["joined", "referring"])
def test_another_pipeline_takes_the_place_of_static_pipe(name):
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    counter = counted(model)
    history = run_pipe(
        model, arguments(baseline_pipe=f"{__name__}:{name}", microbatches=4)
    )
    assert counter.rows() == {"trained": 12 * 1078, "forward": 12 * 719}
    shape = history.epochs[0].shape
    assert (shape.num_stages, shape.num_microbatches) == (2, 4)
    assert any(
        not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )


def test_a_baseline_without_a_colon_is_refused():
    with pytest.raises(ValueError, match="--baseline-pipe: expected MODULE:ATTR"):
        run_pipe(tiny_model(), arguments(baseline_pipe="mypackage"))
