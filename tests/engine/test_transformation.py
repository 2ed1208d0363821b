import json

import pytest
import torch

import pipetransformer as pt
from pipetransformer.autodp import ActiveGroup
from tests.engine.scenario import config, schedule, train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

# With 6 blocks: the budget forces K=4 unfrozen; freezing lets shorter pipelines fit.
SHRINKING = config(plan=pt.PlanConfig(slot_memory_bytes=13_500, reshape="always"))
SHRINKING_64 = config(
    plan=pt.PlanConfig(slot_memory_bytes=2 * 13_500, reshape="always")
)


@pytest.fixture(scope="module")
def elastic():
    """Four processes, four plans, float32."""
    return run_ranks(
        train, 4, schedule(0, 2, 4, 6), 4, {"config": SHRINKING}, timeout_s=110
    )


def _lead(results):
    return results[0]


def test_pipeline_shrinks_and_replicas_grow(elastic):
    epochs = _lead(elastic)["history"]["epochs"]
    assert [e["num_frozen_layers"] for e in epochs] == [0, 2, 4, 6]
    assert epochs[0]["num_stages"] == 4 and epochs[0]["num_replicas"] == 1
    assert epochs[-1]["num_stages"] == 1 and epochs[-1]["num_replicas"] == 4
    assert len(_lead(elastic)["history"]["transformations"]) >= 2


def test_loss_is_bitwise_equal_before_and_after_each_transformation(elastic):
    before, after = _lead(elastic)["before"], _lead(elastic)["after"]
    assert before[:-1] == after[1:]
    assert len(set(before)) == len(before), "training must change the loss"


def test_every_rank_gets_the_same_metrics(elastic):
    for result in elastic:
        assert result["before"] == _lead(elastic)["before"]
        assert result["after"] == _lead(elastic)["after"]


def test_a_thaw_leaves_out_a_rank_that_no_longer_pipeline_has_room_for():
    settings = config(plan=pt.PlanConfig(num_stages=2))
    options = {"config": settings, "depth": 2}
    results = run_ranks(train, 3, schedule(0, 2, 0), 3, options, timeout_s=110)
    epochs = _lead(results)["history"]["epochs"]
    shapes = [(e["num_stages"], e["num_replicas"]) for e in epochs]
    assert shapes == [(2, 1), (1, 3), (2, 1)]
    assert _lead(results)["before"][:-1] == _lead(results)["after"][1:]


def test_a_rank_that_stands_by_again_keeps_the_metrics_of_earlier_epochs():
    results = run_ranks(
        train, 4, schedule(0, 6, 0), 3, {"config": SHRINKING}, timeout_s=110
    )
    told = {e["epoch"]: e["metrics"] for e in _lead(results)["history"]["epochs"]}
    assert len({str(metrics) for metrics in told.values()}) == 3
    for result in results[1:]:
        kept = {e["epoch"]: e["metrics"] for e in result["history"]["epochs"]}
        # It drove in epoch 1, and was given the record of epoch 0 when it joined.
        assert kept == {epoch: told[epoch] for epoch in (0, 1)}


def test_moments_rate_and_step_are_bitwise_equal_after_a_transformation(elastic):
    for epoch in range(1, 4):
        end = _lead(elastic)["ends"][epoch - 1]
        for result in elastic:
            begin = result["begins"][epoch]
            if begin is None:
                continue
            assert begin["rates"] == end["rates"]
            assert begin["step"] == end["step"]
            assert begin["scheduler"] == end["scheduler"]
            assert len(begin["tensors"]) == len(end["tensors"]) > 0
            for name in ("tensors", "weights"):
                pairs = zip(begin[name], end[name], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)


def test_replicas_end_with_equal_weights(elastic):
    reference = _lead(elastic)["last"]
    for result in elastic:
        if result["last"] is not None:
            pairs = zip(result["last"]["weights"], reference["weights"], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_every_sample_is_seen_exactly_once_in_each_epoch(elastic):
    for epoch in _lead(elastic)["history"]["epochs"]:
        assert epoch["samples"] == epoch["unique_samples"] == 50
        assert epoch["optimizer_steps"] == 5  # 50 samples in batches of 12


def test_frozen_activations_come_from_the_cache(elastic):
    epochs = _lead(elastic)["history"]["epochs"]
    # A record at an earlier boundary is a hit too: only the layers behind it run.
    hits = [(e["cache_hits"], e["cache_misses"]) for e in epochs]
    assert hits == [(0, 0), (0, 50), (50, 0), (50, 0)]


def test_a_steady_boundary_hits_for_the_whole_training_set():
    results = run_ranks(train, 2, schedule(0, 4), 4, {"config": config()})
    hits = [e["cache_hits"] for e in results[0]["history"]["epochs"]]
    assert hits == [0, 0, 50, 50]


def test_elastic_run_equals_a_static_run_with_the_same_freezes_in_float64():
    options = {"dtype": torch.float64}
    freezes = schedule(0, 2, 4, 6)
    moving = run_ranks(
        train, 4, freezes, 4, {**options, "config": SHRINKING_64}, timeout_s=110
    )[0]
    still = run_ranks(
        train,
        1,
        freezes,
        4,
        {**options, "config": config(cache=pt.CacheConfig(enabled=False))},
        timeout_s=110,
    )[0]
    assert {e["num_stages"] for e in moving["history"]["epochs"]} >= {1, 4}
    assert {e["num_stages"] for e in still["history"]["epochs"]} == {1}
    for name in ("weights", "tensors"):
        for a, b in zip(moving["last"][name], still["last"][name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_pipeline_grows_again_when_layers_unfreeze():
    results = run_ranks(
        train, 4, schedule(0, 6, 0), 3, {"config": SHRINKING}, timeout_s=110
    )
    epochs = results[0]["history"]["epochs"]
    assert [e["num_stages"] for e in epochs] == [4, 1, 4]
    assert [e["num_replicas"] for e in epochs] == [1, 4, 1]
    assert results[0]["before"][:-1] == results[0]["after"][1:]


def test_run_alone_and_run_of_four_see_the_same_losses():
    alone = run_ranks(train, 1, schedule(0, 3), 2, {"dtype": torch.float64})[0]
    four = run_ranks(
        train,
        4,
        schedule(0, 3),
        2,
        {"dtype": torch.float64, "config": SHRINKING_64},
    )[0]
    for a, b in zip(alone["before"], four["before"], strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def train_and_count_records(rank, freeze, epochs):
    """Train; return the history, and how many records each hand-over sent."""
    sent, plain = [], ActiveGroup.all_gather_bytes

    def counted(group, value):
        if value.startswith(b"[{"):
            sent.append(len(json.loads(value)))
        return plain(group, value)

    ActiveGroup.all_gather_bytes = counted
    return train(rank, freeze, epochs, {"config": SHRINKING})["history"], sent


def test_a_rank_that_joins_again_is_given_the_records_it_lacks_and_no_more():
    results = run_ranks(
        train_and_count_records, 4, schedule(*[0, 6] * 4), 8, timeout_s=110
    )
    sent = results[0][1]
    assert len(sent) >= 4
    assert max(sent) <= 3, "records of epochs that every member has are sent again"
    told = [(e["epoch"], e["metrics"]) for e in results[0][0]["epochs"]]
    assert [epoch for epoch, _ in told] == list(range(8))
    for history, _ in results[1:]:
        assert [(e["epoch"], e["metrics"]) for e in history["epochs"]] == told
