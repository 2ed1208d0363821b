"""Batches through a DataLoader of the user's own."""

import multiprocessing
import os

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler, default_collate

import pipetransformer as pt
from tests.engine.losses import SURVIVING, die
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import Ranks, run_ranks
from tests.support.store_host import StoreHost
from tests.support.toy import ToySet

SIZE, BATCH = 50, 12  # the last batch has two rows: some replicas get none
# Four stages as long as nothing is frozen, then one; within each pass.
SHRINKING = {"slot_memory_bytes": 27_000, "reshape": "always"}


class Keyed(ToySet):
    """Loader processes get it pickled; the cache takes its word for inputs."""

    def input_key(self, index, epoch):
        return index


def whole(samples):
    """Collate, and refuse what no loader should be asked for."""
    assert samples
    return default_collate(samples)


def train(rank, workers, plan, drop_last=False, **loader_options):
    """Return losses, what each epoch was trained on here, and the shapes of plans."""
    multiprocessing.current_process().daemon = False  # ranks may start no loaders
    engine = make_engine(
        freeze=schedule(0, 0, 6),
        dtype=torch.float64,
        config=config(plan=pt.PlanConfig(**plan), freeze_every=2),
    )
    dataset, seen, losses = Keyed(SIZE, dtype=torch.float64), [], []
    data, size = dataset, BATCH
    if workers is not None:
        data, size = (
            DataLoader(
                dataset,
                batch_sampler=engine.sampler(dataset, BATCH, drop_last=drop_last),
                collate_fn=whole,
                num_workers=workers,
                persistent_workers=workers > 0,
                **loader_options,
            ),
            None,
        )
        assert len(data) == (SIZE // BATCH if drop_last else -(-SIZE // BATCH))
        drop_last = False  # the sampler says it
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(data, size, drop_last=drop_last):
                seen.append((batch.index, batch.global_rows, batch.ids.tolist()))
                assert batch.inputs.shape == (batch.rows, 4)
                assert batch.targets.shape == (batch.rows,)
                losses.append(float(engine.step(batch)))
        epochs = engine.history.epochs
        records = [
            (e.train_loss, e.samples, e.unique_samples, e.cache_hits) for e in epochs
        ]
        shapes = [[segment.shape for segment in e.segments] for e in epochs]
    return records, seen, losses, shapes


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_gives_the_samples_and_losses_of_its_dataset(workers, drop_last):
    plan = {"num_stages": 1}
    expected = train(0, None, plan, drop_last)
    assert train(0, workers, plan, drop_last) == expected
    assert expected[0][2][3] > 0  # the cache is read


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_begins_anew_where_the_plan_changes_within_a_pass(workers):
    expected = run_ranks(train, 4, None, SHRINKING)
    found = run_ranks(train, 4, workers, SHRINKING)
    assert found == expected
    shapes = next(shapes for _, _, _, shapes in expected if shapes)
    assert any(len({str(shape) for shape in segments}) > 1 for segments in shapes)
    rows = [len(ids) for _, seen, _, _ in found for _, _, ids in seen]
    assert 0 in rows, "an empty share was to come"


def lose(rank, environment):
    """Train through a loader; rank 1 dies within a pass."""
    os.environ.update(environment)
    engine = make_engine(
        freeze=schedule(0),
        dtype=torch.float64,
        config=config(
            plan=pt.PlanConfig(num_stages=1, reshape="never"), autodp=SURVIVING
        ),
    )
    dataset = ToySet(SIZE, dtype=torch.float64)
    loader = DataLoader(dataset, batch_sampler=engine.sampler(dataset, BATCH))
    with engine:
        for epoch in engine.epochs(2):
            for batch in engine.batches(loader):
                if (epoch, rank, batch.index) == (1, 1, 2):
                    die()
                engine.step(batch)
        loss = engine.evaluate(ToySet(21, seed=2, dtype=torch.float64))["loss"]
        epochs = engine.history.epochs
    return loss, [(e.samples, e.unique_samples) for e in epochs]


@pytest.mark.distributed
def test_a_pass_through_a_loader_survives_a_lost_rank():
    with StoreHost() as host:
        with Ranks(lose, 1, host.environment) as ranks:
            (ok, alone) = ranks.outcomes([0])[0]
        assert ok, alone
    with StoreHost() as host, Ranks(lose, 3, host.environment) as ranks:
        outcomes = ranks.outcomes([0, 2])
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank} failed:\n{value}"
        assert value[0] == pytest.approx(alone[0], rel=1e-9)
        assert value[1] == alone[1] == [(SIZE, SIZE)] * 2


def test_prepare_takes_a_loader():
    dataset = ToySet(SIZE)
    engine = make_engine(freeze=pt.freeze.Never())
    loader = DataLoader(dataset, batch_sampler=engine.sampler(dataset, BATCH))
    with engine:
        engine.prepare(loader)
        assert engine.plan is not None
        assert next(iter(engine.batches(loader))).global_rows == BATCH


@pytest.mark.parametrize(
    ("loader", "got"),
    [
        (DataLoader(ToySet(8), batch_size=4), "SequentialSampler"),
        (
            DataLoader(ToySet(8), 4, sampler=WeightedRandomSampler([1.0] * 8, 8)),
            "WeightedRandomSampler; .*weights=",
        ),
        (DataLoader(ToySet(8), batch_size=None), "SequentialSampler"),
    ],
)
def test_another_batch_sampler_is_an_error_that_says_what_to_do(loader, got):
    text = rf"batch_sampler=engine\.sampler\(dataset, batch_size\).* got one with {got}"
    with make_engine(freeze=pt.freeze.Never()) as engine:
        with pytest.raises(ValueError, match=text):
            next(engine.batches(loader))
        with pytest.raises(ValueError, match=text):
            engine.prepare(loader)


def test_what_a_loader_cannot_be_given_with_is_named():
    dataset = ToySet(8)
    engine = make_engine(freeze=pt.freeze.Never())
    sampler = engine.sampler(dataset, 4)
    loader = DataLoader(dataset, batch_sampler=sampler)
    with engine:
        with pytest.raises(TypeError, match="a DataLoader alone, got batch_size, num_"):
            next(engine.batches(loader, 4, num_workers=1))
        with pytest.raises(TypeError, match="batch_size: expected an int, got None"):
            next(engine.batches(dataset))
        with pytest.raises(ValueError, match="sampler of the 9 samples .* one of 8"):
            next(engine.batches(DataLoader(ToySet(9), batch_sampler=sampler)))
        with pytest.raises(ValueError, match="expected a DataLoader in engine.batches"):
            next(iter(loader))
        as_they_come = DataLoader(
            dataset, batch_sampler=sampler, num_workers=2, in_order=False
        )
        with pytest.raises(ValueError, match="in_order=True.* got in_order=False"):
            next(engine.batches(as_they_come))
    with pytest.raises(ValueError, match="batch_size: expected"):
        engine.sampler(dataset, 0)
    with pytest.raises(TypeError, match="expected a map-style dataset"):
        engine.sampler(iter(dataset), 4)
    loader = DataLoader(dataset, batch_size=4)
    with (
        make_engine(freeze=pt.freeze.Never()) as engine,
        pytest.raises(TypeError, match="got a DataLoader; pass its dataset, and coll"),
    ):
        engine.evaluate(loader)
