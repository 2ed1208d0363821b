"""An old program: a U-Net with its skips as skips, and as tuples from layer to layer.

The second form is what programs compared the first with: a wrapper that carries each
stashed tensor along in the tuple, by way of ``Skippable.dispatch``.
"""

import pytest
import torch
from torch import nn

import pipetransformer.compat

pipetransformer.compat.install(torchgpipe=True)

from torchgpipe import GPipe  # noqa: E402
from torchgpipe.skip import Namespace, pop, skippable, stash  # noqa: E402
from torchgpipe.skip.skippable import Skippable  # noqa: E402

pytestmark = pytest.mark.compat

DEPTH = 3
MODES = ["always", "except_last", "never"]


@skippable(stash=["skip"])
class Encode(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.conv(x))
        yield stash("skip", x)
        return nn.functional.avg_pool2d(x, 2)


@skippable(pop=["skip"])
class Decode(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x):
        skip = yield pop("skip")
        x = nn.functional.interpolate(x, scale_factor=2)
        return torch.tanh(self.conv(torch.cat([x, skip], dim=1)))


class AsTuple(nn.Module):
    """Takes and returns (value, skips under way, in a fixed order)."""

    def __init__(self, layer, names_in):
        super().__init__()
        self.layer = layer
        self.names_in = names_in
        popped = set(layer.poppable()) if isinstance(layer, Skippable) else set()
        stashed = list(layer.stashable()) if isinstance(layer, Skippable) else []
        self.names_out = [name for name in names_in if name not in popped] + stashed

    def forward(self, input):
        tensors = input if isinstance(input, tuple) else (input,)
        under_way = dict(zip(self.names_in, tensors[1:], strict=True))
        if not isinstance(self.layer, Skippable):
            output = self.layer(tensors[0])
        else:
            namespaces = self.layer.namespaces

            def handle_stash(name, tensor):
                under_way[namespaces.get(name), name] = tensor

            def handle_pop(name):
                return under_way.pop((namespaces.get(name), name))

            output = self.layer.dispatch(tensors[0], handle_stash, handle_pop)
        if not self.names_out:
            return output
        return (output, *(under_way[name] for name in self.names_out))


def unet():
    torch.manual_seed(0)
    namespaces = [Namespace() for _ in range(DEPTH)]
    layers = [Encode(3).isolate(ns) for ns in namespaces]
    layers += [nn.Conv2d(3, 3, 1), nn.Tanh()]
    layers += [Decode(3).isolate(ns) for ns in reversed(namespaces)]
    return nn.Sequential(*layers).double()


def by_hand(layers, x):
    """What the layers compute, without skippables."""
    skips = []
    for layer in layers[:DEPTH]:
        x = torch.tanh(layer.module.conv(x))
        skips.append(x)
        x = nn.functional.avg_pool2d(x, 2)
    x = torch.tanh(layers[DEPTH](x))
    for layer in layers[DEPTH + 2 :]:
        x = nn.functional.interpolate(x, scale_factor=2)
        x = torch.tanh(layer.module.conv(torch.cat([x, skips.pop()], dim=1)))
    return x


def as_tuples(layers):
    """The same layers; tensors under way pass through every one in between."""
    wrapped, names = [], []
    for layer in layers:
        wrapped.append(AsTuple(layer, names))
        names = wrapped[-1].names_out
    assert names == []
    return nn.Sequential(*wrapped)


def run(model, layers, x):
    """Return the output and all gradients of one training step."""
    x = x.detach().requires_grad_()
    layers.zero_grad()
    output = model(x)
    (output**2).sum().backward()
    return [output.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]


def pipeline(model, balance, mode):
    cpu = [torch.device("cpu")] * len(balance)
    return GPipe(model, balance, devices=cpu, chunks=3, checkpoint=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[8], [3, 5], [2, 2, 2, 2]])
def test_skips_and_tuples_give_equal_outputs_and_gradients(balance, mode):
    layers = unet()
    assert len(layers) == sum(balance)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 3, 16, 16, generator=generator, dtype=torch.double)
    plain = run(lambda x: by_hand(layers, x), layers, x)
    skips = run(pipeline(layers, balance, mode), layers, x)
    tuples = run(pipeline(as_tuples(layers), balance, mode), layers, x)
    assert len(plain) == 2 + 2 * (2 * DEPTH + 1) and all(g.any() for g in plain)
    for a, b, c in zip(plain, skips, tuples, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
        torch.testing.assert_close(c, a, rtol=0, atol=1e-12)
