"""A small U-Net-like model of skippable layers for engine tests."""

import torch
from torch import nn

from pipetransformer.pipe.skip import Namespace, pop, skippable, stash
from tests.support.toy import Block

# (stashing layer, popping layer) of `skip_model`: neighbours; crossing; nested, the
# outer one past three layers.
PAIRS = ((1, 2), (3, 5), (4, 6), (7, 11), (8, 9))
BOUNDARIES = (0, 1, 3, 7, 12)  # that no pair goes past
NUM_LAYERS = 13


@skippable(stash="skip")
class Keep(nn.Module):
    """Stashes what a linear layer makes of its input."""

    def __init__(self, width):
        super().__init__()
        self.side = nn.Linear(width, width)
        self.main = nn.Linear(width, width)

    def forward(self, x):
        yield stash("skip", self.side(x))
        return x + torch.tanh(self.main(x))


@skippable(pop="skip")
class Join(nn.Module):
    """Mixes its input with what was stashed."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x):
        skip = yield pop("skip")
        return x + torch.tanh(self.mix(torch.cat([x, skip], 1)))


def skip_model(width=8, classes=3, *, seed=0, dtype=torch.float32):
    """Return the model: inputs of 4 numbers, skips of one name in namespaces."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = {0: nn.Linear(4, width), 10: Block(width)}
        layers[12] = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))
        for number, (first, second) in enumerate(PAIRS):
            # One pair is in the default namespace.
            namespace = Namespace() if number else None
            layers[first] = Keep(width).isolate(namespace)
            layers[second] = Join(width).isolate(namespace)
    return nn.Sequential(*(layers[i] for i in range(NUM_LAYERS))).to(dtype)
