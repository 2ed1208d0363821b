"""Views: so many versions of each augmented sample come again, and are cached."""

import logging
import multiprocessing
import random
import subprocess
import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

import pipetransformer as pt
from pipetransformer.autocache import cache_files
from pipetransformer.data.loading import ElasticSampler, batches
from tests.engine.scenario import config, make_engine
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

SIZE, BATCH = 24, 4


class Augmented(ToySet):
    """Adds noise of each generator; some samples draw more often than others."""

    def __getitem__(self, index):
        return self._augmented(index), self.y[index]

    def _augmented(self, index):
        for _ in range(index % 3):
            random.random(), numpy.random.rand(), torch.rand(1)
        noise = [random.random(), numpy.random.rand(), float(torch.rand(1)), 0]
        return self.x[index] + torch.tensor(noise, dtype=self.x.dtype)


class Halves(Augmented):
    """Loads inputs alone, when touched, and notes what it is asked for."""

    def __init__(self, size, **options):
        super().__init__(size, **options)
        self.keys = set()

    def inputs(self, index):
        return self._augmented(index)

    def targets(self, index):
        return self.y[index]

    def input_key(self, index, epoch):
        self.keys.add((index, epoch))
        return 1000 * index + epoch


def loaded(dataset, *, views, epoch=0, seed=0, replicas=1, size=BATCH, **options):
    """Return the inputs of each sample of a pass, and the numbers of views."""
    found, numbers = {}, set()
    for replica in range(replicas):
        sampler = ElasticSampler(
            SIZE, size, seed=seed, replicas_on_node=replicas, replica_on_node=replica
        )
        sampler.set_epoch(epoch)
        for batch in batches(dataset, sampler, views=views, **options):
            numbers.add(batch.view)
            rows = zip(batch.ids.tolist(), batch.inputs.tolist(), strict=True)
            found.update(rows)
    assert len(found) == SIZE
    return found, numbers


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**63 - 1),
    views=st.integers(1, 4),
    epoch=st.integers(0, 9),
    replicas=st.integers(1, 3),
    size=st.integers(1, SIZE),
    dataset=st.sampled_from([Augmented, Halves]),
)
def test_seed_sample_and_view_alone_say_what_is_drawn(
    seed, views, epoch, replicas, size, dataset
):
    view = epoch % views
    found, numbers = loaded(
        dataset(SIZE),
        views=views,
        epoch=epoch,
        seed=seed,
        replicas=replicas,
        size=size,
    )
    assert numbers == {view}
    # In the order of another epoch, another batch size, by one replica.
    assert found == loaded(Augmented(SIZE), views=view + 1, epoch=view, seed=seed)[0]
    other = loaded(Augmented(SIZE), views=view + 2, epoch=view + 1, seed=seed)[0]
    assert all(found[i] != other[i] for i in found)


@pytest.mark.parametrize("dataset", [Augmented, Halves])
def test_loader_processes_draw_what_this_process_draws(dataset):
    here = loaded(dataset(SIZE), views=2, epoch=1)
    for workers in (1, 3):
        assert loaded(dataset(SIZE), views=2, epoch=5, num_workers=workers) == here
    # View v is what loader processes draw in epoch v without views.
    plain = loaded(Augmented(SIZE), views=None, epoch=1, num_workers=2)[0]
    assert here[0] == plain


def masked(samples):
    x, y = default_collate(samples)
    return x + torch.rand(len(x), 1) + random.random() + numpy.random.rand(), y


def test_what_collating_draws_is_seeded_in_this_process_too():
    here = loaded(ToySet(SIZE), views=2, epoch=1, collate_fn=masked)
    for workers in (0, 2):
        again = loaded(
            ToySet(SIZE), views=2, epoch=1, collate_fn=masked, num_workers=workers
        )
        assert again == here
    # It is that of a batch, and batches are others in the next epoch of a view.
    assert loaded(ToySet(SIZE), views=2, epoch=3, collate_fn=masked) != here


def states():
    drawn = numpy.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (drawn[1].tobytes(), *drawn[2:]),
    )


class Failing(Augmented):
    def _augmented(self, index):
        if index == 5:
            raise LookupError("no such sample")
        return super()._augmented(index)


@pytest.mark.parametrize("dataset", [Augmented, Halves])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_programs_generators_are_as_they_were(dataset, workers):
    before = states()
    loaded(dataset(SIZE), views=3, num_workers=workers, epoch=1)
    assert states() == before


def test_the_programs_generators_are_as_they_were_after_an_error():
    before = states()
    with pytest.raises(LookupError):
        loaded(Failing(SIZE), views=1)
    assert states() == before


FIRST_DRAW = """
import sys
import torch
from pipetransformer.data.loading import ElasticSampler, batches

class Drawing:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        import numpy
        return torch.tensor(numpy.random.rand()), 0

assert "numpy.random" not in sys.modules
(batch,) = batches(Drawing(), ElasticSampler(1, 1), views=1)
print(batch.inputs.item())
"""


def test_numpy_is_seeded_for_the_first_sample_that_draws_from_it():
    drawn = {
        subprocess.run(
            [sys.executable, "-c", FIRST_DRAW], capture_output=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(drawn) == 1 and drawn != {b""}


# -- whole runs ---------------------------------------------------------------


def train(data, views, *, epochs=5, freeze=None, loader=None, **cache):
    """Return losses, history, what was trained on by epoch and sample, and the run."""
    toy = make_engine(
        freeze=freeze or pt.freeze.Schedule([2] * epochs),
        config=config(
            cache=pt.CacheConfig(views=views, **cache),
            plan=pt.PlanConfig(num_stages=1, num_microbatches=2),
        ),
    )
    source = (data, BATCH)
    if loader is not None:
        sampler = toy.sampler(data, BATCH)
        source = (DataLoader(data, batch_sampler=sampler, num_workers=loader),)
    losses, seen = [], {}
    with toy as engine:
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(*source):
                rows = zip(batch.ids.tolist(), batch.inputs.tolist(), strict=True)
                seen.update({(epoch, i): row for i, row in rows})
                losses.append(float(engine.step(batch)))
        slots = run_of(engine).caches.training_room().samples
    return losses, engine.history, seen, slots


def counted(history, kind):
    return [each.get(kind, 0) for each in history.cache]


def test_without_views_augmentation_never_hits_and_the_cache_is_given_up(caplog):
    with caplog.at_level(logging.WARNING):
        _, history, _, _ = train(Augmented(SIZE), None)
    assert counted(history, "hits") == [0] * 5
    assert counted(history, "stored") == [SIZE, SIZE, SIZE, 0, 0]
    assert caplog.text.count("used no more") == 1 and "augmentation" in caplog.text


@pytest.mark.parametrize("data", [Augmented, Halves])
def test_two_views_are_stored_in_two_epochs_and_found_in_all_others(data):
    losses, history, seen, slots = train(data(SIZE), 2)
    assert counted(history, "hits") == [0, 0, SIZE, SIZE, SIZE]
    assert counted(history, "stored") == [SIZE, SIZE, 0, 0, 0]
    assert counted(history, "absent") == [SIZE, SIZE, 0, 0, 0]
    assert [epoch.unique_samples for epoch in history.epochs] == [SIZE] * 5
    assert slots == SIZE  # in both views
    plain = train(data(SIZE), 2, enabled=False)
    assert losses == plain[0] and seen == plain[2]
    for (epoch, sample), row in seen.items():
        assert row == seen[epoch % 2, sample]
        assert row != seen[1 - epoch % 2, sample]


def test_views_advance_with_the_boundary():
    freeze = [0, 1, 1, 2, 2, 3, 3]
    found = train(Augmented(SIZE), 2, epochs=7, freeze=pt.freeze.Schedule(freeze))
    plain = train(
        Augmented(SIZE), 2, epochs=7, freeze=pt.freeze.Schedule(freeze), enabled=False
    )
    assert found[0] == plain[0]
    assert counted(found[1], "hits") == [0, 0, 0, SIZE, SIZE, SIZE, SIZE]


def test_nothing_is_stored_that_no_later_epoch_reads():
    history = train(Augmented(SIZE), 2, epochs=3)[1]
    assert counted(history, "stored") == [SIZE, 0, 0]
    assert counted(history, "hits") == [0, 0, SIZE]


def test_one_view_is_said_to_be_the_same_inputs_in_every_epoch(caplog):
    with caplog.at_level(logging.WARNING):
        _, history, seen, _ = train(Augmented(SIZE), 1, epochs=3)
    assert counted(history, "hits") == [0, SIZE, SIZE]
    assert all(row == seen[0, sample] for (_, sample), row in seen.items())
    assert caplog.text.count("CacheConfig.views=1") == 1
    assert "generalise worse" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(Augmented(SIZE), 2, epochs=1)
    assert "CacheConfig.views" not in caplog.text


def test_a_budget_for_half_of_the_records_counts_as_half_of_the_samples():
    slot = 1024
    _, history, _, slots = train(Augmented(SIZE), 2, budget_bytes=SIZE * slot)
    stored = sum(counted(history, "stored"))
    assert SIZE // 2 <= slots == stored // 2 < SIZE
    assert sum(counted(history, "full")) > 0
    assert counted(history, "hits")[2:4] == [min(stored, SIZE), max(0, stored - SIZE)]


def test_input_keys_are_asked_for_views():
    data = Halves(SIZE)
    history = train(data, 2)[1]
    assert data.keys == {(i, view) for i in range(SIZE) for view in range(2)}
    assert counted(history, "hits")[2:] == [SIZE] * 3


def mixed(samples):
    x, y = default_collate(samples)
    return x + x.mean(0), y


def test_collating_that_mixes_rows_is_not_cached_with_views(caplog):
    engine = make_engine(
        freeze=pt.freeze.Schedule([2] * 5),
        config=config(cache=pt.CacheConfig(views=2)),
    )
    with caplog.at_level(logging.WARNING), engine:
        for _ in engine.epochs(5):
            for batch in engine.batches(ToySet(SIZE), BATCH, collate_fn=mixed):
                engine.step(batch)
    assert counted(engine.history, "hits") == [0] * 5
    assert caplog.text.count("used no more") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_ones_own_draws_the_same_views(workers):
    found = train(Augmented(SIZE), 2, epochs=4, loader=workers)
    expected = train(Augmented(SIZE), 2, epochs=4)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert counted(found[1], "hits") == [0, 0, SIZE, SIZE]


class Loader(DataLoader):
    pass


def test_a_loader_of_another_class_is_refused():
    engine = make_engine(
        freeze=pt.freeze.Never(), config=config(cache=pt.CacheConfig(views=2))
    )
    loader = Loader(ToySet(8), batch_sampler=engine.sampler(ToySet(8), 4))
    text = r"CacheConfig\.views: expected a torch\.utils\.data\.DataLoader.* got Loader"
    with engine, pytest.raises(ValueError, match=text):
        next(engine.batches(loader))


def test_the_program_may_draw_between_batches():
    seeded = config(cache=pt.CacheConfig(views=2))
    engine = make_engine(freeze=pt.freeze.Schedule([2] * 4), config=seeded)
    with engine:
        for _ in engine.epochs(4):
            before = states()
            for batch in engine.batches(Augmented(SIZE), BATCH):
                engine.step(batch)
                assert states() == before
                torch.rand(1), random.random(), numpy.random.rand()
                before = states()
    assert counted(engine.history, "hits") == [0, 0, SIZE, SIZE]


# -- runs that come after each other ------------------------------------------


def test_files_serve_runs_of_as_many_views_alone(tmp_path):
    train(Augmented(SIZE), 2, directory=tmp_path)
    again = train(Augmented(SIZE), 2, directory=tmp_path)
    assert counted(again[1], "hits") == [SIZE] * 5
    assert again[0] == train(Augmented(SIZE), 2, enabled=False)[0]
    assert counted(train(Augmented(SIZE), 3, directory=tmp_path)[1], "hits") == [
        *(0, 0, 0),
        *(SIZE, SIZE),
    ]
    spaces = {file.head.space for file in cache_files(tmp_path)}
    assert spaces == {"train in 2 views", "train in 3 views"}


class Shifted(Augmented):
    def _augmented(self, index):
        return super()._augmented(index) + 1


def test_views_of_other_samples_replace_the_kept_ones(tmp_path, caplog):
    train(Augmented(SIZE), 2, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        found = train(Shifted(SIZE), 2, directory=tmp_path)
    assert counted(found[1], "changed") == [SIZE, SIZE, 0, 0, 0]
    assert counted(found[1], "hits") == [0, 0, SIZE, SIZE, SIZE]
    assert "used no more" not in caplog.text


def resumed(folder, *, resume, stop=None):
    """Train with a checkpoint every four steps; return what was trained on."""
    engine = make_engine(
        freeze=pt.freeze.Schedule([2] * 5),
        dtype=torch.float64,
        config=config(
            cache=pt.CacheConfig(views=2),
            checkpoint=pt.CheckpointConfig(
                directory=str(folder), every_steps=4, every_epochs=100, resume=resume
            ),
        ),
    )
    seen, data = [], Augmented(SIZE, dtype=torch.float64)
    with engine:
        for epoch in engine.epochs(5):
            for batch in engine.batches(data, BATCH):
                at = run_of(engine).state.step
                if at == stop:
                    return seen, engine.history
                inputs = batch.inputs.tolist()
                loss = float(engine.step(batch))
                seen.append((epoch, at, batch.ids.tolist(), inputs, loss))
    return seen, engine.history


def test_a_run_resumed_within_an_epoch_goes_on_in_its_view(tmp_path):
    whole = resumed(tmp_path / "whole", resume=False)[0]
    begun = resumed(tmp_path / "part", resume=False, stop=10)[0]
    assert begun == whole[:10]
    rest, history = resumed(tmp_path / "part", resume=True)
    assert [row[:4] for row in rest] == [row[:4] for row in whole[10:]]
    expected = pytest.approx([row[4] for row in whole[10:]], rel=1e-9)
    assert [row[4] for row in rest] == expected
    # It begins with an empty cache at the fifth batch of epoch 1, hence view 1.
    assert counted(history, "hits")[-4:] == [0, 0, SIZE - 4 * BATCH, SIZE]


def train_share(rank, workers):
    multiprocessing.current_process().daemon = False  # ranks may start no loaders
    engine = make_engine(
        freeze=pt.freeze.Schedule([2] * 4),
        dtype=torch.float64,
        config=config(
            cache=pt.CacheConfig(views=2),
            plan=pt.PlanConfig(num_stages=1, reshape="never"),
        ),
    )
    seen, data = {}, Augmented(SIZE, dtype=torch.float64)
    torch.manual_seed(rank)
    with engine:
        for epoch in engine.epochs(4):
            for batch in engine.batches(data, BATCH, num_workers=workers):
                rows = zip(batch.ids.tolist(), batch.inputs.tolist(), strict=True)
                seen.update({(epoch, i): row for i, row in rows})
                engine.step(batch)
        epochs = engine.history.epochs
    hits = [epoch.cache_hits for epoch in epochs]
    return seen, hits, [epoch.train_loss for epoch in epochs]


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [0, 1])
def test_two_ranks_share_the_views_of_a_node(workers):
    (alone,) = run_ranks(train_share, 1, workers)
    first, second = run_ranks(train_share, 2, workers)
    assert first[0] and second[0] and {**first[0], **second[0]} == alone[0]
    for ranks in (first, second, alone):
        assert ranks[1] == [0, 0, SIZE, SIZE]
        assert ranks[2] == pytest.approx(alone[2], rel=1e-9)


def test_wrong_numbers_of_views_are_refused():
    with pytest.raises(ValueError, match=r"CacheConfig\.views: expected a positive"):
        pt.CacheConfig(views=0)
    with pytest.raises(TypeError, match=r"CacheConfig\.views: expected an int or None"):
        pt.CacheConfig(views=1.5)
