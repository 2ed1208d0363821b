"""Random augmentation in loader processes depends on the sample alone."""

import multiprocessing
import random

import numpy
import pytest
import torch
from torch.utils.data import default_collate

from pipetransformer.data.loading import ElasticSampler, batches
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

SIZE, BATCH = 22, 4


class Augmented(ToySet):
    """Adds noise of each generator; some samples draw more often than others."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        for _ in range(index % 3):
            random.random(), numpy.random.rand(), torch.rand(1)
        noise = [random.random(), numpy.random.rand(), float(torch.rand(1)), 0]
        return x + torch.tensor(noise), y


def loaded(workers, *, replicas=1, epoch=0, seed=0, collate=None):
    """Return the augmented inputs of each sample."""
    found = {}
    for replica in range(replicas):
        sampler = ElasticSampler(
            SIZE, BATCH, seed=seed, replicas_on_node=replicas, replica_on_node=replica
        )
        sampler.set_epoch(epoch)
        for batch in batches(
            Augmented(SIZE), sampler, num_workers=workers, collate_fn=collate
        ):
            rows = zip(batch.ids.tolist(), batch.inputs.tolist(), strict=True)
            found.update(rows)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_samples_are_the_same_for_any_processes_and_replicas(workers, replicas):
    found = loaded(workers, replicas=replicas)
    assert len(found) == SIZE and found == loaded(1)


def test_epochs_seeds_and_samples_draw_differently():
    assert loaded(1) != loaded(1, epoch=1)
    assert loaded(1) != loaded(1, seed=1)
    plain, found = ToySet(SIZE).x, loaded(1)
    noise = {tuple((torch.tensor(found[i]) - plain[i]).tolist()) for i in found}
    assert len(noise) == SIZE


def masked(samples):
    """Draw for the batch, as a collator that masks tokens does."""
    x, y = default_collate(samples)
    return x + torch.rand(len(x), 1) + random.random() + numpy.random.rand(), y


def test_what_collating_draws_does_not_depend_on_the_processes():
    assert loaded(1, collate=masked) == loaded(3, collate=masked)
    assert loaded(1, collate=masked) != loaded(1)


def test_the_programs_own_generators_are_left_alone():
    for workers in (0, 2):
        seed_all()
        list(batches(ToySet(SIZE), ElasticSampler(SIZE, BATCH), num_workers=workers))
        left = random.random(), numpy.random.rand(), float(torch.rand(1))
        seed_all()
        assert left == (random.random(), numpy.random.rand(), float(torch.rand(1)))


def seed_all():
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


def train(rank, workers):
    """Return the inputs that this rank trained on, by epoch and sample."""
    multiprocessing.current_process().daemon = False  # ranks may start no loaders
    engine, found = make_engine(freeze=schedule(0), config=config(seed=5)), {}
    seed_all()
    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(Augmented(SIZE), BATCH, num_workers=workers):
                rows = zip(batch.ids.tolist(), batch.inputs.tolist(), strict=True)
                found.update({(epoch, i): row for i, row in rows})
                engine.step(batch)
    return found


@pytest.mark.distributed
def test_a_run_trains_on_the_same_samples_with_any_ranks():
    (alone,) = run_ranks(train, 1, 1)
    assert len(alone) == 2 * SIZE
    first, second = run_ranks(train, 2, 2)
    assert first and second and {**first, **second} == alone
