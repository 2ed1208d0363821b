"""Pipelines of any length one after the other, also where it divides no world."""

import pytest
import torch

import pipetransformer as pt
from pipetransformer.transformation import plan_search as plans
from tests.engine.scenario import config, schedule, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

COUNTS = (0, 1, 6, 2, 0)
STAGES = {0: 4, 2: 3, 7: 1, 3: 2}  # by boundary


def train_in_shapes(rank):
    plans._forced_stages = lambda run, boundary: STAGES[boundary]
    settings = config(plan=pt.PlanConfig(reshape="always"))
    return train(rank, schedule(*COUNTS), len(COUNTS), {"config": settings})


@pytest.fixture(scope="module")
def shapes():
    return run_ranks(train_in_shapes, 4, timeout_s=110)


def test_pipelines_of_4_3_1_2_and_4_stages_follow_each_other(shapes):
    epochs = shapes[0]["history"]["epochs"]
    assert [e["num_stages"] for e in epochs] == [4, 3, 1, 2, 4]
    # Three stages leave one of four ranks over.
    assert [e["num_replicas"] for e in epochs] == [1, 1, 4, 2, 1]
    assert [e["num_frozen_layers"] for e in epochs] == list(COUNTS)
    assert all(e["samples"] == e["unique_samples"] == 50 for e in epochs)


def test_state_stays_bitwise_through_all_shapes(shapes):
    lead = shapes[0]
    assert lead["before"][:-1] == lead["after"][1:]
    for epoch in range(1, len(COUNTS)):
        end = lead["ends"][epoch - 1]
        begins = [r["begins"][epoch] for r in shapes if r["begins"][epoch] is not None]
        assert begins
        for begin in begins:
            for name in ("tensors", "weights"):
                pairs = zip(begin[name], end[name], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
            for name in ("rates", "step", "scheduler"):
                assert begin[name] == end[name]
