"""A step of the engine finds the memory that the step before has freed."""

import os
import platform
import resource

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import _C
from tests.engine.scenario import config
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc", reason="keeps freed memory under glibc alone"
    ),
]

WIDTH, ROWS, STEPS = 256, 2048, 8
PAGES = 4 * ROWS * WIDTH // os.sysconf("SC_PAGE_SIZE")  # of what one layer gives


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def note(name, asked):
    """Let a function of the extension's note its name when it is called."""
    real = getattr(_C.core, name)
    setattr(_C.core, name, lambda: (asked.append(name), real())[1])


def held_pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


def train(rank, keeps, stages):
    """Train two passes; return what `_C.core` was asked for, faults, pages kept.

    The faults are those of a step of the second pass.
    """
    torch.manual_seed(0)
    asked = []
    for name in ("keep_freed_memory", "stop_keeping_freed_memory"):
        note(name, asked)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    settings = config(
        plan=pt.PlanConfig(num_stages=stages, max_replicas=1),
        pipe=pt.PipeConfig(num_slots=stages, keep_freed_memory=keeps),
    )
    engine = pt.PipeTransformer(
        nn.Sequential(*layers),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        loss=nn.functional.mse_loss,
        freeze=pt.freeze.Never(),
        config=settings,
    )
    x = torch.randn(ROWS * STEPS, WIDTH)
    data = torch.utils.data.TensorDataset(x, x)

    def collate(rows):
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])

    taken = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data, ROWS, collate_fn=collate):
                before = faults()
                engine.step(batch)
                taken.append(faults() - before)
        most = held_pages()
    return asked, sorted(taken[STEPS:])[STEPS // 2], most - held_pages()


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_take_no_memory_anew_and_in_the_end_it_is_given_back(stages):
    ((asked, in_a_step, given_back),) = run_ranks(train, 1, True, stages, fresh=True)
    assert asked == ["keep_freed_memory", "stop_keeping_freed_memory"]
    # Six layers give, save and get gradients of that size.
    assert in_a_step < PAGES
    assert given_back > 2 * PAGES


def test_it_can_be_left_to_the_library():
    ((asked, _, _),) = run_ranks(train, 1, False, 1, fresh=True)
    assert asked == []
