"""Table 1: switches, counted work, bounds, losses, accuracy tests."""

import argparse
import math
import os
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pipetransformer as pt
import table1_speedup
from harness.common import RunFailed, Sample, Series
from harness.paired import non_inferiority
from pipetransformer import planner
from pipetransformer.planner import Cluster, InfeasiblePlan, search
from table1_speedup import (
    Calibration,
    Runner,
    Setting,
    at_fault,
    capped,
)
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy, toy_model
from training.losses import WORK, breakdown, category_of, losses, seconds_per_work
from training.memory_cap import memory_cap
from training.row_cost import row_seconds
from training.runs import (
    ACCURACY,
    TRAINING_TIME,
    WALL_TIME,
    Job,
    Result,
    training_seconds,
)
from training.systems import (
    AGAIN,
    CACHED_DDP,
    DDP,
    FULL,
    KEPT,
    PLAIN,
    REFERENCE,
    STATIC_PIPE,
    SYSTEMS,
    UNCACHED,
)
from training.table1_report import Table, throughput
from training.table1_text import AT_FAULT, _bounds_text, _systems_text, told_ratio
from training.work import TRAINING, LayerCounter, work_of


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
    told = "ddp: plain PyTorch, no engine: torch's DDP"
    assert SYSTEMS["ddp"].describe() == told
    assert SYSTEMS[KEPT].describe().endswith("cache on, the profile an earlier run's")


def test_the_same_system_runs_under_two_names():
    first, again = SYSTEMS[STATIC_PIPE], SYSTEMS[AGAIN]
    assert replace(again, name=first.name) == first


def test_the_same_system_runs_at_both_ends_of_a_round():
    """So a machine that drifts shows as well."""
    names = tuple(SYSTEMS)
    settings = [Setting("no-cap", None, names), capped(1000, names, 2)]
    titles = Runner(argparse.Namespace(), settings, None).titles
    assert (titles[0], titles[-1]) == (f"no-cap {STATIC_PIPE}", f"no-cap {AGAIN}")
    # What is forced to K = slots runs once for both settings.
    shared = [STATIC_PIPE, "freeze-only", AGAIN]
    assert not {f"cap {name}" for name in shared} & {*titles}
    assert {f"cap {FULL}", f"no-cap {FULL}"} <= {*titles}


def test_the_plain_rival_is_one_process_with_a_thread_per_slot(tmp_path):
    job = Job(PLAIN, 2)
    assert "--nproc-per-node=1" in job.command(tmp_path) and job.threads == 2
    assert Job(DDP, 2).threads == 1


def test_counter_tells_trained_rows_from_forward_only_ones():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[0].requires_grad_(False)
    counter = LayerCounter(layers, layers[-1])
    nn.Sequential(*layers)(torch.randn(5, 4)).sum().backward()
    with torch.no_grad():
        nn.Sequential(*layers)(torch.randn(2, 4))
        layers[0].eval()  # a frozen layer may be so while others train
        nn.Sequential(*layers)(torch.randn(1, 4))
        nn.Sequential(*layers).eval()(torch.randn(3, 4))
    assert counter.rows() == {"trained": 10, "forward": 5 + 6 + 3, "evaluated": 9}
    other = {"trained": 1, "forward": 0, "evaluated": 2}
    assert work_of([counter.rows(), other]) == 3 * 11 + 14 + 11
    assert work_of([counter.rows(), other], TRAINING) == 3 * 11 + 14
    counter.reset()
    assert set(counter.rows().values()) == {0}


class Masked(nn.Linear):
    """A layer of a text model: takes and returns a hidden state with its mask."""

    def forward(self, taken):
        return super().forward(taken[0]), taken[1]


def test_counter_counts_layers_that_pass_on_tuples():
    layers = nn.Sequential(Masked(4, 4), Masked(4, 4))
    layers[0].requires_grad_(False)
    counter = LayerCounter(layers, layers[-1])
    layers((torch.randn(5, 4), torch.ones(5, 1)))
    assert counter.rows() == {"trained": 5, "forward": 5, "evaluated": 0}


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


EVALUATION = 10  # of a run's work, and 2.2 s of its time
STATIC = {"stages": 2, "microbatches": 8, "busy": (4.0, 4.0)}


def result(wall, work, seed, **options):
    told = summary(wall, PHASES, **options)
    training_s = training_seconds(told)
    metrics = {WALL_TIME: wall, TRAINING_TIME: training_s, ACCURACY: 90.0 + seed}
    return Result(Sample(wall, wall), metrics, seed, told, work, work - EVALUATION)


def table(row_factor=1.0, **walls):
    series = {}
    for name, (wall, work, options) in walls.items():
        runs = tuple(result(wall + s, work, s, **options) for s in range(3))
        series[name.replace("_", "-")] = Series(name, runs, (), ())
    accuracies = {name: {s: 90.0 + s for s in range(3)} for name in series}
    return Table("no-cap", series, accuracies, row_factor=row_factor)


def again(made, slower):
    """Add static-pipe once more, in a slower run."""
    runs = [
        result(r.wall_s * slower, r.work, r.seed) for r in made.results(STATIC_PIPE)
    ]
    twin = Series(AGAIN, tuple(runs), (), ())
    return replace(made, series={**made.series, AGAIN: twin})


def test_training_time_is_the_wall_time_without_evaluations():
    told = summary(10.0, PHASES)  # evaluate 1.5, its prefix 0.5, its cache reads 0.2
    assert training_seconds(told) == pytest.approx(10.0 - 2.2)


def test_bounds_come_from_counted_work_and_the_pipelines_fill():
    made = table(
        static_pipe=(30.0, 90, STATIC), best_static=(20.0, 90, {}), full=(10.0, 30, {})
    )
    over_pipe, over_best = (made.ratio(FULL, r) for r in (STATIC_PIPE, REFERENCE))
    assert over_pipe.value == statistics.median([30 / 10, 31 / 11, 32 / 12])
    assert over_best.value == pytest.approx(21 / 11)
    assert over_pipe.bound == pytest.approx(3.0 * 9 / 8)
    assert over_best.bound == pytest.approx(3.0)
    assert over_best.target.bound == pytest.approx(0.9 * 3.0)
    assert made.ratio(REFERENCE, STATIC_PIPE).target is None
    assert made.accuracy_test().differences == (0.0, 0.0, 0.0)
    assert throughput(made.results(FULL))[0]["samples_per_s"] == 25.0


def test_with_a_kept_profile_the_whole_system_has_the_same_aims():
    walls = {"ddp": (20.0, 90, {}), FULL: (10.0, 30, {}), KEPT: (9.0, 30, {})}
    made = table(static_pipe=(30.0, 90, STATIC), **walls)
    for rival in (STATIC_PIPE, DDP):
        measured, kept = (made.ratio(system, rival) for system in (FULL, KEPT))
        assert kept.value > measured.value
        assert (kept.bound, kept.target) == (measured.bound, measured.target)
        assert kept.target.bound == pytest.approx(0.9 * kept.bound)


def test_a_profile_is_kept_only_for_the_system_that_looks_for_it(tmp_path):
    looks = {
        name
        for name, system in SYSTEMS.items()
        if system.plan_config(2, None, None, tmp_path).profile is not None
    }
    assert looks == {KEPT}


def kept_run(monkeypatch, tmp_path, *, writes_anew=False):
    """Run FULL and KEPT for two seeds and two settings; return the jobs."""
    jobs = []

    def run(job, *_):
        jobs.append(job)
        (place,) = [f for f in job.flags if f.startswith("--profiles=")] or [None]
        if place is not None:
            folder = Path(place.removeprefix("--profiles="))
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / "profile-1.json"
            if writes_anew or not file.exists():
                file.write_text("{}")
                os.utime(file, ns=(0, len(jobs)))
        return result(1, 20, job.seed)

    monkeypatch.setattr(table1_speedup, "run_job", run)
    args = argparse.Namespace(out=tmp_path, slots=2, seeds=[3, 4], epochs=9, alpha=0.5)
    systems = (FULL, KEPT)
    settings = [Setting("no-cap", None, systems), Setting("cap", 99, systems)]
    runner = Runner(args, settings, None)
    for turn in (0, 1):
        for title in runner.titles:
            runner(title, turn)
    return jobs


def test_a_round_keeps_a_profile_once_and_its_runs_are_told_where(
    monkeypatch, tmp_path
):
    jobs = kept_run(monkeypatch, tmp_path)
    for seed in (3, 4):
        of_seed = [job for job in jobs if job.seed == seed]
        names = [job.system for job in of_seed]
        assert names == [FULL, KEPT, KEPT, FULL, KEPT]
        place = f"--profiles={(tmp_path / 'profiles' / str(seed)).resolve()}"
        assert [place in job.flags for job in of_seed] == [n == KEPT for n in names]
        first = next(job for job in of_seed if job.system == KEPT)
        assert "--epochs=1" in first.flags


def test_a_run_that_measures_anew_has_failed(monkeypatch, tmp_path):
    with pytest.raises(RunFailed, match="expected it to find a profile"):
        kept_run(monkeypatch, tmp_path, writes_anew=True)


def test_one_process_of_many_threads_bounds_nothing():
    made = table(plain=(40.0, 90, {}), full=(10.0, 30, {}))
    assert made.ratio(FULL, "plain").bound is None
    assert not at_fault(made)
    assert "full / plain: 3.73 (3.50 to 4.00), other threads" in _bounds_text(made)


def test_a_ratio_above_its_bound_is_a_fault_of_the_measurement():
    walls = {"best_static": (20.0, 90, {}), "full": (10.0, 30, {})}
    assert not at_fault(table(**walls))
    assert at_fault(table(**(walls | {"full": (3.0, 30, {})})))
    failing = table(**walls)
    series = replace(failing.series[FULL], failures=("it died",))
    assert at_fault(replace(failing, series={**failing.series, FULL: series}))


def test_a_second_set_of_ratios_leaves_the_evaluations_out():
    made = table(best_static=(20.0, 90, {}), full=(10.0, 30, {}))
    training = made.ratio(FULL, REFERENCE, TRAINING_TIME)
    assert training.name == "no-cap full / best-static without evaluation"
    assert training.value == pytest.approx((21 - 2.2) / (11 - 2.2))
    assert training.bound == pytest.approx(80 / 20)
    assert {row.metric for row in made.rows()} == {
        "no-cap wall time",
        "no-cap training time",
        "no-cap final accuracy",
    }


def test_small_micro_batches_are_a_loss_of_static_pipes_own():
    made = table(1.1, static_pipe=(30.0, 90, STATIC), full=(10.0, 30, {}))
    bound = (1.1 * 80 + 10) / 30 * 9 / 8
    assert made.ratio(FULL, STATIC_PIPE).bound == pytest.approx(bound)
    training = made.ratio(FULL, STATIC_PIPE, TRAINING_TIME)
    assert training.bound == pytest.approx(1.1 * 80 / 20 * 9 / 8)


def test_equal_work_bounds_nothing():
    made = table(ddp_freeze_cache=(12.0, 30, {}), full=(10.0, 30, {}))
    series = dict(made.series)
    series[CACHED_DDP] = series.pop("ddp-freeze-cache")
    made = replace(made, series=series)
    assert made.ratio(FULL, CACHED_DDP).bound is None
    assert "equal work" in _bounds_text(made)


def test_a_ratio_above_its_bound_is_called_a_fault_and_no_merit():
    walls = {"static_pipe": (30.0, 90, STATIC), "best_static": (28.0, 90, {})}
    fair, fast = (table(**walls, full=(wall, 30, {})) for wall in (10.0, 5.0))
    assert not fair.ratio(FULL, STATIC_PIPE).above_bound
    assert AT_FAULT not in _bounds_text(fair) + _systems_text(fair)
    above = fast.ratio(FULL, STATIC_PIPE)
    assert above.above_bound and f"> {above.bound:.2f}: {AT_FAULT}" in told_ratio(above)
    assert "share" not in told_ratio(above)
    (line,) = [
        each for each in _systems_text(fast).splitlines() if each.startswith("full ")
    ]
    assert AT_FAULT in line


def test_the_same_system_twice_is_printed_with_the_others_and_has_no_bound():
    made = again(table(static_pipe=(30.0, 90, STATIC), full=(10.0, 30, {})), 1.25)
    ratio = made.ratio(AGAIN, STATIC_PIPE)
    assert (ratio.value, ratio.bound) == (pytest.approx(0.8), None)
    assert any(line.startswith(AGAIN) for line in _systems_text(made).splitlines())
    assert "the same system twice: 0.80 (0.80 to 0.80)" in _bounds_text(made)


def test_under_the_cap_whole_models_do_not_fit_and_the_static_plan_is_forced():
    setting = capped(1000, tuple(SYSTEMS), 2)
    assert setting.does_not_fit == (PLAIN, DDP, CACHED_DDP)
    assert setting.same_as == {REFERENCE: STATIC_PIPE}
    left_out = {*setting.does_not_fit, REFERENCE, UNCACHED}
    assert {*setting.systems, *left_out} == {*SYSTEMS}
    assert not left_out & {*setting.systems}
    assert REFERENCE in capped(1000, tuple(SYSTEMS), 4).systems
    assert capped(1000, (REFERENCE, FULL), 2).systems == (REFERENCE, FULL)


def test_where_the_static_plan_is_forced_static_pipe_is_the_reference():
    made = table(static_pipe=(30.0, 90, STATIC), full=(10.0, 30, {}))
    made = replace(made, same_as={REFERENCE: STATIC_PIPE})
    assert made.reference == STATIC_PIPE and made.accuracy_test() is not None
    assert "slower work" in made.losses(FULL)
    assert "as static-pipe" in _systems_text(made)


def test_a_row_is_timed_in_each_micro_batch_size():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    found = row_seconds(model, torch.randn(8, 4), torch.zeros(8, dtype=int), [8, 2, 2])
    assert set(found) == {2, 8} and min(found.values()) > 0
    assert all(p.grad is None for p in model.parameters())


def test_calibration_takes_the_fastest_m_and_its_rows():
    epochs = {2: [5.0, 4.0, 6.0], 4: [4.5, 4.5, 4.5]}
    made = Calibration(epochs, {32: 1.1, 16: 1.2, 64: 1.0})
    assert made.microbatches == 2
    assert made.row_factor == pytest.approx(1.1)
    empty = Calibration({}, {})
    assert (empty.microbatches, empty.row_factor) == (None, 1.0)


@pytest.mark.parametrize(("system", "steady"), [(DDP, True), (FULL, False)])
def test_only_systems_that_do_the_same_in_each_epoch_are_judged_by_it(system, steady):
    runner = Runner(argparse.Namespace(), [Setting("no-cap", None, (system,))], None)
    run = result(10.0, 30, 0)
    assert runner.pace(f"no-cap {system}", run) == (4.0 if steady else None)


def test_non_inferiority_is_the_one_sided_t_interval():
    test = non_inferiority([90.0, 91.0, 92.5], [90.5, 91.0, 92.0])
    assert test.differences == (-0.5, 0.0, 0.5) and test.mean == 0.0
    # t(0.95, 2 degrees of freedom) = 2.919986
    assert test.lower_limit == pytest.approx(-2.919986 * 0.5 / math.sqrt(3))
    assert not test.passes
    same = non_inferiority([90.0, 91.0], [90.1, 91.1])
    assert same.passes and same.lower_limit == pytest.approx(-0.1)


def test_non_inferiority_says_its_verdict():
    # The demo's five seeds of 2026-11-21.
    worse = non_inferiority([-0.28, -0.70, -0.70, 0.0, -0.70], [0.0] * 5)
    assert str(worse) == (
        "mean -0.48 points over 5 seeds, one-sided 95 % lower limit -0.78, "
        "margin 0.3: fails"
    )
    assert str(non_inferiority([1.0, 1.1], [0.0, 0.0])).endswith("margin 0.3: passes")


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


def test_the_cap_follows_from_bytes_whatever_a_busy_machine_measures(monkeypatch):
    model, rows = toy_model(depth=6), torch.randn(4, 4)
    sizes = {"slots": 2, "batch_size": 8, "frozen_boundary": 4}
    measure = planner.profile

    def busy(*args, **options):
        """Others had the processor while the last layer was measured."""
        found = measure(*args, **options)
        late = tuple(10**9 for _ in found.microbatch_samples)
        last = replace(found.layers[-1], forward_ns=late, input_grad_ns=late)
        return replace(found, layers=(*found.layers[:-1], last))

    quiet = memory_cap(model, rows, **sizes)
    monkeypatch.setattr(planner, "profile", busy)
    assert memory_cap(model, rows, **sizes) == quiet


def test_no_cap_is_made_up_where_none_exists():
    with pytest.raises(ValueError, match="memory cap: expected 2 unfrozen stages"):
        memory_cap(
            toy_model(depth=6),
            torch.randn(4, 4),
            slots=2,
            batch_size=8,
            frozen_boundary=0,
        )
