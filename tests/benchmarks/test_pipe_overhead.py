"""What counts as overhead, and that every system computes the same."""

import argparse
import sys

import pytest
import torch
from torch import nn

import gpu_pipe
import pipe_overhead
from harness.common import Repeat, Sample, Series
from pipe import cells
from pipe.cells import BACKWARD, FORWARD, LOOP
from pipe.pipes import load_factory, our_pipe, recomputed_share, tensor_of

TINY = {"stages": 2, "microbatches": 3, "iterations": 1, "seed": 0, "dispatch": "auto"}


def arguments(**changes):
    options = {**TINY, "modes": ["never", "always"], "pipe": None, "quick": True}
    return argparse.Namespace(**{**options, **changes})


def series(system, turns):
    repeats = [
        Repeat(Sample(1.0, 1.0), {FORWARD: forward, BACKWARD: backward})
        for forward, backward in turns.values()
    ]
    return Series(system, tuple(repeats), (), (), tuple(turns))


@pytest.mark.parametrize(
    ("mode", "share"), [("never", 0.0), ("except_last", 0.75), ("always", 1.0)]
)
def test_recomputed_share_leaves_out_what_keeps_its_activations(mode, share):
    assert recomputed_share(mode, 4) == share


def test_overhead_takes_the_loop_and_the_recomputed_forward_off_pair_by_pair():
    given = {
        LOOP: series(LOOP, {0: (4.0, 10.0), 1: (6.0, 10.0), 2: (1.0, 1.0)}),
        "x": series("x", {0: (9.0, 20.0), 1: (9.0, 20.0)}),
    }
    forward, backward, both = cells.overheads("x", given, 0.5)
    assert forward.values == (5.0, 3.0)
    assert backward.values == (20.0 - 10.0 - 2.0, 20.0 - 10.0 - 3.0)
    assert both.values == (13.0, 10.0)
    assert forward.turns == (0, 1)


def test_every_system_computes_the_loops_gradients():
    systems = pipe_overhead.build(arguments(modes=["never", "except_last", "always"]))
    rows = torch.randn(6, cells.WIDTH)
    gradients = {}
    for name, system in systems.items():
        tensor_of(system.call(rows)).sum().backward()
        gradients[name] = [p.grad for p in system.model.parameters()]
    for name in systems:
        torch.testing.assert_close(gradients[name], gradients[LOOP])


def other_pipe(model, *, num_stages, chunks, checkpoint):
    """Our own pipeline behind the interface of `--pipe`."""
    assert num_stages == len(model)
    return our_pipe(model, chunks=chunks, checkpoint=checkpoint)


def test_another_pipe_is_measured_beside_ours():
    args = arguments(pipe=f"{__name__}:other_pipe", modes=["never"])
    systems = pipe_overhead.build(args)
    assert list(systems) == [LOOP, "never", f"{__name__}:other_pipe never"]
    metrics = cells.runner(args, systems)(list(systems)[-1], 0).metrics
    assert metrics.keys() == {FORWARD, BACKWARD}
    assert min(metrics.values()) > 0


def test_name_of_a_pipe_needs_a_colon():
    with pytest.raises(ValueError, match="--pipe: expected MODULE:ATTR, got 'torch'"):
        load_factory("--pipe", "torch")


def test_unknown_dispatch_is_refused():
    with pytest.raises(ValueError, match="dispatch: expected"):
        our_pipe(nn.Sequential(), chunks=1, checkpoint="never", dispatch="nothing")


def test_parts_of_the_gpu_benchmark_run_on_any_device():
    args, device = arguments(microbatches=2), torch.device("cpu")
    systems = gpu_pipe.cell_systems(args, device)
    assert list(systems) == [LOOP, "never", "except_last", "always"]
    run = cells.runner(args, systems, device)
    assert min(run("always", 0).metrics.values()) > 0
    for step in gpu_pipe.overlap_systems(args, device).values():
        step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("flags", "status"), [([], 1), (["--allow-no-gpu"], 0)])
def test_gpu_benchmark_says_that_it_was_not_run(monkeypatch, capsys, flags, status):
    monkeypatch.setattr(sys, "argv", ["gpu_pipe.py", *flags])
    assert gpu_pipe.main() == status
    assert "not run" in capsys.readouterr().err
