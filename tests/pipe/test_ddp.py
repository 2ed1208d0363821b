"""A Pipe trains under DistributedDataParallel in every combination of options."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.pipe import Pipe, PipeResult, Workers
from tests.support.default_group import default_group
from tests.support.ranks import run_ranks

from .models import MODES, even_cuts

STEPS = 3


def make_layers(unused):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    if unused:
        layers[1] = WithSpare(layers[1])
    return nn.Sequential(*layers).double()


class WithSpare(nn.Module):
    """Holds a parameter that forward does not use."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.spare = nn.Linear(5, 5)

    def forward(self, x):
        return self.inner(x)


def train(model, parameters, rank, world_size):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(12, 5, dtype=torch.double, generator=generator)
        optimizer.zero_grad()
        output = model(x.chunk(world_size)[rank])
        if isinstance(output, PipeResult):
            output = output.local_value()
        (output**2).mean().backward()
        optimizer.step()
    return [p.tolist() for p in parameters]


def make_pipe(layers, kind, mode, workers):
    if kind == "result object":
        return Pipe(layers, 3, mode)
    stages = 1 if kind == "one stage" else 4
    return Pipe.from_plan(
        layers,
        cuts=even_cuts(4, stages),
        num_microbatches=3 if stages > 1 else 1,
        checkpoint=mode,
        workers=workers,
    )


def ddp_matrix(rank, unused):
    with default_group(rank, 2):
        return _ddp_matrix(rank, unused)


def _ddp_matrix(rank, unused):
    results = {}
    with Workers(4) as workers:
        for mode, find_unused, static, kind in itertools.product(
            MODES, (False, True), (False, True), ("one stage", "four", "result object")
        ):
            if unused and not (find_unused or static) and kind == "one stage":
                continue  # the plain module itself needs find_unused there
            layers = make_layers(unused)
            pipe = make_pipe(layers, kind, mode, workers)
            model = DistributedDataParallel(
                pipe, find_unused_parameters=find_unused, static_graph=static
            )
            results[mode, find_unused, static, kind] = train(
                model, list(layers.parameters()), rank, 2
            )
            pipe.close()
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("unused", [False, True], ids=["all_used", "one_unused"])
def test_ddp_matrix_trains_like_one_process(unused):
    ranks = run_ranks(ddp_matrix, 2, unused, timeout_s=100)
    layers = make_layers(unused)
    expected = train(layers, list(layers.parameters()), 0, 1)
    assert len(ranks[0]) == (33 if unused else 36)
    for combination in ranks[0]:
        for mine, other, plain in zip(
            ranks[0][combination], ranks[1][combination], expected, strict=True
        ):
            assert mine == other, combination
            torch.testing.assert_close(
                torch.tensor(mine, dtype=torch.double),
                torch.tensor(plain, dtype=torch.double),
                msg=str(combination),
            )
