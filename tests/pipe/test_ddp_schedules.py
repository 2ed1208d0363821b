"""Schedules with the loss, and both dispatches, under DistributedDataParallel."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.pipe import Pipe, PipeResult, Workers
from tests.support.default_group import default_group
from tests.support.ranks import run_ranks

from .models import MODES, even_cuts
from .test_ddp import WithSpare

STEPS = 3
ACCUMULATED = 2
DEADLINE_S = 100
SCHEDULES = ("1f1b", "zb-h1")
FLAGS = tuple(itertools.product((False, True), (False, True)))


def make_layers(unused=False):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    if unused:
        layers[1] = WithSpare(layers[1])
    return nn.Sequential(*layers).double()


def mean_square(output, targets):
    return ((output - targets) ** 2).mean()


def batches(rank, world_size, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(2, 12, 5, dtype=torch.double, generator=generator)
        yield x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def train(loss_of, parameters, rank, world_size):
    """Gradients of every step, and the parameters at the end."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    seen = []
    for x, y in batches(rank, world_size, STEPS):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        seen.append([None if p.grad is None else p.grad.tolist() for p in parameters])
        optimizer.step()
    return [*seen, [p.tolist() for p in parameters]]


def plain_training(unused=False):
    layers = make_layers(unused)
    return train(
        lambda x, y: mean_square(layers(x), y), list(layers.parameters()), 0, 1
    )


def value_of(output):
    return output.local_value() if isinstance(output, PipeResult) else output


def make_pipe(layers, kind, mode, workers, **options):
    if kind == "result object":
        return Pipe(layers, 3, mode, **options)
    stages = 1 if kind == "one stage" else 4
    return Pipe.from_plan(
        layers,
        cuts=even_cuts(4, stages),
        num_microbatches=3,
        checkpoint=mode,
        workers=workers,
        **options,
    )


def in_group(rank, matrix, *args):
    with default_group(rank, 2):
        return matrix(rank, *args)


def schedule_matrix(rank, unused):
    results = {}
    with Workers(4) as workers:
        for schedule, mode, flags, kind in itertools.product(
            SCHEDULES, MODES, FLAGS, ("one stage", "four", "result object")
        ):
            layers = make_layers(unused)
            pipe = make_pipe(
                layers, kind, mode, workers, schedule=schedule, loss=mean_square
            )
            model = DistributedDataParallel(
                pipe, find_unused_parameters=flags[0], static_graph=flags[1]
            )
            results[(schedule, mode, *flags, kind)] = train(
                lambda x, y, model=model: value_of(model(x, targets=y)),
                list(layers.parameters()),
                rank,
                2,
            )
            pipe.close()
    return results


def dispatch_matrix(rank):
    results = {}
    with Workers(4) as workers:
        for dispatch, mode, flags in itertools.product(
            ("serial", "threads"), MODES, FLAGS
        ):
            layers = make_layers()
            pipe = make_pipe(layers, "four", mode, workers, dispatch=dispatch)
            model = DistributedDataParallel(
                pipe, find_unused_parameters=flags[0], static_graph=flags[1]
            )
            results[(dispatch, mode, *flags)] = train(
                lambda x, y, model=model: mean_square(model(x), y),
                list(layers.parameters()),
                rank,
                2,
            )
    return results


def assert_trains_like_one_process(ranks, expected):
    mine, other = ranks
    assert mine.keys() == other.keys()
    for case in mine:
        assert mine[case] == other[case], case
        for step, plain_step in zip(mine[case], expected, strict=True):
            for found, plain in zip(step, plain_step, strict=True):
                if plain is None:  # not used: DDP may deliver zeros
                    assert found is None or not tensor(found).any(), case
                    continue
                torch.testing.assert_close(tensor(found), tensor(plain), msg=str(case))


def tensor(values):
    return torch.tensor(values, dtype=torch.double)


@pytest.mark.distributed
@pytest.mark.parametrize("unused", [False, True], ids=["all_used", "one_unused"])
def test_schedules_with_the_loss_train_like_one_process(unused):
    ranks = run_ranks(in_group, 2, schedule_matrix, unused, timeout_s=DEADLINE_S)
    assert len(ranks[0]) == 2 * 3 * 4 * 3
    assert_trains_like_one_process(ranks, plain_training(unused))


@pytest.mark.distributed
def test_both_dispatches_train_like_one_process():
    ranks = run_ranks(in_group, 2, dispatch_matrix, timeout_s=DEADLINE_S)
    assert len(ranks[0]) == 2 * 3 * 4
    assert_trains_like_one_process(ranks, plain_training())


def accumulate(rank):
    """Mini-batches without synchronisation before one with it."""
    results = {}
    with Workers(4) as workers:
        for schedule, mode in itertools.product(("gpipe", *SCHEDULES), MODES):
            layers = make_layers()
            takes_loss = schedule != "gpipe"
            loss = mean_square if takes_loss else None
            pipe = make_pipe(
                layers, "four", mode, workers, schedule=schedule, loss=loss
            )
            model = DistributedDataParallel(pipe)
            synced = []
            for k, (x, y) in enumerate(batches(rank, 2, ACCUMULATED)):
                last = k == ACCUMULATED - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    if takes_loss:
                        model(x, targets=y).backward()
                    else:
                        mean_square(model(x), y).backward()
                synced.append([p.grad.tolist() for p in layers.parameters()])
            results[schedule, mode] = synced
    return results


@pytest.mark.distributed
def test_gradients_accumulate_without_synchronisation_until_the_last_step():
    first, second = run_ranks(in_group, 2, accumulate, timeout_s=DEADLINE_S)
    layers = make_layers()
    for x, y in batches(0, 1, ACCUMULATED):
        mean_square(layers(x), y).backward()
    expected = [p.grad for p in layers.parameters()]
    for case in first:
        assert first[case][0] != second[case][0], case
        assert first[case][-1] == second[case][-1], case
        torch.testing.assert_close(
            [tensor(g) for g in first[case][-1]],
            expected,
            msg=str(case),
        )
