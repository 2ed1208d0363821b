"""Small models and data sets for engine tests."""

import torch
from torch import nn


class Block(nn.Module):
    """A residual MLP block; every row is computed on its own."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def toy_model(depth=6, width=8, classes=3, *, seed=0, dtype=torch.float32, dropout=0.0):
    """Return [linear, block * depth, head]; depth + 2 layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, width)]
        layers += [Block(width, dropout) for _ in range(depth)]
        layers += [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))]
    return nn.Sequential(*layers).to(dtype)


def toy_units(depth=6):
    """Return units: linear + block 1, block 2, ...; `depth` units."""
    return list(range(2, depth + 2))


class ToySet(torch.utils.data.Dataset):
    """Random inputs of 4 numbers in 3 classes that a small model can learn."""

    def __init__(self, size=48, *, seed=1, dtype=torch.float32, vouch=False):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=generator, dtype=dtype)
        self.y = self.x[:, :3].argmax(1)
        self.loads = 0
        if vouch:
            self.inputs = self._inputs
            self.targets = lambda i: self.y[i]
            self.input_key = lambda i, epoch: i

    def _inputs(self, i):
        self.loads += 1
        return self.x[i]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.loads += 1
        return self.x[i], self.y[i]


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double()
