"""An old program: it draws its batches between steps, from the global generator.

So it trains on the data, and to the losses, of the plain model in a loop over
micro-batches, which it does only if the pipeline leaves that generator alone.
"""

import pytest
import torch
from torch import nn

import pipetransformer.compat

pytestmark = pytest.mark.compat

STEPS, ROWS, CHUNKS = 8, 12, 4
MODES = ("always", "except_last", "never")


@pytest.fixture(autouse=True)
def _old_names():
    pipetransformer.compat.install(torchgpipe=True)


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.RReLU(),  # draws in training mode only, and is not trained here
        nn.Dropout(0.0),
        nn.Linear(16, 3),
    ).double()


class Plain(nn.Module):
    """The model without a pipeline, micro-batch by micro-batch."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return torch.cat([self.layers(part) for part in x.chunk(CHUNKS)])


def plain(layers, _):
    return Plain(layers)


def sync_pipe(layers, mode):
    from torch.distributed.pipeline.sync import Pipe

    return Pipe(layers, chunks=CHUNKS, checkpoint=mode)


def gpipe(layers, mode):
    from torchgpipe import GPipe

    cpu = [torch.device("cpu")] * 3
    return GPipe(layers, [2, 3, 2], devices=cpu, chunks=CHUNKS, checkpoint=mode)


def output_of(model, x):
    output = model(x)
    return output if isinstance(output, torch.Tensor) else output.local_value()


def program(build, mode):
    """Train as these programs did; return each step's losses and the generator."""
    layers = make_layers()
    model = build(layers, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        model.train()
        layers[4].eval()
        x = torch.randn(ROWS, 6, dtype=torch.double)
        target = torch.randint(3, (ROWS,))
        order = torch.randperm(ROWS)
        optimizer.zero_grad()
        output = output_of(model, x[order])
        noise = 0.1 * torch.randn(ROWS, 3, dtype=torch.double)  # before backward
        loss = nn.functional.cross_entropy(output + noise, target[order])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                x = torch.rand(5, 6, dtype=torch.double)
                losses.append(output_of(model, x).square().mean().item())
    return losses, torch.get_rng_state()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [sync_pipe, gpipe])
def test_program_trains_on_the_data_of_the_plain_loop(build, mode):
    expected, generator = program(plain, mode)
    losses, after = program(build, mode)
    assert len(losses) == len(expected) == STEPS + STEPS // 3
    for ours, theirs in zip(losses, expected, strict=True):
        assert abs(ours - theirs) < 1e-8
    assert torch.equal(after, generator)
