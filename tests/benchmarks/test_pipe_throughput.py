"""The bounds, the byte counter, and that all systems train the same step."""

import argparse
import gc

import pytest
import torch

import pipe_overlap
import pipe_throughput
from harness.child import RunFailed
from harness.common import Row
from harness.rank_pool import RankPool
from pipe.bounds import (
    one_f_one_b_saved_share,
    pipeline_speedup,
    zero_bubble_speedup,
)
from pipe.encoder import Shape, batch, encoder, train_step
from pipe.live_bytes import LiveBytes
from pipe.rank_systems import DDP, SCHEDULES, RankSystems
from pipe.throughput_systems import ONE_THREAD, Maker

TINY = Shape(blocks=2, width=8, heads=1, tokens=2, rows=6)


def arguments(**changes):
    options = {
        "slots": 2,
        "microbatches": [3],
        "schedules": ["gpipe", "1f1b", "zb-h1"],
        "dispatch": "auto",
        "seed": 0,
        "pipe": None,
        "no_processes": True,
        "quick": True,
        "repeats": 1,
        "modes": False,
    }
    return argparse.Namespace(**{**options, **changes})


def squares():
    model, (inputs, targets) = encoder(TINY, 0), batch(TINY, 0)
    train_step(model, inputs, targets)
    return [float(p.grad.square().sum()) for p in model.parameters()]


def test_pipeline_of_one_stage_gains_nothing():
    assert pipeline_speedup(1, 5) == zero_bubble_speedup(1, 5) == 1.0


def test_bounds_are_the_schedules_formulas():
    assert pipeline_speedup(2, 4) == pytest.approx(8 / 5)
    assert zero_bubble_speedup(2, 4) == pytest.approx(24 / 13)
    assert one_f_one_b_saved_share(2, 4) == pytest.approx(3 / 8)
    assert one_f_one_b_saved_share(4, 2) == pytest.approx((2 + 2 + 2 + 1) / 8)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_bound_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="bound: expected at least one stage"):
        pipeline_speedup(*sizes)


def test_every_system_in_this_process_trains_the_same_step():
    expected = squares()
    for system in Maker(arguments(), TINY).all():
        system.step()
        found = [float(p.grad.square().sum()) for p in system.model.parameters()]
        assert found == pytest.approx(expected, rel=1e-3), system.name


@pytest.mark.distributed
def test_every_process_system_trains_the_same_step():
    expected = squares()
    half = len(expected) // 2
    with RankPool(RankSystems, 2, TINY, 0, timeout_s=150.0) as ranks:
        for kind in SCHEDULES:
            first, second = ranks.call("gradients", kind, 3)
            assert first[:half] == pytest.approx(expected[:half], rel=1e-3), kind
            assert second[half:] == pytest.approx(expected[half:], rel=1e-3), kind
        for found in ranks.call("gradients", DDP, 0):
            assert found == pytest.approx(expected, rel=1e-3)
        times = ranks.call("run", DDP, 0, 2)
        assert min(wall for wall, _ in times) > 0


def failing(rank, world_size, store):
    def answer(command):
        if command == "end":
            raise SystemExit
        return rank, world_size, command

    return answer


def test_pool_answers_by_rank_and_survives_a_failed_command():
    with RankPool(failing, 2, timeout_s=150.0) as pool:
        assert pool.call("x") == [(0, 2, "x"), (1, 2, "x")]
        with pytest.raises(RunFailed, match="rank 0: .* failed:(?s:.*)SystemExit"):
            pool.call("end")


def test_live_bytes_count_a_storage_once_and_fall_when_the_graph_goes():
    weight = torch.ones(4, requires_grad=True)
    live = LiveBytes([weight])
    with live.counting():
        outputs = (weight * 2).exp()  # keeps its result, 16 bytes
        outputs = outputs * outputs.view(4)  # the same storage, twice
    assert live.now == live.peak == 16
    outputs.sum().backward()
    assert live.now == 0
    assert live.peak == 16


def test_live_bytes_fall_when_a_graph_is_dropped_without_backward():
    live = LiveBytes()
    with live.counting():
        outputs = torch.ones(4, requires_grad=True).exp()
    assert live.now > 0
    del outputs
    gc.collect()
    assert live.now == 0


def test_speedup_stands_beside_one_thread_and_the_rival_of_its_schedule():
    args = arguments(microbatches=[3], schedules=["gpipe"], no_processes=False)
    systems = Maker(args, TINY).all()
    names = [system.name for system in systems]
    assert names == [
        ONE_THREAD,
        f"{ONE_THREAD} M=3",
        "gpipe M=3",
        "pipelining gpipe M=3",
        "pipelining 1f1b M=3",
        "ddp",
    ]
    rows = {
        name: Row(name, "step time", "s", (float(k + 1),))
        for k, name in enumerate(names)
    }
    ratios = {
        each.name: each.value for each in pipe_throughput.speedups(args, systems, rows)
    }
    assert ratios[f"gpipe M=3 / {ONE_THREAD}"] == pytest.approx(1 / 3)
    assert ratios["gpipe M=3 / pipelining gpipe M=3"] == pytest.approx(4 / 3)
    assert f"{ONE_THREAD} / {ONE_THREAD}" not in ratios


def test_schedules_have_targets_their_rivals_and_modes_have_none():
    args = arguments(microbatches=[3], modes=True, no_processes=False)
    systems = Maker(args, TINY).all()
    rows = {s.name: Row(s.name, "step time", "s", (1.0,)) for s in systems}
    bounds = {s.name: s.bound for s in systems}
    found = {
        each.name: each.target.bound
        for each in pipe_throughput.speedups(args, systems, rows)
        if each.target is not None
    }
    assert found == {
        f"gpipe M=3 / {ONE_THREAD}": pytest.approx(0.97 * bounds["gpipe M=3"]),
        "gpipe M=3 / pipelining gpipe M=3": 1.0,
        f"1f1b M=3 / {ONE_THREAD}": pytest.approx(0.97 * bounds["1f1b M=3"]),
        "1f1b M=3 / pipelining 1f1b M=3": 1.0,
        f"zb-h1 M=3 / {ONE_THREAD}": pytest.approx(0.95 * bounds["zb-h1 M=3"]),
        "zb-h1 M=3 / pipelining 1f1b M=3": 1.0,
    }


def test_saved_bytes_of_gpipe_are_those_of_the_whole_batch():
    args = arguments(schedules=["gpipe"])
    rows = pipe_throughput.saved_rows(args, TINY, Maker(args, TINY).all())
    peaks = {row.system: row.values[0] for row in rows}
    assert peaks["gpipe M=3"] == pytest.approx(peaks[ONE_THREAD], rel=0.1)
    assert peaks[f"{ONE_THREAD} M=3"] < 0.5 * peaks[ONE_THREAD]


def test_modes_and_inference_are_compared_with_their_like():
    args = arguments(schedules=["gpipe"], modes=True)
    systems = {system.name: system for system in Maker(args, TINY).all()}
    always, plain = systems["gpipe always M=3"], systems["gpipe M=3"]
    assert always.bound == pytest.approx(plain.bound * 3 / 4)
    assert systems["gpipe except_last M=3"].bound == pytest.approx(
        plain.bound / (1 + 2 / 9)
    )
    always.step()
    found = [float(p.grad.square().sum()) for p in always.model.parameters()]
    assert found == pytest.approx(squares(), rel=1e-3)
    systems["inference, gpipe M=3"].step()
    rows = {n: Row(n, "step time", "s", (1.0,)) for n in systems}
    names = [r.name for r in pipe_throughput.speedups(args, systems.values(), rows)]
    assert "inference, gpipe M=3 / inference, one thread" in names
    assert not any(n.startswith("inference, one thread") for n in names)
    assert not any(n.endswith("/ one thread") for n in names if "inference" in n)


def test_slow_stages_keep_values_and_gradients():
    args = arguments(stages=2, microbatches=3, sleep=0.0)
    for name, call in pipe_overlap.build(args).items():
        repeat = pipe_overlap.run(call, 3)
        assert repeat.metrics.keys() == {"forward", "backward"}, name
