"""Frozen layers whose outputs are as long as the longest row that they are given."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pipetransformer as pt
from pipetransformer.replica.differences import difference
from tests.engine.scenario import config
from tests.engine.test_ragged import Texts, pad

SIZE, BATCH, WIDTH = 24, 8, 8


class Words(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.in_place = in_place

    def forward(self, tokens, mask):
        if self.in_place:
            tokens += 0
        return self.table(tokens), mask.sum(1)


class Packed(nn.Module):
    """Packs, runs and pads again: to the longest of what it was given."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden, lengths):
        packed = pack_padded_sequence(hidden, lengths, True, enforce_sorted=False)
        return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0], lengths


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, hidden, lengths):
        return self.linear(hidden.sum(1) / lengths[:, None])


def train(slots, *, frozen=(1, 2, 2, 2), in_place=False, **cache):
    """Return losses and the history; the data comes in whole batches of 8."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [Words(in_place), Packed(), Packed(), Mean()]
    engine = pt.PipeTransformer(
        nn.Sequential(*layers).double(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(list(frozen)),
        ragged=pt.Ragged(lambda inputs: inputs[1].sum(1)),
        config=config(
            cache=pt.CacheConfig(admission="always", **cache),
            pipe=pt.PipeConfig(num_slots=slots),
            plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
        ),
    )
    losses = []
    with engine:
        for _ in engine.epochs(len(frozen)):
            for batch in engine.batches(Texts(SIZE), BATCH, collate_fn=pad):
                losses.append(float(engine.step(batch)))
    return losses, engine.history


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("debug", [False, True])
def test_layers_that_pack_rows_freeze_and_are_cached(slots, debug, caplog):
    plain, _ = train(1, enabled=False)
    with caplog.at_level(logging.WARNING):
        found, history = train(slots, debug=debug)
    assert found == pytest.approx(plain, rel=1e-9)
    assert "not cached" not in caplog.text
    assert [each["hits"] for each in history.cache][2:] == [SIZE] * 2


def test_they_freeze_in_a_pipeline_without_a_cache():
    plain, _ = train(1, enabled=False)
    assert train(2, enabled=False)[0] == pytest.approx(plain, rel=1e-9)


def test_inputs_changed_in_place_are_not_run_again():
    with pytest.raises(TypeError, match="or inputs that stay as they are, got neither"):
        train(2, frozen=(2, 2), in_place=True)


class Normalised(nn.Module):
    """Works on its inputs in place, as preprocessing does."""

    def forward(self, x):
        return x.sub_(0.5).div_(2.0)


class Cancelled(nn.Module):
    """Hands on what it knows, and a difference that is rounding alone."""

    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.linalg.qr(torch.randn(64, 64))[0])

    def forward(self, x):
        return x, x @ self.q @ self.q.t() - x


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, x, rest=None):
        return self.linear(x)


class Vectors:
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        drawn = torch.Generator().manual_seed(i)
        return 10 * torch.randn(64, generator=drawn), i % 3


@pytest.mark.parametrize("layer", [Normalised, Cancelled])
@pytest.mark.parametrize("slots", [1, 2])
def test_layers_that_work_in_place_or_cancel_are_cached(layer, slots, caplog):
    def run(**cache):
        torch.manual_seed(0)
        engine = pt.PipeTransformer(
            nn.Sequential(layer(), First(), nn.Linear(3, 3)),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Schedule([1]),
            config=config(
                cache=pt.CacheConfig(admission="always", **cache),
                pipe=pt.PipeConfig(num_slots=slots),
                plan=pt.PlanConfig(num_stages=slots, num_microbatches=2),
            ),
        )
        losses = []
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(Vectors(), BATCH):
                    losses.append(float(engine.step(batch)))
        return losses, [each["hits"] for each in engine.history.cache]

    plain, _ = run(enabled=False)
    with caplog.at_level(logging.WARNING):
        found, hits = run()
    assert found == pytest.approx(plain, rel=1e-5)
    assert hits == [0, SIZE, SIZE] and "not cached" not in caplog.text


def test_rounding_counts_beside_the_largest_tensor_alone():
    large, small = torch.full((1, 64), 10.0), torch.full((1, 64), 1e-7)
    assert difference([large, small], [large, 0 * small]) is None
    assert difference([small], [0 * small]) is not None
    assert difference([large, 1e3 * small], [large, 0 * small]) is not None
    assert difference([large, small], [large, 0 * small], bits=True) is not None
    halves = [large.bfloat16(), small.bfloat16()]
    assert difference(halves, [halves[0], 0 * halves[1]]) is not None


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_a_mask_hides_no_difference_beside_it(least):
    mask = torch.zeros(1, 64)
    mask[:, 32:] = least
    one, other = torch.randn(1, 64), torch.randn(1, 64)
    assert difference([one, mask], [other, mask]) is not None
    assert difference([one.bfloat16(), mask], [other.bfloat16(), mask]) is not None
    assert difference([one, mask], [one, 0 * mask]) is not None
    assert difference([one, mask], [one, mask.clone()]) is None
    tenths, large = torch.full((1, 64), 0.1), torch.full((1, 64), 1e6)
    assert difference([tenths, large], [2 * tenths, large]) is not None
