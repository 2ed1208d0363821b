"""Nothing about the cache ends a run: it trains as without one, and says why."""

import logging
import resource
import threading

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.run.caches import Caches
from tests.engine.scenario import config
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model

SIZE = 200  # samples: a slab is larger than what may be reserved
BATCH = 50
LIMITS = {
    "memory": (resource.RLIMIT_FSIZE, 1 << 16),
    "descriptors": (resource.RLIMIT_NOFILE, 0),
}


def refuse(kind):
    """Make slabs under a limit of this process that they break."""
    number, most = LIMITS[kind]
    create = Caches._create

    def create_limited(self, space, num_samples):
        before = resource.getrlimit(number)
        resource.setrlimit(number, (most, before[1]))
        try:
            return create(self, space, num_samples)
        finally:
            resource.setrlimit(number, before)

    return create_limited


def train(*, epochs=2, dataset=None, **cache):
    engine = pt.PipeTransformer(
        toy_model(3),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2] * epochs),
        config=config(cache=pt.CacheConfig(**cache)),
    )
    losses = []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(dataset or ToySet(SIZE), BATCH):
                losses.append(float(engine.step(batch)))
    return losses, [epoch.cache_hits for epoch in engine.history.epochs]


@pytest.mark.parametrize("kind", LIMITS)
def test_a_slab_that_is_refused_leaves_the_run_as_without_a_cache(
    kind, monkeypatch, caplog
):
    plain, _ = train(enabled=False)
    assert train()[1] == [0, SIZE]
    monkeypatch.setattr(Caches, "_create", refuse(kind))
    with caplog.at_level(logging.WARNING):
        losses, hits = train()
    assert losses == plain and hits == [0, 0]
    assert caplog.text.count("no cache, frozen layers are recomputed: ") == 1


def train_refused(rank, kind):
    if kind is not None:
        Caches._create = refuse(kind)
    return train()


@pytest.mark.distributed
def test_replicas_go_on_together_when_their_slab_is_refused():
    cached = run_ranks(train_refused, 2, None)
    refused = run_ranks(train_refused, 2, "memory")
    assert cached[0][1] == [0, SIZE] and refused[0][1] == [0, 0]
    for (losses, _), (others, _) in zip(cached, refused, strict=True):
        assert losses == pytest.approx(others, rel=1e-6)


class Masked(nn.Module):
    """Gives a hidden state and an additive mask, which holds infinities."""

    def forward(self, hidden):
        mask = torch.zeros_like(hidden).masked_fill(hidden > 0.5, float("-inf"))
        return hidden, mask


class Unmasked(nn.Module):
    def forward(self, hidden, mask):
        return hidden * mask.exp()


SETTING = {"factor": 2.0, "more": False}  # of the file: no fingerprint sees it


class Grown(nn.Module):
    """A layer whose code returns more tensors in a later run."""

    def forward(self, hidden):
        return (hidden, 2 * hidden) if SETTING["more"] else (hidden,)


class First(nn.Module):
    def forward(self, hidden, *_):
        return hidden


def pair_model(first, second):
    layers = list(toy_model(3))
    return nn.Sequential(layers[0], first, second, *layers[1:])


def train_pair(first, second, *, epochs=3, batch_size=12, **cache):
    engine = pt.PipeTransformer(
        pair_model(first, second),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2] * epochs),
        config=config(cache=pt.CacheConfig(**cache)),
    )
    losses = []
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(24), batch_size):
                losses.append(float(engine.step(batch)))
    return losses, engine.history.cache


def test_records_with_infinities_pass_their_audits(caplog):
    with caplog.at_level(logging.WARNING):
        losses, counts = train_pair(Masked(), Unmasked(), audit_every=1)
    plain, _ = train_pair(Masked(), Unmasked(), enabled=False)
    assert losses == plain
    assert [each["hits"] for each in counts] == [0, 24, 24]
    assert [each["audited"] for each in counts] == [0, 2, 2]
    assert "used no more" not in caplog.text


def test_a_layer_that_returns_more_tensors_than_a_run_before_fails_the_audit(
    tmp_path, monkeypatch, caplog
):
    # A batch that is found in part is computed in part, which may give other bits.
    whole = {"batch_size": 24}
    train_pair(Grown(), First(), directory=tmp_path, **whole)
    monkeypatch.setitem(SETTING, "more", True)
    with caplog.at_level(logging.WARNING):
        losses, counts = train_pair(Grown(), First(), directory=tmp_path, **whole)
    assert "records of earlier runs are dropped" in caplog.text
    assert losses == train_pair(Grown(), First(), enabled=False, **whole)[0]
    assert counts[-1]["hits"] == 24


def test_a_machine_without_threads_left_keeps_its_records_at_the_end(
    tmp_path, monkeypatch, caplog
):
    real = threading.Thread.start

    def start(self):
        if self.name == "cache file":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    small = ToySet(24)
    with caplog.at_level(logging.WARNING):
        losses, hits = train(dataset=small, directory=tmp_path)
    assert losses == train(dataset=small, enabled=False)[0] and hits == [0, 24]
    assert "not kept now: can't start new thread" in caplog.text
    assert train(dataset=small, directory=tmp_path)[1] == [24, 24]


def audits_of_rank(rank, folder):
    """Return what this rank audited, with a layer whose code has changed."""
    SETTING["factor"] = 3.0
    losses, counts = train_pair(Twice(), nn.Identity(), directory=folder)
    return losses, [each["audited"] for each in counts]


class Twice(nn.Module):
    def forward(self, x):
        return x * SETTING["factor"]


@pytest.mark.distributed
def test_each_replica_audits_what_earlier_runs_kept(tmp_path):
    train_pair(Twice(), nn.Identity(), directory=tmp_path)
    plain = run_ranks(losses_of_rank, 2)
    for (losses, _), expected in zip(
        run_ranks(audits_of_rank, 2, tmp_path), plain, strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-6)


def losses_of_rank(rank):
    SETTING["factor"] = 3.0
    return train_pair(Twice(), nn.Identity(), enabled=False)[0]
