"""What the profile is taken with: rows as they are in training."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

import pipetransformer as pt
from pipetransformer import planner
from pipetransformer.data.loading import ElasticSampler
from pipetransformer.data.typical import typical_rows
from tests.engine.scenario import config

SIZE, BATCH, SHORT, LONG = 400, 8, 3, 40


class Texts(torch.utils.data.Dataset):
    """Rows of different lengths, the first of them all short; counts what is loaded."""

    def __init__(self, lengths, kind=torch.tensor):
        self.lengths = lengths
        self.kind = kind
        self.loaded = []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.kind([1] * self.lengths[index]), index % 2


def ragged():
    drawn = torch.Generator().manual_seed(4)
    lengths = torch.randint(LONG // 2, LONG + 1, (SIZE,), generator=drawn).tolist()
    return [SHORT] * 32 + lengths[32:]


def pad(samples):
    texts = [torch.as_tensor(text) for text, _ in samples]
    return pad_sequence(texts, batch_first=True), torch.tensor([y for _, y in samples])


def take(dataset, rows, *, collate=pad, batch=BATCH, **options):
    sampler = ElasticSampler(len(dataset), batch, node=None, **options)
    return typical_rows(
        dataset, sampler, rows, collate=collate, inputs_of=lambda pair: pair[0]
    )


@pytest.mark.parametrize("kind", [torch.tensor, list])
@pytest.mark.parametrize("rows", [1, 4, 8, 13])
def test_rows_are_as_long_as_in_the_batch_of_median_size(kind, rows):
    dataset = Texts(ragged(), kind)
    found = take(dataset, rows)
    batches = list(ElasticSampler(SIZE, BATCH, node=None))[:5]
    longest = sorted(max(dataset.lengths[i] for i in ids) for ids in batches)
    assert found.shape == (rows, longest[2])


def test_of_two_batches_one_is_taken():
    dataset = Texts([3, 9, 9, 3])
    assert take(dataset, 2, batch=2).shape in [(2, 3), (2, 9)]
    assert take(Texts([3, 9]), 1, batch=1).shape == (1, 3)


def test_samples_of_one_shape_are_loaded_as_often_as_needed():
    dataset = Texts([7] * SIZE)
    assert take(dataset, 4, collate=default_collate).shape == (4, 7)
    assert dataset.loaded == next(iter(ElasticSampler(SIZE, BATCH, node=None)))[:4]


def test_rows_are_repeated_where_there_are_too_few():
    dataset = Texts([7] * 3)
    assert take(dataset, 8, collate=default_collate).shape == (8, 7)
    assert sorted(dataset.loaded) == [0, 1, 2]


def test_inputs_may_be_structures():
    def collate(samples):
        ids, labels = pad(samples)
        return {"ids": ids, "mask": (ids > 0,)}, labels

    found = take(Texts(ragged()), 4, collate=collate)
    assert found["ids"].shape == found["mask"][0].shape and len(found["ids"]) == 4


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 4)

    def forward(self, ids):
        return self.table(ids)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, hidden):
        return self.out(hidden.mean(1))


def test_the_engine_measures_typical_batches(monkeypatch):
    shapes, profile = [], planner.profile

    def measure(model, sample, **options):
        shapes.append(tuple(sample.shape))
        return profile(model, sample, **options)

    monkeypatch.setattr(planner, "profile", measure)
    dataset = Texts(ragged())
    engine = pt.PipeTransformer(
        nn.Sequential(Embed(), nn.Linear(4, 4), Mean()),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        loss=nn.functional.cross_entropy,
        freeze=pt.freeze.Never(),
        config=config(),
    )
    with engine:
        engine.prepare(dataset, BATCH, collate_fn=pad)
    ((rows, length),) = shapes
    assert rows <= BATCH and LONG - 4 <= length <= LONG
