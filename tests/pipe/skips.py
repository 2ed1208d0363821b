"""Skippable layers shared by the tests."""

from torch import nn

from pipetransformer.pipe.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes its input."""

    def forward(self, x):
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x):
        skip = yield pop("skip")
        return x if skip is None else x + skip


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    """Stashes two, with parameters."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width).double()

    def forward(self, x):
        yield stash("a", x.tanh())
        yield stash("b", self.linear(x))
        return x


@skippable(stash=["c"], pop=["a"])
class PopStash(nn.Module):
    """Pops one and stashes another."""

    def forward(self, x):
        a = yield pop("a")
        yield stash("c", x * a)
        return x + a


def declares(stash_names=(), pop_names=()):
    """A layer that only declares; its forward does nothing."""

    class Layer(nn.Module):
        def forward(self, x):
            return x

    return skippable(stash=stash_names, pop=pop_names)(Layer)()
