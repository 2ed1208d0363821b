"""Table 1: switches, counted work, bounds, losses, accuracy tests."""

import math
import statistics

import pytest
import torch
from _harness import Sample, Series
from _losses import WORK, breakdown, category_of, losses, seconds_per_work
from _memory_cap import memory_cap
from _paired import non_inferiority
from _runs import ACCURACY, WALL_TIME, Result
from _systems import SYSTEMS
from _table1_report import Table, throughput
from _work import LayerCounter, work_of
from torch import nn

import pipetransformer as pt
from pipetransformer import planner
from pipetransformer.planner import Cluster, InfeasiblePlan, search
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy, toy_model


def run_system(rank, name):
    system = SYSTEMS[name]
    engine = make_engine(
        freeze=schedule(0, 2, 4) if system.freezes else pt.freeze.Never(),
        config=config(
            plan=system.plan_config(2, None, None),
            cache=pt.CacheConfig(enabled=system.caches),
        ),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(ToySet(50, vouch=True), batch_size=12):
                engine.step(batch)
            metrics = engine.evaluate(
                ToySet(21, seed=2, vouch=True), {"accuracy": accuracy}
            )
    return engine.history.to_json()["epochs"], metrics


@pytest.mark.distributed
@pytest.mark.parametrize("name", [n for n, s in SYSTEMS.items() if s.engine])
def test_each_system_trains_to_the_end_on_all_ranks(name):
    system = SYSTEMS[name]
    (epochs, metrics), (_, other) = run_ranks(run_system, 2, name)
    assert metrics == other and set(metrics) == {"loss", "accuracy"}
    assert [e["samples"] for e in epochs] == [50] * 3
    assert [e["unique_samples"] for e in epochs] == [50] * 3
    assert [e["optimizer_steps"] for e in epochs] == [5] * 3
    frozen = [e["num_frozen_layers"] for e in epochs]
    assert frozen == ([0, 2, 4] if system.freezes else [0] * 3)
    hits = [e["cache_hits"] for e in epochs]
    assert hits == ([0, 0, 50] if system.caches else [0] * 3)
    if not system.replicates:
        assert {e["num_replicas"] for e in epochs} == {1}
    if not system.shrinks:
        assert {e["num_stages"] for e in epochs} == {2}


def test_a_system_says_what_is_switched_off():
    told = SYSTEMS["freeze+pipe+cache"].describe()
    assert told == (
        "freeze+pipe+cache: freezing on, K chosen by the planner on, replicas off, "
        "cache on"
    )
    assert SYSTEMS["ddp"].describe() == "ddp: plain PyTorch, no engine"


def test_counter_tells_trained_rows_from_forward_only_ones():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[0].requires_grad_(False)
    counter = LayerCounter(layers)
    nn.Sequential(*layers)(torch.randn(5, 4)).sum().backward()
    with torch.no_grad():
        nn.Sequential(*layers)(torch.randn(2, 4))
    assert counter.rows() == {"trained": 10, "forward": 5 + 6}
    assert work_of([counter.rows(), {"trained": 1, "forward": 0}]) == 3 * 11 + 11
    counter.reset()
    assert counter.rows() == {"trained": 0, "forward": 0}


def summary(total, phases, stages=1, busy=(), microbatches=1):
    epoch = {
        "epoch": 0,
        "num_frozen_layers": 0,
        "num_stages": stages,
        "num_replicas": 1,
        "num_microbatches": microbatches,
        "samples": 100,
        "seconds": 4.0,
        "cache_hits": 0,
        "phase_seconds": phases,
        "worker_seconds": list(busy),
    }
    return {
        "total_seconds": total,
        "phase_seconds": phases,
        "epochs": [epoch],
        "transformations": [{"pause_seconds": 0.02}],
    }


PHASES = {
    "forward": 2.0,
    "forward/prefix": 1.0,
    "forward/cache_read": 0.1,
    "evaluate/cache_read": 0.2,
    "evaluate": 1.5,
    "evaluate/prefix": 0.5,
    "backward": 3.0,
    "backward/all_reduce": 0.4,
    "optimizer": 0.3,
    "open": 0.25,
}


def test_categories_add_up_to_the_wall_time():
    parts = breakdown(summary(10.0, PHASES))
    assert sum(parts.values()) == pytest.approx(10.0)
    assert parts["compute"] == 5.0 and parts["populate"] == 1.0
    assert parts["evaluation"] == 2.0 and parts["all-reduce"] == 0.4
    assert parts["cache reads"] == pytest.approx(0.3)
    assert parts["rest"] == pytest.approx(0.75 + 0.25)


def test_bubble_is_the_time_in_which_stages_stood_still():
    parts = breakdown(summary(10.0, PHASES, stages=2, busy=(5.0, 4.0)))
    assert parts["bubble"] == pytest.approx(6.0 - 4.5)
    assert parts["compute"] == pytest.approx(5.0 - 1.5)
    assert sum(parts.values()) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("phase", "category"),
    [
        ("forward", "compute"),
        ("forward/prefix", "populate"),
        ("evaluate/prefix", "evaluation"),
        ("evaluate/cache_write", "cache writes"),
        ("transformation", "transformations"),
        ("other", "rest"),
    ],
)
def test_phases_have_categories(phase, category):
    assert category_of(phase) == category


def test_losses_and_work_at_the_references_rate_are_the_wall_time():
    run = breakdown(summary(10.0, PHASES))
    lost = losses(run, work=50.0, seconds_per_work=0.1)
    assert lost["slower work"] == pytest.approx(8.0 - 5.0)
    assert sum(lost.values()) + 50.0 * 0.1 == pytest.approx(10.0)
    assert not set(lost) & set(WORK)
    assert seconds_per_work(run, 40.0) == pytest.approx(8.0 / 40.0)


def result(wall, work, seed, **options):
    metrics = {WALL_TIME: wall, ACCURACY: 90.0 + seed}
    return Result(
        Sample(wall, wall), metrics, seed, summary(wall, PHASES, **options), work
    )


def table(**walls):
    series = {}
    for name, (wall, work, options) in walls.items():
        runs = tuple(result(wall + s, work, s, **options) for s in range(3))
        series[name.replace("_", "-")] = Series(name, runs, (), ())
    accuracies = {name: {s: 90.0 + s for s in range(3)} for name in series}
    return Table("no-cap", series, accuracies)


def test_bounds_come_from_counted_work_and_the_pipelines_fill():
    made = table(
        static_pipe=(30.0, 90, {"stages": 2, "microbatches": 8, "busy": (4.0, 4.0)}),
        best_static=(20.0, 90, {}),
        full=(10.0, 30, {}),
    )
    assert made.bounds() == {
        "static-pipe": pytest.approx(3.0 * 9 / 8),
        "best-static": pytest.approx(3.0),
    }
    values = {each.name: each.value for each in made.ratios}
    assert values["no-cap full / static-pipe"] == statistics.median(
        [30 / 10, 31 / 11, 32 / 12]
    )
    assert values["no-cap full / best-static"] == pytest.approx(21 / 11)
    assert made.accuracy_test().differences == (0.0, 0.0, 0.0)
    assert throughput(made.results("full"))[0]["samples_per_s"] == 25.0


def test_non_inferiority_is_the_one_sided_t_interval():
    test = non_inferiority([90.0, 91.0, 92.5], [90.5, 91.0, 92.0])
    assert test.differences == (-0.5, 0.0, 0.5) and test.mean == 0.0
    # t(0.95, 2 degrees of freedom) = 2.919986
    assert test.lower_limit == pytest.approx(-2.919986 * 0.5 / math.sqrt(3))
    assert not test.passes
    same = non_inferiority([90.0, 91.0], [90.1, 91.1])
    assert same.passes and same.lower_limit == pytest.approx(-0.1)


def test_non_inferiority_needs_pairs():
    with pytest.raises(ValueError, match="expected two sequences of the same length"):
        non_inferiority([1.0, 2.0], [1.0])


def test_under_the_cap_only_all_slots_hold_the_unfrozen_model():
    model, rows = toy_model(depth=6), torch.randn(4, 4)
    cap = memory_cap(model, rows, slots=2, batch_size=8, frozen_boundary=4)
    profile = planner.profile(model, rows, microbatch_samples=(4,), repeats=1)
    cluster = Cluster(devices_per_node=2, device_memory_bytes=cap)
    assert search(profile, cluster, global_batch=8, num_stages=2).num_stages == 2
    with pytest.raises(InfeasiblePlan):
        search(profile, cluster, global_batch=8, num_stages=1)
    frozen = search(
        profile,
        cluster,
        global_batch=8,
        boundary=4,
        num_stages=1,
        cache_tiers=("host",),
    )
    assert frozen.num_replicas == 2


def test_no_cap_is_made_up_where_none_exists():
    with pytest.raises(ValueError, match="memory cap: expected 2 unfrozen stages"):
        memory_cap(
            toy_model(depth=6),
            torch.randn(4, 4),
            slots=2,
            batch_size=8,
            frozen_boundary=0,
        )
