"""An old program: deferred batch norm, stopped and gone on with from a checkpoint."""

import io

import pytest
import torch
from torch import nn

import pipetransformer.compat

pytestmark = pytest.mark.compat

# What torch 2.3 and torchgpipe 0.0.7 wrote for this model, in their order.
HISTORIC_KEYS = [
    "{conv}.weight",
    "{conv}.bias",
    "{norm}.weight",
    "{norm}.bias",
    "{norm}.running_mean",
    "{norm}.running_var",
    "{norm}.num_batches_tracked",
    "{norm}.sum",
    "{norm}.sum_squares",
    "{head}.weight",
    "{head}.bias",
]
NAMES = {
    "Pipe": {
        "conv": "partitions.0.0",
        "norm": "partitions.1.0",
        "head": "partitions.4.0",
    },
    "GPipe": {
        "conv": "partitions.0.conv",
        "norm": "partitions.0.norm",
        "head": "partitions.1.head",
    },
}


@pytest.fixture(autouse=True)
def _old_names():
    pipetransformer.compat.install(torchgpipe=True)


def make_model(kind, seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential()
    layers.add_module("conv", nn.Conv2d(2, 6, 3, padding=1))
    layers.add_module("norm", nn.BatchNorm2d(6))
    layers.add_module("relu", nn.ReLU())
    layers.add_module("flat", nn.Flatten())
    layers.add_module("head", nn.Linear(6 * 4 * 4, 3))
    layers.double()
    if kind == "GPipe":
        from torchgpipe import GPipe

        cpu = [torch.device("cpu")] * 2
        return GPipe(layers, [3, 2], devices=cpu, chunks=4, deferred_batch_norm=True)
    from torch.distributed.pipeline.sync import Pipe, WithDevice

    # Theirs made a stage of every layer on the CPU; ours, where its device is named.
    layers.relu, layers.flat = (
        WithDevice(layer, "cpu") for layer in (layers.relu, layers.flat)
    )
    return Pipe(layers, chunks=4, deferred_batch_norm=True)


def run(model, optimizer, steps):
    """Train as these programs did, each step on data of its own; return the losses."""
    losses = []
    model.train()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(10, 2, 4, 4, generator=generator, dtype=torch.double) + step
        target = torch.randint(3, (10,), generator=generator)
        optimizer.zero_grad()
        output = model(x)
        if not isinstance(output, torch.Tensor):
            output = output.local_value()
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["Pipe", "GPipe"])
def test_program_goes_on_from_its_checkpoint_with_equal_numbers(kind):
    whole = make_model(kind)
    optimizer = make_optimizer(whole)
    expected = run(whole, optimizer, range(6))

    first = make_model(kind)
    optimizer = make_optimizer(first)
    losses = run(first, optimizer, range(3))
    checkpoint = through_a_file(
        {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
    )
    second = make_model(kind, seed=1)
    optimizer = make_optimizer(second)
    second.load_state_dict(checkpoint["model"], strict=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    losses += run(second, optimizer, range(3, 6))

    assert losses == expected
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in state_of(second))
    # Six mini-batches, not 24 micro-batches, are in the running statistics.
    tracked = [v for name, v in state_of(second) if name.endswith("tracked")]
    assert tracked == [6]


def state_of(model):
    return model.state_dict().items()


@pytest.mark.parametrize("kind", ["Pipe", "GPipe"])
def test_checkpoints_of_the_old_packages_and_ours_load_strictly_either_way(kind):
    model = make_model(kind)
    run(model, make_optimizer(model), range(2))
    keys = [name.format(**NAMES[kind]) for name in HISTORIC_KEYS]

    # Theirs takes ours: the same names, shapes and types, the accumulators at rest.
    ours = model.state_dict()
    assert list(ours) == keys
    norm = NAMES[kind]["norm"]
    for name in ("sum", "sum_squares"):
        assert torch.equal(ours[f"{norm}.{name}"], torch.zeros(6, dtype=torch.double))

    # Ours takes theirs, whose accumulators may stand at a mini-batch of few rows.
    theirs = {name: value.clone() for name, value in ours.items()}
    theirs[f"{norm}.sum"] += 7
    theirs[f"{norm}.sum_squares"] += 70
    losses = []
    for state in (ours, theirs):
        again = make_model(kind, seed=1)
        result = again.load_state_dict(through_a_file(dict(state)), strict=True)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert all(torch.equal(v, state[k]) for k, v in state_of(again))
        losses.append(run(again, make_optimizer(again), range(2, 4)))
        assert not again.state_dict()[f"{norm}.sum"].any()
    assert losses[0] == losses[1]
