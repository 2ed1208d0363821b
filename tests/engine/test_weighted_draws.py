"""Samples drawn by weight: the same draws whatever the plan, and cached."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pipetransformer as pt
from pipetransformer.data.sampler import ElasticSampler, checked_weights
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

SIZE, BATCH = 50, 12
WEIGHTS = [0.0 if i % 5 == 0 else 1.0 + 9.0 * (i % 7 == 0) for i in range(SIZE)]


def drawn(replicas, *, epoch=0, position=0, nodes=1, size=SIZE, weights=WEIGHTS):
    """Return the ids of each global batch, joined from the shares of all replicas."""
    joined = None
    for node in range(nodes):
        for replica in range(replicas):
            sampler = ElasticSampler(
                size,
                BATCH,
                num_nodes=nodes,
                node=node,
                replicas_on_node=replicas,
                replica_on_node=replica,
                weights=checked_weights(weights, size),
            )
            sampler.set_epoch(epoch)
            sampler.set_position(position)
            lists = list(sampler)
            before = joined or [[]] * len(lists)
            joined = [a + b for a, b in zip(before, lists, strict=True)]
    return joined


@pytest.mark.parametrize("nodes", [1, 2])
def test_batches_do_not_depend_on_the_replicas(nodes):
    for epoch in range(3):
        whole = drawn(1, epoch=epoch, nodes=nodes)
        assert [len(ids) for ids in whole] == [12, 12, 12, 12, 2]
        for replicas in (2, 3):
            parts = drawn(replicas, epoch=epoch, nodes=nodes)
            assert list(map(sorted, parts)) == list(map(sorted, whole))
        assert drawn(1, epoch=epoch, nodes=nodes, position=3) == whole[3:]
    assert drawn(1, nodes=nodes) != whole


def test_samples_come_as_often_as_their_weights_say():
    counts = torch.zeros(SIZE)
    for epoch in range(400):
        ids = torch.tensor([i for batch in drawn(1, epoch=epoch) for i in batch])
        counts += torch.bincount(ids, minlength=SIZE)
    weights = torch.tensor(WEIGHTS)
    expected = 400 * SIZE * weights / weights.sum()
    assert counts[weights == 0].sum() == 0
    # Five standard deviations of a binomial draw.
    assert ((counts - expected).abs() <= 5 * expected.sqrt()).all()


def test_one_sample_with_weight_is_all_that_comes():
    only = [float(i == SIZE - 1) for i in range(SIZE)]
    assert {i for batch in drawn(2, weights=only) for i in batch} == {SIZE - 1}


def train(rank, loader=False, epochs=3, **cache):
    """Return losses by epoch, records, and the ids of this rank by epoch."""
    cache = pt.CacheConfig(admission="always", **cache)
    engine = make_engine(
        freeze=schedule(2), dtype=torch.float64, config=config(cache=cache)
    )
    dataset, seen = ToySet(SIZE, dtype=torch.float64), []
    options = {"weights": torch.tensor(WEIGHTS)}
    data, size = dataset, BATCH
    if loader:
        sampler = engine.sampler(dataset, BATCH, **options)
        data, size, options = DataLoader(dataset, batch_sampler=sampler), None, {}
    with engine:
        engine.prepare(data, size, **options)
        for _ in engine.epochs(epochs):
            seen.append([])
            for batch in engine.batches(data, size, **options):
                engine.step(batch)
                seen[-1] += batch.ids.tolist()
        records = engine.history.epochs
    return [(e.train_loss, e.samples, e.unique_samples) for e in records], records, seen


def test_what_was_drawn_before_is_cached_and_trains_as_without_a_cache():
    found, records, seen = train(0)
    plain, _, same = train(0, enabled=False)
    assert seen == same
    for (loss, *counts), (other, *others) in zip(found, plain, strict=True):
        # Rows that are not found run in a batch of their own: other rounding.
        assert loss == pytest.approx(other, rel=1e-12) and counts == others
    known = set()
    for record, ids in zip(records, seen, strict=True):
        assert record.samples == SIZE and record.unique_samples == len(set(ids))
        batches = [ids[i : i + BATCH] for i in range(0, SIZE, BATCH)]
        hits = 0
        for batch in batches:
            hits += sum(i in known for i in batch)
            known |= set(batch)
        assert record.cache_hits == hits
    assert records[-1].cache_hits > SIZE // 2


def test_a_loader_draws_the_same():
    found, _, seen = train(0, loader=True)
    assert (found, seen) == train(0)[::2]


def ranked(rank):
    losses, _, seen = train(rank)
    return losses, seen


@pytest.mark.distributed
def test_two_replicas_train_on_the_samples_of_one():
    losses, _, seen = train(0)
    first, second = run_ranks(ranked, 2)
    for (loss, *counts), (other, *others) in zip(losses, first[0], strict=True):
        assert other == pytest.approx(loss, rel=1e-9) and others == counts
    for whole, mine, theirs in zip(seen, first[1], second[1], strict=True):
        assert sorted(mine + theirs) == sorted(whole)


def differing(rank):
    try:
        with make_engine(freeze=pt.freeze.Never()) as engine:
            weights = [1.0] * (SIZE - 1) + [1.0 + rank]
            for batch in engine.batches(ToySet(SIZE), BATCH, weights=weights):
                engine.step(batch)
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.distributed
def test_other_weights_on_another_rank_are_refused_on_all():
    first, second = run_ranks(differing, 2)
    assert first == second and '"weights"' in first
    assert first.startswith("batches: expected {")


def test_other_weights_in_a_later_pass_are_refused():
    with (
        make_engine(freeze=pt.freeze.Never()) as engine,
        pytest.raises(ValueError, match="drop_last and weights of the first pass"),
    ):
        for epoch in engine.epochs(2):
            weights = [1.0 + epoch] + [1.0] * (SIZE - 1)
            for batch in engine.batches(ToySet(SIZE), BATCH, weights=weights):
                engine.step(batch)


@pytest.mark.parametrize(
    ("weights", "kind", "text"),
    [
        ([1.0] * (SIZE - 1), ValueError, "a number for each of the 50 samples"),
        ([[1.0]] * SIZE, ValueError, r"got shape \(50, 1\)"),
        ([0.0] * SIZE, ValueError, "some of them positive, got 0 to 0"),
        ([-1.0] + [1.0] * (SIZE - 1), ValueError, "got -1 to 1"),
        ([float("nan")] + [1.0] * (SIZE - 1), ValueError, "expected finite"),
        ([float("inf")] + [1.0] * (SIZE - 1), ValueError, "got 1 to inf"),
        ([1e308] * SIZE, ValueError, "expected finite"),
        (["a"] * SIZE, TypeError, "expected a number per sample"),
    ],
)
def test_weights_that_are_none_are_refused(weights, kind, text):
    engine = make_engine(freeze=pt.freeze.Never())
    with pytest.raises(kind, match=f"weights: .*{text}"):
        engine.sampler(ToySet(SIZE), BATCH, weights=weights)
    with engine, pytest.raises(kind, match=f"weights: .*{text}"):
        next(engine.batches(ToySet(SIZE), BATCH, weights=weights))


def test_weights_beside_a_loader_are_refused():
    engine, dataset = make_engine(freeze=pt.freeze.Never()), ToySet(SIZE)
    loader = DataLoader(dataset, batch_sampler=engine.sampler(dataset, BATCH))
    with engine, pytest.raises(TypeError, match="a DataLoader alone, got weights"):
        next(engine.batches(loader, weights=WEIGHTS))


def test_a_node_without_a_sample_to_draw_is_refused():
    only = torch.tensor([1.0] + [0.0] * 5, dtype=torch.float64)
    for node in (0, 1, None):  # on all, or the others would wait
        with pytest.raises(ValueError, match="each of the 2 nodes, got none on one"):
            ElasticSampler(6, 2, num_nodes=2, node=node, weights=only)


def test_weights_are_those_of_the_call():
    given = torch.ones(3, dtype=torch.float64)
    found = checked_weights(given, 3)
    given.zero_()
    assert found.tolist() == [1.0] * 3


@pytest.mark.parametrize("saved", [None, WEIGHTS])
def test_the_middle_of_an_epoch_goes_on_with_its_own_weights_alone(saved, tmp_path):
    def engine(resume):
        folder = pt.CheckpointConfig(directory=str(tmp_path), resume=resume)
        return make_engine(freeze=pt.freeze.Never(), config=config(checkpoint=folder))

    with engine(False) as first:
        for batch in first.batches(ToySet(SIZE), BATCH, weights=saved):
            first.step(batch)
            if batch.index == 1:
                break
        first.save(tmp_path / "middle.pt")
    for weights in (None, WEIGHTS, [1.0] * SIZE):
        same = weights is saved
        fails = pytest.raises(ValueError, match="from the middle of an epoch: expected")
        with engine(False) as again, contextlib.nullcontext() if same else fails:
            again.load(tmp_path / "middle.pt")
            batch = next(again.batches(ToySet(SIZE), BATCH, weights=weights))
            assert batch.index == 2


def test_class_weights_may_be_a_tensor_of_any_dtype():
    for dtype in (torch.float32, torch.int64, torch.float64):
        found = checked_weights(nn.Parameter(torch.ones(3)).to(dtype), 3)
        assert found.dtype == torch.float64 and not found.requires_grad
