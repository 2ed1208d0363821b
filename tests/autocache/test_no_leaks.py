"""A long run takes no more of the machine in its last epoch than in its first ones."""

import gc
import os

import pytest
import torch
from torch import nn

from pipetransformer.autocache import ActivationCache, CacheFolder, Ragged
from pipetransformer.pipe import Workers
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock

from .test_cache import make_cache

EPOCHS, WARM_UP, SAMPLES = 1000, 50, 10
LENGTH, WIDTH = 16, 256  # a record of 16 KB
AT = DrawPosition(0, 0)


def usage():
    """Descriptors, mappings of cache memory, all mappings, threads, resident bytes."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = maps.read().splitlines()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "cache mappings": sum("pipetransformer-cache" in line for line in mappings),
        "mappings": len(mappings),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": resident,
    }


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def lengths_of(inputs):
    return (inputs[..., 0] != 0).sum(1)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_a_thousand_epochs_of_ten_samples_leak_nothing(ragged, tmp_path):
    """Passes that advance, unfreeze, evaluate, audit, attach, let go and keep files."""
    torch.manual_seed(0)
    layers = [Layer().eval() for _ in range(3)]
    inputs = torch.rand(SAMPLES, LENGTH, WIDTH) + 0.1
    if ragged:
        for sample in range(SAMPLES):
            inputs[sample, 1 + sample :] = 0
    spec = Ragged(lengths_of) if ragged else None
    slot_bytes = 4 * LENGTH * WIDTH + 512
    options = dict(num_samples=SAMPLES, slot_bytes=slot_bytes, ragged=ragged)
    cache = make_cache(verify="all", audit_every=7, **options)
    keeper = CacheFolder(tmp_path)
    keeper.load(cache, "train", 1)
    after, used = {}, set()
    with Workers(2) as workers:
        for epoch in range(EPOCHS):
            boundary = 1 + epoch // 3 % 3
            prefix = FrozenPrefix(
                layers, boundary, workers, Clock(), seed=0, ragged=spec
            )
            order = torch.randperm(SAMPLES)
            for ids in (order[:6], order[6:]):
                prefix(lambda ids=ids: inputs[ids], ids, cache, position=AT)
            if epoch % 3 == 0:
                other = ActivationCache.attach(cache.address, run_id="run")
                evaluation = make_cache(**options)
                for each in (other, evaluation):
                    prefix(lambda: inputs[:3], torch.arange(3), each, position=AT)
                    each.close()
            cache.begin_pass()
            if epoch % 100 == 0:
                keeper.save(cache, "train", 1)
            if epoch >= WARM_UP:
                used.add(cache.used_bytes)
            if epoch in (WARM_UP, EPOCHS - 1):
                after[epoch] = usage()
    assert cache.given_up is None and cache.counters.hits > EPOCHS * SAMPLES / 2
    assert len(used) == 1, "the slab has all its slots"
    first, last = after[WARM_UP], after[EPOCHS - 1]
    assert first["cache mappings"] == last["cache mappings"] >= 1
    assert first["descriptors"] == last["descriptors"]
    assert first["threads"] == last["threads"]
    assert last["mappings"] <= first["mappings"] + 10  # of the allocator
    # One record per epoch would be 15 MB.
    assert last["resident"] - first["resident"] < 8 << 20
